"""Overload, readers that stop reading, SQL outages: memory is flat, no accepted job is lost."""

import signal
import socket
import tracemalloc
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.producer.aio import AsyncProducer
from sluice.producer.client import Producer
from sluice.producer.errors import QueueFull
from sluice.producer.operations.submission import Receipt
from sluice.protocol.calls import QueueSettings
from sluice.protocol.wire import JobOptions
from tests.chaos.checker.queue import FOR_EVER, WORKER_KEPT_MS
from tests.chaos.faults.recording import record_all
from tests.chaos.faults.sql_outage import away_for
from tests.chaos.overload import Overload, overloaded, readers_that_stop, report
from tests.end_to_end.processes import worker_pool
from tests.integration.jobs import KEYS, Ask, num_on_channel, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.postgres import HOW_TO_GET, has_postgres
from tests.servers import RedisServer

MAX_OUTBOX = 40
LONG = Ask(options=JobOptions(max_tokens=3000))


def flooded(load: Overload, seconds: float) -> None:
    load.run(seconds, seconds / 24, lambda _line: None)
    load.wait_until_idle()


@pytest.mark.slow
class TestGivenTenTimesMoreThanAWorkerCanDo:
    @pytest.mark.long
    def test_when_it_goes_on_then_memory_is_flat_and_latency_bounded(self, tmp_path: Path) -> None:
        with overloaded(tmp_path) as load:
            flooded(load, 4)

            lines, is_well = report(load)
            assert is_well, lines
            assert load.flood.counts["accepted"] == len(load.waits()[0]), "each that was accepted is done"
            assert load.flood.counts["refused (full_jobs)"] > load.flood.counts["accepted"]
            assert load.worker.process.poll() is None

    @pytest.mark.long
    @pytest.mark.timeout(600)
    def test_when_it_goes_on_for_minutes_then_too(self, tmp_path: Path) -> None:
        with overloaded(tmp_path) as load:
            load.run(180, 1, lambda _line: None)
            load.wait_until_idle()

            lines, is_well = report(load)
            assert is_well, lines


@pytest.mark.slow
class TestGivenAHistoryThatIsAway:
    def test_when_the_outbox_is_full_then_submits_are_refused_and_nothing_is_dropped(self, tmp_path: Path) -> None:
        with overloaded(tmp_path, RECORDER="false", max_outbox_entries=MAX_OUTBOX) as load:
            accepted, refusal = submit_until_refused(load.producer)
            with load.server.client() as client:
                wait_for_ends(client, [one.id for one in accepted])
                # Each job adds its start and its end to what was there when it was submitted, at most.
                assert MAX_OUTBOX <= client.xlen(KEYS.outbox) <= MAX_OUTBOX + 3 * len(accepted)
            assert refusal.reason == "outbox_full"

            record_all(load.server, load.database_url)

            assert len(load.waits()[0]) == len(accepted), "each has its row"
            assert load.producer.submit("there is room again").id

    @pytest.mark.long
    @pytest.mark.timeout(300)
    @pytest.mark.skipif(not has_postgres(), reason=HOW_TO_GET)
    def test_when_it_is_killed_under_load_and_returns_then_each_accepted_job_has_a_row(self, tmp_path: Path) -> None:
        with away_for(60, before_s=5, say=lambda _line: None, folder=tmp_path) as made:
            assert made.findings() == []


def submit_until_refused(producer: Producer) -> tuple[list[Receipt], QueueFull]:
    accepted: list[Receipt] = []
    while True:
        for answer in producer.submit_many(["tell me"] * 4, max_tokens=20):
            if isinstance(answer, QueueFull):
                return accepted, answer
            assert isinstance(answer, Receipt)
            accepted.append(answer)


class TestGivenReadersThatStopReading:
    """A job of 3000 tokens, and thirty readers that have its first event each."""

    def test_when_the_job_goes_on_then_they_cost_the_server_nothing(self, valkey: RedisServer) -> None:
        client: Any = valkey.client()  # redis-py types it in part
        with client, running_worker(valkey.url):
            [job_id] = submit_all(client, [LONG])
            with readers_that_stop(valkey.url, [job_id] * 30):
                wait_for_ends(client, [job_id])

                clients = client.client_list()
                assert len(clients) > 30
                assert sum(int(one["omem"]) for one in clients) == 0, "nothing waits to be read"

    async def test_when_one_of_them_reads_on_then_the_others_cost_the_client_nothing(self, valkey: RedisServer) -> None:
        client: Any = valkey.client()  # redis-py types it in part
        with client, running_worker(valkey.url, model__path="null?step_s=0.0005"):
            [job_id] = submit_all(client, [LONG])
            async with AsyncProducer(valkey.url) as producer:
                streams = [producer.stream(job_id) for _ in range(31)]
                for stream in streams:
                    await anext(stream)
                tracemalloc.start()
                num_tokens = sum([len(event.token_ids) async for event in streams[0]])
                kept_bytes, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()

        assert num_tokens > 1000
        # The job once, of which the worker on its thread keeps some; not thirty times.
        assert kept_bytes < 4 * 2**20

    def test_when_readers_vanish_then_nothing_of_them_is_left(self, valkey: RedisServer) -> None:
        client: Any = valkey.client()  # redis-py types it in part
        with client:
            before = client.info("clients")["connected_clients"]  # tests before this one may have left some
            with readers_that_never_read(valkey, "nothing", 20, block_ms=60_000):
                wait_until(lambda: client.info("clients")["blocked_clients"] == 20, "they wait")

            # Fast: their reads would block for a minute.
            wait_until(lambda: client.info("clients")["connected_clients"] <= before, "they are forgotten")
            assert client.info("clients")["blocked_clients"] == 0


@contextmanager
def readers_that_never_read(server: RedisServer, channel: str, count: int, *, block_ms: int = 1) -> Generator[None]:
    """Each requests a whole channel, and never reads the reply."""
    words = ["XREAD", "COUNT", "512", "BLOCK", str(block_ms), "STREAMS", channel, "0-0"]
    request = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    with ExitStack() as stack:
        for _ in range(count):
            reader = stack.enter_context(socket.socket(socket.AF_UNIX))
            reader.connect(str(server.socket_path))
            reader.sendall(request.encode())
        yield


@pytest.mark.slow
class TestGivenAQueueThatForgetsSoon:
    """Results are kept for a second, channels and keys for half of one."""

    @pytest.mark.long
    def test_when_the_stated_times_are_over_then_nothing_is_left(self, valkey: RedisServer, tmp_path: Path) -> None:
        asks = [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=60, n=1 + i % 2), seed=i) for i in range(12)]
        client: Any = valkey.client()  # redis-py types it in part
        with client, Producer(valkey.url) as producer, worker_pool(valkey.url, tmp_path) as workers:
            client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
            producer.configure(QueueSettings(result_ttl_ms=1000, channel_ttl_ms=500, idempotency_ttl_ms=500))
            first, second = workers.start_all(2)
            job_ids = submit_all(client, asks)
            producer.submit("once", idempotency_key="k", batch="b", tenant="u", deadline=None, ttl_s=30)
            producer.close_batch("b")
            wait_until(lambda: any(num_on_channel(client, one) > 5 for one in job_ids), "some speak")
            first.kill()
            wait_until(lambda: int(client.hget(KEYS.key("counters"), "done") or 0) == 13, "all are done")

            wait_until(lambda: names_left(client) <= FOR_EVER | {"worker", "alive", "serving"}, "all else is gone")
            second.signal(signal.SIGTERM)
            assert second.wait() == 0

            record_all(valkey, f"sqlite:///{tmp_path}/history.db")
            assert names_left(client) <= FOR_EVER | {"worker", "serving"}
            assert client.xlen(KEYS.outbox) == 0
            assert all(0 < client.pttl(key) <= WORKER_KEPT_MS for key in client.scan_iter(KEYS.key("worker", "*")))


def names_left(client: Any) -> set[str]:  # Any: a redis-py client
    """Kinds of keys that the queue still has."""
    return {key.decode().split(":")[3] for key in client.scan_iter(f"{KEYS.prefix}:*")}
