"""Classification of redis-py's errors, raised or returned. Callers decide which kinds to retry.

For some error codes, redis-py has a class and removes the code from the message; other codes stay in the message.
"""

import re
from enum import Enum, auto

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
"""Errors of a lost or failed connection, and of a Sentinel that knows no primary."""

NODE_ERRORS = (*CONNECTION_ERRORS, ResponseError, InvalidResponse)
"""Errors by which a node gives no replies: those of its connection, a refusal during the handshake, and bytes that are
not Redis's protocol. An error reply to a command is not one of them: it is returned in the place of the reply."""


class ErrorKind(Enum):
    """The reason why a command has no result."""

    UNAVAILABLE = auto()
    """No reply, or a server that cannot serve now: restart, failover, long script."""

    LOADING = auto()
    """The server is loading its data set after a start."""

    INTERRUPTED = auto()
    """A failover has ended a blocking read."""

    MOVED = auto()
    """Another shard serves the slot, or it is being moved to one (MOVED, ASK)."""

    DENIED = auto()
    """Wrong credentials or missing rights."""

    DENIED_IN_SCRIPT = auto()
    """A script used a command or key that the user may not use."""

    FULL = auto()
    """The server is at its maxmemory."""

    CANNOT_WRITE = auto()
    """The server accepts no writes: its disk fails, or it has too few replicas."""

    NOT_REDIS = auto()
    """The reply is not valid in Redis's protocol."""

    UNKNOWN_SCRIPT = auto()
    """EVALSHA of a script that the server does not have."""

    OTHER = auto()
    """Any other error: the command itself is refused."""


_KIND_OF_CLASS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], ErrorKind], ...] = (
    # Subclasses of the connection errors come first.
    ((AuthenticationError, NoPermissionError), ErrorKind.DENIED),
    (BusyLoadingError, ErrorKind.LOADING),
    (CONNECTION_ERRORS, ErrorKind.UNAVAILABLE),
    (InvalidResponse, ErrorKind.NOT_REDIS),
    (AskError, ErrorKind.MOVED),  # MovedError is a subclass
    ((ClusterDownError, ReadOnlyError, TryAgainError), ErrorKind.UNAVAILABLE),
    (OutOfMemoryError, ErrorKind.FULL),
    (NoScriptError, ErrorKind.UNKNOWN_SCRIPT),
)

_KIND_OF_CODE: tuple[tuple[tuple[str, ...], ErrorKind], ...] = (
    (("LOADING",), ErrorKind.LOADING),
    (("READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY"), ErrorKind.UNAVAILABLE),
    (("UNBLOCKED",), ErrorKind.INTERRUPTED),
    (("NOAUTH", "WRONGPASS", "NOPERM"), ErrorKind.DENIED),
    (("OOM",), ErrorKind.FULL),
    (("MISCONF", "NOREPLICAS"), ErrorKind.CANNOT_WRITE),
)
"""Kinds by the first word of an error reply without a class in redis-py."""

_REFUSED_IN_SCRIPT = re.compile(
    r"^(Error running script \(call to f_\w+\): @user_script:\d+: )?@user_script: \d+: -"
    r"(?=(READONLY|NOREPLICAS|MISCONF|OOM) )"
)
"""Prefix of Redis 6.2 before the error code of a write in a script."""

_DENIED_IN_SCRIPT = ("NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script can't")
"""Parts of an error reply of a script (Valkey, Redis 7.0 and 6.2)."""


_SENTINEL = re.compile(r"<redis\.\S*client\.Redis\(.*?,host=([^,]+),port=(\d+).*?\)>\)>\)> - (?:network:)?")
"""A Sentinel in redis-py's message that none names a primary: the text of its client, with all options."""


def reason_of(error: BaseException) -> str:
    """Return an error's message without a period; Sentinels are named by their addresses."""
    return _SENTINEL.sub(r"\1:\2 ", str(error)).rstrip(".")


def classify(error: BaseException) -> ErrorKind:
    """Return the kind of an exception, whether raised or returned as a reply."""
    for classes, kind in _KIND_OF_CLASS:
        if isinstance(error, classes):
            return kind
    return _kind_of_reply(str(error)) if isinstance(error, ResponseError) else ErrorKind.OTHER


def _kind_of_reply(message: str) -> ErrorKind:
    code = _REFUSED_IN_SCRIPT.sub("", message).partition(" ")[0]
    for codes, kind in _KIND_OF_CODE:
        if code in codes:
            return kind
    return ErrorKind.DENIED_IN_SCRIPT if any(words in message for words in _DENIED_IN_SCRIPT) else ErrorKind.OTHER
