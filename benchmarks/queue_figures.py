"""What is measured of a queue, ours or another."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A queue that was full when its workers began."""

    submitted_per_s: float
    done_per_s: float
    client_us_per_submit: float
    server_us_per_submit: float
    """Processor time of the submitter and of the server for each job submitted."""

    commands_per_job: float
    """Commands that the server ran for a job while it was drained, those inside of scripts included."""

    server_us_per_job: float
    worker_us_per_job: float
    """Processor time of the server and of all workers for each job drained: it hardly depends on who else has the
    cores."""

    recorded_per_s: float | None = None
    """Rows written to the history a second, from the same beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What became of jobs whose worker was killed amid them and started again."""

    missing: int
    twice: int
    took_s: float
    """Until the last had run, or the time given was over."""

    started_again: int = 0
    """Began anew, or went on, at another worker; each with one end."""
