"""Kernel configurations measured on a GPU, which override those of the kernels' rules.

`python -m benchmarks tune-kernels` writes them to `tuned.json` next to this file, by GPU. A running worker measures
nothing. A table is read once, so that a process uses one configuration from start to end.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch

PATH = Path(__file__).parent / "tuned.json"

Table = Mapping[str, Mapping[str, Sequence[int]]]
"""By operation, then by `key_of` of a launch."""


def key_of(**sizes: int) -> str:
    """Return the table key of a configuration."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def tuned(device: torch.device, operation: str, key: str) -> Sequence[int] | None:
    """Return the configuration measured for a kind of launch on the GPU in `device`; None if there is none."""
    return _table(card_name(device)).get(operation, {}).get(key)


@cache
def card_name(device: torch.device) -> str:
    """Return the table's name of the GPU in `device`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _table(card: str) -> Table:
    return read_tables().get(card, {})


def read_tables() -> dict[str, Table]:
    """Return all measured configurations, by GPU."""
    # Only `write_table` writes it.
    return cast("dict[str, Table]", json.loads(PATH.read_text())) if PATH.is_file() else {}


def write_table(card: str, table: Table) -> None:
    """Replace what is stored for `card` by `table`; this process keeps its configurations."""
    tables = read_tables() | {card: table}
    PATH.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n")
