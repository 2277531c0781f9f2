"""Between the loop and the threads around it: requests in, deltas out, and who must wake. Knows no Redis and no jobs.

Every method is short: the lock is held for microseconds. It is an `RLock`, because a signal handler may interrupt the
loop inside one of them and call `interrupt`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.request import Request, Room, TokenDelta
from worker.clock import monotonic_s

NO_ROOM = Room(kv_tokens=0, prefill_tokens=0, sequences=0)

MAX_WAIT_S = 0.5
"""No wait of the loop is longer: a signal's handler runs in its thread, and may call `interrupt` when the wait has
looked but does not sleep yet; that wakes nobody."""

_TOKEN_BYTES = 200
_LOGPROB_BYTES = 120
"""What a buffered token, and each log-probability with it, takes in Python's memory, about."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step yielded, and when."""

    at_s: float
    deltas: Sequence[TokenDelta]


class Mailbox:
    """The one place where the loop meets the exchange. Changes under its own lock."""

    def __init__(self, *, max_buffered_bytes: int, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._max_buffered_bytes = max_buffered_bytes
        lock = threading.RLock()
        self._loop_wakes = threading.Condition(lock)
        self._exchange_wakes = threading.Condition(lock)
        self._puller_wakes = threading.Condition(lock)
        self._steps: deque[Stepped] = deque()
        self._steps_bytes = 0
        self._ended: list[str] = []
        self._requests: list[Request] = []
        self._cancelled: list[str] = []
        self._lost: list[str] = []
        self._room = NO_ROOM
        self._coming: dict[str, Room] = {}
        self._handed: list[str] = []
        self._buffered_bytes = 0
        self._is_interrupted = False
        self._has_news = False
        self._has_urgent_news = False
        self._waits_for_urgent_news = False
        self._may_pull_again = False
        self._failure: BaseException | None = None

    # ------------------------------------------------------------ the loop's side

    def take_requests(self, room: Room, *, wait_s: float) -> list[Request]:
        """Say how much room there is, and take the requests that are ready; wait up to `wait_s` for something to do.

        It may return sooner, with nothing.

        Raises:
            BaseException: the failure of a part that the loop depends on.
        """
        self._state_room(room)
        with self._loop_wakes:
            if wait_s > 0:
                self._loop_wakes.wait_for(self._has_mail, timeout=min(wait_s, MAX_WAIT_S))
            self._is_interrupted = False
            self._raise_failure()
            requests, self._requests = self._requests, []
            self._handed = [request.id for request in requests]
            return requests

    def _state_room(self, room: Room) -> None:
        with self._exchange_wakes:
            # The engine counts what it was handed before it measured this room.
            for request_id in self._handed:
                self._coming.pop(request_id, None)
            has_grown = _exceeds(room, self._room)
            self._room = room
            if has_grown:
                self._wake_puller()

    def _has_mail(self) -> bool:
        return bool(self._requests or self._cancelled or self._lost or self._is_interrupted or self._failure)

    def take_cancelled(self) -> list[str]:
        """Request ids to abort; not those that the loop has yet to take: an abort of them would meet nothing."""
        with self._loop_wakes:
            untaken = {request.id for request in self._requests}
            cancelled = [one for one in self._cancelled if one not in untaken]
            self._cancelled = [one for one in self._cancelled if one in untaken]
            return cancelled

    def take_lost(self) -> list[str]:
        """Request ids to forget: their leases are no longer ours."""
        with self._loop_wakes:
            lost, self._lost = self._lost, []
            return lost

    def put_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        """Hand on what a step yielded; stand still while the buffer is at its bound (Redis has long been away).

        Raises:
            BaseException: the failure of a part that the loop depends on.
        """
        if deltas:
            with self._exchange_wakes:
                self._steps.append(Stepped(self._clock(), deltas))
                num_bytes = bytes_of(deltas)
                self._steps_bytes += num_bytes
                self._buffered_bytes += num_bytes
                self._wake_exchange(urgent=any(map(is_urgent, deltas)))
        if self._buffered_bytes > self._max_buffered_bytes:
            with self._loop_wakes:
                while self._buffered_bytes > self._max_buffered_bytes and not (self._failure or self._is_interrupted):
                    self._loop_wakes.wait(MAX_WAIT_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def interrupt(self) -> None:
        """Let a loop that waits return once, with nothing: something outside changed."""
        with self._loop_wakes:
            self._is_interrupted = True
            self._loop_wakes.notify_all()

    # ------------------------------------------------------------ the threads' side

    def wait(self, timeout_s: float, *, for_urgent: bool = False) -> None:
        """Sleep until there is something for the exchange to do, or something urgent if so asked; at most this long."""
        with self._exchange_wakes:
            self._waits_for_urgent_news = for_urgent
            if not (self._has_urgent_news if for_urgent else self._has_news):
                self._exchange_wakes.wait(timeout_s)
            self._has_news = self._has_urgent_news = False

    def wait_to_pull(self, timeout_s: float) -> None:
        """Sleep until there may be something to pull, or room for it, at most this long."""
        with self._puller_wakes:
            if not self._may_pull_again:
                self._puller_wakes.wait(timeout_s)
            self._may_pull_again = False

    def ring(self) -> None:
        """Wake the threads of the exchange."""
        with self._exchange_wakes:
            self._wake_exchange()
            self._wake_puller()

    def _wake_exchange(self, *, urgent: bool = True) -> None:
        self._has_news = True
        self._has_urgent_news = self._has_urgent_news or urgent
        if urgent or not self._waits_for_urgent_news:
            self._exchange_wakes.notify()

    def _wake_puller(self) -> None:
        self._may_pull_again = True
        self._puller_wakes.notify()

    def take_steps(self) -> tuple[list[Stepped], int]:
        """All that the loop yielded since the last call, and about how many bytes it takes."""
        with self._exchange_wakes:
            steps, num_bytes = list(self._steps), self._steps_bytes
            self._steps.clear()
            self._steps_bytes = 0
            return steps, num_bytes

    def put_ended(self, request_id: str) -> None:
        """A job ended without the engine: the exchange has its end to publish."""
        with self._exchange_wakes:
            self._ended.append(request_id)
            self._wake_exchange()

    def take_ended(self) -> list[str]:
        """Jobs that ended without the engine."""
        with self._exchange_wakes:
            ended, self._ended = self._ended, []
            return ended

    def expect(self, coming: Iterable[tuple[str, Room]]) -> None:
        """Count requests as on their way to the engine, each with the room it will take."""
        with self._exchange_wakes:
            self._coming.update(coming)

    def is_coming(self, request_id: str) -> bool:
        """Whether a request is on its way to the engine, or not yet counted in the room it states."""
        return request_id in self._coming

    def room(self) -> Room:
        """What the engine said it can take, less what is on its way to it."""
        with self._exchange_wakes:
            return Room(
                kv_tokens=max(0, self._room.kv_tokens - sum(one.kv_tokens for one in self._coming.values())),
                prefill_tokens=max(
                    0, self._room.prefill_tokens - sum(one.prefill_tokens for one in self._coming.values())
                ),
                sequences=max(0, self._room.sequences - sum(one.sequences for one in self._coming.values())),
            )

    def deliver(self, requests: Iterable[Request]) -> None:
        """Put requests where the loop takes them."""
        with self._loop_wakes:
            self._requests.extend(requests)
            self._loop_wakes.notify()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ask the loop to abort these."""
        with self._loop_wakes:
            self._cancelled.extend(request_ids)
            self._loop_wakes.notify()

    def lose(self, request_ids: Sequence[str]) -> None:
        """Tell the loop to forget these, wherever they are on their way."""
        self.forget(request_ids)
        with self._loop_wakes:
            gone = set(request_ids)
            self._requests = [request for request in self._requests if request.id not in gone]
            self._lost.extend(request_ids)
            self._loop_wakes.notify()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Count these no longer as on their way: others may come in their place."""
        with self._exchange_wakes:
            gone = [self._coming.pop(request_id, None) for request_id in request_ids]
            if any(gone):
                self._wake_puller()

    def release(self, num_bytes: int) -> None:
        """Buffered output was taken by Redis."""
        with self._loop_wakes:
            self._buffered_bytes = max(0, self._buffered_bytes - num_bytes)
            self._loop_wakes.notify()

    def fail(self, failure: BaseException) -> None:
        """A part that the loop depends on has ended: the loop hears it at its next call."""
        with self._loop_wakes:
            self._failure = self._failure or failure
            self._loop_wakes.notify_all()


def is_urgent(delta: TokenDelta) -> bool:
    """Whether somebody waits for just this: a choice's first token, or its end."""
    return delta.start == 0 or delta.finish is not None


def bytes_of(deltas: Sequence[TokenDelta]) -> int:
    """About how much memory deltas take while they wait for Redis."""
    total = 0
    for delta in deltas:
        total += _TOKEN_BYTES * (len(delta.token_ids) + 1) + len(delta.text)
        for one in delta.logprobs or ():
            total += _LOGPROB_BYTES * (len(one.top) + 1)
    return total


def _exceeds(room: Room, other: Room) -> bool:
    return (
        room.kv_tokens > other.kv_tokens
        or room.prefill_tokens > other.prefill_tokens
        or room.sequences > other.sequences
    )
