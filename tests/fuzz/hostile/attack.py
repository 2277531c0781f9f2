"""What the hostile user writes: random fields, members and entries into every key that its rule lets it write."""

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis

from sluice.protocol.calls import Call, NewJob, submit
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import JobId, JobOptions, JobSpec, encode_prompt, encode_spec
from tests.fuzz import inputs
from tests.integration.jobs import new_job_id
from tests.security.acl import QUEUE

TENANT = "acme"
KEYS = QueueKeys(QUEUE)
CLASSES = ("returned", *map(str, range(10)), "x", "")
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
COUNTERS = ("submitted", "waiting_jobs", "waiting_tokens", "waiting_bytes", "running_jobs", "done", "outbox_bytes")
EVENTS = ("submitted", "started", "returned", "ended", "x")
WRITES_PER_ROUND = 20
JOBS_KEPT = 200

Command = tuple[Any, ...]  # Any: what redis-py sends


class Attacker:
    """Draws hostile writes. Changes: its random state, and the jobs that it knows."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.own: list[JobId] = [new_job_id(TENANT)]
        self.seen: list[str] = []
        """Ids of others' jobs, found in the keys that it may read."""

    def writes(self) -> list[Command]:
        """Draw one round of writes."""
        kinds: Sequence[Callable[[], Command]] = (
            self._shared_hash, self._own_job, self._batch, self._zset, self._stream, self._event, self._text,
        )  # fmt: skip
        drawn = [self._dice.choice(kinds)() for _ in range(WRITES_PER_ROUND)]
        return [_in_a_script(one) if self._dice.random() < 0.1 else one for one in drawn]

    def job(self) -> NewJob:
        """Draw a job of its own, as any client submits it, to damage it later."""
        own = new_job_id(TENANT)
        self.own = [*self.own[-JOBS_KEPT:], own]
        payload, options = encode_prompt("tell me"), JobOptions(max_tokens=self._dice.randrange(1, 20))
        return NewJob(
            id=own,
            spec=encode_spec(JobSpec(options=options)),
            payload=payload,
            seed=self._dice.randrange(2**64),
            priority=self._dice.randrange(10),
            prompt_tokens=None,
            prompt_bytes=len(payload),
            max_tokens=options.planned_tokens,
            digest=b"d",
            batch=self._dice.choice((None, None, self._name())),
            idempotency_key=self._dice.choice((None, None, self._name())),
            not_before_ms=self._dice.choice((None, None, self._moment())),
            ttl_ms=self._dice.choice((None, None, 100, 5000)),
            deadline_ms=self._dice.choice((None, None, self._moment())),
            wants_callback=self._dice.random() < 0.1,
        )

    def row(self) -> Call[Any]:  # Any: the reply is not looked at
        """Draw a submit that no client packs."""
        row: list[object] = [str(self._job_id()), b"spec", b"payload", "1", 0, 10, 40, 20, 1, None, b"d", *[None] * 6]
        for _ in range(self._dice.randrange(1, 4)):
            row[self._dice.randrange(len(row))] = inputs.value(self._dice)
        packed = self._dice.choice((_packed([row]), inputs.packed(self._dice), inputs.noise(self._dice)))
        return Call("submit", KEYS.fixed(), (packed,), lambda reply: reply)

    # ------------------------------------------------------------ names and values

    def _name(self) -> str:
        return self._dice.choice(("a", "b", "c", "d"))

    def _job_id(self) -> str:
        others = self.seen[-50:] or ["0.victim.a"]
        return self._dice.choice((self._dice.choice(self.own), self._dice.choice(others), f"0.{TENANT}.{self._name()}"))

    def _moment(self) -> int:
        return self._dice.choice((1, 2**53, 1_790_000_000_000 + self._dice.randrange(10**12)))

    def _value(self) -> object:
        """Draw a value of a field: a number, a name, an id, or what nobody writes."""
        numbers = (0, 1, -1, 5, 2**31, 2**53, 2**63 - 1, -(2**63), 1.5, "1e308", "nan", "inf", "-inf", "9" * 5000)
        match self._dice.randrange(5):
            case 0 | 1:
                return self._dice.choice(numbers)
            case 2:
                return self._dice.choice(
                    ("queued", "running", "done", "failed", "expired", "0:victim", "returned:acme")
                )
            case 3:
                return self._job_id()
            case _:
                return inputs.noise(self._dice)

    def _score(self) -> object:
        return self._dice.choice((0, 1, -1, 1.5, 2**53, "1e308", "-1e308", "inf", "-inf", self._moment()))

    def _tenant(self) -> str:
        return self._dice.choice((TENANT, "victim", "ghost", f"ghost{self._dice.randrange(1000)}", ":time", "a b", ""))

    # ------------------------------------------------------------ writes

    def _shared_hash(self) -> Command:
        lane = f"{self._dice.choice(CLASSES)}:{self._tenant()}"
        depth = " ".join(str(self._dice.choice((0, 1, 2**53, -1, "x"))) for _ in range(self._dice.randrange(7)))
        return self._dice.choice(
            (
                ("HSET", KEYS.key("counters"), self._dice.choice((*COUNTERS, self._name())), self._value()),
                ("HINCRBY", KEYS.key("counters"), self._dice.choice(COUNTERS), self._dice.randrange(-(10**6), 10**6)),
                ("HSET", KEYS.key("depth"), lane, self._dice.choice((depth, self._value()))),
                ("HSET", KEYS.key("served"), self._tenant(), self._value()),
                ("HSET", KEYS.key("served"), self._dice.choice((":time", ":lower", ":0", ":9")), self._value()),
            )
        )

    def _own_job(self) -> Command:
        name = self._job_id() if self._dice.random() < 0.1 else self._dice.choice(self.own)
        key = KEYS.key("job", TENANT, name.rpartition(".")[2])
        at = self._dice.randrange(150)
        return self._dice.choice((("SET", key, self._value()), ("SETRANGE", key, at, self._dice.randbytes(3))))

    def _batch(self) -> Command:
        key, fields = KEYS.key("batch", self._name()), ("total", "done", "closed", "url", "deadline", "completed", "x")
        return self._dice.choice(
            (("HSET", key, self._dice.choice(fields), self._value()), ("HINCRBY", key, "total", 1), ("PERSIST", key))
        )

    def _zset(self) -> Command:
        kinds = ("not_before", "retry", "ttl", "deadline", "batch", "x")
        timer = f"{self._dice.choice(kinds)}|{self._dice.choice((self._job_id(), self._name()))}"
        class_ = self._dice.choice(CLASSES)
        key, member = self._dice.choice(
            (
                ("timers", timer),
                ("delayed", self._job_id()),
                (f"heads:{class_}", self._tenant()),
                (f"ready:{class_}", self._tenant()),
                (f"members:{self._name()}", self._job_id()),
            )
        )
        return ("ZADD", KEYS.key(key), self._score(), self._dice.choice((member, member, member, self._value())))

    def _stream(self) -> Command:
        """Draw an entry; those that end a stream or delete what is in it are rare."""
        keys = (
            KEYS.lane(self._dice.choice(CLASSES), TENANT),
            *(KEYS.key(one) for one in ("bell", "outbox", "garbage")),
        )
        at = self._dice.choice(("*", "*", "*", "1-1", LAST_ID)) if self._dice.random() < 0.2 else "*"
        trim = ("MAXLEN", self._dice.choice((0, 1, 5))) if self._dice.random() < 0.02 else ()
        entry: list[object] = ["job", self._job_id(), "prompt", 10, "cost", 30, "choices", 1, "at", 5]
        entry[self._dice.randrange(len(entry))] = self._value()
        return (
            "XADD",
            self._dice.choice(keys),
            *trim,
            at,
            *self._dice.choice((entry, ["e", self._value()], ["x", "y"])),
        )

    def _event(self) -> Command:
        fields = {inputs.key(self._dice): inputs.value(self._dice) for _ in range(self._dice.randrange(4))}
        known = {"state": self._value(), "attempt": self._value(), "epoch": self._value(), "error": self._value()}
        version = self._dice.choice((1, 2, 3, 99, 2**31 - 1, 2**53, self._value()))
        event = [self._dice.choice(EVENTS), self._job_id(), version, self._moment(), {**fields, **known}]
        if self._dice.random() < 0.3:
            event[self._dice.randrange(len(event))] = inputs.value(self._dice)
        return ("XADD", KEYS.outbox, "*", "e", _packed([event]))

    def _text(self) -> Command:
        own = self._dice.choice(self.own).rpartition(".")[2]
        name = self._dice.choice((KEYS.key("payload", TENANT, own), KEYS.key("idem", TENANT, self._name())))
        return ("SET", name, self._dice.choice((inputs.packed(self._dice), self._value(), "")))


def _packed(value: object) -> bytes:
    try:
        return pack_for_script(value)
    except (ValueError, OverflowError, TypeError):
        return b"\xc1"


def _in_a_script(command: Command) -> Command:
    return ("EVAL", "return redis.call(unpack(ARGV))", "0", *command)


def attack(client: Any, attacker: Attacker) -> tuple[int, int]:  # Any: a redis-py client
    """Write one round as the submitting user; return how many writes were taken and how many refused."""
    for key in ("timers", "delayed"):
        found = [member.decode(errors="replace") for member in client.zrange(KEYS.key(key), 0, 50)]
        attacker.seen += [one.rpartition("|")[2] for one in found]
    del attacker.seen[:-200]
    pipeline = client.pipeline(transaction=False)
    for command in attacker.writes():
        pipeline.execute_command(*command)
    replies = pipeline.execute(raise_on_error=False)
    for call in cast("list[Call[Any]]", [submit(KEYS, [attacker.job()]), attacker.row()]):  # Any: of both kinds
        try:
            replies.append(run(client, call))
        except redis.ResponseError as error:
            replies.append(error)
    num_refused = sum(isinstance(one, Exception) for one in replies)
    return len(replies) - num_refused, num_refused
