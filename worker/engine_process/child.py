"""The process of an engine: `python -m sluice.worker.engine_process.child SOCKET`, started by `process.py` alone.

`serve` is its loop. A thread receives orders, so that the worker never waits for a step to send one; it ends the
process when the worker's has ended, whatever the step does.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection
from types import FrameType

from sluice.engine.errors import EngineBroken
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import TokenDelta
from sluice.engine.watching import Iteration
from sluice.worker.engine_process.messages import Load, LoadFailed, Orders, Report, Setup, packed, receive, send
from sluice.worker.errors import ConfigError, WorkerError
from sluice.worker.log import Log, configure_logs, get_log
from sluice.worker.model.engine import STALLED_S
from sluice.worker.model.load import load_prepared, prepare
from sluice.worker.model.loaded_model import LocalModel

END_WITHIN_S = 2.0
"""How long a step may last on after the worker has ended."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load a model for the process at the other end of the socket, and generate for it until it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGHUP):
        # They are for the worker, whose process group or container they reach.
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        try:
            setup = receive(connection, Setup)
            configure_logs(setup.config.log)
            _run(connection, setup)
        except (EOFError, BrokenPipeError):
            return  # the worker has ended


def _run(connection: Connection, setup: Setup) -> None:
    log = get_log(engine_pid=os.getpid())
    try:
        loaded = _load(connection, setup)
    except ConfigError as error:
        send(connection, LoadFailed(error.problems, are_settings=True))
        return
    except WorkerError as error:
        send(connection, LoadFailed((str(error),), are_settings=False))
        return
    _describe_on_signal(loaded.engine, log)
    send(connection, loaded.facts)
    # As in the worker: full collections stop every step.
    gc.collect()
    gc.freeze()
    inbox = Inbox(connection)
    try:
        serve(loaded.engine, inbox, connection)
    except EngineBroken as error:
        send(connection, error)
    except Exception as error:
        log.exception("engine process failed")
        send(connection, EngineBroken(f"{type(error).__name__}: {error}"))


def _load(connection: Connection, setup: Setup) -> LocalModel:
    """Prepare while the worker does, and load once its checks have passed."""
    prepared = prepare(setup.config)
    receive(connection, Load)
    return load_prepared(prepared, setup.config.model)


def _describe_on_signal(engine: LLMEngine, log: Log) -> None:
    def describe(_number: int, _frame: FrameType | None) -> None:
        lines = engine.describe()
        # The handler may have interrupted a write to the log, which cannot be entered twice.
        facts = {"count": len(lines), "lines": lines}
        threading.Thread(target=log.info, args=("sequences",), kwargs=facts, daemon=True).start()

    signal.signal(signal.SIGUSR1, describe)


class Inbox:
    """The orders that have arrived. Its thread receives them."""

    def __init__(self, connection: Connection) -> None:
        """Begin to receive."""
        self._connection = connection
        self._orders: deque[Orders] = deque()
        self._arrived = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def take(self, *, wait_s: float) -> list[Orders] | None:
        """Return the orders since the last call; None once the worker has ended. Waits for them up to `wait_s`."""
        with self._arrived:
            if wait_s > 0 and not self._orders:
                self._arrived.wait_for(self._has_news, None if wait_s == float("inf") else wait_s)
            orders = list(self._orders)
            self._orders.clear()
            return None if self._is_closed else orders

    def _has_news(self) -> bool:
        return bool(self._orders) or self._is_closed

    def _receive(self) -> None:
        try:
            while True:
                orders = receive(self._connection, Orders)
                with self._arrived:
                    self._orders.append(orders)
                    self._arrived.notify()
        except EOFError:
            with self._arrived:
                self._is_closed = True
                self._arrived.notify()
            end = threading.Timer(END_WITHIN_S, os._exit, (1,))
            end.daemon = True
            end.start()


def serve(engine: LLMEngine, inbox: Inbox, connection: Connection) -> None:
    """Do what is ordered, step by step, and report, until the worker has ended.

    Raises:
        EngineBroken: the device is lost.
        BrokenPipeError: the worker has ended.
    """
    num_orders = num_added = 0
    iterations: list[Iteration] = []
    deltas: list[TokenDelta] = []
    while True:
        send(
            connection,
            Report(
                deltas=[*map(packed, deltas)],
                room=engine.room(),
                num_orders=num_orders,
                num_added=num_added,
                is_idle=engine.idle_s > 0,
                stalled=engine.stalled(for_s=STALLED_S),
                stats=engine.stats,
                iterations=tuple(iterations),
            ),
        )
        iterations.clear()
        if (orders := inbox.take(wait_s=engine.idle_s)) is None:
            return
        for order in orders:
            engine.add(order.added)
            engine.abort(order.aborted)
            engine.drop(order.dropped)
            num_orders += 1
            num_added += len(order.added)
            if order.is_watched is not None:
                engine.watch(iterations.append if order.is_watched else None)
        deltas = engine.advance()


if __name__ == "__main__":
    main()
