"""Configurations that were measured on a card, where there are any, in place of those that the kernels' rules give.

`python -m benchmarks.tune_kernels` writes them to `tuned.json` beside this file, by card; nothing is tried or measured
while a worker runs. A table is read once, so that a process computes with one configuration from start to end.
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
"""By operation, then by what `key_of` says of a launch."""


def key_of(**sizes: int) -> str:
    """What a configuration depends on, as a table names it."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def tuned(device: torch.device, operation: str, key: str) -> Sequence[int] | None:
    """The numbers measured for one kind of launch on the card in `device`; None where the rules are all there is."""
    return _table(card_name(device)).get(operation, {}).get(key)


@cache
def card_name(device: torch.device) -> str:
    """What a table calls the card in `device`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _table(card: str) -> Table:
    return read_tables().get(card, {})


def read_tables() -> dict[str, Table]:
    """All that was measured, by card."""
    # Whoever writes it is `write_table`.
    return cast("dict[str, Table]", json.loads(PATH.read_text())) if PATH.is_file() else {}


def write_table(card: str, table: Table) -> None:
    """Put `table` in the place of what was known of `card`; this process goes on as it began."""
    tables = read_tables() | {card: table}
    PATH.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n")
