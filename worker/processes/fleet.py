"""`worker fleet`: the parent of as many workers as the queue needs, from the least number to the largest.

It starts each missing worker, and drains the newest when fewer are enough: that worker takes no more
jobs, finishes those it has, or returns them. Everything else is as in `parent.py`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.keys import by_queue
from sluice.protocol.redis.surveys import survey
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS, Backlog, backlog_of_all
from sluice.protocol.scaling.demand import ScalePolicy, wanted_by_jobs, wanted_workers
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import connect
from sluice.worker.endpoints import partitions_of
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.parent import Parent, Report, build_kernels_ahead, reporter, server_of_children
from sluice.worker.processes.prepared import PreparedProcess
from sluice.worker.processes.specs import fleet_specs, prepared_process, sidecar_specs

READ_EVERY_S = 0.5
"""Least interval of looks at the queue."""

TIMEOUT_S = 1.0
"""Time for a connection, and for a reply. Signals wait as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """How a fleet scales."""

    scale: ScalePolicy
    scale_in_after_s: float
    """How long fewer workers must be enough before one is drained."""

    jobs_per_worker: int | None = None
    """Follow the number of jobs instead of the backlog in tokens: one worker for this many."""

    def wanted(self, backlog: Backlog) -> int:
        """Return how many workers a backlog needs."""
        if self.jobs_per_worker is None:
            return wanted_workers(backlog, self.scale)
        return wanted_by_jobs(backlog, self.jobs_per_worker, self.scale)


class ScaleIn:
    """The largest number that was wanted in the last seconds. Changes with each number."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._seen: deque[tuple[float, int]] = deque()

    def next(self, wanted: int, now_s: float) -> int:
        """Note the number that is needed now, and return how many should run."""
        while self._seen and now_s - self._seen[0][0] >= self._after_s:
            self._seen.popleft()
        self._seen.append((now_s, wanted))
        return max(number for _, number in self._seen)


class BacklogReader:
    """The backlog of the queues. Opens a new connection for each read: a fleet may be idle for hours."""

    def __init__(self, url: str, config: WorkerConfig, log: Log) -> None:
        self._url = url
        self._config = config
        self._log = log
        self._is_away = False

    def read(self) -> Backlog | None:
        """Read it; None while Redis does not answer, which is logged once."""
        try:
            client = connect(self._url, timeout_s=TIMEOUT_S)
            try:
                views = {
                    queue: [survey(client, keys, fields=BACKLOG_FIELDS) for keys in partitions]
                    for queue, partitions in by_queue(partitions_of(self._config)).items()
                }
            finally:
                client.connection_pool.disconnect()
        except (RedisError, OSError) as error:
            if not self._is_away:
                self._log.warning("redis unreachable; the number of workers stays", error=str(error))
            self._is_away = True
            return None
        if self._is_away:
            self._log.info("redis reachable again")
        self._is_away = False
        return backlog_of_all(views)


def start_fleet(config: WorkerConfig, environ: Mapping[str, str], policy: FleetPolicy) -> int:
    """Run as many workers as the queue needs until asked to stop; return the exit code.

    The number of processes, or of GPUs, is the largest number of workers.

    Raises:
        ConfigError: as `start_parent`, or the least number of workers is over the largest.
    """
    configure_logs(config.log)
    log = get_log()
    workers, sidecars = fleet_specs(config, environ), sidecar_specs(config, environ)
    try:
        policy = replace(policy, scale=replace(policy.scale, max_workers=len(workers)))
    except InvalidSetting as error:
        raise ConfigError([f"--min: {error}. --processes or --gpu say how many workers there may be"]) from error
    redis = server_of_children(config, environ, log)
    reader = BacklogReader(redis.url, config, log)
    build_kernels_ahead(config)
    with ended_by_threads(log):
        report, prepared = reporter(redis.url, config, log), prepared_process(config, environ, log)
        return Fleet(workers, sidecars, log, report, policy=policy, read=reader.read, prepared=prepared).run()


class Fleet(Parent):
    """A parent that follows the queue. Changes as workers come and go."""

    def __init__(  # noqa: PLR0913  # a parent, and what it follows
        self,
        workers: Sequence[ChildSpec],
        sidecars: Sequence[ChildSpec],
        log: Log,
        make_report: Callable[[], Report],
        *,
        policy: FleetPolicy,
        read: Callable[[], Backlog | None],
        prepared: PreparedProcess | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            workers: The workers that may run, in the order in which to start them.
            sidecars: As in `Parent`. They stay when no worker is left.
            log: Where to log.
            make_report: As in `Parent`.
            policy: How many workers to run.
            read: Reads the queue; returns None if it cannot be read now.
            prepared: As in `Parent`.
        """
        super().__init__(workers, sidecars, log, make_report, prepared)
        self._policy = policy
        self._read = read
        self._scale_in = ScaleIn(policy.scale_in_after_s)
        self._fleet_log = log
        self._due_s = 0.0
        for worker in self._workers:
            worker.retire()

    @property
    def _is_needed(self) -> bool:
        return not (self._is_stopping or self._is_misused) or super()._is_needed

    @property
    def _is_misused(self) -> bool:
        """Whether no worker can run with these settings. A worker that was ready shows that they are right."""
        refused = [worker for worker in self._workers if worker.is_refused]
        if len(refused) == len(self._workers):
            return True
        return bool(refused) and not any(worker.is_ready for worker in self._workers)

    def _steer(self) -> None:
        """Look at the queue, and start or drain workers."""
        now_s = monotonic_s()
        if now_s < self._due_s or self._is_stopping:
            return
        self._due_s = now_s + READ_EVERY_S
        if self._is_misused:
            for worker in self._workers:
                worker.dismiss()
            return
        backlog = self._read()
        if backlog is not None:
            self._follow(backlog, self._scale_in.next(self._policy.wanted(backlog), now_s))

    def _follow(self, backlog: Backlog, target: int) -> None:
        active = [worker for worker in self._workers if worker.is_active]
        idle = [worker for worker in self._workers if not (worker.is_needed or worker.is_refused)]
        started, drained = idle[: max(0, target - len(active))], active[target:]
        for worker in started:
            worker.enlist()
        for worker in drained:
            worker.dismiss()
        if started or drained:
            self._fleet_log.info(
                "workers scaled",
                workers=len(active) + len(started) - len(drained),
                before=len(active),
                backlog_jobs=backlog.backlog_jobs,
                backlog_tokens=backlog.backlog_tokens,
                running_jobs=backlog.running_jobs,
                worker_tokens_per_s=backlog.worker_tokens_per_s,
            )
