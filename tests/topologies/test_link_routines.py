"""What a link's routines decide, without I/O: connect, send, retry, fail, and never lose a connection."""

from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.producer.errors import AccessDenied, QueueRefused, QueueUnreachable
from sluice.producer.operations.operation import Ask, Sleep
from sluice.producer.transport.actions import (
    Action,
    Connect,
    Connection,
    Receive,
    Release,
    Routine,
    Send,
    SendAndReceive,
)
from sluice.producer.transport.retries import LinkSettings
from sluice.producer.transport.server import Server
from sluice.protocol.calls import status
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.drivers import RunAll
from sluice.protocol.redis.execution import Reply, command_of, with_source

URL = "redis://127.0.0.1:1"
SCRIPT = command_of(status(QueueKeys("q"), []))
ASK = Ask((SCRIPT, ("PING",)))
CONNECTION = Connection(object(), object())
GONE = RedisConnectionError("gone")


class Script:
    """Plays a server: one result or exception for each action that sends or connects. Keeps the actions."""

    def __init__(self, *results: Reply) -> None:
        self._results = list(results)
        self.actions: list[Action | RunAll] = []

    def run(self, routine: Routine[Any]) -> Any:  # Any: a routine's result
        """Run a routine to its result."""
        try:
            action = next(routine)
            while True:
                self.actions.append(action)
                result = CONNECTION if isinstance(action, Connect) else None
                if isinstance(action, Connect | SendAndReceive | Receive) and self._results:
                    result = self._results.pop(0)
                if isinstance(result, BaseException):
                    action = routine.throw(result)
                else:
                    action = routine.send(CONNECTION if isinstance(action, Connect) else result)
        except StopIteration as stop:
            return stop.value

    def kinds(self) -> list[str]:
        """Names of the actions so far."""
        return [type(action).__name__ for action in self.actions]


def connected_server(patience_s: float = 30.0) -> Server:
    """A server that has answered once."""
    server = Server(LinkSettings(URL, patience_s))
    Script(None, ["PONG"]).run(server.ask(Ask((("PING",),))))
    return server


class TestGivenAServerThatHasNeverAnswered:
    def test_when_it_cannot_be_reached_then_the_ask_fails_at_once(self) -> None:
        script = Script(GONE)

        with pytest.raises(QueueUnreachable, match="does not answer: gone"):
            script.run(Server(LinkSettings(URL)).ask(ASK))

        assert script.kinds() == ["Connect"]

    def test_when_it_is_loading_then_it_is_tried_again(self) -> None:
        script = Script(BusyLoadingError("reading"), None, ["state", "PONG"])

        assert script.run(Server(LinkSettings(URL)).ask(ASK)) == ["state", "PONG"]

        assert script.kinds() == ["Connect", "Sleep", "Connect", "SendAndReceive", "Release"]


class TestGivenAServerThatHasAnswered:
    @pytest.mark.parametrize("failure", [GONE, [ReadOnlyError("a replica"), "PONG"]], ids=["lost", "refused"])
    def test_when_it_fails_then_the_ask_is_repeated_with_growing_delays(self, failure: Reply) -> None:
        script = Script(None, failure, None, failure, None, ["state", "PONG"])

        assert script.run(connected_server().ask(ASK)) == ["state", "PONG"]

        assert [action.seconds for action in script.actions if isinstance(action, Sleep)] == [0.02, 0.04]
        assert script.kinds().count("Connect") == script.kinds().count("Release") == 3

    def test_when_an_ask_may_not_be_repeated_then_it_says_that_the_outcome_is_unknown(self) -> None:
        script = Script(None, GONE)

        with pytest.raises(QueueUnreachable, match="It is not known whether the command was carried out"):
            script.run(connected_server().ask(Ask((SCRIPT,), is_repeatable=False)))

        assert script.kinds() == ["Connect", "SendAndReceive", "Release"]

    def test_when_the_password_is_wrong_then_it_is_not_repeated(self) -> None:
        with pytest.raises(AccessDenied):
            Script(AuthenticationError("wrong")).run(connected_server().ask(ASK))

    def test_when_patience_is_over_then_it_gives_up(self) -> None:
        with pytest.raises(QueueUnreachable, match="gone"):
            Script(GONE).run(connected_server(patience_s=-1).ask(ASK))

    @pytest.mark.parametrize("stop", [KeyboardInterrupt(), MemoryError()], ids=["interrupted", "no memory"])
    def test_when_the_wait_is_cut_short_then_the_connection_is_released(self, stop: BaseException) -> None:
        script = Script(None, stop)

        with pytest.raises(type(stop)):
            script.run(connected_server().ask(ASK))

        assert script.actions[-1] == Release(CONNECTION)


class TestGivenAServerWithoutTheScript:
    UNKNOWN = (NoScriptError("unknown"), "PONG")

    def test_when_the_ask_is_repeatable_then_all_of_it_is_sent_again(self) -> None:
        script = Script(None, list(self.UNKNOWN), ["state", "PONG"])

        assert script.run(connected_server().ask(ASK)) == ["state", "PONG"]

        assert script.actions[2] == SendAndReceive(CONNECTION, (with_source(SCRIPT), ("PING",)))
        assert script.kinds() == ["Connect", "SendAndReceive", "SendAndReceive", "Release"]

    def test_when_it_is_not_then_only_what_did_not_run_is_sent_again(self) -> None:
        script = Script(None, list(self.UNKNOWN), ["state"])

        assert script.run(connected_server().ask(Ask(ASK.commands, is_repeatable=False))) == ["state", "PONG"]

        assert script.actions[2] == SendAndReceive(CONNECTION, (with_source(SCRIPT),))

    def test_when_asks_are_in_flight_then_all_of_them_are_sent_again_in_order(self) -> None:
        pipe, script = connected_server().pipe(), Script(None, [*self.UNKNOWN], [*self.UNKNOWN], ["first", "PONG"])
        script.run(pipe.send(ASK))
        script.run(pipe.send(ASK))

        assert script.run(pipe.receive()) == ["first", "PONG"]

        sent: list[Sequence[Any]] = [action.commands for action in script.actions if isinstance(action, Send)]
        assert sent == [list(ASK.commands) * 2, [with_source(SCRIPT), ("PING",)] * 2]


class TestGivenAPipe:
    def test_when_its_connection_breaks_then_all_in_flight_are_sent_again_on_a_new_one(self) -> None:
        pipe, script = connected_server().pipe(), Script(None, GONE, None, ["first", "PONG"], ["second", "PONG"])
        script.run(pipe.send(ASK))
        script.run(pipe.send(ASK))

        replies = [script.run(pipe.receive()), script.run(pipe.receive())]
        script.run(pipe.close())

        assert replies == [["first", "PONG"], ["second", "PONG"]]
        assert script.actions[3] == Release(CONNECTION, is_broken=True)
        assert script.actions[-1] == Release(CONNECTION)

    def test_when_a_command_is_refused_then_the_pipe_ends_with_its_connection_closed(self) -> None:
        pipe, script = connected_server().pipe(), Script(None, [ResponseError("no such field"), "PONG"])
        script.run(pipe.send(ASK))

        with pytest.raises(QueueRefused):
            script.run(pipe.receive())
        script.run(pipe.close())

        assert script.actions[-1] == Release(CONNECTION, is_broken=True)
