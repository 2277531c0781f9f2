"""A call's cost does not depend on what other tenants have, or on what one tenant has heaped up."""

import pytest
import redis

from sluice.protocol import calls, limits
from sluice.protocol.calls import Beat, Call, PullRequest
from sluice.protocol.packing import pack_for_script
from tests.protocol.costs import Cost, cost_of
from tests.protocol.driving import Queue, check, drain, ending, new_job, short

MANY = 4100
"""Fields of a hash, so that its flat list is more than Lua passes to one command."""


def pull(queue: Queue, number: int = 1) -> calls.Call[calls.PullReply]:
    request = PullRequest(
        incarnation="A",
        number=number,
        kv_tokens=100_000,
        prefill_tokens=100_000,
        sequences=1000,
        cache_tokens=100_000,
        is_empty=False,
    )
    return calls.pull(queue.keys, request)


class TestGivenManyWeights:
    def costs(self, queue: Queue) -> list[Cost]:
        """Of a job's whole life, and a beat."""
        submitted = cost_of(queue, calls.submit(queue.keys, [new_job("one")]))
        pulled = cost_of(queue, pull(queue))
        [job] = queue.worker("A").pull(number=1).jobs
        ended = cost_of(queue, calls.advance(queue.keys, "A", [ending(job, 0, 3)]))
        beat = Beat(incarnation="A", held=(), processed_pull=1, expiry_ms=4000)
        return [submitted, pulled, ended, cost_of(queue, calls.beat(queue.keys, beat))]

    def test_when_a_job_of_one_tenant_runs_then_the_others_are_not_read(self, one_queue: Queue) -> None:
        alone = self.costs(one_queue)
        one_queue.client.flushall()
        one_queue.step_clock(0)
        one_queue.configure(weights={f"t{i}": 2.0 for i in range(1000)})

        among_many = self.costs(one_queue)

        assert [many.commands for many in among_many] == [one.commands for one in alone]
        assert [many.values - one.values for one, many in zip(alone, among_many, strict=True)] == [0] * 4


class TestGivenALaneFullOfWhatIsNoJob:
    """Its tenant was served least, so its lane comes first."""

    @pytest.fixture
    def filled(self, one_queue: Queue) -> Queue:
        pipe = one_queue.client.pipeline(transaction=False)
        for _ in range(600):
            pipe.xadd(one_queue.keys.lane(0, "evil"), {"x": "1"})
        pipe.execute()
        one_queue.add("behind", "evil")
        one_queue.add("one", "victim")
        return one_queue

    def test_when_a_worker_pulls_then_it_gets_the_others_job_and_has_looked_at_a_part(self, filled: Queue) -> None:
        cost = cost_of(filled, pull(filled))

        [job] = filled.worker("A").pull(number=1).jobs
        assert job.id == "0.victim.one"
        assert cost.commands < 250
        assert 0 < filled.client.xlen(filled.keys.lane(0, "evil")) < 500

    def test_when_it_pulls_on_then_the_job_behind_comes_and_the_lane_is_gone(self, filled: Queue) -> None:
        worker = filled.worker("A")
        jobs: list[str] = []
        while True:
            reply = worker.pull()
            jobs += short(reply.jobs)
            if not reply.has_more:
                break

        assert jobs == ["one", "behind"]
        assert worker.number < 10
        check(filled)

    @pytest.mark.parametrize("tenant", [None, "evil"])
    def test_when_it_is_purged_then_a_slice_looks_at_a_part_and_all_slices_at_all(
        self, filled: Queue, tenant: str | None
    ) -> None:
        purge = calls.purge(filled.keys, tenant=tenant)

        assert cost_of(filled, purge).commands < 400

        num_slices = 1
        while filled.run(purge)[1]:
            num_slices += 1
        assert 1 < num_slices < 10
        assert filled.client.xlen(filled.keys.lane(0, "evil")) == 0
        assert filled.look().totals["cancelled"] == (2 if tenant is None else 1)


class TestGivenJobsWhosePromptsAreGone:
    def test_when_a_worker_pulls_then_a_part_of_them_ends_and_the_others_job_comes(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.submit(*[new_job(f"lost{i}", "evil") for i in range(100)])
        queue.add("one", "victim")
        queue.client.delete(*[queue.keys.payload(new_job(f"lost{i}", "evil").id) for i in range(100)])
        worker = queue.worker("A")

        reply = worker.pull()

        assert short(reply.jobs) == ["one"]
        assert reply.has_more
        assert queue.look().totals["failed"] == limits.MAX_SPOILED_PER_LANE
        while worker.pull().has_more:
            pass
        assert queue.look().totals["failed"] == 100
        check(queue)


class TestGivenAHashWithManyFields:
    def add_fields(self, queue: Queue, *key: str) -> None:
        queue.client.hset(queue.keys.key(*key), mapping={f"f{i}": "x" for i in range(MANY)})

    def test_when_it_is_of_a_batch_then_its_jobs_end_and_none_is_read(self, one_queue: Queue) -> None:
        one_queue.submit(*[new_job(f"j{i}", batch="b") for i in range(3)])
        self.add_fields(one_queue, "batch", "b")

        cancelled = cost_of(one_queue, calls.cancel_batch(one_queue.keys, "b"))
        looked = cost_of(one_queue, calls.inspect_batch(one_queue.keys, "b"))

        assert max(cancelled.values, looked.values) < MANY
        assert one_queue.run(calls.inspect_batch(one_queue.keys, "b")).cancelled == 3
        check(one_queue)

    def test_when_it_is_of_the_counters_then_a_look_reads_ours(self, one_queue: Queue) -> None:
        one_queue.add("one")
        self.add_fields(one_queue, "counters")

        assert cost_of(one_queue, calls.inspect(one_queue.keys)).values < MANY
        assert one_queue.look().totals.keys() == {"submitted", "outbox_bytes"}


class TestGivenMoreRowsThanACallTakes:
    def test_when_they_are_submitted_then_nothing_is_written(self, one_queue: Queue) -> None:
        before = one_queue.names()
        rows = [["0.t.a", "spec"]] * (limits.MAX_JOBS_PER_CALL + 1)

        with pytest.raises(redis.ResponseError, match="has 65 rows, and at most 64 are taken"):
            one_queue.run(Call("submit", one_queue.keys.fixed(), (pack_for_script(rows),), lambda reply: reply))

        assert one_queue.names() == before


class TestGivenAnIdempotencyKeyThatNamesAForeignKey:
    @pytest.mark.parametrize("named", ["0.evil.x", "0.other.x"])
    def test_when_it_is_used_then_the_jobs_around_it_are_accepted(self, one_queue: Queue, named: str) -> None:
        queue = one_queue
        _, tenant, name = named.split(".")
        queue.client.set(queue.keys.key("job", tenant, name), "foreign")
        queue.client.set(queue.keys.key("idem", "evil", "k"), f"{named} queued second")

        answers = queue.submit(
            *[new_job(one, "evil") for one in ("first",)],
            new_job("second", "evil", idempotency_key="k"),
            new_job("third", "evil"),
        )

        assert [type(answer) for answer in answers] == [calls.Accepted, calls.Duplicate, calls.Accepted]
        assert sorted(drain(queue, queue.worker("A"))) == ["first", "third"]


class TestGivenJobsWithManyChoices:
    def names(self, num_jobs: int) -> list[str]:
        return [f"wide{i}" for i in range(num_jobs)]

    def test_when_they_have_never_started_then_one_channel_ends_each(self, one_queue: Queue) -> None:
        jobs = [new_job(name, choices=64) for name in self.names(32)]
        one_queue.submit(*jobs)

        cost = cost_of(one_queue, calls.cancel(one_queue.keys, [job.id for job in jobs]))

        assert cost.commands < 32 * 30
        assert len(one_queue.names("channel:*")) == 32
        check(one_queue)

    def test_when_they_had_started_then_a_slice_ends_a_part_and_says_so(self, one_queue: Queue) -> None:
        jobs = [new_job(name, choices=64, batch="b") for name in self.names(6)]
        one_queue.submit(*jobs)
        worker = one_queue.worker("A")
        worker.give_back(*worker.pull().jobs)
        ids = [job.id for job in jobs]

        first, second = one_queue.cancel(*ids), one_queue.cancel(*ids)

        assert first == ["cancelled"] * 2 + [calls.AGAIN] * 4
        assert second == ["cancelled"] * 4 + [calls.AGAIN] * 2
        assert one_queue.run(calls.cancel_batch(one_queue.keys, "b")) == (2, 0, False)
        check(one_queue)

    def test_when_their_deadlines_pass_then_each_beat_ends_a_part(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.submit(*[new_job(name, choices=64, deadline_ms=queue.now_ms + 10) for name in self.names(6)])
        worker = queue.worker("A")
        worker.give_back(*worker.pull().jobs)
        queue.pass_time(20)

        assert [queue.fire_timers() for _ in range(4)] == [2, 2, 2, 0]

        assert queue.look().totals["expired"] == 6
        check(queue)

    def test_when_many_are_purged_then_a_slice_ends_a_part(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.submit(*[new_job(name, choices=64) for name in self.names(6)])
        worker = queue.worker("A")
        worker.give_back(*worker.pull().jobs)

        assert [queue.run(calls.purge(queue.keys)) for _ in range(4)] == [(2, True), (2, True), (2, True), (0, False)]
        check(queue)

    def test_when_their_flagged_ones_are_given_back_then_the_rest_ends_by_the_next_beat(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.submit(*[new_job(name, choices=64) for name in self.names(3)])
        worker = queue.worker("A")
        worker.beat()
        jobs = worker.pull().jobs
        assert queue.cancel(*[job.id for job in jobs]) == ["asked"] * 3

        assert worker.give_back(*jobs) == [True, True, False]
        worker.beat()

        assert queue.look().totals["cancelled"] == 3
        check(queue)
