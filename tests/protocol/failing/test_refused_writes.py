"""A server that takes no writes refuses those of scripts too, and each version says so in another way."""

import pytest
from redis.exceptions import RedisError, ResponseError

from sluice.protocol.redis.error_kinds import ErrorKind, classify
from tests.servers import RedisServer

pytestmark = pytest.mark.every_server

CALLED = "Error running script (call to f_49eeace2bb16c8660781804056e2a7935329d1e6): @user_script:1: "
"""What Redis 6.2 adds where the script did not catch the error."""


class TestGivenAnErrorOfAScriptOnRedis62:
    @pytest.mark.parametrize("before", [CALLED, ""], ids=["raised", "returned"])
    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            ("READONLY You can't write against a read only replica.", ErrorKind.UNAVAILABLE),
            ("NOREPLICAS Not enough good replicas to write.", ErrorKind.CANNOT_WRITE),
            ("MISCONF Errors writing to the AOF file: No space left on device", ErrorKind.CANNOT_WRITE),
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind.FULL),
        ],
        ids=lambda value: value.name if isinstance(value, ErrorKind) else value.partition(" ")[0],
    )
    def test_when_it_is_classified_then_it_is_as_outside_of_scripts(
        self, before: str, reply: str, kind: ErrorKind
    ) -> None:
        error = ResponseError(f"{before}@user_script: 12: -{reply}")

        assert classify(error) is kind

    def test_when_the_command_itself_was_wrong_then_it_is_another_error(self) -> None:
        error = ResponseError(f"{CALLED}WRONGTYPE Operation against a key: -OOM is its name")

        assert classify(error) is ErrorKind.OTHER


class TestGivenAServerThatIsAReplica:
    def test_when_a_script_writes_then_the_server_counts_as_unavailable(self, any_redis: RedisServer) -> None:
        with any_redis.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            try:
                with pytest.raises(RedisError) as caught:
                    client.eval("return redis.call('SET', KEYS[1], 1)", 1, "key")
            finally:
                client.execute_command("REPLICAOF", "NO", "ONE")

        assert classify(caught.value) is ErrorKind.UNAVAILABLE
