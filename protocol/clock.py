"""This host's wall clock. Times of jobs are the server's instead."""

import time


def wall_ms() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000
