"""Fields of a quantization_config, each checked for its type and range."""

from collections.abc import Mapping
from typing import TypeVar, cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.json_files import Json

_T = TypeVar("_T", int, str)
_MOST = 2**31 - 1

WHOLE_ROW = -1
"""Size of a group that is a whole row."""


def group_size_of(config: Json, default: int) -> int:
    """Return the size of groups; the default if it is absent or null."""
    value = default if config.get("group_size") is None else config["group_size"]
    if not isinstance(value, int) or isinstance(value, bool) or not (value == WHOLE_ROW or 1 <= value <= _MOST):
        raise ModelFolderError(
            f"quantization_config: group_size must be a whole number above 0, or -1 for rows, got {value!r}."
        )
    return value


def groups_described(group_size: int) -> str:
    """Return what groups there are, for people."""
    return "whole rows" if group_size == WHOLE_ROW else f"groups of {group_size}"


def flag(config: Json, name: str, *, default: bool = False) -> bool:
    """Return a switch; the default if it is absent or null."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ModelFolderError(f"quantization_config: {name} must be true or false, got {value!r}.")
    return value


def choice(config: Json, name: str, values: tuple[_T, ...], default: _T | None = None) -> _T:
    """Return one of some values; the default if it is absent or null."""
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or value not in values:
        wanted = " or ".join(map(str, values))
        raise ModelFolderError(f"quantization_config: {name} must be {wanted}, got {value!r}.")
    # It equals one of them.
    return cast("_T", value)


def listed(config: Json, name: str) -> list[object]:
    """Return a list; an empty one if it is absent or null."""
    value = config.get(name)
    if not isinstance(value, list | None):
        raise ModelFolderError(f"quantization_config: {name} must be a list, got {value!r}.")
    return cast("list[object]", value or [])


def optional(config: Json, name: str) -> Json:
    """Return an object; an empty one if it is absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelFolderError(f"quantization_config: {name} must be an object, got {config.get(name)!r}.")
    # A parsed JSON object has string keys.
    return cast("Json", config.get(name) or {})


def objects(config: Json, name: str) -> dict[str, Json]:
    """Return the objects that an object holds; none if it is absent or null."""
    named = optional(config, name)
    return {each: optional(named, each) for each in named}


def renamed(config: Json, names: Mapping[str, str]) -> Json:
    """Return the config with the current names of fields that had others."""
    return {names.get(name, name): value for name, value in config.items()}
