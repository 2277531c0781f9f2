"""One thing that `worker doctor` looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what was found, and what to do if it is not well."""

    what: str
    found: str
    is_well: bool = True
    advice: str | None = None
