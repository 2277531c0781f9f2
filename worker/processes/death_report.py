"""Report the end of a worker process to its queue, so that other workers take its jobs over at once."""

import threading
import time
from collections.abc import Sequence

from redis.exceptions import RedisError

from sluice.protocol.calls import report_death
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.execution import run_many
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log

TIMEOUT_S = 1.0
"""Time for a connection, and for a reply."""

RETRY_FOR_S = 3.0
"""How long to repeat a report that Redis did not answer. After it, the worker's heartbeat expires by itself."""

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 0.25


class DeathReports:
    """Reports of incarnations whose process has ended. Each opens a new connection, since they are rare."""

    def __init__(self, url: str, partitions: Sequence[QueueKeys], log: Log) -> None:
        self._url = url
        self._partitions = tuple(partitions)
        self._log = log

    def send(self, incarnation: str, was_ready: bool) -> None:
        """Report an incarnation to every partition, on a thread. The process does not end before the thread.

        A worker that never was ready had no heartbeat and no jobs, so its death need not be reported.
        """
        try:
            threading.Thread(target=self._send, args=(incarnation, was_ready, RETRY_FOR_S), name="death-report").start()
        except RuntimeError:  # the system has no thread left
            self._send(incarnation, was_ready, 0.0)

    def _send(self, incarnation: str, was_ready: bool, retry_for_s: float) -> None:
        until_s, backoff = monotonic_s() + retry_for_s, Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        has_counted = False
        while True:
            replies = self._try(incarnation)
            has_counted = has_counted or True in replies
            error = next((reply for reply in replies if isinstance(reply, Exception)), None)
            if error is None or monotonic_s() >= until_s:
                break
            time.sleep(backoff.next_delay_s())
        log = self._log.bind(worker_id=incarnation[:8])
        if error is not None and not was_ready:
            log.debug("death not reported of a worker that was never ready", error=str(error))
        elif error is not None:
            log.warning("worker's death not reported; its jobs wait until its heartbeat expires", error=str(error))
        elif has_counted:
            log.info("worker's death reported")

    def _try(self, incarnation: str) -> list[bool | Exception]:
        """Report it once. Return each partition's reply, whether it knew the worker, or why there is none."""
        try:
            client = connect(self._url, timeout_s=TIMEOUT_S)
            try:
                return run_many(client, [report_death(keys, incarnation) for keys in self._partitions])
            finally:
                client.connection_pool.disconnect()
        except (ConfigError, RedisError, OSError) as error:
            return [error]
