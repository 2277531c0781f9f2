"""How many examples a property test draws: a tenth in the fast suite, all of them in `make test-long`."""

from hypothesis import settings

LONG = "long"
"""The hypothesis profile of `make test-long` and `make mutation-test`."""


def examples(number: int) -> int:
    """Return `number` under the profile `long`, and a tenth of it otherwise."""
    return number if settings.get_current_profile_name() == LONG else max(1, number // 10)
