"""The processes of rq workers. Each listens to one queue, speaks JSON and never imports torch.

Each process listens to one queue because rq can lose a job between two.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from redis.exceptions import RedisError

from sluice.history.database import HistoryError
from sluice.protocol.redis.backoff import Backoff
from sluice.worker.callbacks import chores, gateway_tasks
from sluice.worker.callbacks.chore_jobs import rq_worker
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.outage import FIRST_RETRY_S, LONGEST_RETRY_S
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.recorder.migrate import prepare_at, wait_for_history

RESTART_AFTER_S = 1.0
STOP_TIMEOUT_S = 30.0


def work(queue: str, settings: CallbackSettings) -> None:
    """Run one rq worker on one queue in this process, until SIGTERM or until the parent or rq's server ends."""
    configure_logs(settings.log)
    log = get_log(queue=settings.queue)
    with ended_by_threads(log):
        _work(queue, settings, log)


def _work(queue: str, settings: CallbackSettings, log: Log) -> None:
    _end_with_parent()
    chores.bind(settings)
    if queue == settings.rq_names.gateway:
        gateway_tasks.bind(settings)
    if queue != settings.rq_names.webhooks:
        # Its chores wait in rq meanwhile, also while the schema is that of another release.
        wait_for_history(lambda: prepare_at(settings.database_url), log, threading.Event(), retried=HistoryError)
    client = connect(settings.rq_url, timeout_s=settings.timeout_s + 30)
    logging.getLogger("rq.worker").addFilter(_is_no_outage)
    _wait_for_rq(client)
    try:
        rq_worker(queue, client).work(logging_level="WARNING")
    except (RedisError, OSError):
        sys.exit(ExitCode.NOT_READY)


def _wait_for_rq(client: Client) -> None:
    """Wait until rq's server answers. The mover reports its outages, for all processes."""
    backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, jitter=0.5)
    while True:
        try:
            client.ping()
        except (RedisError, OSError):
            time.sleep(backoff.next_delay_s())
        else:
            return


def _is_no_outage(record: logging.LogRecord) -> bool:
    """Return whether a line of rq's log is not about its server, whose outages the mover reports."""
    facts = record.args if isinstance(record.args, tuple) else ()
    error = record.exc_info[1] if record.exc_info else None
    return not any(isinstance(fact, RedisError) for fact in (error, *facts))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class WorkerPool:
    """The processes of rq workers, restarted when they die. Changes as processes start and end."""

    def __init__(self, queues: Sequence[str], settings: CallbackSettings) -> None:
        # Spawned, because a forked child would inherit threads and connections.
        self._context = multiprocessing.get_context("spawn")
        self._settings = settings
        self._processes: dict[int, tuple[str, BaseProcess]] = {}
        self._queues = queues
        self._log = get_log(queue=settings.queue)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start all processes and watch them."""
        for number, queue in enumerate(self._queues):
            self._spawn(number, queue)
        self._thread.start()

    def close(self) -> None:
        """Restart no process from now on: a signal to the group may have stopped them too. Safe in a signal handler."""
        self._closing.set()

    def stop(self) -> None:
        """Stop all processes gracefully, and kill them after a timeout."""
        self.close()
        self._thread.join()
        for _, process in self._processes.values():
            process.terminate()
        until_s = time.monotonic() + STOP_TIMEOUT_S
        for _, process in self._processes.values():
            process.join(max(0.1, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _spawn(self, number: int, queue: str) -> None:
        process = self._context.Process(target=work, args=(queue, self._settings), daemon=False)
        process.start()
        self._processes[number] = queue, process

    def _watch(self) -> None:
        while not self._closing.wait(RESTART_AFTER_S):
            for number, (queue, process) in list(self._processes.items()):
                if not process.is_alive() and not self._closing.is_set():
                    # Its server is unreachable, which the mover reports.
                    if process.exitcode != ExitCode.NOT_READY:
                        self._log.warning("rq worker ended; restarting", rq_queue=queue, exit_code=process.exitcode)
                    self._spawn(number, queue)
