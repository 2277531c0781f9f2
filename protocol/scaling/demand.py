"""Number of workers that complete a queue's work within a given time. No I/O."""

from dataclasses import asdict, dataclass
from math import ceil

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.scaling.backlog import Backlog

DEFAULT_WITHIN_S = 300.0
MAX_WORKERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePolicy:
    """The target for the number of workers, and its bounds.

    Raises:
        InvalidSetting: a value is out of its range.
    """

    within_s: float = DEFAULT_WITHIN_S
    """Time within which all waiting and running jobs should be done, in seconds."""

    min_workers: int = 0
    max_workers: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.within_s < float("inf"):
            raise InvalidSetting(f"the time to clear the backlog must be over 0 s, got {self.within_s:g}")
        if not 0 <= self.min_workers <= self.max_workers <= MAX_WORKERS:
            raise InvalidSetting(
                f"workers must be 0 <= min <= max <= {MAX_WORKERS}, got min {self.min_workers}, max {self.max_workers}"
            )

    def bound(self, workers: int) -> int:
        """Clamp a number of workers to the bounds."""
        return min(max(workers, self.min_workers), self.max_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand(Backlog):
    """The work of a queue, and the workers that it needs."""

    within_s: float
    min_workers: int
    max_workers: int
    wanted_workers: int
    """Number of workers that complete all waiting and running jobs within `within_s`, clamped to the bounds."""


def scale_of(backlog: Backlog, policy: ScalePolicy) -> Demand:
    """Return the work of a queue with the workers that it needs."""
    return Demand(**asdict(backlog), **asdict(policy), wanted_workers=wanted_workers(backlog, policy))


def wanted_workers(backlog: Backlog, policy: ScalePolicy) -> int:
    """Return how many workers complete a backlog in time.

    At least one while there is work, at most one for each job; the minimum without work. Waiting jobs of a paused
    queue do not count; running ones do. While the throughput of a worker is unknown, the living workers are
    enough: they measure it.
    """
    jobs, tokens = backlog.running_jobs, backlog.running_tokens
    if not backlog.is_paused:
        jobs, tokens = jobs + backlog.backlog_jobs, tokens + backlog.backlog_tokens
    if jobs == 0:
        return policy.bound(0)
    if backlog.worker_tokens_per_s is None:
        needed = backlog.workers
    else:
        # With a tiny rate, the quotient would be beyond the range of integers in a float.
        needed = ceil(min(tokens / (backlog.worker_tokens_per_s * policy.within_s), MAX_WORKERS))
    return policy.bound(min(max(needed, 1), jobs))


def wanted_by_jobs(backlog: Backlog, jobs_per_worker: int, policy: ScalePolicy) -> int:
    """Return the number of workers by number of jobs alone, whatever their size; for comparison."""
    jobs = backlog.running_jobs + (0 if backlog.is_paused else backlog.backlog_jobs)
    return policy.bound(ceil(jobs / jobs_per_worker))
