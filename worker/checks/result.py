"""Results of a startup check. A reason to refuse `worker start` is not a result: the check raises `ConfigError`."""

from dataclasses import dataclass
from enum import StrEnum


class CheckLevel(StrEnum):
    """What a result means; the value is what `worker doctor` prints."""

    OK = "ok"
    NOTE = "note"
    """A fact that is right or wrong only for some uses."""

    WARNING = "warn"
    """A worker starts, but someone should look at it."""

    WRONG = "WRONG"
    """`worker start` ends with this sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One result of a check, with advice if something should be done."""

    what: str
    found: str
    level: CheckLevel = CheckLevel.OK
    advice: str | None = None


def warning(what: str, found: str, advice: str | None = None) -> CheckResult:
    """Return a result that warns."""
    return CheckResult(what=what, found=found, level=CheckLevel.WARNING, advice=advice)
