"""The client's retry policy, and its errors. No I/O.

redis-py itself retries nothing: a repeated submit must have the same ids, which only the operation knows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from types import TracebackType
from typing import Self

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.producer.errors import (
    AccessDenied,
    CertificateRefused,
    NotAQueue,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
    ResultTimeout,
)
from sluice.producer.operations.operation import Ask
from sluice.protocol.redis import tls, urls
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.error_kinds import ErrorKind, classify, reason_of
from sluice.protocol.redis.execution import Reply
from sluice.protocol.waits import Wait, WaitCause, WaitNotifier, WaitReason

RETRIED_REPLIES = (ErrorKind.UNAVAILABLE, ErrorKind.LOADING, ErrorKind.INTERRUPTED, ErrorKind.MOVED)
NEVER_RETRIED = (ErrorKind.DENIED, ErrorKind.NOT_REDIS)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The address of the server, and how long to retry after a first connection."""

    url: str
    patience_s: float = 30.0
    """As in `Producer`. If short, it shortens the time-outs of an `AsyncLink`'s sockets (`links.REPLY_SHARE`)."""

    waits: WaitNotifier = field(default_factory=WaitNotifier)
    """Receives long outages."""

    revive: Callable[[], None] | None = None
    """Restarts the server if it has stopped; None if it is not an embedded server."""

    def __repr__(self) -> str:
        return f"LinkSettings({urls.redacted(self.url)!r}, patience_s={self.patience_s:g})"


@dataclass(slots=True, eq=False)
class Retries:
    """The attempts of one round trip. Before the first connection, only a loading server is retried."""

    settings: LinkSettings
    has_connected: bool
    deadline_s: float | None = None
    """As in `Ask`."""

    _begin_s: float = field(default_factory=monotonic)
    _backoff: Backoff = field(default_factory=Backoff)
    _wait: Wait = field(init=False)

    def __post_init__(self) -> None:
        self._wait = self.settings.waits.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._wait.__exit__(kind, error, traceback)

    def next_delay_s(self, error: Exception, *, is_repeatable: bool = True) -> float:
        """Return the delay before the next attempt, in seconds.

        Raises:
            QueueUnreachable: there is no next attempt.
            ResultTimeout: there is no next attempt because the deadline has passed.
        """
        kind = classify(error)
        is_hopeless = kind in NEVER_RETRIED or not (self.has_connected or kind is ErrorKind.LOADING)
        now_s = monotonic()
        is_late = now_s - self._begin_s > self.settings.patience_s
        left_s = inf if self.deadline_s is None else self.deadline_s - now_s
        has_hung = left_s <= 0 and isinstance(error, RedisTimeoutError)
        if (is_hopeless or is_late or not is_repeatable) and not has_hung:
            raise _unreachable(error, self.settings.url, is_repeatable=is_repeatable) from error
        if left_s <= 0:
            raise too_late(str(error), self.settings.url) from error
        if self._wait.is_due:
            self._wait.waits_for(_outage(error, kind, self.settings))
        return min(self._backoff.next_delay_s(), left_s)


def _outage(error: Exception, kind: ErrorKind, settings: LinkSettings) -> WaitReason:
    where, how = urls.redacted(settings.url), f"Trying for up to {settings.patience_s:g} s"
    if kind is ErrorKind.LOADING:
        return WaitReason(WaitCause.SERVER_LOADING, f"{where} loads its data. {how}")
    message = f"{where} does not answer: {reason_of(error)}. {how}; check that the server runs"
    return WaitReason(WaitCause.SERVER_UNREACHABLE, message)


def too_late(why: str, url: str) -> ResultTimeout:
    """Return the error of a round trip that did not end by its deadline."""
    return ResultTimeout(f"{urls.redacted(url)} did not answer in time: {why.rstrip('.')}. Call again to keep waiting.")


def hung(settings: LinkSettings, silent_s: float, *, is_repeatable: bool) -> QueueUnreachable:
    """Return the error of a round trip to a server that has not answered for `silent_s`."""
    return _unreachable(RedisTimeoutError(f"no reply for {silent_s:g} s"), settings.url, is_repeatable=is_repeatable)


def _unreachable(error: Exception, url: str, *, is_repeatable: bool) -> QueueUnreachable:
    where, kind = urls.redacted(url), classify(error)
    if kind is ErrorKind.DENIED:
        return _denied(error, url)
    if kind is ErrorKind.NOT_REDIS:
        return NotAQueue(f"the server at {where} is not Redis. Check host and port.")
    if tls.may_be_refused(error, url):
        return CertificateRefused(f"{where}: the TLS handshake failed: {reason_of(error)}. {tls.HOW}")
    unsure = (
        "" if is_repeatable else " It is not known whether the command was carried out: check before you repeat it."
    )
    return QueueUnreachable(
        f"{where} does not answer: {reason_of(error)}. Check the address, and that the server runs.{unsure}"
    )


def _denied(error: Exception, url: str) -> AccessDenied:
    return AccessDenied(
        f"{urls.redacted(url)} refuses this user: {reason_of(error)}. Check user name, password and rights."
    )


def checked(ask: Ask, replies: list[Reply], url: str) -> list[Reply]:
    """Return the replies; for a lenient ask, with a ProducerError in place of each error reply.

    Raises:
        redis.exceptions.ConnectionError: a reply says that the server cannot serve now.
        QueueRefused, QueueFull, AccessDenied: a reply is another error, and the ask is not lenient.
    """
    return [_checked_one(reply, url, ask) if isinstance(reply, Exception) else reply for reply in replies]


def _checked_one(error: Exception, url: str, ask: Ask) -> Reply:
    kind = classify(error)
    if kind in RETRIED_REPLIES:
        raise RedisConnectionError(str(error)) from error
    refusal = _refusal(error, kind, url)
    if ask.is_lenient:
        return refusal
    raise refusal from error


def _refusal(error: Exception, kind: ErrorKind, url: str) -> ProducerError:
    if kind in (ErrorKind.DENIED, ErrorKind.DENIED_IN_SCRIPT):
        return _denied(error, url)
    where = urls.redacted(url)
    if kind is ErrorKind.FULL:
        return QueueFull(f"{where} is at its maxmemory. Try again later, or give it more memory.",
                         reason="full_memory", waiting=(0, 0, 0), bound=0)  # fmt: skip
    if kind is ErrorKind.CANNOT_WRITE:
        how = "Free space on its disk, or bring back its replicas; then try again."
        return QueueRefused(f"{where} takes no writes: {reason_of(error)}. {how}")
    return QueueRefused(f"{where} refuses the command: {error}")
