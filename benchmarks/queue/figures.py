"""Figures of a queue, ours or a peer's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A drain that began with a full queue."""

    submitted_per_s: float
    done_per_s: float
    client_us_per_submit: float
    server_us_per_submit: float
    """Processor time of the submitter and of the server per submitted job."""

    commands_per_job: float
    """Commands that the server ran per drained job, including those inside scripts."""

    server_us_per_job: float
    worker_us_per_job: float
    """Processor time of the server and of all workers per drained job: nearly independent of other load."""

    recorded_per_s: float | None = None
    """Rows written to the history per second, from the same start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Results of jobs whose worker was killed and restarted."""

    missing: int
    twice: int
    took_s: float
    """Until the last had run, or the time limit."""

    started_again: int = 0
    """Started again, or continued, at another worker; each with one end."""
