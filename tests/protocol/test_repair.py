"""The scripts of the audit's repair look again before they write: what is sound stays, and nothing is made twice."""

import pytest

from sluice.protocol.calls import Replaced
from sluice.protocol.calls import audit as audit_calls
from sluice.protocol.calls.audit import Sums
from sluice.protocol.limits import MAX_CALL_BYTES
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, encode_prompt
from tests.protocol.driving import CLASSES, Queue, check, ending, tokens


def busy(queue: Queue) -> list[JobId]:
    """Jobs in every state and place; all is sound."""
    worker = queue.worker("A")
    names = ("done", "failed", "running", "returned", "queued", "delayed")
    for name in names[:4]:
        queue.add(name)
    done, failed, running, returned = worker.pull().jobs
    worker.advance(ending(done, 0, 1), ending(failed, 0, state=JobState.FAILED), tokens(running, 0, 2))
    worker.give_back(returned)
    queue.add("queued")
    queue.add("delayed", not_before_ms=queue.now_ms + 60_000)
    return [JobId(f"0.t.{name}") for name in names]


def lanes(queue: Queue) -> list[str]:
    return [name.removeprefix("lane:") for name in queue.names("lane:*")]


@pytest.mark.every_server
class TestGivenAQueueThatIsSound:
    def test_when_every_repair_comes_late_then_nothing_changes(self, queue: Queue) -> None:
        ids = busy(queue)
        before = {name: queue.client.dump(queue.keys.key(name)) for name in queue.names()}
        entries = {
            lane: [one.decode() for one, _ in queue.entries(queue.keys.key("lane", lane))] for lane in lanes(queue)
        }

        assert queue.run(audit_calls.repair_jobs(queue.keys, ids, {})) == [""] * 6
        for lane, entry_ids in entries.items():
            assert not any(queue.run(audit_calls.repair_lane(queue.keys, lane, entry_ids)))
        assert queue.run(audit_calls.repair_counters(queue.keys, lanes(queue), Sums())) == []
        assert not any(queue.run(audit_calls.restore_prompt(queue.keys, [(one, b"other") for one in ids])))

        assert {name: queue.client.dump(queue.keys.key(name)) for name in queue.names()} == before
        check(queue)

    def test_when_sums_were_made_before_something_changed_then_they_are_not_taken(self, one_queue: Queue) -> None:
        busy(one_queue)
        stamp = one_queue.run(audit_calls.audit_counts(one_queue.keys, [])).stamp
        depth = one_queue.hash_of("depth")["0:t"]
        one_queue.add("later")
        before = one_queue.hash_of("counters")

        sums = Sums(stamp=stamp, tokens=1, bytes=2, lanes=(("0:t", depth, 3),))

        assert one_queue.run(audit_calls.repair_counters(one_queue.keys, lanes(one_queue), sums)) == []
        assert one_queue.hash_of("counters") == before
        check(one_queue)


class TestGivenAJobWithoutAPlace:
    def test_when_it_is_mended_twice_then_it_waits_once(self, queue: Queue) -> None:
        ids = busy(queue)
        about = queue.fields("t", "queued")
        queue.client.xdel(queue.keys.key("lane", about["lane"]), about["entry"])

        first = queue.run(audit_calls.repair_jobs(queue.keys, ids, {}))
        second = queue.run(audit_calls.repair_jobs(queue.keys, ids, {}))
        queue.run(audit_calls.repair_counters(queue.keys, lanes(queue), Sums()))

        assert (first, second) == (["", "", "", "", "put back", ""], [""] * 6)
        waiting = [fields[b"job"] for lane in lanes(queue) for _, fields in queue.entries(queue.keys.key("lane", lane))]
        assert waiting.count(b"0.t.queued") == 1
        assert queue.look().waiting_jobs == 3


class TestGivenARunningJobWithoutALease:
    def test_when_mended_then_the_next_owner_goes_on_where_its_channel_ends(self, queue: Queue) -> None:
        queue.add("one", choices=2)
        old = queue.worker("A")
        job = old.take()
        old.advance(tokens(job, 0, 3), tokens(job, 0, 5, choice=1))
        queue.client.hdel(queue.keys.key("held", "A"), job.id)

        assert queue.run(audit_calls.repair_jobs(queue.keys, [job.id], {})) == ["returned"]

        again = queue.worker("B").take()
        assert (again.published, again.epoch) == ((3, 5), job.epoch + 1)
        assert old.advance(tokens(job, 3, 1)) == [Replaced()]

    def test_when_it_was_asked_to_end_then_it_ends(self, queue: Queue) -> None:
        queue.add("one")
        job = queue.worker("A").take()
        queue.cancel(job.id)
        queue.client.zrem(queue.keys.key("alive"), "A")

        assert queue.run(audit_calls.repair_jobs(queue.keys, [job.id], {})) == ["ended"]
        assert queue.state(job.id) is JobState.CANCELLED


class TestGivenAPromptThatIsGone:
    def test_when_another_is_offered_then_it_is_refused_and_the_right_one_taken(self, queue: Queue) -> None:
        job_id = queue.add("one", payload=encode_prompt("right"))
        queue.client.delete(queue.keys.payload(job_id))

        def offer(prompt: str) -> list[bool]:
            return queue.run(audit_calls.restore_prompt(queue.keys, [(job_id, encode_prompt(prompt))]))

        assert offer("too long to be the right one") == [False]
        assert offer("right") == [True]
        assert queue.worker("A").take().payload == encode_prompt("right")


class TestGivenACountThatIsOff:
    def test_when_mended_then_the_queue_adds_up_again(self, queue: Queue) -> None:
        busy(queue)
        for name in ("waiting_jobs", "running_jobs", "submitted"):
            queue.client.hincrby(queue.keys.key("counters"), name, 5)
        for number in CLASSES:
            queue.client.zrem(queue.keys.key("heads", number), "t")

        queue.run(audit_calls.repair_counters(queue.keys, lanes(queue), Sums()))

        check(queue)


class TestGivenResultsOfEndedJobs:
    @pytest.mark.parametrize(("size", "is_read"), [(9, True), (MAX_CALL_BYTES, True), (MAX_CALL_BYTES + 1, False)])
    def test_when_events_are_republished_then_one_that_is_too_large_for_them_is_not_read(
        self, queue: Queue, size: int, is_read: bool
    ) -> None:
        result, job_id = bytes(size), busy(queue)[0]
        queue.client.delete(queue.keys.result(job_id))

        def reads_of_a_call() -> int:
            before = num_reads(queue)
            queue.run(audit_calls.republish_events(queue.keys, [(job_id, 0)]))
            return num_reads(queue) - before

        without = reads_of_a_call()
        queue.client.set(queue.keys.result(job_id), result)

        assert reads_of_a_call() - without == int(is_read)
        fields = queue.events(job_id)[-1].fields
        assert fields.get("result") == (result if is_read else None)
        assert fields.get("result_bytes") == (None if is_read else size)


def num_reads(queue: Queue) -> int:
    """Commands that have read a whole string."""
    return int(queue.client.info("commandstats")["cmdstat_get"]["calls"])
