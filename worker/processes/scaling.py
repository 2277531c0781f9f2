"""How many workers of a fleet should run: as many as the queue needs, without following every dip."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from sluice.protocol.redis.surveys import survey
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS, Backlog, backlog_of
from sluice.protocol.scaling.demand import ScalePolicy, wanted_by_jobs, wanted_workers
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import connect
from sluice.worker.endpoints import partitions_of
from sluice.worker.log import Log

TIMEOUT_S = 1.0
"""Time for a connection, and for a reply. Signals wait as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """What a fleet follows."""

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
    """The backlog of a queue. Opens a new connection for each read: a fleet may be idle for hours."""

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
                views = [survey(client, keys, fields=BACKLOG_FIELDS) for keys in partitions_of(self._config)]
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
        return backlog_of(self._config.queue.name, views)


Reader = Callable[[], Backlog | None]
"""Reads the backlog; None if it cannot be read now."""
