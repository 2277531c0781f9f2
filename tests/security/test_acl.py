"""What each user of docs/explanation/security.md can do on each server, and what it cannot."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from sluice.producer import AsyncProducer, Producer, Receipt, WaitNotice
from sluice.producer.errors import AccessDenied, JobCancelled, ProducerError, QueueFull, QueueRefused
from sluice.producer.operations import follow, results
from sluice.producer.operations.control import server_id
from sluice.protocol import waits
from sluice.protocol.calls import QueueSettings
from sluice.protocol.jobs import job
from sluice.protocol.keys import QueueKeys
from sluice.protocol.schedules.schedule import ScheduleKeys, pack_schedule, read_schedule
from tests.integration.jobs import wait_until
from tests.integration.workers import running_worker
from tests.security.acl import PASSWORD, QUEUE, rules_for, set_users, url_of
from tests.servers import RedisServer

pytestmark = pytest.mark.every_server

WRITES: list[tuple[str, ...]] = [
    ("XADD", "{chat:0}:2:channel:acme:a:0", "1-0", "e", "x"),
    ("HSET", "{chat:0}:2:held:w", "0.acme.a", "1"),
    ("HSET", "{chat:0}:2:worker:w", "host", "h"),
    ("SET", "{chat:0}:2:result:acme:a", "x"),
    ("DEL", "{chat:0}:2:result:acme:a"),
    ("XADD", "{chat:0}:2:lane:0:other", "*", "job", "x"),
    ("SET", "{chat:0}:2:job:other:a", "x"),
    ("XREADGROUP", "GROUP", "workers", "idle", "STREAMS", "{chat:0}:2:bell", ">"),
    ("XACK", "{chat:0}:2:bell", "workers", "1-0"),
    ("XGROUP", "DESTROY", "{chat:0}:2:bell", "workers"),
    ("HSET", "{chat:0}:2:limits", "max_running:acme", "9"),
    ("ZADD", "{chat:0}:2:parked", "1", "other"),
    ("SADD", "{chat:0}:2:leased:acme", "x"),
    ("HSET", "{chat:0}:2:buckets", "acme", "9 9"),
]
"""What only a worker, or another tenant, may write."""

NEW_WRITES: list[tuple[str, ...]] = [
    ("HSET", "{chat:0}:2:config", "max_waiting_jobs", "1"),
    ("XADD", "{chat:0}:2:callbacks", "*", "kind", "job"),
    ("ZADD", "{chat:0}:2:alive", "1", "w"),
    ("HSET", "{chat:0}:2:weights", "acme", "1000"),
    ("SET", "{chat:0}:2:counters", "x"),
    ("SET", "{chat:0}:2:heads:0", "x"),
    ("XADD", "{chat:0}:2:timers", "*", "e", "x"),
    ("HSET", "{chat:0}:2:delayed", "e", "x"),
    ("SET", "{chat:0}:2:server", "x"),
    ("ZADD", "{chat:0}:2:served", "1", "x"),
]
"""Also refused to a submitter, but by Redis 6.2: its patterns are of all scripts' fixed keys alike."""


@pytest.fixture
def guarded(any_redis: RedisServer) -> RedisServer:
    """A server with the page's users."""
    with any_redis.client() as client:
        for user in rules_for(any_redis.flavor):
            client.execute_command("ACL", "DELUSER", user)
    set_users(any_redis)
    return any_redis


def client_of(server: RedisServer, user: str) -> Any:  # Any: redis-py's client, partly typed
    return redis.Redis(unix_socket_path=str(server.socket_path), username=user, password=PASSWORD)


def is_refused(client: Any, command: tuple[str, ...]) -> bool:
    try:
        client.execute_command(*command)
    except NoPermissionError:
        return True
    except ResponseError as error:
        return any(words in str(error) for words in ("NOPERM", "ACL failure", "can't run this command", "can't access"))
    return False


def through_a_script(command: tuple[str, ...]) -> tuple[str, ...]:
    """The same from inside a script that declares no key."""
    return ("EVAL", "return redis.call(unpack(ARGV))", "0", *command)


class TestGivenAUserWhoManagesSchedules:
    def test_when_it_adds_one_then_a_worker_runs_it(self, guarded: RedisServer) -> None:
        with Producer(url_of(guarded, "chat-scheduler"), queue=QUEUE) as scheduler, guarded.client() as client:
            # Due at once: it was added a minute ago by the server's clock, and fires every minute.
            scheduler.add_schedule("report", ["hello"], cron="* * * * *", tenant="acme", max_tokens=2)
            keys = ScheduleKeys(QueueKeys(QUEUE))
            rule = read_schedule("acme.report", client.hget(keys.schedules, "acme.report"))
            minute_ago = replace(rule, created_s=client.time()[0] - 60)
            client.hset(keys.schedules, "acme.report", pack_schedule(minute_ago))
            with running_worker(url_of(guarded, "chat-worker"), queue__name=QUEUE):
                wait_until(lambda: scheduler.schedule("report", tenant="acme").last_run, "a worker runs it")
            scheduler.pause_schedule("report", tenant="acme")
            scheduler.pause_schedule("report", tenant="acme", is_paused=False)
            scheduler.remove_schedule("report", tenant="acme")

            assert int(client.hget("{chat:0}:2:counters", "submitted")) >= 1

    def test_when_it_does_anything_else_then_it_is_refused(self, guarded: RedisServer) -> None:
        with client_of(guarded, "chat-scheduler") as client:
            tried = [
                ("GET", "{chat:0}:2:job:acme:a"),
                ("XADD", "{chat:0}:2:outbox", "*", "e", "x"),
                ("HSET", "{chat:0}:2:counters", "submitted", "9"),
                ("HSET", "{other:0}:2:schedules", "acme.report", "x"),
                ("EVAL", "return 1", "0"),
            ]
            assert [is_refused(client, command) for command in tried] == [True] * len(tried)

    def test_when_a_submitter_adds_one_then_it_is_refused(self, guarded: RedisServer) -> None:
        with (
            Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter,
            pytest.raises(AccessDenied),
        ):
            submitter.add_schedule("report", ["hello"], cron="@daily", tenant="acme")

    def test_when_a_submitter_lets_a_job_wait_for_another_then_it_is_refused(self, guarded: RedisServer) -> None:
        with Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter:
            parent = submitter.submit("parent", tenant="acme")
            with pytest.raises(AccessDenied):
                submitter.submit("child", tenant="acme", after=[parent])


class TestGivenASubmitOnlyUser:
    def test_when_it_submits_in_every_way_then_the_queue_has_the_jobs(self, guarded: RedisServer) -> None:
        ways: list[dict[str, Any]] = [  # Any: options of jobs
            {"priority": 3},
            {"idempotency_key": "k"},
            {"batch": "b"},
            {"deadline": timedelta(minutes=5)},
            {"not_before": timedelta(seconds=5)},
            {"ttl_s": 50.0},
            {"callback_url": "https://example.com/done"},
        ]
        with Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter:
            receipts = [submitter.submit("hello", tenant="acme", **way) for way in ways]

        with Producer(guarded.url, queue=QUEUE) as owner:
            assert [owner.status(receipt).state for receipt in receipts] == ["queued"] * len(ways)

    def test_when_it_may_submit_for_all_tenants_then_a_call_for_many_of_them_is_accepted(
        self, guarded: RedisServer
    ) -> None:
        words = [word.replace("acme", "*") for word in rules_for(guarded.flavor)["acme-submit"]]
        with guarded.client() as client:
            client.execute_command("ACL", "SETUSER", "all-submit", *words)

        with Producer(url_of(guarded, "all-submit"), queue=QUEUE) as submitter:
            receipts = list(submitter.submit_many(job("hello", tenant=f"t{number}") for number in range(40)))

        with Producer(guarded.url, queue=QUEUE) as owner:
            assert all(isinstance(receipt, Receipt) for receipt in receipts)
            assert sum(view.waiting_jobs for view in owner.queue()) == 40

    def test_when_the_queue_is_full_then_the_refusal_needs_no_access_to_workers(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner:
            owner.configure(QueueSettings(max_waiting_jobs=1))
            owner.submit("hello", tenant="acme")

        with Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter:
            with pytest.raises(QueueFull) as caught:
                submitter.submit("hello", tenant="acme")
            (answer,) = submitter.submit_many(["hello"], tenant="acme")

        assert caught.value.retry_after_s == 5.0
        assert isinstance(answer, QueueFull)
        assert answer.retry_after_s == 5.0

    def test_when_its_tenant_is_at_a_limit_then_its_jobs_wait_for_it(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner, Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as mine:
            owner.configure(QueueSettings(max_running={"acme": 0}))

            job = mine.submit("hello", tenant="acme")

            with running_worker(guarded.url, queue__name=QUEUE):
                owner.result(owner.submit("hello", tenant="other", max_tokens=1), timeout_s=20)
                assert owner.status(job).state == "queued"
                assert "tenant acme runs 0 jobs and may run 0" in (owner.status(job).waits_for or "")

    def test_when_a_call_of_it_refunds_a_tenant_then_it_can_read_the_weight(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner:
            owner.configure(QueueSettings(weights={"acme": 4.0}))
        read = ("HGET", "{chat:0}:2:weights", "acme")

        with client_of(guarded, "acme-submit") as client:
            found = [client.execute_command(*command) for command in (read, through_a_script(read))]

        assert found == [b"4.0", b"4.0"]

    def test_when_it_asks_for_the_id_of_the_server_then_it_is_that_of_all(self, guarded: RedisServer) -> None:
        with Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter:
            asked = [submitter.run(server_id(submitter.target)) for _ in range(2)]

        with Producer(guarded.url, queue=QUEUE) as owner:
            assert {*asked, owner.run(server_id(owner.target))} == {asked[0]}

    def test_when_it_submits_for_another_tenant_then_it_is_refused(self, guarded: RedisServer) -> None:
        with (
            Producer(url_of(guarded, "acme-submit"), queue=QUEUE) as submitter,
            pytest.raises((QueueRefused, AccessDenied)),
        ):
            submitter.submit("hello", tenant="other")

        with guarded.client() as client:
            assert client.keys("*other*") == []

    def test_when_it_writes_what_is_a_workers_then_it_is_refused(self, guarded: RedisServer) -> None:
        writes = WRITES if guarded.flavor == "redis-6.2" else WRITES + NEW_WRITES
        with client_of(guarded, "acme-submit") as client:
            allowed = [write for write in writes if not is_refused(client, write)]
            allowed += [write for write in writes if not is_refused(client, through_a_script(write))]

        assert allowed == []

    def test_when_it_reads_what_was_generated_then_it_is_refused(self, guarded: RedisServer) -> None:
        reads = [("GET", "{chat:0}:2:result:acme:a"), ("XRANGE", "{chat:0}:2:channel:acme:a:0", "-", "+")]
        with client_of(guarded, "acme-submit") as client:
            assert [read for read in reads if not is_refused(client, read)] == []


class TestGivenATenantsReader:
    def test_when_it_follows_a_job_of_its_tenant_then_it_reads_all_of_it(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner, Producer(url_of(guarded, "acme-reader"), queue=QUEUE) as mine:
            job = owner.submit("hello", tenant="acme", max_tokens=8, ignore_eos=True)
            assert mine.status(job).state == "queued"
            with running_worker(guarded.url, queue__name=QUEUE):
                events = list(mine.stream(job, timeout_s=20))

            assert sum(len(event.token_ids) for event in events) == 8
            assert len(mine.result(job, timeout_s=5).choices[0].token_ids) == 8

    def test_when_it_asks_for_another_tenants_job_then_it_is_refused(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner:
            job = owner.submit("secret", tenant="other")
            name = str(job).rpartition(".")[2]
        reads = [
            ("GET", f"{{chat:0}}:2:job:other:{name}"),
            ("GET", f"{{chat:0}}:2:payload:other:{name}"),
            ("GET", f"{{chat:0}}:2:payload:acme:{name}"),
            ("GET", f"{{chat:0}}:2:result:other:{name}"),
            ("XREAD", "STREAMS", f"{{chat:0}}:2:channel:other:{name}:0", "0-0"),
            ("XRANGE", f"{{chat:0}}:2:channel:other:{name}:0", "-", "+"),
            ("XRANGE", "{chat:0}:2:outbox", "-", "+") if guarded.flavor != "redis-6.2" else ("KEYS", "*"),
            ("HGETALL", "{chat:0}:2:served") if guarded.flavor != "redis-6.2" else ("SCAN", "0"),
        ]
        with client_of(guarded, "acme-reader") as client:
            allowed = [read for read in reads if not is_refused(client, read)]
            allowed += [read for read in reads if not is_refused(client, through_a_script(read))]

        assert allowed == []
        # What the scripts answer about it is nothing, or a refusal.
        with Producer(url_of(guarded, "acme-reader"), queue=QUEUE) as mine:
            with pytest.raises(Exception, match=r"unknown|refuses"):
                mine.status(job)
            with pytest.raises(Exception, match=r"unknown|refuses"):
                mine.result(job, timeout_s=1)


class TestGivenATenantsReaderWhoseJobWaits:
    """No worker takes the job. Told of the wait, it cancels the job, as its owner."""

    @pytest.fixture(autouse=True)
    def _early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waits, "NOTICE_AFTER_S", 0.1)
        for module in (follow, results):
            monkeypatch.setattr(module, "WAIT_BLOCK_MS", 100)

    @pytest.fixture
    def owner(self, guarded: RedisServer) -> Iterator[Producer]:
        """The owner of the queue."""
        with Producer(guarded.url, queue=QUEUE) as owner:
            yield owner

    @pytest.mark.parametrize("how", ["stream", "results"])
    def test_when_it_reads_then_it_is_told_that_it_may_not_know_why(
        self, guarded: RedisServer, owner: Producer, how: str
    ) -> None:
        job, told = owner.submit("hello", tenant="acme"), list[str]()

        def hear(notice: WaitNotice) -> None:
            told.append(notice.message)
            owner.cancel(job)

        with Producer(url_of(guarded, "acme-reader"), queue=QUEUE, on_wait=hear) as mine, suppress(JobCancelled):
            list(mine.stream(job, timeout_s=20) if how == "stream" else mine.results([job]))

        assert "this user may not read the queue" in told[0]

    @pytest.mark.parametrize("how", ["stream", "stream_groups"])
    async def test_when_it_reads_on_asyncio_then_it_is_told_the_same(
        self, guarded: RedisServer, owner: Producer, how: str
    ) -> None:
        job, told = owner.submit("hello", tenant="acme"), list[str]()

        def hear(notice: WaitNotice) -> None:
            told.append(notice.message)
            owner.cancel(job)

        async with AsyncProducer(url_of(guarded, "acme-reader"), queue=QUEUE, on_wait=hear) as mine:
            events = mine.stream(job, timeout_s=20) if how == "stream" else mine.stream_groups(job, 1)
            with suppress(JobCancelled):
                _ = [event async for event in events]

        assert "this user may not read the queue" in told[0]


class TestGivenReadersWhoMayNotWrite:
    @pytest.mark.parametrize("user", ["acme-reader", "watcher"])
    def test_when_they_write_anything_then_it_is_refused(self, guarded: RedisServer, user: str) -> None:
        own = [("XADD", "{chat:0}:2:bell", "*", "a", "b"), ("SET", "{chat:0}:2:job:acme:a", "x")]
        writes = [*WRITES, *NEW_WRITES, *own, ("DEL", "{chat:0}:2:config"), ("FLUSHALL",)]
        with client_of(guarded, user) as client:
            allowed = [write for write in writes if not is_refused(client, write)]
            allowed += [write for write in writes if not is_refused(client, through_a_script(write))]

        assert allowed == []

    def test_when_the_watcher_looks_at_the_queue_then_it_sees_all_of_it(self, guarded: RedisServer) -> None:
        with Producer(guarded.url, queue=QUEUE) as owner, Producer(url_of(guarded, "watcher"), queue=QUEUE) as watcher:
            job = owner.submit("hello", tenant="other")

            [partition] = watcher.queue()
            assert partition.totals["submitted"] == 1
            assert watcher.status(job).state == "queued"
            with pytest.raises(ProducerError):
                watcher.submit("hello")
            with pytest.raises(AccessDenied):
                watcher.cancel(job)

        with guarded.client() as client:
            assert client.hget("{chat:0}:2:counters", "submitted") == b"1"


class TestGivenAWorkersUser:
    def test_when_the_worker_runs_as_it_then_jobs_are_done(self, guarded: RedisServer) -> None:
        with (
            Producer(guarded.url, queue=QUEUE) as owner,
            running_worker(url_of(guarded, "chat-worker"), queue__name=QUEUE),
        ):
            job = owner.submit("hello", max_tokens=4, ignore_eos=True)

            assert len(owner.result(job, timeout_s=20).choices[0].token_ids) == 4

    def test_when_it_speaks_of_another_queue_or_the_server_then_it_is_refused(self, guarded: RedisServer) -> None:
        others = [("GET", "{mail:0}:2:config"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("ACL", "LIST")]
        with client_of(guarded, "chat-worker") as client:
            assert [one for one in others if not is_refused(client, one)] == []
