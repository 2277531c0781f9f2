"""Notices of why client calls wait: one when a wait exceeds 2 s, and one when it ends. No I/O.

A waiting call owns a `Wait` and states its reason. `WaitNotifier` aggregates the waits of one client, so that a
hundred readers of a paused queue cause one notice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Self

NOTICE_AFTER_S = 2.0
"""Duration of a wait after which a notice is sent."""


class WaitCause(StrEnum):
    """The cause of a wait, for programs."""

    SERVER_UNREACHABLE = "server_unreachable"
    SERVER_LOADING = "server_loading"
    SERVER_CANNOT_WRITE = "server_cannot_write"
    QUEUE_FULL = "queue_full"
    QUEUE_PAUSED = "queue_paused"
    NO_WORKER = "no_worker"
    MODEL_LOADING = "model_loading"
    WORKERS_QUIET = "workers_quiet"
    WAITS_FOR_TURN = "waits_for_turn"
    """Another model has the device that the job's model shares by turns."""

    NOT_YET = "not_yet"
    """The job is not due yet: `not_before`, or the delay before a retry."""

    BLOCKED = "blocked"
    """The job waits for others to end (`after`)."""

    TENANT_AT_LIMIT = "tenant_at_limit"
    """The tenant runs as many jobs, or has taken as many tokens, as its limit allows."""

    BEHIND_OTHERS = "behind_others"
    RUNNING = "running"
    """A worker runs the job, and the next token has not arrived."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """The reason of a wait: its cause, and a sentence that says what to do."""

    cause: WaitCause
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitNotice:
    """The start or the end of a wait longer than `NOTICE_AFTER_S`."""

    cause: WaitCause
    message: str
    is_over: bool
    waited_s: float


OnWait = Callable[[WaitNotice], None]


@dataclass(slots=True, eq=False)
class _Open:
    """A cause for which calls wait now. Changes as calls start and stop waiting."""

    since_s: float
    num_calls: int = 1


@dataclass(slots=True, eq=False)
class WaitNotifier:
    """The waits of one client. Thread-safe. Changes as calls start and stop waiting."""

    on_wait: OnWait | None = None
    """Receives each notice; called on the thread or event loop of the call that waits."""

    _open: dict[WaitCause, _Open] = field(default_factory=dict[WaitCause, _Open])
    _lock: Lock = field(default_factory=Lock)

    def wait(self) -> "Wait":
        """Start the clock of one call."""
        return Wait(self)

    def begin(self, reason: WaitReason, since_s: float) -> None:
        """Count a waiting call; the first for its cause sends a notice."""
        with self._lock:
            waiting = self._open.get(reason.cause)
            if waiting is not None:
                waiting.num_calls += 1
                return
            self._open[reason.cause] = _Open(since_s)
        self._tell(reason.cause, reason.message, since_s, is_over=False)

    def end(self, cause: WaitCause, *, is_answered: bool) -> None:
        """Remove a waiting call; the last one sends a notice, unless it failed, since its error says why."""
        with self._lock:
            waiting = self._open.get(cause)
            if waiting is None:
                return  # the call was interrupted before `begin`
            waiting.num_calls -= 1
            if waiting.num_calls:
                return
            del self._open[cause]
        if is_answered:
            waited_s = monotonic() - waiting.since_s
            self._tell(cause, f"continued after {waited_s:.0f} s", waiting.since_s, is_over=True)

    def _tell(self, cause: WaitCause, message: str, since_s: float, *, is_over: bool) -> None:
        if self.on_wait is not None:
            waited_s = monotonic() - since_s
            self.on_wait(WaitNotice(cause=cause, message=message, is_over=is_over, waited_s=waited_s))


@dataclass(slots=True, eq=False)
class Wait:
    """The wait of one call, used in a `with` statement. Changes as the call waits and continues."""

    _waits: WaitNotifier
    _since_s: float = field(default_factory=monotonic)
    _asked_s: float = field(default_factory=monotonic)
    _cause: WaitCause | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(is_answered=kind is None)

    @property
    def is_due(self) -> bool:
        """Whether the reason must be looked up again."""
        return self._waits.on_wait is not None and monotonic() - self._asked_s >= NOTICE_AFTER_S

    def waits_for(self, reason: WaitReason) -> None:
        """State why the call waits."""
        self._asked_s = monotonic()
        if reason.cause is not self._cause:
            self._leave(is_answered=True)
            self._cause = reason.cause  # first, so that a call that is interrupted here is removed on exit
            self._waits.begin(reason, self._since_s)

    def goes_on(self) -> None:
        """State that the call made progress; the next wait is measured from now."""
        self._leave(is_answered=True)
        self._since_s = self._asked_s = monotonic()

    def _leave(self, *, is_answered: bool) -> None:
        cause, self._cause = self._cause, None
        if cause is not None:
            self._waits.end(cause, is_answered=is_answered)
