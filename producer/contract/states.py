"""The states of a job and the ways between them; `docs/job-states.md` draws the same table."""

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. Four of the six are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended (a failed one may still be requeued by a person)."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}),
    JobState.RUNNING: frozenset(
        {JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.QUEUED}
    ),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}
"""Ways out of each state; the scripts get this very table.

RUNNING -> QUEUED: given back, owner died, retry. FAILED -> QUEUED: requeued from the dead set.
"""
