"""`worker top`: read the queues once a second, draw them, and carry out what keys ask of workers of this host."""

import os
import signal
import socket
import sys
from collections.abc import Mapping

import psutil
from rich.console import Console
from rich.live import Live

from sluice.protocol.keys import by_queue
from sluice.protocol.redis.surveys import survey
from sluice.protocol.scaling.backlog import Backlog, backlog_of
from sluice.protocol.workers import WorkerRow, workers_of
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import connect
from sluice.worker.connection.server_checks import expecting_answers
from sluice.worker.endpoints import find_redis, stated_partitions_of
from sluice.worker.errors import NotReady
from sluice.worker.top.screen import screen
from sluice.worker.top.state import Action, TopState
from sluice.worker.top.terminal import Keys, raw_keys

SIGNALS = {Action.QUIET: signal.SIGTSTP, Action.RESUME: signal.SIGCONT, Action.DRAIN: signal.SIGTERM}


class QueueReader:
    """A reader of queues. Keeps its connection."""

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        self._url = find_redis(config, environ).url
        self._client = connect(self._url, timeout_s=config.redis.timeout_s)
        self._config = config

    def look(self) -> tuple[list[Backlog], list[WorkerRow]]:
        """Read the queues, and the workers of all of them.

        Raises:
            NotReady: Redis does not answer.
            ConfigError: the settings name another number of partitions than the workers serve.
        """
        with expecting_answers(self._url):
            by_name = {
                queue: [survey(self._client, keys) for keys in partitions]
                for queue, partitions in by_queue(stated_partitions_of(self._client, self._config)).items()
            }
        backlogs = [backlog_of(queue, views) for queue, views in by_name.items()]
        rows = [row for queue, views in by_name.items() for row in workers_of(queue, views)]
        return backlogs, list({row.id: row for row in rows}.values())


def run_top(config: WorkerConfig, environ: Mapping[str, str], *, every_s: float, is_once: bool) -> None:
    """Show the queues until `q`, or once.

    Raises:
        NotReady: Redis does not answer at first.
    """
    reader, console = QueueReader(config, environ), Console()
    backlogs, rows = first = reader.look()
    if is_once or not sys.stdin.isatty() or not console.is_terminal:
        state = TopState()
        console.print(screen(backlogs, state.visible(rows), state))
        return
    with raw_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        _show(reader, first, keys, live, every_s)


def _show(
    reader: QueueReader, first: tuple[list[Backlog], list[WorkerRow]], keys: Keys, live: Live, every_s: float
) -> None:
    state, next_s = TopState(), monotonic_s() + every_s
    backlogs, workers = first
    while not state.is_over:
        rows = state.visible(workers)
        live.update(screen(backlogs, rows, state), refresh=True)
        key = keys.next(max(0.0, next_s - monotonic_s()))
        if key is not None:
            action = state.press(key, rows)
            if action is not None:
                state.message = send(action, next(row for row in rows if row.id == state.selected))
        elif (now_s := monotonic_s()) >= next_s:
            next_s = now_s + every_s
            try:
                backlogs, workers = reader.look()
            except NotReady as error:
                state.message = str(error)


def send(action: Action, row: WorkerRow) -> str:
    """Send a worker of this host the signal of an action. Return what happened."""
    if row.pid is None:
        return f"worker {row.id[:8]} does not report its process id"
    if row.host != socket.gethostname():
        return f"worker {row.id[:8]} is on {row.host}: run `worker top` there, or signal it as its host does"
    try:
        # The process may have ended, and another one have its number.
        if "sluice.worker" not in psutil.Process(row.pid).cmdline():
            return f"process {row.pid} is not a worker of this host"
        os.kill(row.pid, SIGNALS[action])
    except (psutil.Error, OSError) as error:
        return f"worker {row.id[:8]} cannot be sent a signal: {error}"
    return f"worker {row.id[:8]} was asked to {action.value}"
