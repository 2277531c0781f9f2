"""The recorder between a real Valkey and real databases: nothing is lost, nothing is written twice."""

import errno
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from structlog.testing import LogCapture

from sluice.history import rows
from sluice.history.database import open_database
from sluice.history.tables import batches, jobs
from sluice.history.writer import HistoryWriter
from sluice.protocol.keys import QueueKeys
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.stream_group import StreamGroup
from sluice.worker.recorder.recorder import GROUP, Recorder, RecorderSettings
from tests.history import events as e
from tests.postgres import PostgresServer
from tests.servers import RedisServer

OUTBOX = e.KEYS.outbox


def add(client: Client, *entries: list[e.Packed]) -> None:
    """Write outbox entries, as scripts do."""
    for events in entries:
        client.xadd(OUTBOX, {"e": e.pack(events)})


def recorder(valkey: RedisServer, history: Engine, **settings: object) -> Recorder:
    """A recorder of the queue's one partition."""
    usual: dict[str, object] = {"queues": (e.QUEUE,), "name": "r1", "block_s": 0.05}
    return Recorder(client_of(valkey), HistoryWriter(history), RecorderSettings(**usual | settings))  # pyright: ignore[reportArgumentType]  # settings by name


def client_of(valkey: RedisServer) -> Client:
    """A connection as the worker makes them."""
    return connect(valkey.url, timeout_s=5)


class PoolWithoutSockets:
    """A connection pool whose process may open no file at first."""

    def __init__(self, pool: Any) -> None:  # Any: redis-py's pools are partly untyped
        self._pool = pool
        self._errors = [OSError(errno.EMFILE, "Too many open files")] * 2

    def get_connection(self, *_: object, **__: object) -> Any:  # Any: as the pool
        if self._errors:
            raise self._errors.pop()
        return self._pool.get_connection()

    def __getattr__(self, name: str) -> Any:  # Any: as the pool
        return getattr(self._pool, name)


def states(history: Engine) -> dict[str, str]:
    """State by job."""
    with history.connect() as connection:
        return {found.id: found.state for found in connection.execute(sa.select(jobs.c.id, jobs.c.state))}


def names(client: Client) -> set[str]:
    """Names of the group's consumers."""
    return {consumer["name"].decode() for consumer in client.xinfo_consumers(OUTBOX, GROUP)}


def pending(client: Client) -> int:
    """Entries delivered to any recorder and not acknowledged."""
    return client.xpending(OUTBOX, GROUP)["pending"]


@contextmanager
def running(recorder: Recorder) -> Generator[None]:
    """The recorder's loop in a separate thread."""
    thread = threading.Thread(target=recorder.run)
    thread.start()
    try:
        yield
    finally:
        recorder.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()


def until(is_so: Callable[[], bool], what: str, *, patience_s: float = 60) -> None:
    """Wait for something to become true."""
    pause = threading.Event()
    for _ in range(int(patience_s * 100)):
        if is_so():
            return
        pause.wait(0.01)
    pytest.fail(f"never happened: {what}")


class TestGivenEventsInTheOutbox:
    """Written before the first recorder started."""

    def test_when_a_recorder_drains_then_rows_are_written_and_the_outbox_is_empty(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1"), e.submitted("0.a.2")], [e.started("0.a.1")], [e.ended("0.a.1")])

        num_entries = recorder(valkey, history).drain()

        assert num_entries == 3
        assert states(history) == {"0.a.1": "done", "0.a.2": "queued"}
        assert (client.xlen(OUTBOX), pending(client)) == (0, 0)

    def test_when_the_end_comes_before_the_submit_then_the_row_is_whole(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, history)
        add(client, [e.ended("0.a.1")])
        first.drain()

        add(client, [e.submitted("0.a.1")])
        first.drain()

        with history.connect() as connection:
            found = connection.execute(sa.select(jobs)).one()
        assert (found.state, found.priority, found.e2e_s) == ("done", 3, 1.05)

    def test_when_there_are_more_than_a_transaction_holds_then_all_are_written(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)
        for begin in range(0, 2500, 250):
            add(client, [e.submitted(f"0.a.{number}") for number in range(begin, begin + 250)])

        recorder(valkey, sqlite_history).drain()

        assert len(states(sqlite_history)) == 2500
        assert client.xlen(OUTBOX) == 0

    def test_when_an_entry_is_foreign_then_it_goes_to_garbage_and_the_rest_is_recorded(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)
        client.xadd(OUTBOX, {"e": b"\xc1 not msgpack"})
        client.xadd(OUTBOX, {"who": "another program"})
        add(client, [e.submitted("no job id")], [e.submitted("0.a.1")])

        recorder(valkey, sqlite_history).drain()

        assert states(sqlite_history) == {"0.a.1": "queued"}
        kept = [values[b"what"] for _, values in client.xrange(e.KEYS.key("garbage"))]
        assert kept[:2] == [b"\xc1 not msgpack", b"another program"]
        assert len(kept) == 3
        assert client.xlen(OUTBOX) == 0

    @pytest.mark.parametrize(
        "foreign",
        [
            [e.submitted("0.evil.1", priority=b"9" * 5000)],
            [e.started("0.evil.1", attempt=b"9" * 5000), e.started("0.evil.1", attempt=[1])],
            [e.started("0.evil.1", attempt=1), e.started("0.evil.1", version=3, attempt={"a": 1})],
            [e.started("0.evil.1", epoch=2**63 - 1), e.ended("0.evil.1", epoch=1.5, attempt=b"x")],
            [e.submitted("0.evil.1", at_ms=-5)],
            [e.started("0.evil.1", attempt=2**64 - 1), e.ended("0.evil.1", state=[], reason={}, record=7, result=[1])],
            [e.submitted("0.evil.1", spec=[], prompt={}, batch=2.5, seed=[])],
        ],
        ids=["digits", "list", "map", "float", "negative time", "large number", "lists of a submit"],
    )
    def test_when_fields_change_their_types_then_others_are_recorded(
        self, valkey: RedisServer, sqlite_history: Engine, foreign: list[e.Packed]
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")], foreign, foreign, [e.submitted("0.a.2"), e.ended("0.a.2")])

        recorder(valkey, sqlite_history).drain()

        found = states(sqlite_history)
        assert (found["0.a.1"], found["0.a.2"]) == ("queued", "done")
        assert client.xlen(OUTBOX) == 0

    @pytest.mark.parametrize(
        "foreign",
        [
            [e.submitted("3.evil.1")],
            [e.ended("0.evil.1", state="over")],
            [e.submitted("0.evil.1", version=2**31)],
            [e.started("0.evil.1", submitted_ms=None)],
            [e.started("0.evil.1", submitted_ms=b"9" * 5000)],
            [e.submitted("0.evil.1", submitted_ms=-5)],
        ],
        ids=["partition", "no final state", "version", "no submit time", "endless time", "negative time"],
    )
    def test_when_no_script_writes_an_event_then_it_alone_goes_to_garbage(
        self, valkey: RedisServer, sqlite_history: Engine, foreign: list[e.Packed]
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1"), *foreign, e.submitted("0.a.2")])

        recorder(valkey, sqlite_history).drain()

        assert states(sqlite_history) == {"0.a.1": "queued", "0.a.2": "queued"}
        assert client.xlen(e.KEYS.key("garbage")) == 1

    def test_when_an_entry_cannot_be_folded_then_only_it_goes_to_garbage(
        self, valkey: RedisServer, sqlite_history: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(change: rows.JobChange, event: object, keep_prompts: object) -> None:
            if change.submission[0] == "0.evil.1":
                raise ZeroDivisionError

        monkeypatch.setitem(vars(rows)["_READERS"], "returned", refuse)
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")], [e.submitted("0.evil.1"), e.returned("0.evil.1")], [e.submitted("0.a.2")])

        recorder(valkey, sqlite_history).drain()

        assert states(sqlite_history) == {"0.a.1": "queued", "0.a.2": "queued"}
        assert (client.xlen(OUTBOX), client.xlen(e.KEYS.key("garbage"))) == (0, 1)


class TestGivenARecorderThatDied:
    """It had read events and not acknowledged them."""

    def test_when_it_starts_again_then_it_records_its_own_first(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")])
        client.xgroup_create(OUTBOX, GROUP, id="0")
        client.xreadgroup(GROUP, "r1", {OUTBOX: ">"})
        add(client, [e.submitted("0.a.2")])

        recorder(valkey, sqlite_history).drain()

        assert states(sqlite_history) == {"0.a.1": "queued", "0.a.2": "queued"}
        assert (client.xlen(OUTBOX), pending(client)) == (0, 0)

    def test_when_only_the_reply_was_lost_then_it_reads_again_what_was_in_it(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, sqlite_history, claim_after_s=3600.0)
        first.drain()
        add(client, [e.submitted("0.a.1")])
        client.xreadgroup(GROUP, "r1", {OUTBOX: ">"})

        with running(first):
            # Only a connection that waits for a reply can lose one: until it does, closing it is harmless.
            until(lambda: client.client_kill_filter(skipme=True) > 0 and states(sqlite_history) != {}, "the row")
            until(lambda: pending(client) == 0, "it is acknowledged")

    @pytest.mark.parametrize("age_s", [0.0, 3600.0])
    def test_when_another_runs_then_it_takes_over_what_has_lain_long_enough(
        self, valkey: RedisServer, sqlite_history: Engine, age_s: float
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")])
        client.xgroup_create(OUTBOX, GROUP, id="0")
        client.xreadgroup(GROUP, "dead", {OUTBOX: ">"})

        recorder(valkey, sqlite_history, name="alive", claim_after_s=age_s).drain()

        was_taken = age_s == 0
        assert states(sqlite_history) == ({"0.a.1": "queued"} if was_taken else {})
        assert pending(client) == (0 if was_taken else 1)

    def test_when_it_had_written_but_not_acknowledged_then_writing_again_changes_nothing(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1", batch=b"b1")], [e.started("0.a.1")], [e.ended("0.a.1")])
        copies = client.xrange(OUTBOX)
        recorder(valkey, history).drain()
        with history.connect() as connection:
            before = connection.execute(sa.select(jobs)).all()
        for entry_id, values in copies:
            client.xadd(OUTBOX, values, id=entry_id.replace(b"-", b"999-"))

        recorder(valkey, history).drain()

        with history.connect() as connection:
            assert connection.execute(sa.select(jobs)).all() == before


class TestGivenTwoRecorders:
    """Of one queue, at the same time."""

    def test_when_both_record_then_every_job_has_its_row(self, valkey: RedisServer, history: Engine) -> None:
        client = client_of(valkey)
        job_ids = [f"0.a.{number}" for number in range(300)]

        with running(recorder(valkey, history, name="r1")), running(recorder(valkey, history, name="r2")):
            for job_id in job_ids:
                add(client, [e.submitted(job_id)], [e.started(job_id)], [e.ended(job_id)])
            until(lambda: client.xlen(OUTBOX) == 0, "the outbox is empty")

        assert states(history) == dict.fromkeys(job_ids, "done")


@pytest.mark.every_server
class TestGivenAnOutboxWhoseBytesAreCounted:
    def test_when_entries_are_recorded_then_each_is_subtracted_once(self, any_redis: RedisServer) -> None:
        client, counters = client_of(any_redis), e.KEYS.key("counters")
        stream = StreamGroup(client, OUTBOX, group=GROUP, name="r1", claim_after_s=60)
        add(client, [e.submitted("a")], [e.submitted("b"), e.started("b")])
        entries = stream.read(block_s=0.01, max_bytes=1000, max_pages=1)
        add(client, [e.submitted("c")])
        sizes = [len(fields[b"e"]) for _, fields in client.xrange(OUTBOX)]
        client.hset(counters, "outbox_bytes", sum(sizes))

        for _ in range(2):  # as two recorders that both had them
            stream.acknowledge_counted(entries, counters)
            assert client.hget(counters, "outbox_bytes") == str(sizes[-1]).encode()

        stream.acknowledge_counted(stream.read(block_s=0.01, max_bytes=1000, max_pages=1), counters)
        assert client.hget(counters, "outbox_bytes") == b"0"

    def test_when_an_older_release_wrote_some_then_an_empty_outbox_has_none(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client, counters = client_of(valkey), e.KEYS.key("counters")
        add(client, [e.submitted("a")])
        client.hset(counters, "outbox_bytes", 10**9)

        recorder(valkey, history).drain()

        assert client.hget(counters, "outbox_bytes") == b"0"


@pytest.mark.every_server
class TestGivenRecordersThatNeverComeBack:
    """Each host name is a consumer of the group."""

    def test_when_they_left_nothing_then_their_names_go_and_the_others_stay(self, any_redis: RedisServer) -> None:
        client = client_of(any_redis)
        streams = {
            name: StreamGroup(client, OUTBOX, group=GROUP, name=name, claim_after_s=60, consumer_kept_s=kept_s)
            for name, kept_s in (("gone", 3600), ("owes", 3600), ("lives", -1))
        }
        add(client, *[[e.submitted(f"j{i}")] for i in range(2)])
        taken = streams["gone"].read(block_s=0.01, max_bytes=1000, max_pages=1)
        streams["gone"].acknowledge([entry_id for entry_id, _ in taken])
        add(client, [e.submitted("last")])
        client.xreadgroup(GROUP, "owes", {OUTBOX: ">"})

        streams["lives"].read(block_s=0.01, max_bytes=1000, max_pages=1)

        assert names(client) == {"owes", "lives"}
        assert pending(client) == 1
        add(client, [e.submitted("after")])
        assert len(streams["gone"].read(block_s=0.01, max_bytes=1000, max_pages=1)) == 1, "it was only quiet"


class TestGivenADatabaseThatGoesAway:
    """The outbox must hold the rows until it is back."""

    def test_when_postgres_is_down_for_a_while_then_nothing_is_lost_and_it_is_said_once(
        self, valkey: RedisServer, postgres: PostgresServer, postgres_history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, postgres_history)
        add(client, [e.submitted("0.a.1")])
        first.drain()

        with running(first):
            postgres.kill()
            try:
                add(client, [e.submitted("0.a.2")])
                until(lambda: num_logged(log, "history database unreachable") == 1, "the recorder notices")
                add(client, [e.ended("0.a.2")])
            finally:
                postgres.start()
            until(lambda: client.xlen(OUTBOX) == 0, "the outbox is empty")

        assert states(postgres_history) == {"0.a.1": "queued", "0.a.2": "done"}
        events = ("history database unreachable", "history database reachable again")
        assert [num_logged(log, event) for event in events] == [1, 1]

    def test_when_postgres_comes_back_while_no_event_comes_then_that_is_said(
        self, valkey: RedisServer, postgres: PostgresServer, postgres_history: Engine, log: LogCapture
    ) -> None:
        first = recorder(valkey, postgres_history)
        postgres.kill()
        with running(first):
            try:
                until(lambda: num_logged(log, "history database unreachable") == 1, "the count of batches fails")
            finally:
                postgres.start()
            until(lambda: num_logged(log, "history database reachable again") == 1, "a count succeeds")

        assert num_logged(log, "history database unreachable") == 1

    def test_when_sqlite_is_full_then_rows_wait_until_there_is_room(
        self, valkey: RedisServer, sqlite_history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, sqlite_history)
        add(client, [e.submitted(f"0.a.{number}", prompt=e.prompt("x" * 10_000)) for number in range(50)])
        bound_pages(sqlite_history, spare=5)

        with running(first):
            until(lambda: num_logged(log, "history database unreachable") == 1, "the recorder notices")
            assert client.xlen(OUTBOX) == 1
            bound_pages(sqlite_history, spare=100_000)
            until(lambda: client.xlen(OUTBOX) == 0, "the outbox is empty")

        assert len(states(sqlite_history)) == 50
        assert "full" in next(
            entry["error"] for entry in log.entries if entry["event"] == "history database unreachable"
        )

    def test_when_the_sqlite_file_is_damaged_then_all_rows_are_stored_after_its_repair(
        self, valkey: RedisServer, sqlite_history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, sqlite_history)
        add(client, *[[e.submitted(f"0.a.{number}")] for number in range(20)])
        sqlite_history.dispose()
        path = Path(sqlite_history.url.database or "")
        whole = path.read_bytes()
        path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))

        with running(first):
            until(lambda: num_logged(log, "history database unreachable") == 1, "the recorder notices")
        sqlite_history.dispose()

        assert client.xlen(OUTBOX) == 20
        assert num_logged(log, "row cleaned") == 0
        assert "malformed" in next(x["error"] for x in log.entries if x["event"] == "history database unreachable")
        for leftover in path.parent.glob(f"{path.name}-*"):
            leftover.unlink()
        path.write_bytes(whole)
        recorder(valkey, sqlite_history).drain()
        assert (len(states(sqlite_history)), client.xlen(OUTBOX)) == (20, 0)

    def test_when_even_the_least_of_a_row_is_refused_then_its_event_stays_in_the_outbox(
        self, valkey: RedisServer, history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        with history.begin() as connection:
            connection.execute(sa.text("CREATE UNIQUE INDEX one_state ON jobs (state)"))
        try:
            add(client, [e.submitted("0.a.1"), e.submitted("0.a.2")])
            with running(recorder(valkey, history)):
                until(lambda: num_logged(log, "history database unreachable") == 1, "the recorder notices")
            assert client.xlen(OUTBOX) == 1
        finally:
            with history.begin() as connection:
                connection.execute(sa.text("DROP INDEX one_state"))

        recorder(valkey, history).drain()

        assert (len(states(history)), client.xlen(OUTBOX)) == (2, 0)

    def test_when_a_column_that_it_writes_is_renamed_then_its_events_stay_until_one_knows_the_column(
        self, valkey: RedisServer, history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        with history.begin() as connection:
            connection.execute(sa.text("ALTER TABLE jobs RENAME COLUMN reserved_tokens TO newer"))
        try:
            add(client, [e.submitted("0.a.1")])
            with running(recorder(valkey, history)):
                until(lambda: num_logged(log, "history database unreachable") == 1, "the recorder notices")
            assert client.xlen(OUTBOX) == 1
        finally:
            with history.begin() as connection:
                connection.execute(sa.text("ALTER TABLE jobs RENAME COLUMN newer TO reserved_tokens"))

        recorder(valkey, history).drain()

        assert (states(history), client.xlen(OUTBOX)) == ({"0.a.1": "queued"}, 0)

    def test_when_asked_to_stop_meanwhile_then_it_stops_and_the_events_stay(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        history = open_database(f"sqlite:///{tmp_path}/no/such/folder.db", is_writer=True)
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")])

        with running(recorder(valkey, history)):
            until(
                lambda: client.exists(OUTBOX) and client.xinfo_groups(OUTBOX) != [] and pending(client) == 1,
                "it is read",
            )

        assert client.xlen(OUTBOX) == 1


class TestGivenARedisThatGoesAway:
    """The recorder resumes at its position."""

    def test_when_it_restarts_then_events_after_it_are_recorded_and_it_is_said_once(
        self, durable_valkey: RedisServer, sqlite_history: Engine, log: LogCapture
    ) -> None:

        with running(recorder(durable_valkey, sqlite_history)):
            until(lambda: client_of(durable_valkey).exists(OUTBOX) == 1, "the group is there")
            durable_valkey.restart()
            until(lambda: num_logged(log, "redis reachable again") == 1, "the recorder is back")
            add(client_of(durable_valkey), [e.submitted("0.a.1")])
            until(lambda: states(sqlite_history) == {"0.a.1": "queued"}, "the row")

        assert num_logged(log, "redis unreachable") == 1

    def test_when_a_socket_raises_an_os_error_then_it_is_an_outage_that_ends(
        self, valkey: RedisServer, sqlite_history: Engine, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")])
        broken = client_of(valkey)
        broken.connection_pool = PoolWithoutSockets(broken.connection_pool)
        settings = RecorderSettings(queues=(e.QUEUE,), name="r1", block_s=0.05)

        with running(Recorder(broken, HistoryWriter(sqlite_history), settings)):
            until(lambda: states(sqlite_history) == {"0.a.1": "queued"}, "the row")

        assert [num_logged(log, event) for event in ("redis unreachable", "redis reachable again")] == [1, 1]

    def test_when_it_was_emptied_then_the_group_is_made_again(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)

        with running(recorder(valkey, sqlite_history)):
            until(lambda: client.exists(OUTBOX) == 1, "the group is there")
            client.flushall()
            add(client, [e.submitted("0.a.1")])
            until(lambda: states(sqlite_history) == {"0.a.1": "queued"}, "the row")


class TestGivenTwoPartitionsOfWhichOneFails:
    """Another program's key lies where its outbox should be."""

    def test_when_one_outbox_fails_then_the_other_continues_and_it_is_logged_once(
        self, valkey: RedisServer, sqlite_history: Engine, log: LogCapture
    ) -> None:
        client, ill = client_of(valkey), QueueKeys(e.QUEUE, 1).outbox
        client.set(ill, "mine")

        with running(recorder(valkey, sqlite_history, partitions=2)):
            for number in range(20):
                add(client, [e.submitted(f"0.a.{number}")])
                until(lambda: client.xlen(OUTBOX) == 0, "the well one is recorded")
            assert [entry["key"] for entry in log.entries if entry["event"] == "redis unreachable"] == [ill]
            assert num_logged(log, "redis reachable again") == 0
            client.delete(ill)
            client.xadd(ill, {"e": e.pack([e.submitted("1.a.1")])})
            until(lambda: num_logged(log, "redis reachable again") == 1, "the ill one is back")
            until(lambda: client.xlen(ill) == 0, "and is recorded")

        assert len(states(sqlite_history)) == 21


@pytest.mark.every_server
class TestGivenARedisThatIsFull:
    """At maxmemory it refuses what grows; the recorder is what makes room."""

    def test_when_the_first_recorder_comes_then_it_drains_the_outbox(
        self, any_redis: RedisServer, sqlite_history: Engine
    ) -> None:
        client = client_of(any_redis)
        client.xadd(OUTBOX, {"who": "another program"})
        add(client, [e.submitted("0.a.1")])
        client.config_set("maxmemory", 1)

        recorder(any_redis, sqlite_history).drain()

        assert states(sqlite_history) == {"0.a.1": "queued"}
        assert (client.xlen(OUTBOX), client.xlen(e.KEYS.key("garbage"))) == (0, 1)


class TestGivenRowsThatSqlRefuses:
    """Bad values among good ones."""

    @pytest.mark.parametrize(
        "bad",
        [
            {"batch": b"nul\0in\0text"},
            {"batch": random.Random(1).randbytes(20_000).hex().encode()},
            {"priority": 2**40},
            {"prompt": e.prompt("a NUL \0 inside")},
            {"seed": b"\0"},
        ],
        ids=lambda bad: next(iter(bad)),
    )
    def test_when_recorded_then_the_others_are_stored_and_the_bad_one_says_why(
        self, valkey: RedisServer, postgres_history: Engine, bad: dict[str, Any]
    ) -> None:
        client = client_of(valkey)
        good = [f"0.a.good{number}" for number in range(20)]
        add(client, [e.submitted(job_id) for job_id in good[:7]], [e.submitted("0.a.bad", **bad)])
        add(client, [e.submitted(job_id) for job_id in good[7:]])

        recorder(valkey, postgres_history).drain()

        assert states(postgres_history) == dict.fromkeys([*good, "0.a.bad"], "queued")
        with postgres_history.connect() as connection:
            errors = dict(map(tuple, connection.execute(sa.select(jobs.c.id, jobs.c.record_error))))
        assert {job_id for job_id, error in errors.items() if error} == {"0.a.bad"}
        assert client.xlen(OUTBOX) == 0

    @pytest.mark.parametrize("version", [2**64 - 1, -1])
    def test_when_no_script_writes_such_a_version_then_it_is_foreign_and_blocks_nothing(
        self, valkey: RedisServer, history: Engine, version: int
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.bad", version=version)], [e.submitted("0.a.good")])

        recorder(valkey, history).drain()

        assert (states(history), client.xlen(e.KEYS.key("garbage"))) == ({"0.a.good": "queued"}, 1)

    def test_when_a_number_has_more_than_64_bits_then_it_is_left_out(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        add(client_of(valkey), [e.submitted("0.a.good"), e.submitted("0.a.bad", cost=2**63)])

        recorder(valkey, history).drain()

        with history.connect() as connection:
            found = connection.execute(
                sa.select(jobs.c.id, jobs.c.reserved_tokens, jobs.c.priority).order_by("id")
            ).all()
        assert [tuple(one) for one in found] == [("0.a.bad", None, 3), ("0.a.good", 76, 3)]

    def test_when_an_encoded_part_is_broken_then_the_row_is_stored_without_it(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        add(client_of(valkey), [e.submitted("0.a.1", spec=b"\xff")], [e.ended("0.a.1", record=b"\xff")])

        recorder(valkey, history).drain()

        with history.connect() as connection:
            found = connection.execute(sa.select(jobs)).one()
        assert (found.state, found.priority, found.options) == ("done", 3, None)
        assert "WireError" in found.record_error


class TestGivenABatch:
    """Jobs submitted under one name."""

    def counters(self, history: Engine) -> tuple[object, ...]:
        """The row of the one batch."""
        columns = (batches.c.jobs, batches.c.queued, batches.c.done, batches.c.failed, batches.c.completed_ms)
        with history.connect() as connection:
            return tuple(connection.execute(sa.select(*columns)).one())

    def test_when_its_jobs_end_then_the_counters_follow_and_it_completes(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        job_ids = [f"0.a.{number}" for number in range(3)]

        with running(recorder(valkey, history)):
            add(client, [e.submitted(job_id, batch=b"nightly") for job_id in job_ids])
            until(lambda: states(history) != {} and self.counters(history) == (3, 3, 0, 0, None), "counted while open")
            add(client, [e.ended(job_ids[0]), e.ended(job_ids[1]), e.ended(job_ids[2], state=b"failed", reason=None)])
            until(lambda: self.counters(history)[0:4] == (3, 0, 2, 1), "counted at the end")

        assert self.counters(history)[4] == e.NOON_MS + 1050

    def test_when_a_failed_job_is_requeued_then_the_batch_is_open_again(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, history)
        add(client, [e.submitted("0.a.1", batch=b"nightly"), e.ended("0.a.1", state=b"failed", reason=None)])

        with running(first):
            until(lambda: states(history) != {} and self.counters(history)[4] is not None, "complete")
            add(client, [e.returned("0.a.1", version=4, why=b"requeued")])
            until(lambda: self.counters(history) == (1, 1, 0, 0, None), "open again")


class TestGivenAJobWhoseDataWasDeleted:
    """A late event must not bring it back."""

    def test_when_an_older_event_is_recorded_then_the_row_stays_empty(
        self, valkey: RedisServer, history: Engine
    ) -> None:
        client = client_of(valkey)
        first = recorder(valkey, history)
        add(client, [e.submitted("0.a.1")])
        first.drain()
        with history.begin() as connection:
            connection.execute(jobs.update().values(deleted_ms=e.NOON_MS, options=None, metadata=None))

        add(client, [e.ended("0.a.1", result=e.result("secret"))])
        first.drain()

        with history.connect() as connection:
            found = connection.execute(sa.select(jobs.c.state, jobs.c.options)).one()
            assert tuple(found) == ("queued", None)
            assert connection.execute(sa.text("SELECT count(*) FROM results")).scalar_one() == 0


def num_logged(log: LogCapture, event: str) -> int:
    """How often a line was logged."""
    return sum(entry["event"] == event for entry in log.entries)


def bound_pages(history: Engine, *, spare: int) -> None:
    """Let the file grow by `spare` pages at most, as a full disk would."""
    raw = history.raw_connection()
    try:
        (used,) = raw.driver_connection.execute("PRAGMA page_count").fetchone()  # pyright: ignore[reportOptionalMemberAccess]
        raw.driver_connection.execute(f"PRAGMA max_page_count = {used + spare}")  # pyright: ignore[reportOptionalMemberAccess]
    finally:
        raw.close()
