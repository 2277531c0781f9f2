"""A pull reads classes and lanes once and keeps its changes in memory: what it takes, and what it leaves behind."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, drain, ending, new_job, short

SMALL = {"prompt_tokens": 10, "max_tokens": 20}
LARGE = {"prompt_tokens": 5000, "max_tokens": 20}
ROOM = {"kv_tokens": 1000, "prefill_tokens": 1000, "cache_tokens": 1000}
"""Large jobs never fit."""


class TestGivenAPullThatFillsTheRoom:
    def test_when_it_takes_the_last_job_of_a_lane_then_the_lane_is_gone(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b")

        assert short(queue.worker("A").pull(sequences=2).jobs) == ["a", "b"]

        check(queue)
        assert queue.look().oldest_ms is None

    def test_when_lanes_keep_jobs_in_mode_fifo_then_the_oldest_comes_next(self, queue: Queue) -> None:
        queue.configure(mode="fifo")
        for name in ("a1", "b1", "a2", "b2", "b3", "a3"):
            queue.pass_time(1)
            queue.add(name, name[0])
        worker = queue.worker("A")

        names = short(worker.pull(sequences=3).jobs)
        for _ in range(3):
            names += short(worker.pull(sequences=1).jobs)

        assert names == ["a1", "b1", "a2", "b2", "b3", "a3"]
        check(queue)

    def test_when_an_entry_was_foreign_then_the_lane_is_listed_by_the_next_job(self, queue: Queue) -> None:
        queue.add("a")
        queue.client.xadd(queue.keys.lane(0, "t"), {"x": "1"})
        queue.add("b")

        assert short(queue.worker("A").pull(sequences=1).jobs) == ["a"]
        assert short(queue.worker("A").pull(number=2, sequences=1).jobs) == ["b"]
        check(queue)


class TestGivenManyLanesWhoseHeadsNeverFit:
    def add_large(self, queue: Queue, priority: int, num: int = limits.MAX_LANES_PER_PULL) -> None:
        for i in range(num):
            queue.add("large", f"large{i:02}", priority=priority, **LARGE)

    def test_when_one_behind_them_fits_then_it_is_served_before_a_lower_class(self, queue: Queue) -> None:
        self.add_large(queue, 9)
        queue.add("small", "zz", priority=9, **SMALL)
        queue.add("low", "low", priority=0, **SMALL)

        names = [short(queue.worker("A").pull(number=number, **ROOM).jobs) for number in (1, 2)]

        assert names[0] == ["small", "low"]
        check(queue)

    def test_when_more_wait_than_a_pull_reads_then_lower_classes_wait_too(self, queue: Queue) -> None:
        for i in range(limits.MAX_LANES_LISTED + 10):
            queue.add("high", f"high{i:02}", priority=9, **(LARGE if i < 10 else SMALL))
        for i in range(40):
            queue.add("low", f"low{i:02}", priority=0, **SMALL)

        jobs = queue.worker("A").pull(sequences=31, **ROOM).jobs

        # A twentieth is the share of the lower classes.
        assert [job.priority for job in jobs].count(0) <= 2
        assert len(jobs) > 20
        check(queue)


class TestGivenMoreWaitingTenantsThanLuaPassesToOneCommand:
    """A lane's place is two values, and Lua passes about 8,000."""

    def test_when_the_mode_changes_then_each_lane_has_its_new_place(self, one_queue: Queue) -> None:
        queue, tenants = one_queue, [f"t{i}" for i in range(4100)]
        for at in range(0, len(tenants), limits.MAX_JOBS_PER_CALL):
            queue.submit(*[new_job("a", tenant) for tenant in tenants[at : at + limits.MAX_JOBS_PER_CALL]])

        queue.configure(mode="fifo")

        heads, ready = (
            dict(queue.client.zrange(queue.keys.key(name, 0), 0, -1, withscores=True)) for name in ("heads", "ready")
        )
        assert len(heads) == len(tenants)
        assert ready == heads


class TestGivenATenantInTwoClasses:
    def test_when_it_is_alone_in_the_higher_then_its_charges_count_in_the_lower(self, queue: Queue) -> None:
        for name in ("a9x", "a9y", "a9z"):
            queue.add(name, "a", priority=9, prompt_tokens=980, max_tokens=20)
        for name in ("b1", "b2"):
            queue.add(name, "b", priority=5, **SMALL)
        queue.add("a5", "a", priority=5, **SMALL)
        queue.client.zadd(queue.keys.key("ready", 5), {"a": 0, "b": 10})
        queue.client.hset(queue.keys.key("served"), "b", 10)

        names = drain(queue, queue.worker("A"))

        assert names.index("b1") < names.index("a5")
        check(queue)


class TestGivenADeadSetThatForgets:
    def test_when_it_holds_none_then_a_failed_job_is_kept_as_other_ended_ones(self, queue: Queue) -> None:
        queue.configure(dead_set_max=0)
        job_id = queue.add("a")
        worker = queue.worker("A")

        worker.advance(ending(worker.take(), 0, 1, state=JobState.FAILED))

        assert queue.client.pttl(queue.keys.job(job_id)) <= limits.RESULT_TTL_S * 1000


class TestGivenDamagedKeysAroundJobs:
    def test_when_an_id_has_zeros_before_its_partition_then_it_is_no_job(self, queue: Queue) -> None:
        job_id = queue.add("a")

        assert queue.cancel(job_id, JobId("00.t.a"), JobId("000.t.a")) == ["cancelled", "unknown", "unknown"]
        check(queue)

    def test_when_the_list_of_an_owner_is_no_hash_then_its_job_ends_with_the_others(self, queue: Queue) -> None:
        running = queue.add("a")
        queue.worker("W").take()
        waiting = queue.add("z")
        queue.client.delete(queue.keys.key("held", "W"))
        queue.client.set(queue.keys.key("held", "W"), "foreign")

        assert queue.cancel(waiting, running) == ["cancelled", "cancelled"]
        assert {queue.state(one) for one in (waiting, running)} == {JobState.CANCELLED}

    @pytest.mark.parametrize("lost", ["all", "one"])
    def test_when_scores_of_tenants_are_gone_then_they_are_served(self, queue: Queue, lost: str) -> None:
        queue.add("a1", "a", priority=5)
        queue.add("b1", "b", priority=5)
        key = queue.keys.key("ready", 5)
        if lost == "all":
            queue.client.delete(key)
        else:
            queue.client.zrem(key, "b")

        assert sorted(short(queue.worker("A").pull().jobs)) == ["a1", "b1"]
        check(queue)

    def test_when_an_incarnation_has_a_nul_then_it_gets_nothing(self, queue: Queue) -> None:
        queue.add("a")
        request = calls.PullRequest(
            incarnation="W\0x",
            number=1,
            kv_tokens=1000,
            prefill_tokens=1000,
            sequences=1,
            cache_tokens=1000,
            is_empty=True,
        )

        with pytest.raises(Exception, match="wrong arguments"):
            queue.run(calls.pull(queue.keys, request))
        check(queue)
