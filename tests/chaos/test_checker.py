"""The checker has no findings in a sound queue, and finds each kind of damage."""

import ast
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)
import pytest
import structlog

from sluice.producer.client import Producer
from sluice.protocol.states import JobState
from sluice.protocol.webhooks import sign, tenant_secrets
from sluice.protocol.wire import JobId
from sluice.worker.config import LogConfig
from sluice.worker.log import configure_logs
from tests.chaos.catalogue import Ask, Intent, JournalWriter, catalogue, write_reference
from tests.chaos.checker.audit import Findings, check
from tests.chaos.checker.deliveries import read_deliveries
from tests.chaos.checker.evidence import read_journals, read_reference
from tests.chaos.checker.rows import fields_of, row_of
from tests.chaos.faults.recording import record_all
from tests.end_to_end.processes import ROOT
from tests.integration.jobs import KEYS, wait_until
from tests.integration.workers import running_worker
from tests.servers import redis_server

msgpack: Any = untyped_msgpack
Keys = dict[bytes, tuple[bytes, int]]
CALLS: Any = {"model__tool_format": "hermes"}
"""Flags of workers that take chats with tools."""

SLOWER: Any = {"model__path": "null?step_s=0.002"}
SECRET = "whsec_dGhlIGNoZWNrZXI="


@dataclass(slots=True, eq=False)
class Drained:
    """A sound, drained queue with its history and its evidence. Each test damages a fresh copy."""

    client: Any
    folder: Path
    url: str
    sound: Keys = field(default_factory=dict[bytes, tuple[bytes, int]])
    rows: bytes = b""
    notes: str = ""

    @property
    def deliveries(self) -> Path:
        """What the receiver of callbacks noted."""
        return self.folder / "deliveries.jsonl"

    @property
    def database_url(self) -> str:
        """Of the history."""
        return f"sqlite:///{self.folder}/history.db"

    @property
    def ids(self) -> list[str]:
        """Jobs, as asked."""
        return list(read_journals([self.folder / "journal.jsonl"]))

    def keep(self) -> None:
        """This is what is sound."""
        for key in self.client.keys("*"):
            self.sound[key] = (self.client.dump(key), max(0, self.client.pttl(key)))
        self.rows = (self.folder / "history.db").read_bytes()
        self.notes = self.deliveries.read_text()

    def restore(self) -> None:
        """As it was."""
        self.client.flushall()
        for key, (dump, kept_ms) in self.sound.items():
            self.client.restore(key, kept_ms, dump)
        (self.folder / "history.db").write_bytes(self.rows)
        self.deliveries.write_text(self.notes)

    def sql(self, statement: str) -> None:
        """Damage the history."""
        with sqlite3.connect(self.folder / "history.db") as database:
            database.execute(statement)
        database.close()

    def check(self) -> Findings:
        """Look."""
        return check(
            self.client,
            read_journals([self.folder / "journal.jsonl"]),
            read_reference(self.folder / "reference.json"),
            database_url=self.database_url,
            deliveries=read_deliveries(self.deliveries, SECRET),
        )

    def deliver(self, job_id: str, *, event: str = "evt_1", state: str = "done", **note: object) -> None:
        """Record a request as a receiver would; `note` changes it."""
        reported = {"id": event, "type": f"job.{state}", "data": {"job_id": job_id, "state": state}}
        body = json.dumps(reported, ensure_ascii=False)
        headers = sign(
            tenant_secrets(SECRET, job_id.split(".")[1]), event_id=event, timestamp_s=1_800_000_000, body=body.encode()
        )
        usual = {"at_ms": 1_800_000_001_000, "headers": headers, "body": body, "answered": 200}
        with self.deliveries.open("a") as file:
            file.write(json.dumps({**usual, **note}) + "\n")


def submit_some(producer: Producer, asks: list[Ask], folder: Path) -> list[str]:
    """Jobs of every kind: streamed and not, in a batch, with a key, with a callback, and one that is cancelled."""
    intents = [Intent(asked=f"0.t.job{i}", ask=i, batch="b", callback=i == 1) for i in range(len(asks))]
    intents[3] = Intent(asked="0.t.job3", ask=3, batch="b", ends=("cancelled",))
    jobs = [
        ask.job(
            job_id=JobId(intent.asked),
            tenant="t",
            batch="b",
            stream=intent.ask != 2,
            callback_url="https://example.org/hook" if intent.callback else None,
            idempotency_key="once" if intent.ask == 4 else None,
        )
        for ask, intent in zip(asks, intents, strict=True)
    ]
    with JournalWriter(folder / "journal.jsonl") as journal:
        journal.intend(intents)
        producer.pause()
        journal.acknowledge(str(receipt) for receipt in producer.submit_many(jobs))
        producer.cancel("0.t.job3")
        producer.pause(is_paused=False)
    return [intent.asked for intent in intents if intent.ends == ("done",)]


@pytest.fixture(scope="module")
def drained_once(tmp_path_factory: pytest.TempPathFactory) -> Generator[Drained]:
    configure_logs(LogConfig(level="error"))
    folder = tmp_path_factory.mktemp("drained")
    asks = [Ask("tell me", {"max_tokens": 30, "seed": 7}), *catalogue(1, 5, max_tokens=40)]
    with redis_server() as other, running_worker(other.url, **CALLS), Producer(other.url) as producer:
        write_reference(producer, asks, folder / "reference.json")
    with redis_server() as server, server.client() as client:
        with Producer(server.url) as producer, running_worker(server.url, **SLOWER, **CALLS):
            ids = submit_some(producer, asks, folder)
            wait_until(lambda: all(producer.status(one).state is JobState.DONE for one in ids), "all are done")
        made = Drained(client, folder, server.url)
        record_all(server, made.database_url)
        # It was delivered at the second try, and then once more.
        client.xtrim(KEYS.key("callbacks"), maxlen=0)
        made.deliver("0.t.job1", answered=503)
        made.deliver("0.t.job1")
        made.deliver("0.t.job1")
        made.keep()
        yield made
    structlog.reset_defaults()


@pytest.fixture
def drained(drained_once: Drained) -> Drained:
    drained_once.restore()
    return drained_once


def channel(number: int, choice: int = 0) -> str:
    return KEYS.key("channel", "t", f"job{number}", choice)


def job_key(number: int, kind: str = "job") -> str:
    return KEYS.key(kind, "t", f"job{number}")


def repack(data: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """The same message with one thing changed."""
    message = msgpack.unpackb(data)
    change(message)
    return msgpack.packb(message)


def rewrite_channel(drained: Drained, number: int, change: Callable[[list[tuple[str, list[Any]]]], object]) -> None:
    """Rewrite a channel with changed entries and the same expiry."""
    key = channel(number)
    kept_ms = drained.client.pttl(key)
    entries = [(one.decode(), msgpack.unpackb(fields[b"e"])) for one, fields in drained.client.xrange(key)]
    change(entries)
    drained.client.delete(key)
    for entry_id, message in entries:
        drained.client.xadd(key, {"e": msgpack.packb(message)}, id=entry_id)
    drained.client.pexpire(key, kept_ms)


def put_in_result(drained: Drained, number: int, change: Callable[[list[Any]], object]) -> None:
    key = job_key(number, "result")
    drained.client.set(key, repack(drained.client.get(key), change), keepttl=True)


def put_in_row(drained: Drained, number: int, **changes: object) -> None:
    key = job_key(number)
    fields: dict[str, object] = {**fields_of("t", drained.client.get(key)), **changes}
    drained.client.set(key, row_of(fields), keepttl=True)


def repeat_an_entry(entries: list[tuple[str, list[Any]]]) -> None:
    (entry_id, message), (_, before) = entries[3], entries[2]
    entries[3] = (entry_id, [*message[:1], before[1], before[2] + message[2], *message[3:]])


def other_token(entries: list[tuple[str, list[Any]]]) -> None:
    entries[2][1][2][0] ^= 1


def second_end(entries: list[tuple[str, list[Any]]]) -> None:
    tokens = entries[-1][0].split("-")[0]
    entries.append((f"{tokens}-2", [1, int(tokens), [], "", 1, False, entries[-1][1][6]]))


HEADERS_OF_ANOTHER = sign("another", event_id="evt_1", timestamp_s=1_800_000_000, body=b"{}")


def only_delivery(drained: Drained, **note: Any) -> None:
    """One request, with something wrong about it."""
    drained.deliveries.write_text("")
    drained.deliver("0.t.job1", **note)


Damage = Callable[[Drained], object]

DAMAGES: dict[str, tuple[str, str, Damage]] = {
    "a job is gone": ("lost", "0.t.job0", lambda d: d.client.delete(job_key(0))),
    "a job never ended": ("unfinished", "0.t.job0", lambda d: put_in_row(d, 0, state="running")),
    "a job ended otherwise": ("ended otherwise", "0.t.job0", lambda d: put_in_row(d, 0, state="failed")),
    "a lease stays": ("lease left", "0.t.job0", lambda d: d.client.hset(KEYS.key("held", "W"), "0.t.job0", b"x")),
    "an entry is gone": (
        "gap", "0.t.job0", lambda d: d.client.xdel(channel(0), d.client.xrange(channel(0))[2][0]),
    ),
    "tokens come twice": ("twice", "0.t.job0", lambda d: rewrite_channel(d, 0, repeat_an_entry)),
    "a token is another": ("tokens", "0.t.job0", lambda d: rewrite_channel(d, 0, other_token)),
    "a text is another": (
        "text", "0.t.job0", lambda d: rewrite_channel(d, 0, lambda entries: entries[0][1].__setitem__(3, "?")),
    ),
    "the end is gone": ("ends", "0.t.job0", lambda d: d.client.xdel(channel(0), d.client.xrevrange(channel(0))[0][0])),
    "there are two ends": ("ends", "0.t.job0", lambda d: rewrite_channel(d, 0, second_end)),
    "an end says another state": (
        "ends", "0.t.job0", lambda d: rewrite_channel(d, 0, lambda entries: entries[-1][1][6].update(state="failed")),
    ),
    "an entry is no message": (
        "malformed", "0.t.job0", lambda d: d.client.xadd(channel(0), {"e": b"\xc1"}, id="9999-0"),
    ),
    "a channel is gone": ("channel gone", "0.t.job0", lambda d: d.client.delete(channel(0))),
    "a channel is for ever": ("residue", "0.t.job0", lambda d: d.client.persist(channel(0))),
    "the offset is another": ("published", "0.t.job0", lambda d: put_in_row(d, 0, published="1:2")),
    "the result is gone": ("result", "0.t.job0", lambda d: d.client.delete(job_key(0, "result"))),
    "the result has another text": (
        "result", "0.t.job0", lambda d: put_in_result(d, 0, lambda m: m[1][0].__setitem__(0, "?")),
    ),
    "the result has a vector that no one asked for": (
        "result", "0.t.job0", lambda d: put_in_result(d, 0, lambda m: m[1][0].extend([[], [], b"abcd"])),
    ),
    "the result has other tokens": ("result", "0.t.job0", lambda d: put_in_result(d, 0, lambda m: m[1][0][1].pop())),
    "the result ended otherwise": (
        "result", "0.t.job0", lambda d: put_in_result(d, 0, lambda m: m[1][0].__setitem__(2, "elsewise")),
    ),
    "a prompt stays": ("residue", "0.t.job0", lambda d: d.client.set(job_key(0, "payload"), b"x", ex=60)),
    "a key stays too long": ("residue", "0.t.job4", lambda d: d.client.pexpire(KEYS.key("idem", "t", "once"), 10**9)),
    "a row is gone": ("row", "0.t.job0", lambda d: d.sql("DELETE FROM jobs WHERE id = '0.t.job0'")),
    "a row says another state": (
        "row", "0.t.job0", lambda d: d.sql("UPDATE jobs SET state = 'failed' WHERE id = '0.t.job0'"),
    ),
    "a row counts other tokens": (
        "row", "0.t.job0", lambda d: d.sql("UPDATE jobs SET output_tokens = 3 WHERE id = '0.t.job0'"),
    ),
    "a row of a job that was not submitted": (
        "row", "0.t.job9", lambda d: d.sql("UPDATE jobs SET id = '0.t.job9' WHERE id = '0.t.job0'"),
    ),
    "a stored result is another": (
        "row", "0.t.job0", lambda d: d.sql("UPDATE results SET choices = '[]' WHERE job_id = '0.t.job0'"),
    ),
    "a stored result has no reason": (
        "row", "0.t.job0",
        lambda d: d.sql(
            "UPDATE results SET choices = json_remove(choices, '$[0].finish_reason') WHERE job_id = '0.t.job0'"
        ),
    ),
    "a claim is gone": ("attempts", "0.t.job0", lambda d: d.sql("DELETE FROM attempts WHERE job_id = '0.t.job0'")),
    "two claims ended it": (
        "attempts", "0.t.job0",
        lambda d: d.sql(
            "INSERT INTO attempts (job_id, submitted_ms, epoch, outcome)"
            " SELECT id, submitted_ms, 2, 'done' FROM jobs WHERE id = '0.t.job0'"
        ),
    ),
    "a claim never ended": (
        "attempts", "0.t.job0", lambda d: d.sql("UPDATE attempts SET outcome = NULL WHERE job_id = '0.t.job0'"),
    ),
    "a batch counts one more": ("batch", "b", lambda d: d.client.hincrby(KEYS.key("batch", "b"), "done", 1)),
    "the queue counts one more": (
        "counters", KEYS.key("counters"), lambda d: d.client.hincrby(KEYS.key("counters"), "done", 1),
    ),
    "something runs for ever": (
        "counters", KEYS.key("counters"), lambda d: d.client.hincrby(KEYS.key("counters"), "running_jobs", 1),
    ),
    "a callback never came": ("callback", "0.t.job1", lambda d: d.deliveries.write_text("")),
    "a callback was refused": ("callback", "0.t.job1", lambda d: only_delivery(d, answered=503)),
    "a callback came under two ids": ("callback", "0.t.job1", lambda d: d.deliver("0.t.job1", event="evt_2")),
    "a callback was not signed": ("callback", "0.t.job1", lambda d: only_delivery(d, headers=HEADERS_OF_ANOTHER)),
    "a callback was signed long ago": (
        "callback", "0.t.job1", lambda d: d.deliver("0.t.job1", at_ms=1_900_000_000_000),
    ),
    "a callback reports another end": ("callback", "0.t.job1", lambda d: d.deliver("0.t.job1", state="failed")),
    "a callback that was not requested": ("callback", "0.t.job0", lambda d: d.deliver("0.t.job0")),
    "a callback still waits": (
        "residue", KEYS.key("callbacks"), lambda d: d.client.xadd(KEYS.key("callbacks"), {"kind": "job"}),
    ),
    "a lane stays": (
        "residue", KEYS.key("lane", 0, "t"), lambda d: d.client.xadd(KEYS.key("lane", 0, "t"), {"job": "0.t.job0"}),
    ),
    "a timer stays": ("residue", KEYS.key("timers"), lambda d: d.client.zadd(KEYS.key("timers"), {"ttl|0.t.job0": 1})),
    "a holder stays": ("residue", KEYS.key("held", "x"), lambda d: d.client.hset(KEYS.key("held", "x"), "0.t.job0", 1)),
    "the dead still live": ("residue", KEYS.key("alive"), lambda d: d.client.zadd(KEYS.key("alive"), {"x": 1})),
    "an event was not recorded": (
        "residue", KEYS.key("outbox"), lambda d: d.client.xadd(KEYS.key("outbox"), {"e": b"\x90"}),
    ),
    "something foreign was found": (
        "residue", KEYS.key("garbage"), lambda d: d.client.xadd(KEYS.key("garbage"), {"where": "x", "what": "y"}),
    ),
    "a batch is for ever": (
        "residue", KEYS.key("batch", "b"), lambda d: d.client.persist(KEYS.key("batch", "b")),
    ),
}  # fmt: skip


class TestGivenADrainedQueue:
    """Six jobs of every kind, served by one worker and recorded; all processes have stopped."""

    def test_when_nothing_is_damaged_then_nothing_is_found(self, drained: Drained) -> None:
        findings = drained.check()

        assert findings.found == []
        assert (findings.figures["done"], findings.figures["cancelled"]) == (5, 1)

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_when_one_thing_is_damaged_then_it_is_named(self, drained: Drained, damage: str) -> None:
        kind, name, harm = DAMAGES[damage]

        harm(drained)

        found = drained.check().found
        assert [(one, what.partition(":")[0]) for one, what in found if one == name].count((name, kind)) >= 1, found

    def test_when_a_job_was_never_acknowledged_then_it_may_be_unknown(self, drained: Drained) -> None:
        with JournalWriter(drained.folder / "other.jsonl") as journal:
            journal.intend([Intent(asked="0.t.other", ask=0)])

        found = check(
            drained.client,
            read_journals([drained.folder / "journal.jsonl", drained.folder / "other.jsonl"]),
            read_reference(drained.folder / "reference.json"),
        ).found

        assert found == []

    def test_when_it_is_run_as_a_program_then_its_exit_code_tells(self, drained: Drained) -> None:
        def run() -> subprocess.CompletedProcess[str]:
            paths = ["--journal", str(drained.folder / "journal.jsonl")]
            paths += ["--reference", str(drained.folder / "reference.json"), "--database-url", drained.database_url]
            paths += ["--deliveries", str(drained.deliveries), "--secret", SECRET]
            command = [sys.executable, "-m", "tests.chaos.checker", "--redis-url", drained.url, *paths]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

        sound = run()
        drained.client.delete(job_key(5))
        damaged = run()

        assert (sound.returncode, sound.stdout.splitlines()[-1]) == (0, "nothing is wrong"), sound.stderr
        assert damaged.returncode == 1
        assert "0.t.job5: lost: it was acknowledged and the queue does not know it" in damaged.stdout


class TestGivenTheCheckersOwnCode:
    def test_when_its_imports_are_read_then_none_is_of_what_it_checks(self) -> None:
        imported: set[str] = set()
        for path in (ROOT / "tests" / "chaos" / "checker").glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add((node.module or "").split(".")[0])

        assert "sluice" not in imported
        assert "redis" in imported
