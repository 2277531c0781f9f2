"""The version of this package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sluice-llm"


@cache
def installed_version() -> str:
    """Return the installed version, or "unknown" where the source runs without an installation."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
