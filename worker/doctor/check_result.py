"""Results of `worker doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check, with advice if it failed."""

    what: str
    found: str
    is_well: bool = True
    advice: str | None = None
