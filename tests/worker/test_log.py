"""Logs: plain for people, JSON for machines, nothing below the level."""

import io
import json
import logging

import pytest
import structlog
from redis.exceptions import AuthenticationError, ResponseError

from sluice.protocol.redis.backoff import MAX_DELAY_S
from sluice.worker.config import LogConfig
from sluice.worker.connection.availability import MAX_UNEXPECTED_REPLIES, RedisHealth, RetryPolicy
from sluice.worker.log import configure_logs, get_log


class Terminal(io.StringIO):
    """A stream with a person before it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> object:  # pyright: ignore[reportUnusedFunction]  # pytest uses it
    yield
    structlog.reset_defaults()


class TestGivenAStream:
    def test_when_it_is_no_terminal_then_each_line_is_json_with_its_facts(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(), stream=stream)

        get_log(worker_id="w").info("job ended", job_id="j", ttft_s=0.5)

        line = json.loads(stream.getvalue())
        assert (line["event"], line["worker_id"], line["job_id"], line["ttft_s"]) == ("job ended", "w", "j", 0.5)
        assert line["level"] == "info"

    def test_when_it_is_a_terminal_then_it_is_for_people(self) -> None:
        stream = Terminal()
        configure_logs(LogConfig(), stream=stream)

        get_log().info("job ended", job_id="j")

        assert "job ended" in stream.getvalue()
        assert "{" not in stream.getvalue()

    def test_when_below_the_level_then_nothing_is_written(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(level="warning"), stream=stream)

        get_log().info("job ended")

        assert stream.getvalue() == ""


class TestGivenALibraryThatLogs:
    """As rq does, with a traceback in its message, and as Python does, with the exception."""

    def test_when_its_message_has_several_lines_then_the_log_has_one(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(), stream=stream)

        logging.getLogger("some.worker").warning("job %s failed (%s)", "j", "Traceback:\n  line 1\nValueError")

        (line,) = map(json.loads, stream.getvalue().splitlines())
        assert line["event"] == "job j failed (Traceback:\n  line 1\nValueError)"
        assert (line["level"], line["library"]) == ("warning", "some.worker")

    def test_when_it_logs_an_exception_then_that_is_a_field(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(), stream=stream)

        try:
            int("no")
        except ValueError:
            logging.getLogger("some.library").exception("it broke")

        (line,) = map(json.loads, stream.getvalue().splitlines())
        assert line["event"] == "it broke"
        assert line["exception"].endswith("ValueError: invalid literal for int() with base 10: 'no'")


class TestGivenRedisThatBreaksAndHeals:
    def test_when_several_threads_meet_it_then_it_is_said_once_each_way(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(), stream=stream)
        health = RedisHealth(get_log(), "redis://:***@host")

        for who in ("exchange", "beat", "exchange"):
            health.failed(who, ConnectionError("gone"))
        assert not health.is_well
        health.answered("beat")
        health.answered("exchange")

        events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
        assert events == ["redis unreachable", "redis reachable again"]
        assert health.is_well

    def test_when_it_refuses_the_user_then_that_is_said_in_place_of_an_outage(self) -> None:
        stream = io.StringIO()
        configure_logs(LogConfig(), stream=stream)
        health = RedisHealth(get_log(), "redis://:***@host")

        health.failed("beat", AuthenticationError("invalid username-password pair"))

        (line,) = map(json.loads, stream.getvalue().splitlines())
        assert line["event"] == "redis refuses this user"

    def test_when_it_stays_away_then_each_wait_is_longer_up_to_a_second(self) -> None:
        retries = RetryPolicy()

        waits = [retries.delay_after(ConnectionError("gone")) for _ in range(100)]

        assert waits == sorted(waits)
        assert waits[-1] == MAX_DELAY_S

    def test_when_it_answers_with_errors_of_our_making_then_we_give_up(self) -> None:
        retries = RetryPolicy()
        for _ in range(MAX_UNEXPECTED_REPLIES - 1):
            retries.delay_after(ResponseError("ERR bad call"))

        with pytest.raises(ResponseError, match="bad call"):
            retries.delay_after(ResponseError("ERR bad call"))

    @pytest.mark.parametrize("word", ["LOADING", "READONLY", "MISCONF", "OOM", "NOAUTH"])
    def test_when_it_says_that_it_cannot_serve_now_then_we_do_not(self, word: str) -> None:
        retries = RetryPolicy()

        for _ in range(3 * MAX_UNEXPECTED_REPLIES):
            retries.delay_after(ResponseError(f"{word} try later"))


class TestGivenALineWithTextOfAJob:
    def test_when_it_is_for_a_terminal_then_controls_are_replaced(self) -> None:
        stream = Terminal()
        configure_logs(LogConfig(), stream=stream)

        get_log().error("job rejected", reason="\x1b[2Jx", exc_info=ValueError("\x1b]0;owned\x07"))

        assert "\x1b]" not in stream.getvalue()
        assert "\x1b[2J" not in stream.getvalue()
        assert "]0;owned" in stream.getvalue()
