"""Connections of the worker: no command is sent twice, even if its reply is lost."""

import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import redis

from sluice.worker.connection.clients import connect
from tests.chaos.faults.proxies import cutting_proxy
from tests.servers import RedisServer


@pytest.fixture
def socket_path() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        yield Path(folder) / "proxy.sock"


class TestGivenAReplyThatIsLost:
    """The server has done what it was asked, and the connection breaks before the reply."""

    def test_when_a_script_was_sent_then_it_is_not_sent_again_and_the_caller_hears_it(
        self, valkey: RedisServer, socket_path: Path
    ) -> None:
        script = "return redis.call('INCR', KEYS[1])"
        with cutting_proxy(socket_path, valkey.socket_path, lambda data: b"INCR" in data) as proxy:
            client = connect(proxy.url, timeout_s=5)

            with pytest.raises(redis.ConnectionError):
                client.eval(script, 1, "n")
            with pytest.raises(redis.ConnectionError):
                client.pipeline(transaction=False).eval(script, 1, "n").execute()

        with valkey.client() as other:
            assert other.get("n") == b"2"
