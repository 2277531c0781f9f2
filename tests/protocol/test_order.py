"""Decision "Order": the class, then the mode, then the older head; in a lane first come, first served."""

import pytest
from redis.exceptions import ResponseError

from sluice.protocol import limits
from sluice.protocol.calls import Call, Ok, QueueSettings
from sluice.protocol.states import JobState
from tests.grids import cross_section
from tests.protocol.driving import Queue, check, drain, ending, new_job, short, tokens


def served_by(queue: Queue, tenant: str) -> float:
    """A tenant's virtual tokens."""
    return float(queue.hash_of("served")[tenant])


@pytest.mark.every_server
class TestGivenOneLane:
    def test_when_it_is_drained_then_first_come_is_first_served(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i:02}") for i in range(50)])

        assert drain(queue, queue.worker("A")) == [f"j{i:02}" for i in range(50)]
        check(queue)

    def test_when_a_job_is_given_back_then_it_goes_first_and_keeps_its_submit_time(self, queue: Queue) -> None:
        old = queue.add("old")
        worker = queue.worker("A")
        job = worker.take()
        queue.pass_time(1000)
        queue.add("new", priority=9)
        worker.give_back(job)

        jobs = worker.pull().jobs

        assert short(jobs) == ["old", "new"]
        assert jobs[0].submitted_ms == job.submitted_ms == queue.view(old).submitted_ms

    def test_when_jobs_wait_then_what_is_ahead_is_an_upper_bound(self, queue: Queue) -> None:
        ids = [queue.add(f"j{i}") for i in range(4)]
        queue.worker("A").pull(sequences=1)

        assert [queue.view(one).ahead_jobs for one in ids[1:]] == [0, 1, 2]
        assert [queue.view(one).ahead_tokens for one in ids[1:]] == [0, 30, 60]
        queue.cancel(ids[2])
        assert queue.view(ids[3]).ahead_jobs == 2


class TestGivenClasses:
    def test_when_all_wait_then_the_highest_class_goes_first(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"p{p}", priority=p) for p in (0, 9, 3, 5)])

        assert drain(queue, queue.worker("A")) == ["p9", "p5", "p3", "p0"]

    def test_when_lower_classes_have_waited_long_then_the_highest_still_goes_first(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"old{i}", "old") for i in range(40)])
        queue.pass_time(600_000)
        queue.add("fresh", "fresh", priority=9)

        assert drain(queue, queue.worker("A"))[0] == "fresh"
        check(queue)

    @pytest.mark.parametrize(("mode", "at_once"), cross_section(["fifo", "fair", "deadline"], [1, 7, 1000]))
    def test_when_the_highest_never_ends_then_lower_ones_get_their_share(
        self, queue: Queue, mode: str, at_once: int
    ) -> None:
        queue.configure(mode=mode)
        queue.submit(*[new_job(f"high{i}", "high", priority=9) for i in range(250)])
        queue.submit(*[new_job(f"low{i}", "low", prompt_tokens=40) for i in range(30)])
        worker = queue.worker("A")

        order: list[str] = []
        while len(order) < 200:
            order += short(worker.pull(sequences=at_once).jobs)

        tokens_of = {"high": 30, "low": 60}
        for end in range(1, len(order)):
            kinds = [name.rstrip("0123456789") for name in order[:end]]
            total, low = sum(map(tokens_of.__getitem__, kinds)), 60 * kinds.count("low")
            assert 0.05 * total - 60 <= low <= 0.05 * total, (end, order[:end])
        check(queue)

    def test_when_it_is_the_turn_of_lower_classes_then_ageing_decides_among_them(self, queue: Queue) -> None:
        queue.configure(age_step_ms=1000)
        queue.add("class0", "a", priority=0)
        queue.pass_time(3500)
        queue.add("class3", "b", priority=3)
        queue.add("class5", "c", priority=5)
        queue.pass_time(10)
        queue.submit(*[new_job(f"high{i}", "high", priority=9) for i in range(70)])

        order = drain(queue, queue.worker("A"))

        assert [name for name in order if name.startswith("class")] == ["class5", "class0", "class3"]

    def test_when_only_one_class_waits_then_nothing_is_saved_for_others(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.submit(*[new_job(f"high{i}", "high", priority=9) for i in range(60)])
        drain(queue, worker)
        queue.submit(*[new_job(f"low{i}", "low") for i in range(3)])
        queue.submit(*[new_job(f"again{i}", "high", priority=9) for i in range(3)])

        assert [name.rstrip("012") for name in drain(queue, worker)] == ["again"] * 3 + ["low"] * 3

    def test_when_ageing_is_off_then_classes_are_strict(self, queue: Queue) -> None:
        queue.configure(age_step_ms=0)
        queue.add("old", "one", priority=0)
        queue.pass_time(10_000_000)
        queue.submit(*[new_job(f"new{i:02}", "two", priority=1) for i in range(40)])

        assert drain(queue, queue.worker("A")) == [*(f"new{i:02}" for i in range(40)), "old"]


class TestGivenModeFifo:
    def test_when_tenants_wait_then_the_oldest_head_goes_first(self, queue: Queue) -> None:
        queue.configure(mode="fifo")
        for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("c1", "c")):
            queue.add(name, tenant)
            queue.pass_time(10)

        assert drain(queue, queue.worker("A")) == ["a1", "b1", "a2", "c1"]
        check(queue)


class TestGivenModeFair:
    def test_when_one_tenant_floods_then_the_others_get_their_share(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"flood{i}", "flood") for i in range(30)])
        queue.submit(*[new_job(f"calm{i}", "calm") for i in range(3)])

        order = drain(queue, queue.worker("A"))

        assert order[:6].count("calm0") + order[:6].count("calm1") + order[:6].count("calm2") == 3
        check(queue)

    def test_when_tenants_have_weights_then_tokens_go_by_them(self, queue: Queue) -> None:
        queue.configure(weights={"big": 3.0})
        queue.submit(*[new_job(f"b{i}", "big") for i in range(40)], *[new_job(f"s{i}", "small") for i in range(40)])

        first = short(queue.worker("A").pull(sequences=20).jobs)

        assert sum(name.startswith("b") for name in first) == 15

    @pytest.mark.parametrize("weight", ["-1", "0", "nan", "inf", "1e-300", "abc"])
    def test_when_a_weight_is_no_share_then_it_is_refused_and_counts_as_one(self, queue: Queue, weight: str) -> None:
        bad, good = ("weight:odd", weight), ("weight:odd", "0.5")

        with pytest.raises(ResponseError, match=r"weight:odd must be a number from 0\.001 to 1000"):
            queue.run(Call("configure", queue.keys.fixed(), ("mode", "fifo", *good, *bad), lambda reply: reply))

        assert "mode" not in queue.hash_of("config"), "refused as a whole"
        queue.client.hset(queue.keys.key("weights"), "odd", weight)
        queue.submit(*[new_job(f"o{i}", "odd") for i in range(20)], *[new_job(f"e{i}", "even") for i in range(20)])
        first = short(queue.worker("A").pull(sequences=20).jobs)
        assert sum(name.startswith("o") for name in first) == 10

    @pytest.mark.parametrize("weight", [-1, 0, float("nan"), float("inf")])
    def test_when_a_weight_is_no_share_then_the_settings_are_a_mistake(self, weight: float) -> None:
        with pytest.raises(ValueError, match="the weight of tenant a must be from"):
            QueueSettings(weights={"a": weight})

    def test_when_jobs_differ_in_cost_then_tokens_count_and_not_jobs(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"l{i}", "large", prompt_tokens=130) for i in range(20)])
        queue.submit(*[new_job(f"s{i}", "small") for i in range(20)])

        first = short(queue.worker("A").pull(sequences=12).jobs)

        assert sum(name.startswith("l") for name in first) == 2

    def test_when_a_tenant_was_away_then_it_has_saved_nothing_up(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.submit(*[new_job(f"x{i}", "busy") for i in range(20)])
        worker.pull()
        queue.submit(*[new_job(f"y{i}", "busy") for i in range(10)])
        queue.submit(*[new_job(f"z{i}", "back") for i in range(10)])

        first = short(worker.pull(sequences=10).jobs)

        assert sum(name.startswith("z") for name in first) in (5, 6)

    def test_when_a_tenant_comes_while_no_job_waits_then_it_has_saved_nothing_up_either(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.submit(*[new_job(f"x{i}", "busy") for i in range(20)])
        worker.pull()
        queue.submit(*[new_job(f"z{i}", "new") for i in range(10)])
        queue.submit(*[new_job(f"y{i}", "busy") for i in range(10)])

        first = short(worker.pull(sequences=10).jobs)

        assert sum(name.startswith("y") for name in first) >= 4

    def test_when_a_job_ends_early_then_its_tenant_gets_the_difference_back(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.add("a")
        job = worker.take()
        assert queue.hash_of("served")["t"] == "30"

        worker.advance(ending(job, 0, 2))

        assert queue.hash_of("served")["t"] == "12"

    @pytest.mark.parametrize(("scheduled_ms", "expected"), [(None, 0), (5, 10)], ids=["refused", "computed"])
    def test_when_a_job_fails_then_its_prompt_is_charged_if_it_was_computed(
        self, queue: Queue, scheduled_ms: int | None, expected: int
    ) -> None:
        worker = queue.worker("A")
        queue.add("a", prompt_tokens=None, prompt_bytes=40)
        end = ending(worker.take(), 0, state=JobState.FAILED, error_code="request_too_large")

        worker.advance(end._replace(first_scheduled_ms=scheduled_ms))

        assert served_by(queue, "t") == expected

    def test_when_an_output_exceeds_the_reserve_then_it_is_charged_while_it_is_written(self, queue: Queue) -> None:
        queue.configure(reserve_tokens=100)
        worker = queue.worker("A")
        queue.add("a", max_tokens=1000, choices=2)
        job = worker.take()
        charged = [served_by(queue, "t")]

        for at in range(0, 600, 60):
            worker.advance(tokens(job, at, 60), tokens(job, at, 60, choice=1))
            charged.append(served_by(queue, "t"))
        worker.advance(ending(job, 600), ending(job, 600, choice=1, output_tokens=1200))

        assert charged[0] == 10 + 2 * 100
        lag = 2 * (limits.CHARGE_EVERY_TOKENS - 100)
        written = [10 + 2 * at for at in range(0, 601, 60)]
        assert all(wrote - lag <= paid <= wrote + 200 for wrote, paid in zip(written, charged, strict=True)), charged
        assert served_by(queue, "t") == 10 + 1200
        check(queue)

    def test_when_it_comes_back_amid_a_long_output_then_it_is_not_charged_twice(self, queue: Queue) -> None:
        queue.configure(reserve_tokens=100)
        worker = queue.worker("A")
        queue.add("a", max_tokens=1000)
        job = worker.take()
        worker.advance(tokens(job, 0, 300))
        before = served_by(queue, "t")
        worker.give_back(job)
        job = worker.take()

        assert served_by(queue, "t") == before == 10 + 300 + 100
        worker.advance(ending(job, 300))
        assert served_by(queue, "t") == 10 + 300

    def test_when_the_served_key_is_a_string_then_a_long_output_waits_unwritten(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.add("a", max_tokens=1000)
        job = worker.take()
        queue.client.delete(queue.keys.key("served"))
        queue.client.set(queue.keys.key("served"), "foreign")

        with pytest.raises(ResponseError, match="served"):
            worker.advance(tokens(job, 0, 300))

        assert queue.channel(job.id) == []
        queue.client.delete(queue.keys.key("served"))
        assert worker.advance(tokens(job, 0, 300)) == [Ok()]

    def test_when_a_failed_job_is_requeued_often_then_its_tenant_pays_its_tokens_once(self, queue: Queue) -> None:
        worker = queue.worker("A")
        job_id = queue.add("a")
        for at in range(3):
            worker.advance(ending(worker.take(), at, 1, state=JobState.FAILED))
            queue.requeue(job_id)

        assert queue.hash_of("served")["t"] == "13", "10 of the prompt, 3 of the output"

    def test_when_a_job_comes_back_then_its_tenant_is_not_charged_twice(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.add("a")
        worker.give_back(worker.take())
        worker.take()

        assert queue.hash_of("served")["t"] == "30"

    def test_when_many_tenants_have_come_and_gone_then_they_are_forgotten(self, queue: Queue) -> None:
        served = queue.keys.key("served")
        gone = {f"gone{i}": i for i in range(limits.SERVED_KEPT + 500)}
        waiting = {f"waits{i}": 5 for i in range(40)}
        queue.client.hset(served, mapping={**gone, ":time": 1200, **waiting})
        queue.submit(*[new_job("a", tenant) for tenant in waiting])

        for _ in range(300):
            queue.fire_timers()

        left = queue.hash_of("served")
        # One more is kept for each lane that waits.
        assert limits.SERVED_KEPT - limits.SLICE_JOBS <= len(left) <= limits.SERVED_KEPT + len(waiting)
        assert {*waiting, ":time"} <= set(left)
        assert all(f"gone{i}" in left for i in range(1201, limits.SERVED_KEPT + 500))

    def test_when_tenants_come_for_one_job_each_then_a_bounded_number_is_kept(self, one_queue: Queue) -> None:
        queue, worker = one_queue, one_queue.worker("A")
        for i in range(2 * limits.SERVED_KEPT):
            queue.add("j", f"once{i}")
            worker.advance(ending(worker.take(), 0, 1))

        assert len(queue.hash_of("served")) <= limits.SERVED_KEPT + limits.SLICE_JOBS
        check(queue)

    def test_when_all_are_ahead_then_those_with_the_greatest_lead_are_kept(self, queue: Queue) -> None:
        names = [f"ahead{i}" for i in range(limits.SERVED_KEPT + 500)]
        queue.client.hset(queue.keys.key("served"), mapping={name: i + 1 for i, name in enumerate(names)})

        for _ in range(300):
            queue.fire_timers()

        left = queue.hash_of("served")
        assert limits.SERVED_KEPT - limits.SLICE_JOBS <= len(left) <= limits.SERVED_KEPT
        assert set(names[-100:]) <= set(left)

    def test_when_more_tenants_wait_than_are_kept_then_each_keeps_its_share(self, one_queue: Queue) -> None:
        num_tenants = limits.SERVED_KEPT + 200
        names = [f"waits{i}" for i in range(num_tenants)]
        for at in range(0, num_tenants, 200):
            one_queue.submit(*[new_job("j", name) for name in names[at : at + 200]])
        one_queue.client.hset(one_queue.keys.key("served"), mapping=dict.fromkeys(names, 5))

        for _ in range(50):
            one_queue.fire_timers()

        assert set(names) <= set(one_queue.hash_of("served"))

    def test_when_two_have_the_same_share_then_the_older_head_goes_first(self, queue: Queue) -> None:
        queue.add("old", "zz")
        queue.pass_time(5)
        queue.add("new", "aa")

        assert drain(queue, queue.worker("A")) == ["old", "new"]


class TestGivenModeDeadline:
    def test_when_heads_have_deadlines_then_the_least_slack_goes_first(self, queue: Queue) -> None:
        queue.configure(mode="deadline")
        now = queue.look().server_ms
        queue.add("none", "a")
        queue.add("late", "b", deadline_ms=now + 90_000)
        queue.add("soon", "c", deadline_ms=now + 30_000)

        assert drain(queue, queue.worker("A")) == ["soon", "late", "none"]
        check(queue)

    def test_when_the_cost_takes_time_then_it_lessens_the_slack(self, queue: Queue) -> None:
        queue.configure(mode="deadline", ms_per_token=100)
        now = queue.look().server_ms
        queue.add("light", "a", deadline_ms=now + 60_000)
        queue.add("heavy", "b", deadline_ms=now + 80_000, prompt_tokens=500)

        assert drain(queue, queue.worker("A")) == ["heavy", "light"]

    def test_when_a_head_has_no_deadline_then_it_is_due_ten_ageing_steps_after_arrival(self, queue: Queue) -> None:
        queue.configure(mode="deadline", age_step_ms=1000)
        now = queue.look().server_ms
        queue.add("none", "a")
        queue.add("sooner", "b", deadline_ms=now + 9_999)
        queue.add("later", "c", deadline_ms=now + 10_001)

        assert drain(queue, queue.worker("A")) == ["sooner", "none", "later"]

    def test_when_the_step_changes_then_lanes_that_wait_are_ordered_anew(self, queue: Queue) -> None:
        queue.configure(mode="deadline", age_step_ms=0)
        queue.add("none", "a")
        queue.add("some", "b", deadline_ms=queue.look().server_ms + 60_000)

        queue.configure(age_step_ms=1000)

        assert drain(queue, queue.worker("A")) == ["none", "some"]

    def test_when_ageing_is_off_then_those_with_a_deadline_always_go_first(self, queue: Queue) -> None:
        queue.configure(mode="deadline", age_step_ms=0)
        queue.add("none", "a")
        queue.pass_time(10_000_000)
        queue.add("some", "b", deadline_ms=queue.look().server_ms + 60_000)

        assert drain(queue, queue.worker("A")) == ["some", "none"]


class TestGivenAModeThatChanges:
    @pytest.mark.parametrize("mode", ["fifo", "deadline"])
    def test_when_lanes_wait_then_they_are_ordered_anew(self, queue: Queue, mode: str) -> None:
        now = queue.look().server_ms
        queue.add("first", "a", deadline_ms=now + 90_000)
        queue.pass_time(10)
        queue.add("second", "b", deadline_ms=now + 30_000)
        worker = queue.worker("A")

        queue.configure(mode=mode)

        assert drain(queue, worker) == (["first", "second"] if mode == "fifo" else ["second", "first"])

    def test_when_it_becomes_fair_then_no_tenant_starves(self, queue: Queue) -> None:
        queue.configure(mode="fifo")
        queue.submit(*[new_job(f"a{i}", "a") for i in range(10)])
        queue.configure(mode="fair")
        queue.submit(*[new_job(f"b{i}", "b") for i in range(10)])

        first = short(queue.worker("A").pull(sequences=10).jobs)

        assert sum(name.startswith("a") for name in first) == 5
