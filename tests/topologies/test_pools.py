"""URLs that redis-py refuses: the client and the worker each raise their own error, and neither shows a secret."""

from collections.abc import Callable

import pytest

from sluice.producer.errors import InvalidSetting
from sluice.producer.transport.pools import make_async_pool, make_pool
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError


def connect_worker(url: str) -> object:
    """The worker's client."""
    return connect(url, timeout_s=1)


USERS = [(make_pool, InvalidSetting), (make_async_pool, InvalidSetting), (connect_worker, ConfigError)]


@pytest.mark.parametrize(("make", "error"), USERS, ids=["client", "asyncio", "worker"])
class TestGivenAUrlThatCannotBeRead:
    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("redis://:opensesame@h:port", "port"),
            ("redis://:opensesame@h/0?colour=red", "colour"),
            ("rediss://:opensesame@h/0?ssl_ca_certs=/nonexistent/ca.pem", "ssl_ca_certs: cannot read"),
            ("rediss://:opensesame@h/0?ssl_cert_reqs=perhaps", "perhaps"),
            ("redis+sentinel://:opensesame@h", "names no sentinels or no service"),
            ("redis+sentinel://:opensesame@h:port/x", "a port or the database is not a number"),
        ],
        ids=["port", "option", "file", "value", "sentinel", "sentinel's port"],
    )
    def test_when_a_client_is_made_then_the_error_says_why_and_keeps_the_secret(
        self, make: Callable[[str], object], error: type[Exception], url: str, why: str
    ) -> None:
        with pytest.raises(error, match=why) as caught:
            make(url)

        assert "opensesame" not in str(caught.value)
        assert str(caught.value).count("redis+cluster://") <= 1, "it says once how URLs look"
