"""The states of a job and the transitions between them; `docs/reference/job-states.md` draws the same table."""

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job. Four of the seven are terminal."""

    BLOCKED = "blocked"
    """It waits for other jobs (`sluice.protocol.chains`), and has no row yet: scripts do not know this state."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended. A failed job can still be requeued."""
        return self not in (JobState.BLOCKED, JobState.QUEUED, JobState.RUNNING)


RECORDED = tuple(state for state in JobState if state is not JobState.BLOCKED)
"""States that a job has in its row and in the history."""

REJECTIONS = frozenset({"prompt_empty", "prompt_too_long", "unknown_token"})
"""Error codes of prompts that no worker of the model can process, so these jobs are not kept in the dead set."""

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.BLOCKED: frozenset({JobState.QUEUED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}),
    JobState.RUNNING: frozenset(
        {JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.QUEUED}
    ),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}
"""Possible next states of each state. The scripts contain this table, except for blocked jobs.

RUNNING -> QUEUED: returned by the worker, reclaimed after its death, or retried. FAILED -> QUEUED: requeued.
"""
