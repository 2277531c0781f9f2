"""The phases of one attempt of a job, from the times that queue and history have of it. No I/O.

They have the first schedule and the first token of the job, and the last token of its last attempt. An attempt that
resumes has none of its own: its decode begins at its start.
"""

from typing import NamedTuple


class Phases(NamedTuple):
    """When each phase of an attempt ended, in ascending order: none is before the start of the attempt."""

    pulled_ms: int
    """The engine scheduled it."""

    prefilled_ms: int
    """Its first token was on the channel."""

    decoded_ms: int
    """Its last token was computed."""

    alive_ms: int
    """Its end was published, or its worker was alive for the last time, as far as that is known."""


def phases_of(
    started_ms: int,
    ended_ms: int,
    *,
    scheduled_ms: int | None,
    first_token_ms: int | None,
    last_token_ms: int | None,
    seen_ms: int | None,
) -> Phases:
    """Return the phases of an attempt. A phase whose end is not known lasts until the attempt ended.

    Args:
        started_ms: When a worker pulled the job.
        ended_ms: When the attempt ended, or now.
        scheduled_ms: When the job was first scheduled.
        first_token_ms: When its first token was on the channel.
        last_token_ms: When its last token was computed, of its last attempt.
        seen_ms: The last heartbeat of the attempt's worker, if that died. A first token shows that it lived longer.
    """
    alive_ms = ended_ms
    if seen_ms is not None:
        signs_ms = [seen_ms, *([first_token_ms] if first_token_ms is not None and first_token_ms <= ended_ms else [])]
        alive_ms = _within(max(signs_ms), started_ms, ended_ms)
    pulled_ms = _within(scheduled_ms, started_ms, alive_ms)
    prefilled_ms = _within(first_token_ms, pulled_ms, alive_ms)
    return Phases(pulled_ms, prefilled_ms, _within(last_token_ms, prefilled_ms, alive_ms), alive_ms)


def _within(at_ms: int | None, low_ms: int, high_ms: int) -> int:
    return high_ms if at_ms is None else min(max(at_ms, low_ms), high_ms)
