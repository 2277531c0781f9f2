"""What a link decides, without a server: connect, send, retry, fail, and never lose a connection."""

import time
from collections.abc import Sequence

import pytest
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.producer.errors import AccessDenied, QueueRefused, QueueUnreachable
from sluice.producer.operations.operation import Ask
from sluice.producer.transport.blocking import Runner
from sluice.producer.transport.retries import LinkSettings
from sluice.protocol.calls import status
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import Command, Reply, command_of, with_source

URL = "redis://127.0.0.1:1"
SCRIPT = command_of(status(QueueKeys("q"), []))
ASK = Ask((SCRIPT, ("PING",)))
GONE = RedisConnectionError("gone")


class Script:
    """Plays the pool and the connection of a server: one result or exception for each time that it connects or reads.

    Keeps what was done.
    """

    def __init__(self, *results: object, patience_s: float = 30.0) -> None:
        self._results = list(results)
        self.done: list[str] = []
        self.sent: list[Sequence[Command]] = []
        self.runner = Runner(LinkSettings(URL, patience_s), lambda _: self)

    def is_connected_already(self) -> "Script":
        """The server has answered before."""
        self.runner.server.has_connected = True
        return self

    def _next(self, name: str) -> object:
        self.done.append(name)
        result = self._results.pop(0) if self._results else None
        if isinstance(result, BaseException):
            raise result
        return result

    def get_connection(self) -> "Script":
        self._next("connect")
        return self

    def send_commands(self, commands: Sequence[Command]) -> None:
        self.done.append("send")
        self.sent.append(commands)

    def read_replies(self, num_replies: int) -> object:
        return self._next("read")

    def release(self) -> None:
        self.done.append("release")

    def drop(self) -> None:
        self.done.append("drop")


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it sleeps, instead of doing so."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


class TestGivenAServerThatHasNeverAnswered:
    def test_when_it_cannot_be_reached_then_the_ask_fails_at_once(self) -> None:
        script = Script(GONE)

        with pytest.raises(QueueUnreachable, match="does not answer: gone"):
            script.runner.ask(ASK)

        assert script.done == ["connect"]

    def test_when_it_is_loading_then_it_is_tried_again(self, slept: list[float]) -> None:
        script = Script(BusyLoadingError("reading"), None, ["state", "PONG"])

        assert script.runner.ask(ASK) == ["state", "PONG"]

        assert script.done == ["connect", "connect", "send", "read", "release"]
        assert len(slept) == 1


class TestGivenAServerThatHasAnswered:
    @pytest.mark.parametrize("failure", [GONE, [ReadOnlyError("a replica"), "PONG"]], ids=["lost", "refused"])
    def test_when_it_fails_then_the_ask_is_repeated_with_growing_delays(
        self, failure: Reply, slept: list[float]
    ) -> None:
        script = Script(None, failure, None, failure, None, ["state", "PONG"]).is_connected_already()

        assert script.runner.ask(ASK) == ["state", "PONG"]

        assert slept == [0.02, 0.04]
        assert script.done.count("connect") == script.done.count("release") == 3

    def test_when_an_ask_may_not_be_repeated_then_it_says_that_the_outcome_is_unknown(self) -> None:
        script = Script(None, GONE).is_connected_already()

        with pytest.raises(QueueUnreachable, match="It is not known whether the command was carried out"):
            script.runner.ask(Ask((SCRIPT,), is_repeatable=False))

        assert script.done == ["connect", "send", "read", "release"]

    def test_when_the_password_is_wrong_then_it_is_not_repeated(self) -> None:
        with pytest.raises(AccessDenied):
            Script(AuthenticationError("wrong")).is_connected_already().runner.ask(ASK)

    def test_when_patience_is_over_then_it_gives_up(self) -> None:
        with pytest.raises(QueueUnreachable, match="gone"):
            Script(GONE, patience_s=-1).is_connected_already().runner.ask(ASK)

    @pytest.mark.parametrize("stop", [KeyboardInterrupt(), MemoryError()], ids=["interrupted", "no memory"])
    def test_when_the_wait_is_cut_short_then_the_connection_is_released(self, stop: BaseException) -> None:
        script = Script(None, stop)

        with pytest.raises(type(stop)):
            script.runner.ask(ASK)

        assert script.done[-1] == "release"


class TestGivenAServerWithoutTheScript:
    UNKNOWN = (NoScriptError("unknown"), "PONG")

    def test_when_the_ask_is_repeatable_then_all_of_it_is_sent_again(self) -> None:
        script = Script(None, list(self.UNKNOWN), ["state", "PONG"])

        assert script.runner.ask(ASK) == ["state", "PONG"]

        assert script.sent[1] == [with_source(SCRIPT), ("PING",)]
        assert script.done == ["connect", "send", "read", "send", "read", "release"]

    def test_when_it_is_not_then_only_what_did_not_run_is_sent_again(self) -> None:
        script = Script(None, list(self.UNKNOWN), ["state"])

        assert script.runner.ask(Ask(ASK.commands, is_repeatable=False)) == ["state", "PONG"]

        assert script.sent[1] == [with_source(SCRIPT)]

    def test_when_asks_are_in_flight_then_all_of_them_are_sent_again_in_order(self) -> None:
        script = Script(None, [*self.UNKNOWN], [*self.UNKNOWN], ["first", "PONG"])
        with script.runner.pipe() as pipe:
            pipe.send(ASK)
            pipe.send(ASK)

            assert pipe.receive() == ["first", "PONG"]

        assert script.sent == [list(ASK.commands) * 2, [with_source(SCRIPT), ("PING",)] * 2]


class TestGivenAPipe:
    def test_when_its_connection_breaks_then_all_in_flight_are_sent_again_on_a_new_one(self) -> None:
        script = Script(None, GONE, None, ["first", "PONG"], ["second", "PONG"]).is_connected_already()
        with script.runner.pipe() as pipe:
            pipe.send(ASK)
            pipe.send(ASK)

            replies = [pipe.receive(), pipe.receive()]

        assert replies == [["first", "PONG"], ["second", "PONG"]]
        assert script.done == ["connect", "send", "read", "drop", "connect", "send", "read", "read", "release"]

    def test_when_a_command_is_refused_then_the_pipe_ends_with_its_connection_released(self) -> None:
        script = Script(None, [ResponseError("no such field"), "PONG"])

        with script.runner.pipe() as pipe:
            pipe.send(ASK)
            with pytest.raises(QueueRefused):
                pipe.receive()

        assert script.done[-1] == "release"
