"""Calls of the blocking client that a signal handler ends: Ctrl-C, a soft time limit, an alarm."""

import dis
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest
from redis import Connection
from redis.exceptions import DataError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.producer import JobState, Producer
from sluice.producer.transport.links import make_pool
from sluice.protocol.redis.connections import Packer, pack
from tests.late_replies import late_replies
from tests.servers import RedisServer

OURS = ("sluice/producer/", "/redis/", "contextlib.py")
"""Files whose code is interrupted."""

PLACES = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD", "SEND")
"""Instructions around which Python runs signal handlers."""

LATE_S = 0.002
"""How late the server's replies are: long beside the way from one call to the next."""


class Interrupted(BaseException):
    """What the signal handler raises."""


@cache
def _places_in(code: CodeType) -> frozenset[int]:
    found, nones = set[int](), 0
    for one in dis.get_instructions(code):
        # The call of `__exit__` follows three constants. Python runs no handler between a block's end and that call.
        if one.opname in PLACES and nones < 3:
            found.add(one.offset)
        if one.opname not in ("PRECALL", "CACHE"):
            nones = nones + 1 if one.opname == "LOAD_CONST" and one.argval is None else 0
    return frozenset(found)


@contextmanager
def interrupted_at(place: int | None, files: tuple[str, ...] = OURS) -> Generator[list[int]]:
    """Raise at a place, numbered from 0, where Python may run a signal handler; yield the number of places so far."""
    passed = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in files) or frame.f_code is interrupted_at.__code__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return" or (event == "opcode" and frame.f_lasti in _places_in(frame.f_code)):
            passed[0] += 1
            if passed[0] - 1 == place:
                sys.settrace(None)
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(None)


def _places_of(call: Callable[[], object], files: tuple[str, ...] = OURS) -> int:
    with interrupted_at(None, files) as passed:
        call()
    return passed[0]


def _interrupt(call: Callable[[], object], place: int, files: tuple[str, ...] = OURS) -> None:
    try:
        with interrupted_at(place, files):
            call()
    except Interrupted:
        return


@pytest.fixture
def late(valkey: RedisServer) -> Iterator[Producer]:
    """A client whose replies are late."""
    with late_replies(valkey.socket_path, LATE_S) as url, Producer(url) as client:
        yield client


def _check_all(late: Producer, call: Callable[[Producer], object], places: Iterator[int]) -> None:
    """Interrupt a call at places; after each, the next call gets its own answer."""
    asked = [late.submit(f"prompt {number}") for number in range(2)]
    for place in places:
        _interrupt(lambda: call(late), place)
        for receipt in asked:
            assert late.status(receipt).id == receipt.id


CALLS: dict[str, Callable[[Producer], object]] = {
    "queue": lambda client: client.queue(),
    "submit": lambda client: client.submit("hello", max_tokens=2),
    "submit_many": lambda client: list(client.submit_many(["hello"] * 3)),
}


class TestGivenACallThatASignalHandlerEnds:
    @pytest.mark.parametrize("name", CALLS)
    def test_when_it_ends_anywhere_then_the_next_call_gets_its_own_answer(self, late: Producer, name: str) -> None:
        num_places = _places_of(lambda: CALLS[name](late))
        places = random.Random(1).sample(range(num_places), 30)

        _check_all(late, CALLS[name], iter(places))

    @pytest.mark.long
    @pytest.mark.parametrize("name", CALLS)
    def test_when_it_ends_at_each_place_then_the_next_call_gets_its_own_answer(self, late: Producer, name: str) -> None:
        num_places = _places_of(lambda: CALLS[name](late))

        _check_all(late, CALLS[name], iter(range(num_places)))

    def test_when_many_end_then_no_connection_is_left_open(self, valkey: RedisServer, late: Producer) -> None:
        late.submit("hello")
        files = ("redis/blocking.py",)  # what ends there does not always release its connection
        num_places = _places_of(late.queue, files)
        assert num_places
        for place in range(num_places):
            _interrupt(late.queue, place, files)

        gc.collect()

        with valkey.client() as client:
            names = [one["name"] for one in client.client_list()]
            assert names.count("sluice-producer") <= 1


SIGNAL_WITHIN_PACK = """
import ctypes, operator, signal
from functools import partial
from {module} import {name} as pack

class Interrupted(Exception):
    pass

def interrupt(*_):
    raise Interrupted

signal.signal(signal.SIGALRM, interrupt)
come = partial(ctypes.CDLL(None)["raise"], signal.SIGALRM)
try:
    # `map` calls both without running a bytecode in between: the signal is due while the command is packed.
    list(map(operator.call, (come, partial(pack, ("WAIT", 1, 100)))))
except Interrupted:
    print("interrupted")
"""


class TestGivenASignalThatIsDueWhileACommandIsPacked:
    def test_when_its_handler_raises_then_the_process_lives(self) -> None:
        code = SIGNAL_WITHIN_PACK.format(module=pack.__module__, name=pack.__name__)

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

        assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr

    @pytest.mark.parametrize(
        "argument",
        ["text", b"bytes", bytearray(b"array"), memoryview(b"view"), 0, -7, 2**70, 0.5, 1e300, JobState.DONE],
    )
    def test_when_a_command_has_any_argument_then_it_is_packed_as_redis_py_does(self, argument: object) -> None:
        connection: Any = Connection()  # redis-py types it in part
        theirs = connection.pack_command("CLIENT SETNAME", argument)

        assert Packer().pack("CLIENT SETNAME", argument) == theirs

    def test_when_an_argument_is_none_of_these_then_it_is_refused(self) -> None:
        for wrong in (None, True, [1]):
            with pytest.raises(DataError):
                Packer().pack("SET", "key", wrong)


class TestGivenAConnectionThatStaysOpenWhenAReplyIsLate:
    """As redis-py's connections behind Sentinels do."""

    def test_when_a_reply_is_late_then_the_next_round_trip_does_not_get_it(self, valkey: RedisServer) -> None:
        pool = make_pool(f"unix://{valkey.socket_path}")
        connection = pool.get_connection()
        with valkey.client() as client:
            client.client_pause(200, all=True)
        connection.send_command("ECHO", "first")
        with pytest.raises(RedisTimeoutError):
            connection.read_response(timeout=0.001, disconnect_on_error=False)
        pool.release(connection)

        connection = pool.get_connection()
        connection.send_command("ECHO", "second")
        reply = connection.read_response()
        pool.disconnect()

        assert reply == b"second"
