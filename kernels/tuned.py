"""Kernel configurations measured on a GPU, which override those of the kernels' rules.

`python -m benchmarks gpu --tune` writes them to `tuned.json` next to this file, by GPU and version of Triton. A
running worker measures nothing. A table is read once, so that a process uses one configuration from start to end.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

PATH = Path(__file__).parent / "tuned.json"

Config = TypeVar("Config")
"""A frozen dataclass of integers."""

Table = Mapping[str, Mapping[str, Sequence[int]]]
"""By operation, then by `key_of` of a launch."""

Kind = tuple[str, str]
"""An operation and the key of a launch."""

_tried: dict[Kind, Any] = {}  # configurations of any operation
_requests: list[dict[Kind, Any]] = []


def key_of(**sizes: int) -> str:
    """Return the table key of a configuration."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def chosen(device: torch.device, operation: str, key: str, rule: Config) -> Config:
    """Return the configuration measured for a kind of launch on the GPU in `device`, or `rule`, that of the rules."""
    if _requests:
        _requests[-1][operation, key] = rule
    if (operation, key) in _tried:
        return _tried[operation, key]
    measured = _table(card_name(device)).get(operation, {}).get(key)
    return rule if measured is None else type(rule)(*measured)


@contextmanager
def recording_requests() -> Generator[dict[Kind, Any]]:
    """Collect the kinds of launches that ask for a configuration, with the rules' choice for each (to tune them)."""
    _requests.append({})
    try:
        yield _requests[-1]
    finally:
        _requests.pop()


@contextmanager
def trying(kind: Kind, config: object) -> Generator[None]:
    """Let launches of a kind use `config` (to measure it)."""
    _tried[kind] = config
    try:
        yield
    finally:
        del _tried[kind]


@cache
def card_name(device: torch.device) -> str:
    """Return the table's name of the GPU in `device` and of the compiler."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        return f"{card}, triton {version('triton')}"
    except PackageNotFoundError:
        return card


@cache
def _table(card: str) -> Table:
    return read_tables().get(card, {})


def read_tables() -> dict[str, Table]:
    """Return all measured configurations, by GPU."""
    # Only `write_table` writes it.
    return cast("dict[str, Table]", json.loads(PATH.read_text())) if PATH.is_file() else {}


def write_table(card: str, table: Table) -> None:
    """Replace the stored configurations of `card` by `table`; this process keeps its configurations."""
    tables = read_tables() | {card: table}
    PATH.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n")
