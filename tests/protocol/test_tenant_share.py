"""What one tenant may hold of a queue: a share of what the others leave, so that there is room for one that comes."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Accepted, Refused, SubmitReply
from tests.protocol.driving import Queue, check, new_job
from tests.protocol.test_submit import NUM_BYTES


def fill(queue: Queue, tenant: str, num_jobs: int, prefix: str = "a") -> list[SubmitReply]:
    return queue.submit(*[new_job(f"{prefix}{number:02d}", tenant) for number in range(num_jobs)])


def num_accepted(answers: list[SubmitReply]) -> int:
    return sum(isinstance(answer, Accepted) for answer in answers)


@pytest.fixture
def shared(queue: Queue) -> Queue:
    """A queue of ten jobs that tenant `other` has used lately: nothing of it waits."""
    queue.configure(max_waiting_jobs=10)
    queue.add("one", "other")
    queue.worker("W").take()
    return queue


class TestGivenATenantAlone:
    def test_when_no_other_has_come_then_it_may_fill_the_queue(self, queue: Queue) -> None:
        queue.configure(max_waiting_jobs=10)

        answers = fill(queue, "acme", 12)

        assert num_accepted(answers) == 10
        assert isinstance(answers[10], Refused)
        assert answers[10].reason == "full_jobs"

    def test_when_another_finds_it_full_then_the_next_places_are_its(self, queue: Queue) -> None:
        queue.configure(max_waiting_jobs=10)
        fill(queue, "acme", 10)
        assert num_accepted(fill(queue, "other", 1)) == 0
        queue.worker("W").pull(sequences=2)

        assert num_accepted(fill(queue, "acme", 2, "b")) == 0
        assert num_accepted(fill(queue, "other", 2)) == 1
        check(queue)

    def test_when_the_other_has_been_away_for_a_day_then_it_is_alone_again(self, shared: Queue) -> None:
        shared.pass_time(limits.TENANT_KEPT_MS + 1)
        shared.worker("B").beat()

        assert num_accepted(fill(shared, "acme", 10)) == 10


class TestGivenJobsThatAreCancelledAtOnce:
    def test_when_the_queue_is_full_then_they_are_taken_and_others_are_not(self, shared: Queue) -> None:
        fill(shared, "acme", 5)
        fill(shared, "other", 5)
        ending = [new_job(name, "acme", not_before_ms=shared.now_ms + 60_000) for name in ("x", "y")]

        answers = shared.run(calls.submit(shared.keys, ending, is_to_end=True))

        assert num_accepted(answers) == 2
        assert shared.run(calls.cancel(shared.keys, [job.id for job in ending])) == ["cancelled"] * 2
        assert num_accepted(fill(shared, "acme", 1, "z")) == 0
        check(shared)


class TestGivenATenantAmongOthers:
    def test_when_it_floods_then_half_is_left_and_the_refusal_says_why(self, shared: Queue) -> None:
        answers = fill(shared, "acme", 8)

        assert num_accepted(answers) == 5
        refused = answers[5]
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.waiting_jobs, refused.bound) == ("tenant_full", 5, 5)
        assert refused.message == (
            "tenant acme has 5 jobs waiting and may have 5 now: 50 % of what other tenants leave of the 10 that the "
            "queue takes"
        )
        check(shared)

    def test_when_several_flood_then_there_is_still_room_for_the_next(self, shared: Queue) -> None:
        accepted = [num_accepted(fill(shared, tenant, 10)) for tenant in ("a", "b", "c", "d", "e")]

        assert accepted == [5, 2, 1, 1, 1]

    def test_when_a_call_has_jobs_of_two_then_only_the_one_at_its_share_is_refused(self, shared: Queue) -> None:
        fill(shared, "acme", 5)

        answers = shared.submit(new_job("x", "acme"), new_job("y", "other"), new_job("z", "acme"))

        assert [type(answer) for answer in answers] == [Refused, Accepted, Refused]

    @pytest.mark.parametrize(("setting", "bound"), [("max_waiting_tokens", 300), ("max_waiting_bytes", 10 * NUM_BYTES)])
    def test_when_another_bound_is_nearer_then_the_share_is_of_that(
        self, shared: Queue, setting: str, bound: int
    ) -> None:
        shared.configure(max_waiting_jobs=1000, **{setting: bound})

        answers = shared.submit(*[new_job(name, "acme") for name in "abcdefg"])

        assert num_accepted(answers) == 5

    def test_when_a_job_of_it_leaves_then_another_may_come(self, shared: Queue) -> None:
        fill(shared, "acme", 5)
        shared.cancel(new_job("a00", "acme").id)

        assert num_accepted(fill(shared, "acme", 2, "b")) == 1

    def test_when_its_jobs_are_delayed_then_they_count(self, shared: Queue) -> None:
        later_ms = shared.now_ms + 1000
        answers = shared.submit(*[new_job(name, "acme", not_before_ms=later_ms) for name in "abcdefg"])

        assert num_accepted(answers) == 5
        assert shared.look().tenants == (("acme", 5, 150, 5 * NUM_BYTES),)

    def test_when_it_holds_nothing_then_one_job_is_taken_however_small_the_share(self, shared: Queue) -> None:
        shared.configure(max_waiting_jobs=1)

        assert num_accepted(fill(shared, "acme", 2)) == 1

    def test_when_the_share_is_all_then_only_the_queue_bounds_it(self, shared: Queue) -> None:
        shared.configure(tenant_share_percent=100)

        assert num_accepted(fill(shared, "acme", 12)) == 10

    def test_when_many_idle_tenants_are_known_then_they_are_forgotten_sooner(self, shared: Queue) -> None:
        idle = {f"t{number}": f"0 0 0 {shared.now_ms}" for number in range(limits.TENANTS_KEPT + 20)}
        shared.client.hset(shared.keys.key("tenants"), mapping=idle)
        worker = shared.worker("B")
        for _ in range(3):
            worker.beat()
            shared.pass_time(1000)

        assert limits.TENANTS_KEPT - 32 <= shared.client.hlen(shared.keys.key("tenants")) <= limits.TENANTS_KEPT

    def test_when_their_key_is_foreign_then_the_queue_goes_on_and_a_beat_replaces_it(self, shared: Queue) -> None:
        shared.client.set(shared.keys.key("tenants"), "foreign")

        assert num_accepted(shared.submit(*[new_job(name, "acme") for name in "abcdefghijkl"])) == 10
        shared.worker("B").beat()
        assert shared.look().tenants == (("acme", 10, 300, 10 * NUM_BYTES),)


class TestGivenSeveralPartitions:
    def test_when_a_bound_is_set_then_each_takes_its_part(self, queue: Queue) -> None:
        queue.configure(max_waiting_jobs=10, partitions=4)

        answers = fill(queue, "acme", 3)

        assert num_accepted(answers) == 2
        assert isinstance(answers[2], Refused)
        assert (answers[2].bound, answers[2].message) == (2, "this partition of the queue holds 2 jobs and takes 2")

    @pytest.mark.parametrize(("bound", "taken"), [(0, 0), (1, 1)])
    def test_when_it_is_smaller_than_their_number_then_each_takes_one_or_none(
        self, queue: Queue, bound: int, taken: int
    ) -> None:
        queue.configure(max_waiting_jobs=bound, partitions=4)

        assert num_accepted(fill(queue, "acme", 3)) == taken
