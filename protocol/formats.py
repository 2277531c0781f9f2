"""Find jobs in the format of an earlier version, which programs of this one do not see. No I/O."""

from collections.abc import Sequence
from typing import cast

from sluice.protocol.keys import FORMAT, QueueKeys


def look_for_format_1(keys: QueueKeys) -> tuple[str, ...]:
    """Return the command whose reply `said_of_format_1` reads."""
    return ("HMGET", f"{keys.prefix_of_format_1}:counters", "waiting_jobs", "running_jobs", "submitted")


def said_of_format_1(queue: str, replies: Sequence[object]) -> str | None:
    """Say that a queue has jobs in the format of an earlier version; None if it has none.

    Args:
        queue: Its name.
        replies: Those of its partitions. An error counts as none: this user may not look.
    """
    found = [[_number(value) for value in cast("list[object]", reply)] for reply in replies if isinstance(reply, list)]
    waiting, running, submitted = (sum(numbers) for numbers in zip(*found, strict=True)) if found else (0, 0, 0)
    if not (waiting or running or submitted):
        return None
    return (
        f"queue {queue!r} has jobs in the format of an earlier version, {waiting} waiting and {running} running: "
        f"run `worker migrate-queue --queue {queue}`"
    )


def refusal_of_format_1(queue: str) -> str:
    """Return what programs of format 1 show, and what stands in place of its keys."""
    return f"queue {queue} has moved to format {FORMAT} of its keys: update this program"


def _number(value: object) -> int:
    # Another program may have written any text.
    return int(value) if isinstance(value, bytes) and value.isdigit() else 0
