"""Where the queue and the history are looked for, and what a message may show of a URL."""

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sluice.producer import Producer, config
from sluice.producer.errors import InvalidJob, InvalidSetting
from sluice.producer.operations.queue import Queue
from sluice.producer.transport.links import Link
from sluice.producer.transport.retries import LinkSettings
from sluice.protocol.host import state_folder
from sluice.protocol.redis import urls
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError

# What may stand in a password without being escaped.
secrets = st.text(alphabet="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP0123456789-._~", min_size=8, max_size=30)

UNESCAPED = [
    *((f"redis://u:hun{letter}ter@h:1/0", "redis://u:***@h:1/0") for letter in "/?#[\uff0f"),
    ("redis://:hun[ter@h", "redis://:***@h"),
    ("REDIS://u:hun/ter@h/0", "REDIS://u:***@h/0"),
    ("valkey://u:hun/ter@h", "valkey://u:***@h"),
]
"""URLs whose password is not escaped, and how they are shown."""


class TestGivenAnArgumentAndAnEnvironment:
    def test_when_both_name_a_server_then_the_argument_wins(self) -> None:
        url = config.redis_url("redis://argument", {config.REDIS_URL: "redis://environment"})

        assert url == "redis://argument"

    def test_when_only_the_environment_names_one_then_that_is_it(self) -> None:
        url = config.redis_url(None, {config.REDIS_URL: "redis://environment"})

        assert url == "redis://environment"

    def test_when_neither_does_then_it_is_the_embedded_one(self) -> None:
        assert config.redis_url(None, {}) is None
        assert config.redis_url(None, {config.REDIS_URL: ""}) is None

    def test_when_the_scheme_is_forgotten_then_the_error_hides_the_password(self) -> None:
        with pytest.raises(InvalidSetting, match=r"not a Redis URL: '\*\*\*@localhost:6379/0'") as raised:
            config.redis_url("default:hunter2@localhost:6379/0")

        assert "hunter2" not in str(raised.value)

    @pytest.mark.parametrize(("url", "shown"), UNESCAPED)
    def test_when_a_password_is_not_escaped_then_the_error_is_whole_without_it(self, url: str, shown: str) -> None:
        with pytest.raises(InvalidSetting) as raised:
            Producer(url)

        why = "cannot read the URL|the URL is not a Redis URL:"
        assert re.fullmatch(
            rf"({why}) '{re.escape(shown)}'[.:] (in a user name .* as %40\. )?Give one of .*", str(raised.value)
        )
        assert "hun" not in str(raised.value)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None

    @pytest.mark.parametrize(("url", "shown"), UNESCAPED)
    def test_when_a_worker_gets_such_a_url_then_its_error_hides_the_password_too(self, url: str, shown: str) -> None:
        with pytest.raises(ConfigError) as raised:
            connect(url, timeout_s=1)

        assert f"redis url {shown}: " in str(raised.value)
        assert "hun" not in str(raised.value)

    def test_when_a_socket_has_a_password_before_it_then_the_client_is_shown_without_it(self) -> None:
        with Producer("unix://u:hun/ter@/tmp/x") as producer:
            shown = repr(producer)

        assert "'unix://u:***@/tmp/x'" in shown

    @pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis//x", "sentinel://a/b"])
    def test_when_it_is_no_redis_url_then_the_error_names_the_setting_and_the_kinds(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match=r"SLUICE_REDIS_URL is not a Redis URL.*redis://HOST"):
            config.redis_url(None, {config.REDIS_URL: url})


class TestGivenTheStateFolder:
    def test_when_nothing_is_set_then_it_is_the_users_state_home(self) -> None:
        assert state_folder.state_dir({}) == Path("~/.local/state/sluice").expanduser()

    def test_when_the_state_home_is_set_then_it_is_in_there(self, tmp_path: Path) -> None:
        assert state_folder.state_dir({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "sluice"

    def test_when_the_state_home_is_relative_then_it_is_ignored_as_xdg_specifies(self) -> None:
        assert state_folder.state_dir({"XDG_STATE_HOME": "here"}) == Path("~/.local/state/sluice").expanduser()

    def test_when_ours_is_set_then_it_is_taken_as_it_is(self, tmp_path: Path) -> None:
        environ = {state_folder.STATE_DIR: str(tmp_path), "XDG_STATE_HOME": "/elsewhere"}

        assert state_folder.state_dir(environ) == tmp_path
        assert config.database_url(None, environ) == f"sqlite:///{tmp_path}/history.db"

    def test_when_a_database_is_named_then_the_argument_wins_over_the_environment(self) -> None:
        environ = {config.DATABASE_URL: "postgresql://environment"}

        assert config.database_url(None, environ) == "postgresql://environment"
        assert config.database_url("postgresql://argument", environ) == "postgresql://argument"


def urls_with(secret: str) -> list[str]:
    return [
        f"redis://:{secret}@host:6379/0",
        f"rediss://user:{secret}@host/0?ssl_ca_certs=/ca.pem",
        f"unix:///run/redis.sock?password={secret}&db=1",
        f"redis+sentinel://user:{secret}@one:1,two:2/service/0?sentinel_password={secret}",
        f"redis+cluster://user:{secret}@one:1,two:2?ssl_password={secret}",
    ]


class TestGivenAUrlWithASecret:
    @given(secret=secrets)
    def test_when_it_is_shown_then_the_secret_is_not(self, secret: str) -> None:
        # A secret such as `sentinel` is shown, as the scheme.
        assume(not any(secret in url for url in urls_with("***")))

        shown = [urls.redacted(url) for url in urls_with(secret)]

        assert not [text for text in shown if secret in text]
        assert shown[0] == "redis://:***@host:6379/0"
        assert shown[2] == "unix:///run/redis.sock?password=***&db=1"

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("default:hunter2@localhost:6379/0", "***@localhost:6379/0"),
            (":hunter2@localhost:6379", "***@localhost:6379"),
            ("//u:hunter2@h:6379", "***@h:6379"),
            ("redis:/u:hunter2@h:6379", "***@h:6379"),
            ("redis:///u:hunter2@h:6379", "redis:///u:***@h:6379"),
            ("redis://u:hunter2/x#y@h:6379", "redis://u:***@h:6379"),
            ("postgres://u:hunter2@h/db", "postgres://u:***@h/db"),
            ("postgresql+psycopg://u:hun/ter@h/db", "postgresql+psycopg://u:***@h/db"),
            ("unix://u:hun/ter@/tmp/x", "unix://u:***@/tmp/x"),
            ("sqlite:////home/a:b@c/history.db", "sqlite:////home/a:b@c/history.db"),
            *UNESCAPED,
            ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
            ("localhost:6379", "localhost:6379"),
        ],
    )
    def test_when_it_is_malformed_then_what_precedes_the_last_at_is_hidden(self, url: str, shown: str) -> None:
        assert urls.redacted(url) == shown

    def test_when_a_link_is_shown_then_the_secret_is_not(self) -> None:
        link = Link(LinkSettings("redis://:opensesame@127.0.0.1:1/0"))

        assert "opensesame" not in repr(link)


class TestGivenASentinelUrl:
    def test_when_it_is_read_then_addresses_service_database_and_passwords_are_known(self) -> None:
        url = "redis+sentinel://bob:s%40cret@one:1,two/service/3?sentinel_password=other"

        asked = urls.read_sentinel_url(url, {"socket_timeout": 2.0, "client_name": "us"})

        assert (asked.addresses, asked.service) == ([("one", 1), ("two", 26379)], "service")
        named = {"username": "bob", "password": "s@cret", "db": 3}
        assert asked.options == {**named, "socket_timeout": 2.0, "client_name": "us"}
        assert asked.sentinel_options == {"password": "other", "socket_timeout": 2.0}

    @pytest.mark.parametrize("url", ["redis+sentinel://one:1", "redis+sentinel://one:x/service", "redis+sentinel:///s"])
    def test_when_a_part_is_missing_or_no_number_then_the_error_says_how_it_should_look(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="redis\\+sentinel://HOST"):
            Link(LinkSettings(url))


class TestGivenAQueueName:
    @pytest.mark.parametrize("name", ["", "a:b", "{a}", "a b", "x" * 65])
    def test_when_it_cannot_be_part_of_a_key_then_it_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidJob, match="queue's name"):
            Queue(name)
