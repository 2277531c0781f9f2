"""An engine whose steps are computed in another process, as the worker's loop sees it: it advances by reports."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from sluice.engine.errors import EngineBroken
from sluice.engine.interface import EngineStats
from sluice.engine.request import Request, Room, TokenDelta
from sluice.engine.validation import check_request
from sluice.engine.watching import Watcher
from sluice.worker.engine_process.messages import Orders, StepReport, receive, send, unpacked
from sluice.worker.engine_process.process import EngineProcess
from sluice.worker.watchdog import Watchdog

MAX_REPORTS = 8
"""Reports that wait for the loop. Once the socket's buffer is full, too, the engine waits, as one in the loop's process
waits for a full buffer towards Redis."""


class ReportedSteps(Watchdog):
    """A watchdog of steps that begin and end with reports. The loop only takes reports, so its turns are not timed."""

    def __enter__(self) -> None:
        """Begin nothing."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End nothing."""


class RemoteEngine:
    """The engine of another process. A component: start, stop. One thread owns it, as `LLMEngine`.

    Its view of the engine is as of the last report that `advance` has taken.
    """

    def __init__(self, process: EngineProcess, steps: ReportedSteps, *, step_tokens: int) -> None:
        """Let a process load its model, and join its engine.

        Args:
            process: The process, which the caller stops.
            steps: Times them.
            step_tokens: Most tokens of a step.

        Raises:
            ConfigError, WorkerBroken: as `EngineProcess.load`.
        """
        self.facts, self._last = process.load()
        self._process = process
        self._limits = self.facts.limits
        self._step_tokens = step_tokens
        self.watchdog = steps
        self._wake_loop: Callable[[], None] = lambda: None
        self._watcher: Watcher | None = None
        self._watch_orders: deque[bool] = deque()
        self._added: list[Request] = []
        self._aborted: list[str] = []
        self._dropped: list[str] = []
        self._look_ahead_s = 0.0
        self._num_orders = 0
        self._num_added = 0
        self._reports: deque[StepReport] = deque()
        self._places = threading.Semaphore(MAX_REPORTS)
        self._is_closing = False
        self._failure: EngineBroken | None = None
        self._timing = threading.Lock()
        self._is_timed = False
        self._thread = threading.Thread(target=self._receive, name="reports", daemon=True)

    # ------------------------------------------------------------ called as a component

    def wake_with(self, wake_loop: Callable[[], None]) -> None:
        """Call `wake_loop`, from any thread, when `advance` has something to do."""
        self._wake_loop = wake_loop

    def start(self) -> None:
        """Begin to receive reports."""
        self._thread.start()

    def stop(self) -> None:
        """End the process, and with it the thread."""
        self._is_closing = True
        self._places.release()
        self._process.stop()
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------ called by the loop

    def add(self, requests: Iterable[Request]) -> None:
        """See `Engine.add`. Sent by `advance`, as are the other orders."""
        self._added += requests

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        self._aborted += request_ids

    def drop(self, request_ids: Iterable[str]) -> None:
        """See `Engine.drop`. Output that is on its way is still returned."""
        self._dropped += request_ids

    def advance(self) -> list[TokenDelta]:
        """Send the orders, and return the deltas of the reports since the last call.

        Raises:
            EngineBroken: the process has ended, and all its reports are taken.
        """
        self._send_orders()
        if not self._reports and self._failure is not None:
            raise self._failure
        deltas: list[TokenDelta] = []
        for _ in range(len(self._reports)):
            self._last = report = self._reports.popleft()
            self._places.release()
            deltas += map(unpacked, report.deltas)
            if (watcher := self._watcher) is not None:
                for iteration in report.iterations:
                    watcher(iteration)
        return deltas

    @property
    def idle_s(self) -> float:
        """0 if `advance` has something to do, else infinity."""
        return 0.0 if self._reports or self._failure or self._has_orders else float("inf")

    @property
    def _has_orders(self) -> bool:
        return bool(self._added or self._aborted or self._dropped or self._watch_orders)

    def look_ahead(self, seconds: float) -> None:
        """See `Engine.look_ahead`. Sent with the next orders."""
        self._look_ahead_s = seconds

    def room(self) -> Room:
        """See `Engine.room`. It does not count the last `num_uncounted` requests."""
        return self._last.room

    @property
    def num_uncounted(self) -> int:
        """Requests that were added after the last report."""
        return self._num_added - self._last.num_added

    def stalled(self) -> list[str]:
        """See `Engine.stalled`."""
        return self._last.stalled

    # ------------------------------------------------------------ called by any thread

    def validate(self, request: Request) -> None:
        """See `Engine.validate`."""
        self.facts.capabilities.check(request)
        check_request(request, self._limits, step_tokens=self._step_tokens)

    @property
    def max_request_tokens(self) -> int:
        """See `Engine.max_request_tokens`."""
        return self._limits.longest_request(self._step_tokens)

    @property
    def most_offered_tokens(self) -> int:
        """See `Engine.most_offered_tokens`."""
        return self._limits.most_offered_tokens(self._step_tokens)

    @property
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._last.stats

    def watch(self, watcher: Watcher | None) -> None:
        """See `Engine.watch`. The watcher is called by the loop's thread."""
        self._watcher = watcher
        self._watch_orders.append(watcher is not None)
        self._wake_loop()

    def describe(self) -> None:
        """Let the process log its sequences."""
        self._process.describe()

    # ------------------------------------------------------------ orders and reports

    def _send_orders(self) -> None:
        if not self._has_orders:
            return
        is_watched = self._watch_orders.popleft() if self._watch_orders else None
        orders = Orders(tuple(self._added), tuple(self._aborted), tuple(self._dropped), is_watched, self._look_ahead_s)
        self._added, self._aborted, self._dropped = [], [], []
        self._num_added += len(orders.added)
        with self._timing:
            self._num_orders += 1
            if not self._is_timed:
                self._begin_step()
        with suppress(OSError):  # the thread that receives learns why
            send(self._process.connection, orders)

    def _receive(self) -> None:
        try:
            while not isinstance(received := receive(self._process.connection, StepReport, EngineBroken), EngineBroken):
                self._take(received)
            self._failure = received
        except EOFError:
            self._failure = EngineBroken(f"the engine's process ended: {self._process.end()}")
        except Exception as error:  # noqa: BLE001  # the loop must end whatever the error is
            self._failure = EngineBroken(f"a report of the engine's process cannot be read: {error!r}")
        self._wake_loop()

    def _take(self, report: StepReport) -> None:
        with self._timing:
            if self._is_timed:
                self.watchdog.end()
                self._is_timed = False
        # Without a place the engine waits too, and no step is late.
        if not self._is_closing:
            self._places.acquire()
        self._reports.append(report)
        self._wake_loop()
        with self._timing:
            if not self._is_timed and (not report.is_idle or report.num_orders < self._num_orders):
                self._begin_step()

    def _begin_step(self) -> None:
        self.watchdog.begin()
        self._is_timed = True
