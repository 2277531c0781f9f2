"""Questions of the Berkeley Function-Calling Leaderboard, from PyPI's `bfcl-eval` in a cache outside the tree."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.schemas.collection import cache_folder

PACKAGE = "bfcl-eval==2026.3.23"
CATEGORIES = {"simple": "simple_python", "multiple": "multiple", "parallel": "parallel"}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Its types that are Python's."""


class Question(NamedTuple):
    """A question, the functions that may answer it, and which calls are right."""

    category: str
    messages: list[dict[str, str]]
    functions: list[dict[str, Any]]
    right: list[dict[str, dict[str, list[Any]]]]
    """For each call: by the function's name and its parameters' names, the values that are right; "" may be absent."""


def questions(num_each: int) -> list[Question]:
    """Return the first questions of each category, downloaded first if they are not there."""
    found = list(cache_folder().glob("bfcl_eval-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", cache_folder(), PACKAGE], check=True)
        found = list(cache_folder().glob("bfcl_eval-*.whl"))
    with zipfile.ZipFile(found[0]) as archive:
        return [one for name in CATEGORIES for one in _of_category(archive, name)[:num_each]]


def _of_category(archive: zipfile.ZipFile, category: str) -> list[Question]:
    file = f"BFCL_v4_{CATEGORIES[category]}.json"
    asked, answers = (
        _lines(archive, f"bfcl_eval/data/{file}"),
        _lines(archive, f"bfcl_eval/data/possible_answer/{file}"),
    )
    right = {answer["id"]: answer["ground_truth"] for answer in answers}
    return [
        Question(category, one["question"][0], list(map(_tool, one["function"])), right[one["id"]]) for one in asked
    ]


def _lines(archive: zipfile.ZipFile, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(path).decode().splitlines()]


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**function, "parameters": _schema(function["parameters"])}}


def _schema(given: object) -> Any:  # noqa: ANN401 - JSON
    """Return a schema with JSON's names of types. Objects whose properties are known have no others."""
    if isinstance(given, list):
        return list(map(_schema, given))
    if not isinstance(given, dict):
        return given
    made = {name: _schema(part) for name, part in given.items() if name not in ("type", "default")}
    kind = given.get("type")
    if isinstance(kind, dict):  # a property of this name
        made["type"] = _schema(kind)
    elif kind is not None and (named := _TYPES.get(kind, kind)) is not None:
        made["type"] = named
    is_schema_of_object = kind == "dict" and isinstance(given.get("properties"), dict)
    return {**made, "additionalProperties": False} if is_schema_of_object else made
