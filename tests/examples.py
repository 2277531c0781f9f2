"""How many examples a property test draws: a third in the fast suite, all of them in `make test-long`."""

from hypothesis import settings

LONG = "long"
"""The hypothesis profile of `make test-long` and `make mutation-test`."""


def examples(number: int) -> int:
    """Return `number` under the profile `long`, and a third of it otherwise."""
    return number if settings.get_current_profile_name() == LONG else number // 3
