"""A job for rq's workers that says what they have loaded."""

import sys


def loaded(*names: str) -> list[str]:
    """Those of `names` that are imported in this process."""
    return [name for name in names if name in sys.modules]
