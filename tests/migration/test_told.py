"""Programs say that a queue has jobs of an earlier version; the command moves them on each kind of server."""

from collections.abc import Generator
from typing import Any

import pytest
from click.testing import CliRunner

from sluice.producer import Producer
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId
from sluice.worker.checks.queue_check import jobs_left_behind
from sluice.worker.cli import main
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ExitCode
from tests.clusters import redis_cluster
from tests.migration.recorded import KEYS, OLD, end_workers, recorded_ms, restore
from tests.protocol.driving import Queue, check
from tests.security.acl import set_users, url_of
from tests.servers import RedisServer

SENTENCE = (
    "queue 'default' has jobs in the format of an earlier version, 12 waiting and 3 running: "
    "run `worker migrate-queue --queue default`"
)
DAY_MS = 86_400_000


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        restore(client)
        yield client


def worker(*words: str) -> tuple[int, str]:
    """Run the command; return its exit code and all that it prints."""
    result = CliRunner().invoke(main, [*words])
    return result.exit_code, result.output


class TestGivenAQueueThatWasNotMoved:
    def test_when_a_worker_starts_or_the_doctor_looks_then_they_warn(self, valkey: RedisServer, client: Any) -> None:
        settings = ["--model", "null", "--no-recorder", "--no-metrics", "--redis-url", valkey.url]

        assert SENTENCE in worker("doctor", *settings)[1]

    def test_when_workers_are_listed_then_that_warns(self, valkey: RedisServer, client: Any) -> None:
        assert f"warning: {SENTENCE}" in worker("status", "--redis-url", valkey.url)[1]

    def test_when_a_producer_submits_then_it_warns(
        self, valkey: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Producer(valkey.url) as producer:
            producer.submit("hello", max_tokens=1)

        assert SENTENCE in [record.getMessage() for record in caplog.records]

    def test_when_the_counters_are_another_program_s_then_nothing_is_said(self, client: Any) -> None:
        client.set(f"{OLD}:counters", "x")

        assert jobs_left_behind(client, [KEYS]) == []


class TestGivenTheCommand:
    def test_when_it_is_run_then_it_moves_each_queue_and_says_so(self, valkey: RedisServer, client: Any) -> None:
        end_workers(client)

        code, said = worker("migrate-queue", "--queue", "default", "--queue", "mail", "--redis-url", valkey.url)

        assert (code, said.splitlines()[1:]) == (
            ExitCode.DONE,
            ["queue 'default' is in format 2", "queue 'mail' is in format 2"],
        )
        assert jobs_left_behind(client, [KEYS, QueueKeys("mail")]) == []

    def test_when_a_worker_lives_then_it_waits_as_long_as_it_may(self, valkey: RedisServer, client: Any) -> None:
        client.hset(KEYS.key("config"), "test_clock_ms", recorded_ms())

        code, said = worker("migrate-queue", "--redis-url", valkey.url, "--wait", "0.01")

        assert code == ExitCode.NOT_READY
        assert "1 jobs run and 0 wait in the format of the earlier version, which 1 workers serve" in said

    def test_when_no_heartbeat_has_come_for_long_then_the_owner_counts_as_dead(
        self, valkey: RedisServer, client: Any
    ) -> None:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", DAY_MS)

        code, _ = worker("migrate-queue", "--redis-url", valkey.url)

        assert code == ExitCode.DONE
        assert Queue(client, KEYS).state(JobId("0.t.running")) == "queued"

    def test_when_the_server_does_not_answer_then_it_can_be_run_again(self) -> None:
        code, _ = worker("migrate-queue", "--redis-url", "redis://127.0.0.1:1")

        assert code == ExitCode.NOT_READY

    def test_when_the_user_of_workers_runs_it_then_it_may(self, any_redis: RedisServer) -> None:
        with any_redis.client() as client:
            set_users(any_redis)
            restore(client, "chat")
            end_workers(client, "chat")

            code, said = worker("migrate-queue", "--queue", "chat", "--redis-url", url_of(any_redis, "chat-worker"))

            assert (code, said.splitlines()[1:]) == (ExitCode.DONE, ["queue 'chat' is in format 2"])
            check(Queue(client, QueueKeys("chat")))

    def test_when_the_server_is_a_cluster_then_it_moves_the_queue(self) -> None:
        with redis_cluster("valkey") as cluster:
            client = connect(cluster.url, timeout_s=5)
            restore(client)
            end_workers(client)

            code, _ = worker("migrate-queue", "--redis-url", cluster.url)

            assert code == ExitCode.DONE
            assert [entry[b"job"] for _, entry in client.xrange(KEYS.lane(0, "a"))] == [
                b"0.a.waiting0",
                b"0.a.waiting2",
            ]
