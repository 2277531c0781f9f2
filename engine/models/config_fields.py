"""Fields of a parsed config.json, each checked for its type and range. Knows no family."""

from typing import TypeGuard, cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.json_files import Json

LARGEST = 2**31 - 1
GREATEST = 3e38
"""Float32 holds no greater number."""


def object_of(value: object) -> Json:
    """Return a value that is an object; an empty one for any other value."""
    # A parsed JSON object has string keys.
    return cast("Json", value) if isinstance(value, dict) else {}


def optional_object(config: Json, name: str) -> Json:
    """Return an object; an empty one if it is absent or null."""
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise ModelFolderError(f"config.json: {name} must be an object or null, got {value!r}.")
    return object_of(config.get(name))


def integer(config: Json, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
    """Return a whole number in a range; the default if it is absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelFolderError(f"config.json: {name} must be a whole number from {least} to {most}, got {value!r}.")
    return value


def number(config: Json, name: str, default: float) -> float:
    """Return a finite number; the default if it is absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ModelFolderError(f"config.json: {name} must be a number, got {value!r}.")
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that float32 holds: JSON as Python reads it has others."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= GREATEST


def positive(config: Json, name: str, default: float) -> float:
    """Return a number above 0; the default if it is absent or null."""
    value = number(config, name, default)
    if value <= 0:
        raise ModelFolderError(f"config.json: {name} must be above 0, got {value:g}.")
    return value


def switch(config: Json, name: str) -> bool:
    """Return a switch; false if it is absent or null."""
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ModelFolderError(f"config.json: {name} must be true or false, got {value!r}.")
    return value is True


def soft_cap(config: Json, name: str) -> float:
    """Return a number above 0; 0 if it is absent or null, which means no cap."""
    return 0.0 if config.get(name) is None else positive(config, name, 0.0)
