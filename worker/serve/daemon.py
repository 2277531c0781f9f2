"""The worker: starts its components in order, runs the loop, and stops the components in reverse order.

Read `Daemon._loop` first. All work that could block the loop runs on other threads.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Protocol

from sluice.engine.errors import EngineBroken
from sluice.engine.interface import Engine
from sluice.worker.errors import ComponentDied, ExitCode, NotReady, WorkerBroken
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.pull import Pulling
from sluice.worker.signals import handling

END_WITHIN_S = 20.0
"""Time to hand jobs back and end, after the drain's timeout. Then the process ends, and others take its jobs."""


class Component(Protocol):
    """A component that runs alongside the loop. `stop` may be called without `start`, and twice."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Daemon:
    """One worker process: an engine, the mailbox through which it exchanges with the queue, and the components."""

    def __init__(
        self,
        engine: Engine,
        pulling: Pulling,
        context: WorkerContext,
        components: Sequence[Component],
        returns: ReturnQueue,
        on_broken: Callable[[], None],
    ) -> None:
        """Join the loop's parts; `run` starts it.

        Args:
            engine: Generates.
            pulling: Pulls jobs. The exchange, one of the components, starts and stops it.
            context: The worker's shared state.
            components: Components that run alongside the loop, in the order to start.
            returns: Takes the jobs to return at shutdown.
            on_broken: Called if the loop ends with an error, before the components stop.
        """
        self._engine = engine
        self._pulling = pulling
        self._components = tuple(components)
        self._context = context
        self._returns = returns
        self._on_broken = on_broken
        self._log = context.log
        self._num_stops = 0
        self._limit = threading.Timer(context.config.drain.timeout_s + END_WITHIN_S, self._end_at_once)
        self._limit.daemon = True

    def run(self) -> ExitCode:
        """Run until asked to stop; return the exit code, by which a supervisor decides whether to restart.

        Raises:
            NotReady: Redis did not answer the first heartbeat.
        """
        try:
            with self._signals(), self._components_running():
                self._log.info("worker started")
                if self._pulling.is_quiet:
                    self._log.info("quiet: pulling no more")
                self._loop(until=lambda: self._num_stops > 0)
                self._drain()
        except NotReady:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, a supervisor restarts the worker
            self._log_end(error)
            return ExitCode.BROKEN
        finally:
            self._limit.cancel()
        self._log.info("worker stopped")
        return ExitCode.DONE

    def _log_end(self, error: Exception) -> None:
        """Log why the worker ends, with the traceback unless the message says all."""
        if not isinstance(error, WorkerBroken | EngineBroken):
            self._log.error("worker broken", error=f"{type(error).__name__}: {error}", exc_info=error)
        elif isinstance(error, ComponentDied):
            self._log.error("worker broken", error=str(error), exc_info=error)
        else:
            self._log.error("worker broken", error=str(error))

    def _loop(self, until: Callable[[], bool]) -> None:
        engine, mailbox, watchdog = self._engine, self._context.mailbox, self._context.watchdog
        while not until():
            engine.look_ahead(mailbox.ahead_s)
            requests = mailbox.new_requests(engine.room(), num_uncounted=engine.num_uncounted, wait_s=engine.idle_s)
            with watchdog:
                engine.add(requests)
                engine.abort(mailbox.cancelled())
                engine.drop(mailbox.lost())
                deltas = engine.advance()
            mailbox.publish(deltas)
            mailbox.offer(engine.stalled())

    def _drain(self) -> None:
        """Shut down gracefully: stop pulling, return unstarted jobs, finish the others within the timeout."""
        config = self._context.config.drain
        self._log.info("draining", mode=config.mode, timeout_s=config.timeout_s)
        self._pulling.quiet()
        self._returns.add_unstarted()
        if config.mode == "finish":
            over = threading.Event()
            timer = threading.Timer(config.timeout_s, lambda: (over.set(), self._context.mailbox.interrupt()))
            timer.daemon = True
            timer.start()
            self._loop(until=lambda: not len(self._context.leases) or self._num_stops > 1 or over.is_set())
            timer.cancel()

    @contextmanager
    def _components_running(self) -> Generator[None]:
        try:
            for component in self._components:
                component.start()
            yield
        except Exception:
            # A job may break one worker after another. The queue counts a death for each, to find that job.
            self._on_broken()
            raise
        finally:
            # The heartbeat's deregistration returns the jobs that are still held.
            for component in reversed(self._components):
                component.stop()

    # ------------------------------------------------------------ signals

    def _signals(self) -> AbstractContextManager[None]:
        if threading.current_thread() is not threading.main_thread():
            return nullcontext()  # signals need the main thread; tests call `stop`
        return handling(
            {
                signal.SIGTERM: self._on_stop,
                signal.SIGINT: self._on_stop,
                signal.SIGTSTP: self._on_quiet,
                signal.SIGCONT: self._on_resume,
                signal.SIGUSR1: self._on_describe,
            }
        )

    def stop(self) -> None:
        """Request a graceful shutdown; a second call returns all jobs at once. Safe from threads and handlers."""
        self._num_stops += 1
        if self._num_stops == 1:
            self._limit.start()
        self._context.mailbox.interrupt()

    def _end_at_once(self) -> None:
        # The log may be what hangs.
        line = threading.Thread(target=self._log.error, args=("shutdown outlasted its limit",), daemon=True)
        line.start()
        line.join(1.0)
        os._exit(ExitCode.BROKEN)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        # A supervisor may signal the whole group, and the parent forwards its signal: SIGTERM counts once.
        if number == signal.SIGINT or self._num_stops == 0:
            self.stop()

    def _on_quiet(self, _number: int, _frame: FrameType | None) -> None:
        self._pulling.quiet()
        threading.Thread(target=self._log_quiet, daemon=True).start()

    def _log_quiet(self) -> None:
        self._pulling.wait_for_pull()
        self._log.info("quiet: pulling no more")

    def _on_resume(self, _number: int, _frame: FrameType | None) -> None:
        if self._num_stops == 0 and self._pulling.is_quiet:
            self._pulling.resume()
            self._log_later("pulling again")

    def _on_describe(self, _number: int, _frame: FrameType | None) -> None:
        if (lines := self._engine.describe()) is not None:
            self._log_later("sequences", count=len(lines), lines=lines)

    def _log_later(self, event: str, **facts: object) -> None:
        # The handler may have interrupted a write to the log, which cannot be entered twice.
        threading.Thread(target=self._log.info, args=(event,), kwargs=facts, daemon=True).start()
