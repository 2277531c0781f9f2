"""Queues between the loop and its threads: requests in, deltas out, wake-ups. Knows no Redis, no jobs.

Every method holds the lock for microseconds. It is an `RLock`, because a signal handler may interrupt the loop inside a
method and call `interrupt`.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from sluice.engine.request import Request, Room, TokenDelta
from sluice.worker.clock import monotonic_s
from sluice.worker.errors import ComponentDied
from sluice.worker.serve.offered_room import OfferedRoom

MAX_WAIT_S = 0.5
"""Longest wait of the loop. A signal handler may call `interrupt` between the check and the sleep of a wait, and that
notification is lost."""

_TOKEN_BYTES = 200
_LOGPROB_BYTES = 130
"""Approximate memory of a buffered token, and of each log-probability with it."""


class Mailbox:
    """The loop's side of the exchange: what it takes and what it publishes. Changes under its own lock."""

    def __init__(self, *, max_buffered_bytes: int) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        lock = threading.RLock()
        self._loop_wakes = threading.Condition(lock)
        self._exchange_wakes = threading.Condition(lock)
        self._puller_wakes = threading.Condition(lock)
        self._steps: deque[tuple[float, Sequence[TokenDelta]]] = deque()
        self._steps_bytes = 0
        self._unpublished: list[str] = []
        self._requests: list[Request] = []
        self._cancelled: list[str] = []
        self._lost: list[str] = []
        self._room = OfferedRoom()
        self._buffered_bytes = 0
        self._is_interrupted = False
        self._has_reports = False
        self._has_work = False
        self._has_urgent_work = False
        self._waits_for_urgent_work = False
        self._may_pull_again = False
        self._failure: BaseException | None = None
        self._stalled: list[str] = []

    # ------------------------------------------------------------ called by the loop

    def new_requests(self, room: Room, *, num_uncounted: int = 0, wait_s: float) -> list[Request]:
        """Set the engine's room, and take the requests that are ready; wait up to `wait_s` for an event.

        It may return earlier, with nothing. The room does not count the last `num_uncounted` requests taken.

        Raises:
            BaseException: The failure of a thread that the loop depends on.
        """
        with self._loop_wakes:
            if self._room.state(room, num_uncounted):
                self._wake_puller()
            if wait_s > 0:
                self._loop_wakes.wait_for(self._has_mail, timeout=min(wait_s, MAX_WAIT_S))
            self._is_interrupted = self._has_reports = False
            self._raise_failure()
            requests, self._requests = self._requests, []
            self._room.hand([request.id for request in requests])
            return requests

    def _has_mail(self) -> bool:
        is_woken = self._is_interrupted or self._has_reports
        return bool(self._requests or self._cancelled or self._lost or is_woken or self._failure)

    def cancelled(self) -> list[str]:
        """Take the request ids to abort; those that the loop has not taken yet come later, when an abort finds them."""
        with self._loop_wakes:
            if not self._cancelled:
                return []
            untaken = {request.id for request in self._requests}
            cancelled = [request_id for request_id in self._cancelled if request_id not in untaken]
            self._cancelled = [request_id for request_id in self._cancelled if request_id in untaken]
            return cancelled

    def lost(self) -> list[str]:
        """Take the request ids to drop: their leases are lost."""
        with self._loop_wakes:
            lost, self._lost = self._lost, []
            return lost

    def publish(self, deltas: Sequence[TokenDelta]) -> None:
        """Queue the output of a step; block while the buffer is full, which needs a long absence of Redis.

        Raises:
            BaseException: The failure of a thread that the loop depends on.
        """
        if deltas:
            with self._exchange_wakes:
                self._steps.append((monotonic_s(), deltas))
                num_bytes = bytes_of(deltas)
                self._steps_bytes += num_bytes
                self._buffered_bytes += num_bytes
                self._wake_exchange(urgent=any(map(is_urgent, deltas)))
        if self._buffered_bytes > self._max_buffered_bytes:
            with self._loop_wakes:
                while self._buffered_bytes > self._max_buffered_bytes and not (self._failure or self._is_interrupted):
                    self._loop_wakes.wait(MAX_WAIT_S)
        self._raise_failure()

    def offer(self, request_ids: list[str]) -> None:
        """State the requests that another worker may have, if it is idle."""
        self._stalled = request_ids

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def interrupt(self) -> None:
        """Let a waiting loop return once, with nothing."""
        with self._loop_wakes:
            self._is_interrupted = True
            self._loop_wakes.notify_all()

    # ------------------------------------------------------------ called by other threads

    def announce_report(self) -> None:
        """Let a loop that waits for requests return: its engine, in another process, has reported."""
        with self._loop_wakes:
            self._has_reports = True
            self._loop_wakes.notify_all()

    def wait(self, timeout_s: float, *, for_urgent: bool = False) -> None:
        """Sleep until the exchange has work, with `for_urgent` urgent work; at most this long."""
        with self._exchange_wakes:
            self._waits_for_urgent_work = for_urgent
            if not (self._has_urgent_work if for_urgent else self._has_work):
                self._exchange_wakes.wait(timeout_s)
            self._has_work = self._has_urgent_work = False

    def wait_to_pull(self, timeout_s: float) -> None:
        """Sleep until there may be jobs to pull or room for them, at most this long."""
        with self._puller_wakes:
            if not self._may_pull_again:
                self._puller_wakes.wait(timeout_s)
            self._may_pull_again = False

    def wake(self) -> None:
        """Wake the exchange thread and the pull thread."""
        with self._exchange_wakes:
            self._wake_exchange()
            self._wake_puller()

    def wake_puller(self) -> None:
        """Wake the pull thread."""
        with self._puller_wakes:
            self._wake_puller()

    def _wake_exchange(self, *, urgent: bool = True) -> None:
        self._has_work = True
        self._has_urgent_work = self._has_urgent_work or urgent
        if urgent or not self._waits_for_urgent_work:
            self._exchange_wakes.notify()

    def _wake_puller(self) -> None:
        self._may_pull_again = True
        self._puller_wakes.notify()

    def take_steps(self) -> tuple[list[tuple[float, Sequence[TokenDelta]]], int]:
        """Return the output of each step since the last call, with when it ended, and about how many bytes it takes."""
        with self._exchange_wakes:
            steps, num_bytes = list(self._steps), self._steps_bytes
            self._steps.clear()
            self._steps_bytes = 0
            return steps, num_bytes

    def put_unpublished(self, request_id: str) -> None:
        """Queue a job for the exchange to publish now: it ended without the engine, or another worker is to have it."""
        with self._exchange_wakes:
            self._unpublished.append(request_id)
            self._wake_exchange()

    def take_unpublished(self) -> list[str]:
        """Take the jobs to publish now."""
        with self._exchange_wakes:
            unpublished, self._unpublished = self._unpublished, []
            return unpublished

    @property
    def stalled(self) -> list[str]:
        """The requests that another worker may have, as of the loop's last step."""
        return self._stalled

    def expect(self, coming: Sequence[tuple[str, Room]], asked_s: float | None) -> None:
        """See `OfferedRoom.expect`."""
        with self._exchange_wakes:
            self._room.expect(coming, asked_s)

    @property
    def ahead_s(self) -> float:
        """How long before it is free a place must be offered: one pull may be under way, and the next brings a job."""
        return 2 * self._room.pull_s

    def is_coming(self, request_id: str) -> bool:
        """Return whether a request is on its way to the engine, or not yet counted in its room."""
        return self._room.is_coming(request_id)

    def room(self) -> Room:
        """Return the engine's reported room, less the requests on their way to it."""
        with self._exchange_wakes:
            return self._room.free()

    def deliver(self, requests: Sequence[Request]) -> None:
        """Queue requests for the loop."""
        with self._loop_wakes:
            self._requests.extend(requests)
            self._room.note_ready([request.id for request in requests], monotonic_s())
            self._loop_wakes.notify()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Queue requests for the loop to abort."""
        with self._loop_wakes:
            self._cancelled.extend(request_ids)
            self._loop_wakes.notify()

    def lose(self, request_ids: Sequence[str]) -> None:
        """Remove requests that the loop has not taken, and queue all of them for the loop to drop."""
        self.forget(request_ids)
        with self._loop_wakes:
            gone = set(request_ids)
            self._requests = [request for request in self._requests if request.id not in gone]
            self._lost.extend(request_ids)
            self._loop_wakes.notify()

    def forget(self, request_ids: Collection[str]) -> None:
        """Stop counting requests as on their way: their room is free."""
        with self._exchange_wakes:
            if self._room.forget(request_ids):
                self._wake_puller()

    def release(self, num_bytes: int) -> None:
        """Take bytes off the buffer that Redis has acknowledged."""
        with self._loop_wakes:
            self._buffered_bytes = max(0, self._buffered_bytes - num_bytes)
            self._loop_wakes.notify()

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Return a thread that the loop depends on: an error that ends it is raised from the loop's next call."""

        def guarded() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001  # the loop must end whatever the error is
                self.fail(ComponentDied(name, error))

        return threading.Thread(target=guarded, name=name, daemon=True)

    def fail(self, failure: BaseException) -> None:
        """Raise `failure` from the loop's next call: a thread that it depends on has ended."""
        with self._loop_wakes:
            self._failure = self._failure or failure
            self._loop_wakes.notify_all()


def is_urgent(delta: TokenDelta) -> bool:
    """Return whether a delta is published at once: it is a choice's first token or its end."""
    return delta.start == 0 or delta.finish is not None


def bytes_of(deltas: Sequence[TokenDelta]) -> int:
    """Return about how much memory deltas take while they are buffered."""
    total = 0
    for delta in deltas:
        total += _TOKEN_BYTES * (len(delta.token_ids) + 1) + len(delta.text)
        for token in delta.logprobs or ():
            total += _LOGPROB_BYTES * (len(token.top) + 1)
    return total
