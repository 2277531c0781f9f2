"""URLs that redis-py refuses: the client and the worker each raise their own error, and neither shows a secret."""

import inspect
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from redis.connection import (
    URL_QUERY_ARGUMENT_PARSERS,  # pyright: ignore[reportUnknownVariableType] (redis-py types it in part)
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import InvalidSetting
from sluice.producer.transport.links import make_pool
from sluice.protocol.redis.pools import ASYNCIO
from sluice.protocol.redis.url_options import BY_NAME, OPTIONS, read_options
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "redis-url.md"


def make_async_pool(url: str) -> Any:  # redis-py's pools share no typed base
    """The pool of an asyncio client."""
    return make_pool(url, ASYNCIO)


def connect_worker(url: str) -> object:
    """The worker's client."""
    return connect(url, timeout_s=1)


USERS = [(Producer, InvalidSetting), (AsyncProducer, InvalidSetting), (connect_worker, ConfigError)]
NAMES = ["client", "asyncio", "worker"]

REDIS_PY_TAKES = sorted(
    {
        *URL_QUERY_ARGUMENT_PARSERS,
        *(
            name
            for connection in (Connection, SSLConnection, UnixDomainSocketConnection, AbstractConnection)
            for name in inspect.signature(cast("Any", connection).__init__).parameters
        ),
    }
    - {"self", "kwargs"}
)
"""Every option that redis-py would read from a URL."""

SERVED = {
    "db": ("3", 3),
    "username": ("ann", "ann"),
    "password": ("word", "word"),
    "client_name": ("shop", "shop"),
    "socket_keepalive": ("false", False),
    "ssl_ca_path": ("/etc", "/etc"),
    "ssl_ca_data": ("data", "data"),
    "ssl_password": ("word", "word"),
    "ssl_cert_reqs": ("none", "none"),
    "ssl_check_hostname": ("no", False),
    "ssl_min_version": ("1.3", ssl.TLSVersion.TLSv1_3),
    "ssl_ciphers": ("HIGH", "HIGH"),
}
FILES = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}


class TestGivenTheOptionsOfAUrl:
    def test_when_redis_py_takes_more_than_the_table_has_then_the_rest_is_refused(self) -> None:
        for name in REDIS_PY_TAKES:
            option = BY_NAME.get(name)
            if option is None or option.parse is None:
                with pytest.raises(ValueError, match=name):
                    read_options(f"rediss://host/0?{name}=3")

    def test_when_the_table_serves_one_then_redis_py_takes_it(self) -> None:
        served = {option.name for option in OPTIONS if option.parse is not None}

        assert served <= set(REDIS_PY_TAKES)
        assert served == SERVED.keys() | FILES

    @pytest.mark.parametrize("name", SERVED)
    @pytest.mark.parametrize("make", [make_pool, make_async_pool], ids=["client", "asyncio"])
    def test_when_one_is_served_then_connections_get_it(self, make: Callable[[str], Any], name: str) -> None:
        text, value = SERVED[name]

        for url in ("rediss://host", "rediss+sentinel://host/service"):
            assert make(f"{url}?{name}={text}").connection_kwargs[name] == value

    @pytest.mark.parametrize("make", [make_pool, make_async_pool], ids=["client", "asyncio"])
    def test_when_one_says_what_is_so_anyway_then_nothing_changes(self, make: Callable[[str], Any]) -> None:
        said = "&".join(f"{option.name}={value}" for option in OPTIONS for value in option.ignored[:1])

        with_them, without = make(f"redis://host/0?{said}"), make("redis://host/0")

        assert with_them.connection_kwargs.keys() == without.connection_kwargs.keys()
        assert with_them.connection_kwargs["protocol"] == 2

    @pytest.mark.parametrize("make", [make_pool, make_async_pool], ids=["client", "asyncio"])
    def test_when_sentinels_are_asked_then_their_connections_count_replies_too(
        self, make: Callable[[str], Any]
    ) -> None:
        pool = make("redis+sentinel://one,two/service")

        for one in (pool, *(sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels)):
            assert one.make_connection().num_owed == 0

    def test_when_the_page_is_read_then_it_lists_each(self) -> None:
        rows = [f"| `{option.name}` | {option.treatment} | {option.meaning} |" for option in OPTIONS]

        assert [line for line in PAGE.read_text().splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize(("make", "error"), USERS, ids=NAMES)
class TestGivenAUrlThatCannotBeRead:
    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("redis://:opensesame@h:port", "port"),
            ("redis://:opensesame@h/0?colour=red", "colour"),
            ("rediss://:opensesame@h/0?ssl_ca_certs=/nonexistent/ca.pem", "ssl_ca_certs: cannot read"),
            ("rediss://:opensesame@h/0?ssl_cert_reqs=perhaps", "perhaps"),
            ("redis+sentinel://:opensesame@h", "names no sentinels or no service"),
            ("redis+sentinel://:opensesame@h:port/x", "a port is not a number"),
            ("redis://:opensesame@h/prod", "a database is named by its number, got 'prod'"),
            ("redis+sentinel://:opensesame@h/x/prod", "a database is named by its number, got 'prod'"),
            ("redis+cluster://:opensesame@h?db=3", "a Cluster has no database numbers"),
            ("redis://:opensesame@h/1?db=2", "its path names database 1, its option db 2"),
            ("redis://:opensesame@h?db=1&db=1", "db is given twice"),
            ("redis://:opensesame@h?db=-1", "expected a number"),
            ("redis://:opensesame@h/0#1", "write %23"),
            ("redis://:opensesame@h?ssl_cert_reqs=none", "write rediss"),
            ("unix:///tmp/no.sock?socket_keepalive=true", "for TCP"),
            ("redis+sentinel://:opensesame@h/x?sentinel_protocol=3", "sentinel_protocol is not supported"),
            ("redis+sentinel://:opensesame@h/x?is_master=false", "no option is_master"),
            ("redis+cluster://:opensesame@h?max_connections=2", "max_connections is not supported"),
        ],
    )
    def test_when_a_client_is_made_then_the_error_says_why_and_keeps_the_secret(
        self, make: Callable[[str], object], error: type[Exception], url: str, why: str
    ) -> None:
        with pytest.raises(error, match=why) as caught:
            make(url)

        assert "opensesame" not in str(caught.value)
        assert str(caught.value).count("Give one of") <= 1, "it says once how URLs look"
