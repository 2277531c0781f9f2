"""Ends of jobs become webhooks, once each, through a real Valkey, real rq workers and a real receiver."""

import json
import multiprocessing
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq import Queue
from sqlalchemy.engine import Engine
from structlog.testing import LogCapture

from sluice.history.database import open_database
from sluice.history.rows import changes_of
from sluice.history.writer import HistoryWriter
from sluice.producer import Producer, verify_webhook
from sluice.producer.errors import BatchNotFound
from sluice.protocol import calls
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.webhooks import tenant_secrets
from sluice.protocol.wire import JobId, JobSpec, encode_spec
from sluice.worker.callbacks import chores
from sluice.worker.callbacks.chore_jobs import MAX_ERROR_CHARS, rq_queue, rq_worker
from sluice.worker.callbacks.chores import REFUSED_KEPT_S
from sluice.worker.callbacks.command import main
from sluice.worker.callbacks.mover import NO_SECRET, Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.callbacks.webhooks import parse_networks
from sluice.worker.connection.clients import Client
from sluice.worker.recorder.migrate import migrate
from tests.history import events as e
from tests.history.test_recorder import client_of, num_logged, until
from tests.postgres import HOW_TO_GET, has_postgres, postgres_server
from tests.protocol.driving import Queue as ContractQueue
from tests.protocol.driving import ending
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import Receiver, receiver

CALLBACKS = e.KEYS.callbacks
SECRET = "correct horse"


@pytest.fixture
def hook() -> Generator[Receiver]:
    """A receiver."""
    with receiver() as state:
        yield state


def settings_for(
    valkey: RedisServer, database_url: str = "sqlite:////nowhere/history.db", **changes: Any
) -> CallbackSettings:
    """Callbacks of the queue, which may reach loopback."""
    usual: dict[str, Any] = {
        "redis_url": valkey.url, "rq_url": valkey.url, "database_url": database_url, "queue": e.QUEUE,
        "name": "m1", "secret": SECRET, "networks": parse_networks("127.0.0.0/8"), "retry_after_s": (0, 0),
        "block_s": 0.05, "export_patience_s": 0.0,
    }  # fmt: skip
    return CallbackSettings(**usual | changes)


def mover(valkey: RedisServer, **changes: Any) -> Mover:
    """A mover of the queue's one partition."""
    return Mover(client_of(valkey), client_of(valkey), settings_for(valkey, **changes))


def end_job(
    client: Client, url: str | None, job_id: str = "0.acme.1", state: str = "done", version: int = 3,
    *, stream: str = CALLBACKS,
) -> None:  # fmt: skip
    """Write what the script writes when a job that wants a callback ends."""
    spec = encode_spec(JobSpec(callback_url=url, metadata={"custom_id": "line-7"}, batch="nightly"))
    fields = {
        "kind": "job",
        "id": job_id,
        "at": e.NOON_MS,
        "state": state,
        "version": version,
        "error": "",
        "spec": spec,
        "submitted": e.NOON_MS,
    }
    client.xadd(stream, fields)


def complete_batch(client: Client, url: str) -> None:
    """Write what the script writes when a batch completes."""
    totals = {"total": 3, "done": 2, "failed": 1, "cancelled": 0, "expired": 0}
    client.hset(e.KEYS.key("batch", "nightly"), mapping={"closed": 1, "completed": e.NOON_MS, **totals})
    client.xadd(CALLBACKS, {"kind": "batch", "id": "nightly", "at": e.NOON_MS, "url": url, **totals})


def webhooks_of(settings: CallbackSettings, client: Client) -> Queue:
    """The rq queue of webhooks."""
    return rq_queue(settings.rq_names.webhooks, client)


def chores_of(settings: CallbackSettings, client: Client) -> Queue:
    """The rq queue of exports and retention."""
    return rq_queue(settings.rq_names.chores, client)


def try_now(queue: Queue) -> None:
    """Let the time pass that what rq has put off waits for."""
    for job_id in queue.scheduled_job_registry.get_job_ids():
        job = queue.fetch_job(job_id)
        assert job is not None
        queue.scheduled_job_registry.remove(job)
        queue.enqueue_job(job)


def work(client: Client, settings: CallbackSettings, queue: Queue | None = None) -> None:
    """Let an rq worker do all that is enqueued in a queue, usually that of webhooks, in this process."""
    chores.bind(settings)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        rq_worker((queue or webhooks_of(settings, client)).name, client).work(burst=True, logging_level="CRITICAL")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class TestGivenAJobThatWantsAWebhook:
    """It has ended."""

    def test_when_moved_and_worked_then_the_receiver_gets_a_signed_event(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey))

        headers, body = hook.got[0]
        event = json.loads(body)
        assert verify_webhook(tenant_secrets(SECRET, "acme"), headers, body) == event["id"]
        assert (event["type"], event["created_at_ms"]) == ("job.done", e.NOON_MS)
        assert event["data"] == {
            "job_id": "0.acme.1", "queue": e.QUEUE, "state": "done", "error": None, "batch": "nightly", "model": None,
            "metadata": {"custom_id": "line-7"}, "custom_id": None, "line": None,
        }  # fmt: skip
        assert client.xlen(CALLBACKS) == 0

    def test_when_the_mover_died_before_it_acknowledged_then_the_receiver_gets_it_once(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)
        end_job(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey))
        end_job(client, hook.url)
        mover(valkey).drain()
        work(client, settings_for(valkey))

        assert len(hook.got) == 1

    def test_when_it_is_requeued_and_ends_again_then_that_is_another_event(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        end_job(client, hook.url, state="failed", version=3)
        end_job(client, hook.url, state="done", version=6)

        mover(valkey).drain()
        work(client, settings_for(valkey))

        assert sorted(json.loads(body)["type"] for _, body in hook.got) == ["job.done", "job.failed"]
        assert len({headers["webhook-id"] for headers, _ in hook.got}) == 2

    def test_when_the_receiver_fails_at_first_then_it_is_tried_again_with_the_same_id(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        hook.answers += [500, 503]
        end_job(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey))

        assert len(hook.got) == 3
        assert len({headers["webhook-id"] for headers, _ in hook.got}) == 1

    def test_when_a_try_must_wait_then_the_mover_brings_it_back_in_time(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        hook.answers.append(500)
        end_job(client, hook.url)
        first = mover(valkey, retry_after_s=(1,))
        first.drain()
        work(client, settings_for(valkey, retry_after_s=(1,)))
        assert len(hook.got) == 1

        until(
            lambda: first.drain() == 0 and webhooks_of(settings_for(valkey), client).count == 1, "the second try is due"
        )
        work(client, settings_for(valkey, retry_after_s=(1,)))

        assert len(hook.got) == 2

    def test_when_the_url_is_private_then_it_is_refused_and_not_tried_again(
        self, valkey: RedisServer, hook: Receiver, log: LogCapture
    ) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey, networks=()))

        failed = webhooks_of(settings_for(valkey), client).failed_job_registry.get_job_ids()
        assert hook.got == []
        assert len(failed) == 1
        job: Any = webhooks_of(settings_for(valkey), client).fetch_job(failed[0])
        error = job.latest_result().exc_string
        assert "not public" in error
        assert len(error) <= MAX_ERROR_CHARS
        assert 0 < client.ttl(f"rq:results:{job.id}") <= REFUSED_KEPT_S
        assert num_logged(log, "webhook refused") == 1

    def test_when_enqueued_then_the_secret_is_not_in_redis(self, valkey: RedisServer, hook: Receiver) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)

        mover(valkey).drain()

        stored = [client.dump(key) or b"" for key in client.keys("*")]
        assert stored
        assert not any(SECRET.encode() in value for value in stored)

    def test_when_the_entry_is_foreign_then_it_goes_to_the_garbage(self, valkey: RedisServer, hook: Receiver) -> None:
        client = client_of(valkey)
        client.xadd(CALLBACKS, {"who": "another program"})
        end_job(client, hook.url)

        mover(valkey).drain()

        assert client.xlen(e.KEYS.key("garbage")) == 1
        assert webhooks_of(settings_for(valkey), client).count == 1


class TestGivenNoSecret:
    """As compose and Kubernetes start `worker callbacks` until somebody gives one."""

    def test_when_jobs_and_batches_end_then_nothing_of_their_webhooks_is_left(
        self, valkey: RedisServer, hook: Receiver, log: LogCapture
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, secret=None)
        for number in range(3):
            end_job(client, hook.url, job_id=f"0.acme.{number}")
        complete_batch(client, hook.url)

        num_moved = mover(valkey, secret=None).drain()

        assert num_moved == 4
        assert client.xlen(CALLBACKS) == 0
        assert webhooks_of(settings, client).count == 0
        refused = [entry for entry in log.entries if entry["event"] == "webhook refused"]
        assert [entry["of"] for entry in refused] == ["0.acme.0", "0.acme.1", "0.acme.2", "nightly"]
        assert {entry["error"] for entry in refused} == {NO_SECRET}

    def test_when_a_batch_is_to_be_exported_then_it_is(
        self, valkey: RedisServer, hook: Receiver, tmp_path: Path
    ) -> None:
        client = client_of(valkey)
        changes: dict[str, Any] = {"secret": None, "export_folder": str(tmp_path)}
        end_job(client, hook.url)
        complete_batch(client, hook.url)

        mover(valkey, **changes).drain()

        assert chores_of(settings_for(valkey, **changes), client).count == 1


class TestGivenABatchThatCompletes:
    """Its jobs and results are in the history."""

    def test_when_it_has_a_url_then_the_receiver_gets_its_totals(self, valkey: RedisServer, hook: Receiver) -> None:
        client = client_of(valkey)
        complete_batch(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey))

        event = json.loads(hook.got[0][1])
        assert (event["type"], event["data"]["jobs"]["done"]) == ("batch.completed", 2)

    def test_when_its_jobs_span_some_of_three_partitions_then_one_webhook_has_all_totals(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client, moving = client_of(valkey), mover(valkey, partitions=3)
        parts = [ContractQueue(client, QueueKeys(e.QUEUE, number)) for number in range(3)]
        for part, name in ((0, "a"), (0, "b"), (2, "c"), (2, "d")):
            parts[part].add(name, id=JobId(f"{part}.t.{name}"), batch="b")
        workers = {part: parts[part].worker("A") for part in (0, 2)}
        ended = {part: [ending(job, 0, 1) for job in worker.pull().jobs] for part, worker in workers.items()}
        workers[0].advance(*ended[0])

        with Producer(valkey.url, queue=e.QUEUE, partitions=3) as producer:
            assert producer.close_batch("b", callback_url=hook.url).total == 4
        moving.drain()
        work(client, settings_for(valkey))
        assert hook.got == [], "no callback for a part of it"
        workers[2].advance(*ended[2])
        moving.drain()
        mover(valkey, partitions=3, name="m2").drain()
        work(client, settings_for(valkey))

        (event,) = [json.loads(body) for _, body in hook.got]
        assert event["data"]["jobs"] == {"total": 4, "done": 4, "failed": 0, "cancelled": 0, "expired": 0}
        assert [client.xlen(part.keys.callbacks) for part in parts] == [0, 0, 0]

    def test_when_it_has_no_jobs_then_closing_it_is_an_error_without_a_call(
        self, valkey: RedisServer, hook: Receiver
    ) -> None:
        client, keys = client_of(valkey), [QueueKeys(e.QUEUE, number) for number in range(2)]
        mistyped = pytest.raises(BatchNotFound, match="batch nihgtly has no jobs")
        with Producer(valkey.url, queue=e.QUEUE, partitions=2) as producer, mistyped:
            producer.close_batch("nihgtly", callback_url=hook.url)
        assert not client.exists(*[one.key("batch", "nihgtly") for one in keys])

        for one in keys:
            run(client, calls.close_batch(one, "empty", callback_url=hook.url))
        mover(valkey, partitions=2).drain()

        assert webhooks_of(settings_for(valkey), client).count == 0

    def test_when_it_has_no_webhook_then_it_has_no_entry_unless_batches_are_exported(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        client = client_of(valkey)
        queue = ContractQueue(client, e.KEYS)
        for number, folder in enumerate((None, str(tmp_path), None)):
            mover(valkey, export_folder=folder).drain()
            queue.cancel(queue.add(f"j{number}", batch=f"b{number}"))

            queue.run(calls.close_batch(e.KEYS, f"b{number}"))

            assert client.xlen(CALLBACKS) == (0 if folder is None else 1)
            mover(valkey, export_folder=folder).drain()

        assert chores_of(settings_for(valkey, export_folder=str(tmp_path)), client).count == 1

    def test_when_exports_are_kept_then_its_lines_are_written(
        self, valkey: RedisServer, history_url: str, history: Engine, tmp_path: Path
    ) -> None:
        client = client_of(valkey)
        changes = changes_of(
            e.QUEUE,
            e.unpacked(
                [
                    e.submitted("0.a.001", batch=b"nightly"),
                    e.ended("0.a.001", result=e.result("three", "rivers")),
                    e.submitted("0.a.002", e.NOON_MS + 1, batch=b"nightly"),
                    e.ended(
                        "0.a.002", submitted_ms=e.NOON_MS + 1, state=b"failed", error=b"NaN logits", error_code=b"nan"
                    ),
                    e.submitted("0.a.003", batch=b"another"),
                    e.submitted("0.a.004", e.NOON_MS + 2, batch=b"nightly"),
                    e.ended("0.a.004", submitted_ms=e.NOON_MS + 2, result=e.result("five")),
                ]
            ),
        )
        HistoryWriter(history).write(changes.values())
        complete_batch(client, "")
        settings = settings_for(valkey, history_url, export_folder=str(tmp_path / "exports"))

        Mover(client, client, settings).drain()
        work(client, settings, chores_of(settings, client))

        output = [json.loads(line) for line in (tmp_path / "exports/nightly.output.jsonl").read_text().splitlines()]
        errors = [json.loads(line) for line in (tmp_path / "exports/nightly.errors.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in output] == ["line-001", "line-004"]
        assert [choice["text"] for choice in output[0]["response"]["body"]["choices"]] == ["three", "rivers"]
        assert output[0]["response"]["body"]["usage"]["total_tokens"] == 15
        assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [("line-002", "nan")]
        assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [
            "nightly.errors.jsonl",
            "nightly.output.jsonl",
        ]

    @pytest.mark.parametrize("is_recorded", [True, False])
    def test_when_the_recorder_is_behind_then_the_export_waits_for_a_bounded_time(
        self, valkey: RedisServer, history_url: str, history: Engine, tmp_path: Path, *, is_recorded: bool
    ) -> None:
        def record(*names: str) -> None:
            events = [
                one for n in names for one in (e.submitted(n, batch=b"nightly"), e.ended(n, result=e.result("x")))
            ]
            HistoryWriter(history).write(changes_of(e.QUEUE, e.unpacked(events)).values())

        client, folder = client_of(valkey), tmp_path / "exports"
        settings = settings_for(valkey, history_url, export_folder=str(folder), export_after_s=(3600, 3600))
        record("0.a.001", "0.a.002")
        complete_batch(client, "")
        Mover(client, client, settings).drain()

        work(client, settings, chores_of(settings, client))
        assert not folder.exists(), "two of its three ends are no batch"
        if is_recorded:
            record("0.a.003")
        for _ in range(1 if is_recorded else 2):
            try_now(chores_of(settings, client))
            work(client, settings, chores_of(settings, client))

        lines = (folder / "nightly.output.jsonl").read_text().splitlines()
        assert len(lines) == (3 if is_recorded else 2)


class TestGivenTwoPartitionsOfWhichOneFails:
    """Another program's key lies where its callbacks should be."""

    def test_when_the_other_is_well_then_it_continues_and_the_one_is_reported_once(
        self, valkey: RedisServer, log: LogCapture
    ) -> None:
        client, ill = client_of(valkey), QueueKeys(e.QUEUE, 1).callbacks
        client.set(ill, "mine")
        moving = mover(valkey, partitions=2)
        thread = threading.Thread(target=moving.run)
        thread.start()
        try:
            for number in range(20):
                end_job(client, "https://example.org/", job_id=f"0.acme.{number}")
                until(lambda: client.xlen(CALLBACKS) == 0, "the well one is moved")
        finally:
            moving.stop()
            thread.join(timeout=20)

        assert [entry["key"] for entry in log.entries if entry["event"] == "redis unreachable"] == [ill]
        assert num_logged(log, "redis reachable again") == 0


class TestGivenRetention:
    """Once an hour, however many movers run."""

    def test_when_movers_run_then_it_is_enqueued_once(self, valkey: RedisServer) -> None:
        client = client_of(valkey)

        for _ in range(2):
            mover(valkey, retention_days=30.0).drain()

        assert chores_of(settings_for(valkey), client).count == 1

    def test_when_none_is_set_then_nothing_is_enqueued(self, valkey: RedisServer) -> None:
        mover(valkey).drain()

        assert chores_of(settings_for(valkey), client_of(valkey)).count == 0


class TestGivenTheWholeProcess:
    """`worker callbacks`: a mover and rq workers in separate processes."""

    def test_when_it_runs_then_webhooks_arrive_and_no_worker_has_loaded_torch(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver
    ) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)
        settings = settings_for(valkey, sqlite_url, webhook_workers=1)
        process = multiprocessing.get_context("spawn").Process(target=main, args=(settings,))

        process.start()
        try:
            until(lambda: len(hook.got) == 1, "the webhook arrives")
            mapped = libraries_of(workers_of(psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.join(20)

        # What the workers need of compiled libraries is there, torch's are not.
        assert any(name.startswith("_cmsgpack") for name in mapped)
        assert not any("torch" in name for name in mapped)
        assert process.exitcode == 0

    @pytest.mark.long
    def test_when_an_rq_worker_is_killed_then_it_is_restarted_and_ends_with_its_parent(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver
    ) -> None:
        settings = settings_for(valkey, sqlite_url, webhook_workers=1)
        process = multiprocessing.get_context("spawn").Process(target=main, args=(settings,))
        process.start()
        parent = psutil.Process(process.pid)
        until(lambda: num_workers(parent) == 3, "all rq workers are there")
        before = workers_of(parent)
        for one in before:
            one.kill()

        until(lambda: num_workers(parent) == 3 and not set(workers_of(parent)) & set(before), "others are there")
        end_job(client_of(valkey), hook.url)
        until(lambda: len(hook.got) == 1, "the webhook arrives")
        after = workers_of(parent)
        parent.kill()
        process.join()

        until(lambda: not any(is_alive(one) for one in after), "they have gone with their parent")

    @pytest.mark.skipif(not has_postgres(), reason=HOW_TO_GET)
    @pytest.mark.long
    def test_when_sql_is_away_then_webhooks_arrive_and_exports_wait_until_it_is_there(
        self, valkey: RedisServer, hook: Receiver, tmp_path: Path
    ) -> None:
        exports = tmp_path / "exports"
        changes = {"webhook_workers": 1, "export_folder": str(exports), "export_after_s": (0,)}
        with postgres_server() as database:
            url = database.url(database.create_database())
            engine = open_database(url)
            migrate(engine)
            engine.dispose()
            database.kill()
            process = multiprocessing.get_context("spawn").Process(
                target=main, args=(settings_for(valkey, url, **changes),)
            )
            process.start()
            try:
                complete_batch(client_of(valkey), hook.url)
                until(lambda: len(hook.got) == 1, "the webhook arrives")
                assert not exports.exists()
                database.start()
                until(lambda: (exports / "nightly.output.jsonl").exists(), "the export is written")
            finally:
                process.terminate()
                process.join(20)

        assert process.exitcode == 0

    def test_when_the_database_is_too_old_then_it_says_what_to_do(
        self, valkey: RedisServer, postgres_empty_url: str
    ) -> None:
        assert main(settings_for(valkey, postgres_empty_url)) == 2


def libraries_of(processes: list[psutil.Process]) -> set[str]:
    """Names of the files that their memory maps."""
    lines = [line for one in processes for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    return {line.rpartition("/")[2] for line in lines if ".so" in line}


def workers_of(parent: psutil.Process) -> list[psutil.Process]:
    """The rq workers' processes (multiprocessing has a helper process besides)."""
    return [child for child in parent.children() if is_alive(child) and "spawn_main" in " ".join(child.cmdline())]


def num_workers(parent: psutil.Process) -> int:
    """How many there are."""
    return len(workers_of(parent))


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs (an orphan that is not reaped is a zombie)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_partition_of_another_queue_is_left_alone(valkey: RedisServer, hook: Receiver) -> None:
    client = client_of(valkey)
    other = QueueKeys("other").key("callbacks")
    client.xadd(other, {"kind": "batch"})

    mover(valkey).drain()

    assert client.xlen(other) == 1
