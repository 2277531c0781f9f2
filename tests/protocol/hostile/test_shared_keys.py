"""Another user writes into the keys that all tenants share: jobs run on, and nothing fails half-way."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, ending, new_job, short

LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


def run_one(queue: Queue, name: str) -> JobState:
    """Submit a job and run it."""
    queue.add(name, "victim", batch="b")
    worker = queue.worker("A")
    worker.number = int(name.removeprefix("j")) * 10
    worker.beat()
    assert worker.advance(ending(worker.take(), 0, 2)) == [calls.Ok(None)]
    return queue.state(JobId(f"0.victim.{name}"))


@pytest.mark.every_server
class TestGivenASharedStreamAtItsLastId:
    @pytest.mark.parametrize("name", ["bell", "outbox", "garbage"])
    def test_when_jobs_run_then_it_is_made_again(self, queue: Queue, name: str) -> None:
        run_one(queue, "j1")
        num_events = len(queue.events())
        queue.client.xadd(queue.keys.key(name), {"x": "1"}, id=LAST_ID)
        queue.client.zadd(queue.keys.key("timers"), {"garbage": 1})

        assert run_one(queue, "j2") is JobState.DONE

        assert queue.client.xinfo_stream(queue.keys.key(name))["last-generated-id"] != LAST_ID.encode()
        assert len(queue.events()) == num_events + 3


class TestGivenALongOutboxAtItsLastId:
    """The recorder is away."""

    def fill(self, queue: Queue, num_entries: int, entry: bytes) -> None:
        """Add entries that begin with their numbers, and the last possible id."""
        pipeline = queue.client.pipeline(transaction=False)
        for number in range(num_entries):
            pipeline.xadd(queue.keys.outbox, {"e": b"%d " % number + entry})
        pipeline.xadd(queue.keys.outbox, {"x": "1"}, id=LAST_ID)
        pipeline.execute()

    def kept(self, queue: Queue) -> list[int]:
        """The numbers of the entries that are left, without those of jobs."""
        texts = [fields[b"e"].split(b" ")[0] for _, fields in queue.client.xrange(queue.keys.outbox)]
        return [int(text) for text in texts if text.isdigit()]

    def test_when_a_job_runs_then_its_events_and_the_newest_before_are_kept(self, queue: Queue) -> None:
        self.fill(queue, limits.OUTBOX_KEPT + 100, b"")

        assert run_one(queue, "j1") is JobState.DONE

        # The forged entry is one of those that are examined.
        assert self.kept(queue) == list(range(101, limits.OUTBOX_KEPT + 100))
        assert queue.client.xlen(queue.keys.outbox) == limits.OUTBOX_KEPT - 1 + 3

    def test_when_its_entries_are_long_then_fewer_are_kept(self, queue: Queue) -> None:
        self.fill(queue, 8, b"x" * (limits.OUTBOX_KEPT_BYTES // 4))

        assert run_one(queue, "j1") is JobState.DONE

        assert self.kept(queue) == [4, 5, 6, 7]


class TestGivenACounterThatIsNoNumber:
    @pytest.mark.parametrize("value", ["x", "1.5", str(2**63 - 1)])
    def test_when_jobs_run_then_they_end_and_all_is_counted_again(self, queue: Queue, value: str) -> None:
        for name in ("submitted", "waiting_jobs", "waiting_tokens", "running_jobs", "done"):
            queue.client.hset(queue.keys.key("counters"), name, value)
        if value != str(2**63 - 1):
            assert run_one(queue, "j1") is JobState.DONE
        else:
            # The bounds of the queue are reached, for everybody.
            (answer,) = queue.submit(new_job("a"))
            assert isinstance(answer, calls.Refused)

    def test_when_it_is_a_batchs_then_a_submit_is_whole(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.key("batch", "b"), "total", "x")

        assert run_one(queue, "j1") is JobState.DONE

    def test_when_a_client_looks_at_the_queue_then_it_counts_as_nothing(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.key("counters"), "waiting_jobs", "x")

        assert queue.look().waiting_jobs == 0


class TestGivenCountersThatClaimAFullQueue:
    """A submit is refused while they stand."""

    FORGED = ("waiting_jobs", "waiting_tokens", "waiting_bytes")

    @pytest.fixture
    def full(self, queue: Queue) -> Queue:
        queue.client.hset(queue.keys.key("counters"), mapping=dict.fromkeys(self.FORGED, 2**60))
        (answer,) = queue.submit(new_job("no", "victim"))
        assert isinstance(answer, calls.Refused)
        return queue

    def test_when_nothing_waits_and_a_worker_beats_then_they_are_counted_again(self, full: Queue) -> None:
        full.worker("A").beat()

        full.add("one", "victim")
        check(full)

    def test_when_few_jobs_wait_then_they_are_counted(self, queue: Queue) -> None:
        queue.add("one", "victim")
        queue.add("later", "victim", not_before_ms=queue.now_ms + 60_000)
        queue.client.hset(queue.keys.key("counters"), mapping=dict.fromkeys(self.FORGED, 2**60))

        queue.worker("A").beat()

        check(queue)

    def test_when_strangers_are_among_the_delayed_then_they_are_removed(self, full: Queue) -> None:
        full.client.zadd(full.keys.key("delayed"), {f"ghost{number}": 0 for number in range(40)})
        worker = full.worker("A")

        for _ in range(3):
            full.pass_time(1000)
            worker.beat()

        full.add("one", "victim")
        check(full)

    def test_when_many_jobs_wait_then_the_counters_stay(self, queue: Queue) -> None:
        for number in range(40):
            queue.add(f"j{number}", "victim")
        before = queue.hash_of("counters")

        queue.worker("A").beat()

        assert queue.hash_of("counters") == before


class TestGivenPositionsThatNoTenantHas:
    @pytest.mark.parametrize("score", ["inf", "-inf", "1e308"])
    def test_when_a_tenant_joins_them_then_its_tokens_stay_a_number(self, queue: Queue, score: str) -> None:
        for key in ("ready", "heads"):
            queue.client.zadd(queue.keys.key(key, 0), {"ghost": score})

        queue.add("one", "victim")

        assert 0 <= float(queue.hash_of("served").get("victim", "0")) <= 2**53


class TestGivenTenantsThatDoNotExist:
    def test_when_a_pull_finds_only_them_then_the_next_follows_at_once(self, queue: Queue) -> None:
        queue.add("one", "victim")
        for priority in (7, 8, 9):
            ghosts = {f"ghost{number}": 1 for number in range(100)}
            queue.client.zadd(queue.keys.key("heads", priority), ghosts)
            queue.client.zadd(queue.keys.key("ready", priority), ghosts)
        worker, num_pulls = queue.worker("A"), 1

        reply = worker.pull()
        while not reply.jobs:
            assert reply.has_more
            assert num_pulls < 30
            reply, num_pulls = worker.pull(), num_pulls + 1

        assert short(reply.jobs) == ["one"]
