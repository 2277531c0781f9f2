"""Foreign entries and fields in every key of a queue: scripts answer, report the error, and continue.

A person or program with rights on the queue's keys can write anything there. Whatever that is, each script must end in
a reply or an error reply (never hang, never take the server along), and once the foreign keys are gone, jobs run.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from sluice.protocol import calls
from sluice.protocol.calls import Call
from sluice.protocol.wire import WireError
from tests.fuzz import inputs
from tests.protocol.driving import Queue, ending, new_job
from tests.servers import RedisServer

NUM_ROUNDS = 40
PATIENCE_S = 5.0


@pytest.fixture
def queue(valkey: RedisServer) -> Iterator[Queue]:
    """A queue whose server must answer soon."""
    client = redis.Redis(unix_socket_path=str(valkey.socket_path), socket_timeout=PATIENCE_S)
    with client:
        yield Queue(client)


def damaged(queue: Queue, random_: random.Random) -> bytes:
    """The row of a waiting job, with some bytes changed."""
    row = bytearray(queue.client.get(queue.keys.key("job", "t", "waiting")) or b"1q")
    for _ in range(random_.randrange(1, 8)):
        row[random_.randrange(len(row))] = random_.randrange(256)
    return bytes(row[: random_.randrange(len(row) + 1)] if random_.random() < 0.3 else row)


def foreign_writes(queue: Queue, random_: random.Random) -> list[tuple[object, ...]]:
    """Writes of each type into keys that scripts read."""
    key, data = queue.keys.key, inputs.packed(random_)
    name = random_.choice((b"0.t.a", b"0.t.waiting", inputs.text(random_).encode(errors="replace")))
    number = random_.choice((0, 1, -1, 1e308, 2**53))
    lane = [b"job", name, b"at", b"5"]
    lane[random_.randrange(4)] = inputs.noise(random_)
    return [
        ("XADD", key("lane", 0, "t"), "*", *lane),
        ("XADD", key("lane", "returned", "t"), "*", *lane),
        ("XADD", key("outbox"), "*", "e", data),
        ("HSET", key("depth"), "0:t", inputs.noise(random_)),
        ("HSET", key("served"), "t", random_.choice(("x", "nan", "inf", "-1"))),
        ("SET", key("job", "t", "waiting"), random_.choice((data, inputs.noise(random_), damaged(queue, random_)))),
        ("HSET", key("counters"), "waiting_jobs", random_.choice(("5", "-3"))),
        ("ZADD", key("timers"), number, random_.choice((b"ttl|" + name, name, b"|", b"retry|"))),
        ("ZADD", key("suspects"), number, name),
        ("ZADD", key("alive"), number, name),
        ("ZADD", key("dead"), number, name),
        ("ZADD", key("heads", 0), number, name),
        ("ZADD", key("ready", 0), number, name),
        ("HSET", key("held", name.decode(errors="replace")), "0.t.a", data),
    ]


def acts(queue: Queue) -> list[tuple[str, Callable[[], object]]]:
    """Every script, called as programs call it."""
    worker, keys = queue.worker("w"), queue.keys

    def do(call: Call[Any]) -> Callable[[], object]:  # Any: the replies are not looked at
        return lambda: queue.run(call)

    return [
        ("submit", do(calls.submit(keys, [new_job("a"), new_job("b")]))),
        ("pull", worker.pull),
        ("beat", worker.beat),
        ("maintain", do(calls.maintain(keys))),
        ("cancel", do(calls.cancel(keys, [new_job("waiting").id]))),
        ("requeue", do(calls.requeue(keys, [new_job("waiting").id]))),
        ("status", do(calls.status(keys, [new_job("waiting").id, new_job("a").id]))),
        ("inspect", do(calls.inspect(keys))),
        ("purge", do(calls.purge(keys))),
    ]


class TestGivenForeignThingsInAQueue:
    @pytest.mark.parametrize("round_", range(NUM_ROUNDS))
    def test_when_every_script_runs_then_each_answers_and_the_server_lives(self, queue: Queue, round_: int) -> None:
        seed = random.SystemRandom().getrandbits(32)
        random_ = random.Random(f"{seed}:{round_}")
        queue.run(calls.submit(queue.keys, [new_job("waiting")]))
        writes = [write for write in foreign_writes(queue, random_) if random_.random() < 0.4]

        for write in writes:
            queue.client.execute_command(*write)
        for name, act in acts(queue):
            try:
                act()
            except (ResponseError, WireError):
                continue  # an answer, with what is wrong
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                pytest.fail(f"seed {seed}, round {round_}: {name} answers what cannot be read: {error!r}; {writes}")

        for key in queue.client.keys("*"):
            queue.client.delete(key)
        queue.run(calls.submit(queue.keys, [new_job("good")]))
        worker = queue.worker("v")
        worker.beat()
        good = worker.take()
        worker.advance(ending(good, 0, 3))
        assert queue.fields(*good.id.split(".")[1:])["state"] == "done"


class TestGivenArgumentsOfNoClient:
    """A user who may run scripts sends what no library of ours would pack."""

    @pytest.mark.parametrize("name", ["submit", "advance", "pull", "beat", "give_back", "cancel", "status"])
    def test_when_they_are_unpacked_then_the_script_ends_with_an_error_or_answer(self, queue: Queue, name: str) -> None:
        seed = random.SystemRandom().getrandbits(32)
        random_ = random.Random(f"{seed}:{name}")

        for _ in range(40):
            arguments = tuple(
                random_.choice((inputs.packed, inputs.noise))(random_) for _ in range(random_.randrange(5))
            )
            call = Call(name, queue.keys.fixed(), arguments, lambda reply: reply)
            try:
                queue.run(call)
            except ResponseError:
                continue

        assert queue.client.ping(), seed
