"""The engine's side: load the model, then carry out orders, step by step, and report.

`serve` is the loop. A thread receives orders, so that the worker never waits for a step to send one.
"""

import gc
import os
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from types import FrameType

from sluice.engine.errors import EngineBroken
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.interface import Engine
from sluice.engine.request import TokenDelta
from sluice.engine.watching import Iteration
from sluice.version import installed_version
from sluice.worker.engine_process.messages import Load, LoadFailed, Orders, Setup, StepReport, packed, receive, send
from sluice.worker.engines.registry import load
from sluice.worker.errors import ConfigError, WorkerError
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.model.folders import is_null

END_WITHIN_S = 2.0
"""How long a step may last on after the worker has ended."""


def run(socket: int, *, release: str) -> None:
    """Load a model for the process at the other end of the socket, and generate for it until it ends.

    `release` is that of the other process. The two send each other objects, so another release does not run.
    """
    with Connection(socket) as connection:
        try:
            if release == installed_version():
                _run(connection)
            else:
                send(connection, LoadFailed((other_release(release, installed_version()),), are_settings=True))
        except (EOFError, ConnectionError):
            return  # the worker has ended


def other_release(of_worker: str, of_engine: str) -> str:
    """Return the sentence about an engine's process whose Sluice is not of the worker's release."""
    return (
        f"SLUICE_ENGINE_PYTHON: its Sluice is {of_engine}, and this worker's is {of_worker}: "
        "install the same release in both environments"
    )


def _run(connection: Connection) -> None:
    setup = receive(connection, Setup)
    configure_logs(setup.config.log)
    log = get_log(worker_id=setup.worker_id, engine_pid=os.getpid())
    if not is_null(setup.config.model):
        limit_spinning()
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # takes seconds, while the worker checks
    receive(connection, Load)
    try:
        loaded = load(setup.config)
    except ConfigError as error:
        send(connection, LoadFailed(error.problems, are_settings=True))
        return
    except WorkerError as error:
        send(connection, LoadFailed((str(error),), are_settings=False))
        return
    except Exception as error:  # another engine may raise anything, and an exit code would not say what
        log.exception("model not loaded")
        send(connection, LoadFailed((f"{type(error).__name__}: {error}",), are_settings=False))
        return
    _describe_on_signal(loaded.engine, log)
    send(connection, loaded.facts)
    # As in the worker: full collections stop every step.
    gc.collect()
    gc.freeze()
    with ended_by_threads(log):
        _serve(loaded.engine, connection, log)


def _serve(engine: Engine, connection: Connection, log: Log) -> None:
    try:
        serve(engine, Inbox(connection), connection)
    except EngineBroken as error:
        send(connection, error)
    except ConnectionError:
        raise
    except Exception as error:
        log.exception("engine process failed")
        send(connection, EngineBroken(f"{type(error).__name__}: {error}"))


def _describe_on_signal(engine: Engine, log: Log) -> None:
    def describe(_number: int, _frame: FrameType | None) -> None:
        lines = engine.describe() or []
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
        self._failure: Exception | None = None
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def take(self, *, wait_s: float) -> list[Orders] | None:
        """Return the orders since the last call; None once the worker has ended. Waits for them up to `wait_s`.

        Raises:
            Exception: what was raised when an order was read.
        """
        with self._arrived:
            if wait_s > 0 and not self._orders:
                self._arrived.wait_for(self._has_news, None if wait_s == float("inf") else wait_s)
            orders = list(self._orders)
            self._orders.clear()
            if self._failure is not None:
                raise self._failure
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
            self._close(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine gets no more orders
            self._close(error)

    def _close(self, failure: Exception | None) -> None:
        """Let the loop end; after `END_WITHIN_S`, end the process, whatever a step does."""
        with self._arrived:
            self._is_closed, self._failure = True, failure
            self._arrived.notify()
        time.sleep(END_WITHIN_S)
        os._exit(1)


def serve(engine: Engine, inbox: Inbox, connection: Connection) -> None:
    """Carry out orders, step by step, and report, until the worker has ended.

    Raises:
        EngineBroken: the device is lost.
        ConnectionError: the worker has ended.
    """
    num_orders = num_added = 0
    iterations: list[Iteration] = []
    deltas: list[TokenDelta] = []
    while True:
        send(
            connection,
            StepReport(
                deltas=[*map(packed, deltas)],
                room=engine.room(),
                num_orders=num_orders,
                num_added=num_added,
                is_idle=engine.idle_s == float("inf"),
                stalled=engine.stalled(),
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
            engine.look_ahead(order.look_ahead_s)
            num_orders += 1
            num_added += len(order.added)
            if order.is_watched is not None:
                engine.watch(iterations.append if order.is_watched else None)
        deltas = engine.advance()
