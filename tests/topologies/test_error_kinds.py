"""How errors of redis-py are classified: by class where it has one, else by the code of the reply."""

import pytest
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import MasterNotFoundError

from sluice.protocol.redis.error_kinds import ErrorKind, classify


class TestGivenAnErrorOfRedisPy:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (RedisConnectionError("gone"), ErrorKind.UNAVAILABLE),
            (RedisTimeoutError("late"), ErrorKind.UNAVAILABLE),
            (MasterNotFoundError("No master found: NOAUTH"), ErrorKind.UNAVAILABLE),
            (OSError("reset"), ErrorKind.UNAVAILABLE),
            (ClusterDownError("no shard"), ErrorKind.UNAVAILABLE),
            (ReadOnlyError("a replica"), ErrorKind.UNAVAILABLE),
            (TryAgainError("soon"), ErrorKind.UNAVAILABLE),
            (BusyLoadingError("reading"), ErrorKind.LOADING),
            (MovedError("1 a:1"), ErrorKind.MOVED),
            (AskError("1 a:1"), ErrorKind.MOVED),
            (AuthenticationError("wrong password"), ErrorKind.DENIED),
            (NoPermissionError("no right"), ErrorKind.DENIED),
            (OutOfMemoryError("full"), ErrorKind.FULL),
            (InvalidResponse("HTTP/1.1"), ErrorKind.NOT_REDIS),
            (NoScriptError("unknown"), ErrorKind.UNKNOWN_SCRIPT),
            (ValueError("LOADING"), ErrorKind.OTHER),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
    )
    def test_when_it_is_classified_then_its_class_decides(self, error: Exception, kind: ErrorKind) -> None:
        assert classify(error) is kind

    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            ("LOADING the data set", ErrorKind.LOADING),
            ("MASTERDOWN link", ErrorKind.UNAVAILABLE),
            ("BUSY a script runs", ErrorKind.UNAVAILABLE),
            ("UNBLOCKED instance state changed", ErrorKind.INTERRUPTED),
            ("NOPERM no right", ErrorKind.DENIED),
            ("OOM command not allowed", ErrorKind.FULL),
            ("MISCONF cannot write to disk", ErrorKind.CANNOT_WRITE),
            ("NOREPLICAS not enough", ErrorKind.CANNOT_WRITE),
            ("user_script:1: ACL failure in script: no right", ErrorKind.DENIED_IN_SCRIPT),
            ("The user executing the script can't run this command", ErrorKind.DENIED_IN_SCRIPT),
            ("WRONGTYPE not a hash", ErrorKind.OTHER),
            ("BUSYGROUP the group exists", ErrorKind.OTHER),
            ("BUSYKEY the key exists", ErrorKind.OTHER),
        ],
    )
    def test_when_it_has_no_class_then_the_code_of_the_reply_decides(self, reply: str, kind: ErrorKind) -> None:
        assert classify(ResponseError(reply)) is kind
