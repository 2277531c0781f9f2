"""The worker: builds its parts, starts them in order, runs the loop, quiets and stops them in reverse.

Read `Daemon._loop` first: it is the whole life of a worker. Everything that could make it wait runs on other threads.
"""

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from engine.errors import EngineBroken
from engine.llm_engine import LLMEngine
from worker.config import DrainConfig
from worker.errors import ExitCode, WorkerBroken
from worker.exchange import Exchange
from worker.log import Log


class Part(Protocol):
    """Something that runs beside the loop. `stop` may come without `start`, and twice."""

    def start(self) -> None: ...
    def quiet(self) -> None: ...
    def stop(self) -> None: ...


class Daemon:
    """One worker process: an engine, an exchange, and the parts around them."""

    def __init__(
        self,
        engine: LLMEngine,
        exchange: Exchange,
        parts: Sequence[Part],
        drain: DrainConfig,
        log: Log,
        broke: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._exchange = exchange
        self._parts = tuple(parts)
        self._drain_config = drain
        self._log = log
        self._broke = broke
        self._num_stops = 0

    def run(self) -> ExitCode:
        """Work until asked to stop; the exit code tells a supervisor whether to start again."""
        try:
            with self._signals(), self._parts_running():
                self._log.info("worker started")
                if self._exchange.is_quiet:
                    self._log.info("quiet: pulling no more")
                self._loop(until=lambda: self._num_stops > 0)
                self._drain()
        except (WorkerBroken, EngineBroken) as error:
            self._log.error("worker broken", error=str(error))  # a sentence; the cause was logged
            return ExitCode.BROKEN
        self._log.info("worker stopped")
        return ExitCode.DONE

    def _loop(self, until: Callable[[], bool]) -> None:
        engine, exchange = self._engine, self._exchange
        while not until():
            engine.add(exchange.new_requests(room=engine.room(), wait_s=engine.idle_s))
            engine.abort(exchange.cancelled())
            engine.drop(exchange.lost())
            exchange.publish(engine.step())

    def _drain(self) -> None:
        """Take nothing new, hand back what has not begun, and finish or hand over the rest in the time given."""
        config = self._drain_config
        self._log.info("draining", mode=config.mode, timeout_s=config.timeout_s)
        for part in reversed(self._parts):
            part.quiet()
        self._exchange.return_unstarted()
        if config.mode == "finish":
            over = threading.Event()
            timer = threading.Timer(config.timeout_s, lambda: (over.set(), self._exchange.interrupt()))
            timer.daemon = True
            timer.start()
            self._loop(until=lambda: self._exchange.is_drained or self._num_stops > 1 or over.is_set())
            timer.cancel()

    @contextmanager
    def _parts_running(self) -> Generator[None]:
        try:
            for part in self._parts:
                part.start()
            yield
        except Exception:
            # A job may break one worker after the other: the queue counts it as a death, to find that job.
            self._broke()
            raise
        finally:
            # What is still held then is handed back by the beat's farewell.
            for part in reversed(self._parts):
                part.stop()

    # ------------------------------------------------------------ signals

    @contextmanager
    def _signals(self) -> Generator[None]:
        handlers = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGTSTP: self._on_quiet,
            signal.SIGCONT: self._on_resume,
            signal.SIGUSR1: self._on_describe,
        }
        if threading.current_thread() is not threading.main_thread():
            yield  # a test drives it by `stop`
            return
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Ask for a drain; asked again, everything is handed back at once. Any thread, or a signal handler."""
        self._num_stops += 1
        self._exchange.interrupt()

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stop()

    def _on_quiet(self, _number: int, _frame: FrameType | None) -> None:
        self._exchange.quiet()
        threading.Thread(target=self._tell_quiet, daemon=True).start()

    def _tell_quiet(self) -> None:
        self._exchange.wait_for_pull()
        self._log.info("quiet: pulling no more")

    def _on_resume(self, _number: int, _frame: FrameType | None) -> None:
        if self._num_stops == 0 and self._exchange.is_quiet:
            self._exchange.resume()
            self._say("pulling again")

    def _on_describe(self, _number: int, _frame: FrameType | None) -> None:
        lines = self._engine.describe()
        self._say("sequences", count=len(lines), lines=lines)

    def _say(self, event: str, **facts: object) -> None:
        # A handler may interrupt a line that is being written: the log is not for handlers.
        threading.Thread(target=self._log.info, args=(event,), kwargs=facts, daemon=True).start()
