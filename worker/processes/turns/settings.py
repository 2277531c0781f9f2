"""The table `[turns.NAME]` of a fleet's file."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import cast

from sluice.worker.errors import ConfigError
from sluice.worker.processes.turns.policy import TurnRules

FIELD_OF: Mapping[str, str] = {"share": "share", "patience-s": "patience_s", "turn-s": "turn_s", "stop-s": "stop_s"}
"""The settings, by the names in the file."""


def read_rules(place: str, table: object) -> TurnRules:
    """Read the settings of a group; `place` names it in errors.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    if not isinstance(table, dict):
        raise ConfigError([f"{place}: expected a table"])
    stated = cast("Mapping[str, object]", table)
    if problems := list(_problems(place, stated)):
        raise ConfigError(problems)
    return TurnRules(**{FIELD_OF[name]: float(cast("float", value)) for name, value in stated.items()})


def _problems(place: str, table: Mapping[str, object]) -> Iterator[str]:
    for name, value in table.items():
        if name not in FIELD_OF:
            yield f"{place}.{name}: unknown setting; there are {', '.join(FIELD_OF)}"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            yield f"{place}.{name}: expected a number of 0 or more, got {value!r}"
        elif name == "share" and not 0 < value <= 1:
            yield f"{place}.share: must be over 0 and at most 1, got {value:g}"
