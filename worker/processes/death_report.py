"""Report the end of a worker process to its queue, so that other workers take its jobs over at once."""

from collections.abc import Sequence

from redis.exceptions import RedisError

from sluice.producer.contract.calls import report_death
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport.execution import run_many
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log

TIMEOUT_S = 1.0
"""Time for a connection, and for a reply. After it, the worker's heartbeat expires by itself."""


class DeathReports:
    """Reports incarnations whose process has ended. Connects for each report: they are rare."""

    def __init__(self, url: str, partitions: Sequence[QueueKeys], log: Log) -> None:
        self._url = url
        self._partitions = tuple(partitions)
        self._log = log

    def send(self, incarnation: str) -> None:
        """Report an incarnation to every partition. An error is none: its heartbeat expires soon."""
        try:
            client = connect(self._url, timeout_s=TIMEOUT_S)
            try:
                replies = run_many(client, [report_death(keys, incarnation) for keys in self._partitions])
            finally:
                client.connection_pool.disconnect()
        except (ConfigError, RedisError, OSError) as error:
            self._log.debug("worker's death not reported", worker_id=incarnation[:8], error=str(error))
            return
        if True in replies:
            self._log.info("worker's death reported", worker_id=incarnation[:8])
