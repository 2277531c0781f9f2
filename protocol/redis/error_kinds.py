"""Classify what redis-py raises or returns as an error. Knows no policy: which kinds to retry is the caller's decision.

redis-py has a class for some error codes and then cuts the code from the message; other codes stay in the message.
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
"""What a connection raises when it is lost or cannot be made; a Sentinel that knows no primary does too."""

NODE_ERRORS = (*CONNECTION_ERRORS, ResponseError, InvalidResponse)
"""Why a node has no replies: also a refusal while the connection is set up, and bytes that are not the protocol's. The
error reply to a command is no such error: it stands, as an exception, in the place of the reply."""


class ErrorKind(Enum):
    """Why a command has no result."""

    UNAVAILABLE = auto()
    """No reply, or the server cannot serve now: a restart, a failover, a long script."""

    LOADING = auto()
    """The server reads its data set after a start."""

    INTERRUPTED = auto()
    """A blocking read was ended by a failover."""

    MOVED = auto()
    """The slot is served by another shard, or is on its way to one (MOVED, ASK)."""

    DENIED = auto()
    """Wrong credentials or missing rights."""

    DENIED_IN_SCRIPT = auto()
    """A script used a command or key to which the user has no right."""

    FULL = auto()
    """The server is at its maxmemory."""

    CANNOT_WRITE = auto()
    """The server takes no writes: its disk fails, or too few replicas follow it."""

    NOT_REDIS = auto()
    """The reply is not the protocol's."""

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
"""By the first word of an error reply for which redis-py has no class."""

_REFUSED_IN_SCRIPT = re.compile(
    r"^(Error running script \(call to f_\w+\): @user_script:\d+: )?@user_script: \d+: -"
    r"(?=(READONLY|NOREPLICAS|MISCONF|OOM) )"
)
"""What Redis 6.2 puts before the code where a script wanted to write."""

_DENIED_IN_SCRIPT = ("NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script can't")
"""Anywhere in an error reply of a script (Valkey, Redis 7.0 and 6.2)."""


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
