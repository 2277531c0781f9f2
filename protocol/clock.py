"""This host's wall clock. Times of jobs are by the server's clock instead."""

import time


def wall_ms() -> int:
    """Return the milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
