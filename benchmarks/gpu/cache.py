"""Triton's cache of compiled kernels during `benchmarks gpu`, and an archive of it.

A kernel's entry lists the absolute paths of its files, so a folder that is unpacked elsewhere gets new lists.
"""

import json
import os
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SUFFIXES = (".cubin", ".json", ".so")
"""Intermediate languages are four fifths of the bytes, and serve to be read only."""

LISTS = "__grp__*.json"
ROOT = Path(__file__).parents[2]


@contextmanager
def folder(archive: Path | None) -> Generator[Path]:
    """Create a folder for compiled kernels, with those of an archive if one is given."""
    with tempfile.TemporaryDirectory(prefix="sluice-kernels-") as path:
        if archive is not None:
            unpack(archive, Path(path))
        yield Path(path)


def environment(compiled: Path, device: str) -> dict[str, str]:
    """Return the environment of a child: where kernels are compiled to, or that they are interpreted."""
    # A worker of the service runs in another folder's name space (`python -P`).
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Triton reads it once, when it is imported.
    interpreted = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    return {"TRITON_CACHE_DIR": str(compiled), "PYTHONPATH": os.pathsep.join(paths), **interpreted}


def pack(compiled: Path, archive: Path) -> None:
    """Write what a launch needs of each kernel."""
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(compiled.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                tar.add(path, path.relative_to(compiled))


def unpack(archive: Path, compiled: Path) -> None:
    """Put an archive's kernels where Triton looks for them."""
    with tarfile.open(archive) as tar:
        tar.extractall(compiled, filter="data")
    for file in compiled.rglob(LISTS):
        names = json.loads(file.read_text())["child_paths"]
        here = {name: str(file.parent / name) for name in names if (file.parent / name).exists()}
        file.write_text(json.dumps({"child_paths": here}))
