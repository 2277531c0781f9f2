"""What a scrape shows of a queue: all its partitions together."""

from producer.contract.keys import QueueKeys
from producer.contract.wire import JobId
from tests.contract.driving import Queue
from tests.servers import RedisServer
from worker.about import QUEUE_VIEW_AGE_S, Depth, QueueDepth
from worker.connections import connect

PARTITIONS = tuple(QueueKeys("q", number) for number in range(3))


class TestGivenAQueueInPartitions:
    def test_when_jobs_wait_in_some_then_they_are_summed_and_the_oldest_of_all_is_told(
        self, valkey: RedisServer
    ) -> None:
        now_s = [10.0]
        depth = QueueDepth(connect(valkey.url, timeout_s=5), PARTITIONS, clock=lambda: now_s[0])
        assert depth.look() == Depth(jobs=0, tokens=0, oldest_s=None)
        with valkey.client() as client:
            queues = [Queue(client, keys) for keys in PARTITIONS]
            for queue in queues:
                queue.stop_clock()
            queues[2].add("a", id=JobId("2.t.a"))
            queues[2].pass_time(5000)
            queues[1].add("b", id=JobId("1.t.b"))
            queues[1].pass_time(2000)

            assert depth.look() == Depth(jobs=0, tokens=0, oldest_s=None), "asked at most once a second"
            now_s[0] += QUEUE_VIEW_AGE_S + 0.1

            assert depth.look() == Depth(jobs=2, tokens=60, oldest_s=5.0)


class TestGivenARedisThatIsAway:
    def test_when_asked_then_nothing_is_said(self) -> None:
        assert QueueDepth(connect("redis://127.0.0.1:1", timeout_s=1), PARTITIONS).look() is None
