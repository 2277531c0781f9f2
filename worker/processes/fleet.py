"""`worker fleet`: the parent of as many workers as the queue needs, from the least number to the largest.

It starts each missing worker, and drains the newest when fewer are enough: that worker takes no more
jobs, finishes those it has, or returns them. Everything else is as in `parent.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.scaling.backlog import Backlog
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.parent import Parent, Report, build_kernels_ahead, reporter, server_of_children
from sluice.worker.processes.prepared import PreparedProcess
from sluice.worker.processes.scaling import BacklogReader, FleetPolicy, Reader, ScaleIn
from sluice.worker.processes.specs import fleet_specs, prepared_process, sidecar_specs

READ_EVERY_S = 0.5
"""Least interval of looks at the queue."""


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
        read: Reader,
        prepared: PreparedProcess | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            workers: The workers that may run, in the order in which to start them.
            sidecars: As in `Parent`. They stay when no worker is left.
            log: Where to log.
            make_report: As in `Parent`.
            policy: How many workers to run.
            read: Reads the queue.
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
