"""Metrics of a queue's depth: all its partitions together, and each queue apart."""

import urllib.error
import urllib.request

from sluice.protocol import calls
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from sluice.worker.connection.clients import connect
from sluice.worker.serve.metrics import Value
from sluice.worker.serve.status_reporter import QUEUE_VIEW_AGE_S, QueueDepth
from tests.integration.jobs import Ask, submit_all, wait_until
from tests.integration.workers import running_worker
from tests.protocol.driving import Queue, ending
from tests.servers import RedisServer, free_port, redis_server

PARTITIONS = tuple(QueueKeys("q", number) for number in range(3))
NAMES = ("depth_jobs", "depth_tokens", "outbox", "callbacks", "dead", "suspects", "paused", "worker_deaths")
ZEROS: dict[str, Value] = {f"queue_{name}": {"q": 0} for name in (*NAMES, "results_missed")}
EMPTY: dict[str, Value] = {**ZEROS, "queue_oldest_age_seconds": {}}


class TestGivenAQueueInPartitions:
    def test_when_jobs_wait_in_some_then_their_sum_and_the_oldest_of_all_are_exported(
        self, valkey: RedisServer
    ) -> None:
        now_s = [10.0]
        depth = QueueDepth(connect(valkey.url, timeout_s=5), PARTITIONS, clock=lambda: now_s[0])
        assert depth.look() == EMPTY
        with valkey.client() as client:
            queues = [Queue(client, keys) for keys in PARTITIONS]
            for queue in queues:
                queue.stop_clock()
            queues[2].add("a", id=JobId("2.t.a"))
            queues[2].pass_time(5000)
            queues[1].add("b", id=JobId("1.t.b"))
            queues[1].pass_time(2000)

            assert depth.look() == EMPTY, "asked at most once a second"
            now_s[0] += QUEUE_VIEW_AGE_S + 0.1

            assert depth.look() == {
                **EMPTY,
                "queue_depth_jobs": {"q": 2},
                "queue_depth_tokens": {"q": 60},
                "queue_oldest_age_seconds": {"q": 5.0},
                "queue_outbox": {"q": 2},
            }

    def test_when_some_hold_what_a_person_must_look_at_then_it_is_summed_too(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            queues = [Queue(client, keys) for keys in PARTITIONS]
            for number, queue in enumerate(queues[1:], start=1):
                queue.cancel(queue.add("told", id=JobId(f"{number}.t.told"), wants_callback=True))
                worker = queue.worker("A")
                queue.add("bad", id=JobId(f"{number}.t.bad"))
                worker.advance(ending(worker.take(), 0, 1, state=JobState.FAILED))
            client.zadd(PARTITIONS[2].key("suspects"), {"2.t.suspect": 1})
            queues[1].run(calls.pause(PARTITIONS[1], is_paused=True))

            seen = QueueDepth(connect(valkey.url, timeout_s=5), PARTITIONS).look()

        names = ("queue_callbacks", "queue_dead", "queue_suspects", "queue_paused")
        assert [seen[name] for name in names] == [{"q": 2}, {"q": 2}, {"q": 1}, {"q": True}]


class TestGivenTwoQueues:
    def test_when_jobs_wait_in_one_then_the_other_has_its_own_figures(self, valkey: RedisServer) -> None:
        chat, batch = QueueKeys("chat"), QueueKeys("batch")
        with valkey.client() as client:
            Queue(client, batch).add("a")

            seen = QueueDepth(connect(valkey.url, timeout_s=5), (chat, batch)).look()

        assert seen["queue_depth_jobs"] == {"chat": 0, "batch": 1}
        ages = seen["queue_oldest_age_seconds"]
        assert isinstance(ages, dict)
        assert ages.keys() == {"batch"}


class TestGivenAWorkerWhoseRedisGoesAway:
    def test_when_scraped_then_the_outage_is_counted_and_depth_returns_afterwards(self) -> None:
        port = free_port()
        with (
            redis_server("valkey") as server,
            running_worker(server.url, metrics__enabled=True, metrics__port=port),
        ):
            wait_until(lambda: scrape(port).get("sluice_queue_paused") == 0, "it serves")
            assert scrape(port)["sluice_redis_outages_total"] == 0
            server.kill()
            wait_until(lambda: scrape(port)["sluice_redis_outages_total"] == 1, "the outage is counted")
            server.start()
            wait_until(lambda: "sluice_queue_outbox" in scrape(port), "the queue is exported again")


class TestGivenACacheThatHoldsOneJob:
    """Of 64 places one can be used, and the loop never rests."""

    def test_when_more_jobs_come_then_each_gauge_says_what_is_full_and_what_is_not(self, valkey: RedisServer) -> None:
        port, model = free_port(), "null?step_s=0.005&num_blocks=17&block_size=16"
        options = JobOptions(max_tokens=60, ignore_eos=True)
        asks = [Ask(prompt=f"{number:02d}" * 100, options=options) for number in range(45)]

        def is_measured() -> bool:
            seen = scrape(port)
            return seen.get("sluice_queue_depth_jobs", 0) >= 30 and seen["sluice_loop_busy"] > 0.5

        with (
            valkey.client() as client,
            running_worker(valkey.url, model__path=model, metrics__enabled=True, metrics__port=port) as worker,
        ):
            submit_all(client, asks)
            wait_until(is_measured, "a second of it is measured")
            seen = scrape(port)
            worker.stop()

        assert (seen["sluice_places"], seen["sluice_places_used"]) == (64, 1)
        assert seen["sluice_step_occupancy"] == 1 / 64
        assert seen["sluice_engine_waiting"] < 5, "those that were pulled at the same time"


def scrape(port: int) -> dict[str, float]:
    """Return the values of /metrics without labels, and those of the default queue; none while no server listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    except urllib.error.URLError:
        return {}
    own = [line.replace('{queue="default"}', "") for line in lines]
    pairs = [line.split(" ") for line in own if "{" not in line and not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


class TestGivenARedisThatIsAway:
    def test_when_asked_then_nothing_is_said(self) -> None:
        assert QueueDepth(connect("redis://127.0.0.1:1", timeout_s=1), PARTITIONS).look() == {}
