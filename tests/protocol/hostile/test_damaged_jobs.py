"""A submitting user writes anything into its own jobs' rows: that job fails alone, others are served meanwhile."""

import itertools
import math

import pytest

from sluice.protocol import calls
from sluice.protocol.calls import Broken, LeasedJob
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, ending, new_job, short, tokens

RARE = ["not_before", "ttl", "deadline", "retry", "gap", "line"]
POISONS: list[tuple[str, object]] = [
    *zip(RARE, itertools.cycle((b"abc", math.nan, math.inf, -1, 1.5, 1e300)), strict=False),
    ("choices", 0),
    ("choices", 200),
    ("class", 10),
    ("version", 2**31),
    ("max_tokens", 2**32 - 1),
    ("seed", b"x"),
    ("seed", b"9" * 200),
    ("state", "unknown"),
    ("entry", b"x"),
    ("entry", b"9" * 20 + b"-1"),
    ("spec", b"x" * 300_000),
    ("resolved", b"x" * 300_000),
    ("batch", 5),
    ("x", b"1"),
    ("row", b""),
    ("row", b"2"),
    ("row", b"1q" + b"\xff" * 200),
]
"""A field and what it becomes: of `row`, the whole."""

READABLE: list[tuple[str, object]] = [
    ("fingerprint", b"\xff"),
    ("seed", b"9" * 20),
    ("resolved", b"\xff"),
    ("deaths", b"\xff"),
    ("key", b"\0"),
]
"""What scripts pass on; the worker must read each row by itself."""


NAMES_OF = {"state": "row"}
"""Fields that are not read one by one."""


def damage(queue: Queue, job_id: JobId, field: str, value: object) -> None:
    """Write one field of a job's row, as its submitting user may."""
    if field == "row":
        queue.client.set(queue.keys.job(job_id), value)
    else:
        queue.write_fields(job_id, **{field: value})


def garbage(queue: Queue) -> str:
    return str(queue.entries(queue.keys.key("garbage")))


class TestGivenADamagedJobOnItsLane:
    """The victim's job waits behind it."""

    @pytest.mark.parametrize(("field", "value"), POISONS)
    def test_when_workers_pull_then_others_run_and_it_is_named(
        self, one_queue: Queue, field: str, value: object
    ) -> None:
        queue = one_queue
        poison = queue.add("poison", "evil")
        queue.add("one", "victim")
        damage(queue, poison, field, value)

        jobs = queue.worker("A").pull().jobs

        assert short(jobs) == ["one"]
        assert f"not a job: {NAMES_OF.get(field, field)}" in garbage(queue)
        assert queue.worker("A").advance(ending(jobs[0], 0, 2)) == [calls.Ok(None)]
        assert queue.run(calls.status(queue.keys, [poison])) == [None]

    @pytest.mark.parametrize(("field", "value"), READABLE)
    def test_when_only_the_worker_can_tell_then_the_row_fails_alone(
        self, one_queue: Queue, field: str, value: object
    ) -> None:
        queue = one_queue
        damage(queue, queue.add("poison", "evil"), field, value)
        queue.add("one", "victim")

        jobs = {job.id: job for job in queue.worker("A").pull().jobs}

        assert set(jobs) == {"0.evil.poison", "0.victim.one"}
        if field == "seed":
            assert jobs[JobId("0.evil.poison")].spec == b""

    def test_when_its_prompt_is_too_large_then_it_goes_to_the_dead_set(self, one_queue: Queue) -> None:
        queue = one_queue
        poison = queue.add("poison", "evil")
        queue.add("one", "victim")
        queue.client.set(queue.keys.payload(poison), b"x" * 5_000_000)

        assert short(queue.worker("A").pull().jobs) == ["one"]
        assert queue.view(poison).error_code == "payload_lost"

    def test_when_its_entry_is_anothers_then_ending_it_removes_nothing_there(self, one_queue: Queue) -> None:
        queue = one_queue
        victim = queue.add("one", "victim")
        poison = queue.add("poison", "evil", ttl_ms=10)
        entry = queue.fields("victim", "one")["entry"]
        queue.write_fields(poison, entry=entry)

        queue.pass_time(20)
        queue.fire_timers()
        queue.cancel(poison)

        assert queue.worker("A").take().id == victim


class TestGivenADamagedJobThatRuns:
    @pytest.fixture
    def running(self, one_queue: Queue) -> tuple[LeasedJob, LeasedJob]:
        """The poison and the victim's job, both leased to A."""
        one_queue.add("poison", "evil")
        one_queue.add("one", "victim")
        poison, victim = one_queue.worker("A").pull().jobs
        return poison, victim

    @pytest.mark.parametrize(("field", "value"), [*POISONS, ("state", "done"), ("state", "queued"), ("choices", 64)])
    def test_when_its_owner_publishes_then_only_it_is_dropped(
        self, one_queue: Queue, running: tuple[LeasedJob, LeasedJob], field: str, value: object
    ) -> None:
        poison, victim = running
        damage(one_queue, poison.id, field, value)

        first, second = one_queue.worker("A").advance(ending(poison, 0, 2), ending(victim, 0, 2))

        assert second == calls.Ok(None)
        assert one_queue.state(victim.id) is JobState.DONE
        if (field, value) != ("choices", 64):
            assert isinstance(first, Broken)
            assert one_queue.lease(poison.id) is None

    @pytest.mark.parametrize(("field", "value"), [*POISONS, ("state", "done"), ("state", "queued")])
    def test_when_its_owner_dies_then_the_victims_job_moves(
        self, one_queue: Queue, running: tuple[LeasedJob, LeasedJob], field: str, value: object
    ) -> None:
        poison, victim = running
        damage(one_queue, poison.id, field, value)
        one_queue.pass_time(60_000)

        jobs = one_queue.worker("B").pull().jobs

        assert victim.id in [job.id for job in jobs]

    @pytest.mark.parametrize("state", ["done", "unknown"])
    def test_when_its_pull_reply_was_lost_then_a_beat_forgets_it(
        self, one_queue: Queue, running: tuple[LeasedJob, LeasedJob], state: str
    ) -> None:
        poison, victim = running
        damage(one_queue, poison.id, "state", state)
        worker = one_queue.worker("A")

        worker.beat(victim.id, processed=1)

        assert one_queue.lease(poison.id) is None
        assert worker.advance(tokens(victim, 0, 2)) == [calls.Ok(None)]


class TestGivenForeignNumbersInSharedKeys:
    @pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "-5", "x"])
    def test_when_virtual_tokens_are_foreign_then_the_tenant_is_served(self, one_queue: Queue, value: str) -> None:
        one_queue.add("other", "other")
        one_queue.client.hset(one_queue.keys.key("served"), "victim", value)
        one_queue.add("one", "victim")

        assert sorted(short(one_queue.worker("A").pull().jobs)) == ["one", "other"]

    @pytest.mark.parametrize("value", ["9 9 " + "9" * 30 + " 9 9 9", "x", "nan inf -1"])
    def test_when_the_lanes_numbers_are_foreign_then_a_new_job_is_readable(self, one_queue: Queue, value: str) -> None:
        one_queue.client.hset(one_queue.keys.key("depth"), "0:victim", value)

        one_queue.add("one", "victim")

        assert one_queue.worker("A").take().id == "0.victim.one"

    @pytest.mark.parametrize(("at", "value"), [(3, b"nan"), (3, b"-5"), (3, b"inf"), (3, b"x"), (2, b"when")])
    def test_when_a_lanes_entry_is_foreign_then_the_next_one_runs(
        self, one_queue: Queue, at: int, value: bytes
    ) -> None:
        queue = one_queue
        entry = [b"job", b"0.evil.x", b"at", b"5"]
        entry[at] = value
        queue.add("one", "evil")
        queue.client.execute_command("XADD", queue.keys.lane(0, "evil"), "*", *entry)
        queue.submit(new_job("two", "evil"))

        assert short(queue.worker("A").pull().jobs) == ["one", "two"]
        assert "not an entry of ours" in garbage(queue)
