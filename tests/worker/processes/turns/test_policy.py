"""Which model has the device: what holds for any demands, and for any arrivals in virtual time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.turns.simulation import Job, ModelLoad, Simulation
from sluice.worker.processes.turns.costs import NUM_LAST, UNKNOWN_S, SwitchCosts
from sluice.worker.processes.turns.policy import Card, Credit, Demand, TurnRules, choose, weight_of
from tests.examples import examples

RULES = TurnRules(share=0.5)
NAMES = ("a", "b", "c")
BUSY = Demand(name="a", running_jobs=3)
IDLE = Demand(name="a")
COSTS: dict[str, float] = dict.fromkeys(NAMES, 5.0)


def card(present: str | None = "a", *, credit_s: float = 100.0, weight: float = 1.0) -> Card:
    """A device that `a` has, with credit to spend."""
    return Card(present=present, costs=COSTS, credit_s=credit_s, weight=weight, turn_s=RULES.turn_s)


def waiting(name: str, wait_s: float, *, weight: float = 1.0) -> Demand:
    """A member with one job that has waited."""
    return Demand(name=name, waiting_jobs=1, waits_s=wait_s, weighted_wait_s=weight * wait_s, weight=weight)


seconds = st.floats(0, 1000)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    """Any demands of three members."""
    return [
        Demand(
            name=name,
            waiting_jobs=draw(st.integers(0, 3)),
            running_jobs=draw(st.integers(0, 2)),
            waits_s=draw(seconds),
            weighted_wait_s=draw(seconds),
            deadline_s=draw(st.none() | seconds),
            work_s=draw(st.none() | seconds),
            can_run=draw(st.booleans()),
        )
        for name in NAMES
    ]


@st.composite
def cards(draw: st.DrawFn) -> Card:
    """Any device."""
    costs = {name: draw(st.floats(0.1, 100)) for name in NAMES}
    return Card(
        present=draw(st.none() | st.sampled_from(NAMES)),
        costs=costs,
        credit_s=draw(st.floats(-100, 100)),
        turn_s=draw(seconds),
        weight=draw(st.floats(1, 10)),
    )


class TestGivenAnyDemands:
    @given(demands(), cards())
    def test_when_one_is_chosen_then_it_can_run_and_a_switch_is_to_one_with_work(
        self, of_all: list[Demand], device: Card
    ) -> None:
        able = {one.name: one for one in of_all if one.can_run}

        chosen = choose(of_all, device, RULES)

        assert (chosen is None) == (not able)
        if chosen is not None and device.present in able and chosen != device.present:
            assert able[chosen].has_work

    @given(demands(), cards())
    def test_when_the_present_one_works_then_only_credit_takes_the_device_from_it(
        self, of_all: list[Demand], device: Card
    ) -> None:
        present = next((one for one in of_all if one.name == device.present and one.can_run and one.has_work), None)

        chosen = choose(of_all, device, RULES)

        if present is not None and chosen is not None and chosen != present.name:
            assert device.costs[chosen] <= device.credit_s

    @given(demands(), cards())
    def test_when_the_present_one_ends_sooner_than_a_switch_then_only_patience_ends_its_turn(
        self, of_all: list[Demand], device: Card
    ) -> None:
        present = next((one for one in of_all if one.name == device.present and one.can_run and one.has_work), None)

        chosen = choose(of_all, device, RULES)

        if present is not None and chosen is not None and chosen != present.name and present.work_s is not None:
            is_overdue = next(one for one in of_all if one.name == chosen).waits_s >= RULES.patience_s
            assert is_overdue or present.work_s > device.costs[chosen]

    @given(demands(), cards())
    def test_when_others_are_overdue_and_credit_suffices_then_the_oldest_is_next(
        self, of_all: list[Demand], device: Card
    ) -> None:
        rich = replace(device, credit_s=100.0, turn_s=RULES.turn_s)
        overdue = [
            one for one in of_all if one.can_run and one.has_work and one.waits_s >= 60 and one.name != rich.present
        ]

        chosen = choose(of_all, rich, RULES)

        if overdue:
            oldest = max(overdue, key=lambda one: one.waits_s)
            assert next(one for one in overdue if one.name == chosen).waits_s == oldest.waits_s


class TestGivenAPresentModel:
    def test_when_nobody_has_work_then_it_stays(self) -> None:
        assert choose([Demand(name="b"), IDLE], card(), RULES) == "a"

    def test_when_it_has_no_work_then_another_with_work_comes_at_once_without_credit(self) -> None:
        assert choose([IDLE, waiting("b", 0.0)], card(credit_s=-50), RULES) == "b"

    def test_when_there_is_none_and_no_work_then_the_first_that_can_run_comes(self) -> None:
        unable = Demand(name="a", can_run=False)

        assert choose([unable, Demand(name="b"), Demand(name="c")], card(None), RULES) == "b"

    @pytest.mark.parametrize(("wait_s", "chosen"), [(19.9, "a"), (20.0, "b")])
    def test_when_the_ways_there_and_back_are_the_share_of_a_wait_then_it_is_worth_a_switch(
        self, wait_s: float, chosen: str
    ) -> None:
        assert choose([BUSY, waiting("b", wait_s)], card(), RULES) == chosen

    @pytest.mark.parametrize(
        ("own", "weight", "wait_s", "chosen"),
        [(1, 2, 9.9, "a"), (1, 2, 10, "b"), (4, 1, 59, "a"), (4, 1, 60, "b"), (2, 2, 20, "b")],
    )
    def test_when_classes_differ_then_the_higher_one_waits_less(
        self, own: float, weight: float, wait_s: float, chosen: str
    ) -> None:
        assert choose([BUSY, waiting("b", wait_s, weight=weight)], card(weight=own), RULES) == chosen

    @pytest.mark.parametrize(("deadline_s", "chosen"), [(4.0, "a"), (5.1, "b"), (15.0, "b"), (15.1, "a"), (None, "a")])
    def test_when_a_deadline_can_still_be_met_and_soon_not_then_it_is_worth_a_switch(
        self, deadline_s: float | None, chosen: str
    ) -> None:
        pressed = replace(waiting("b", 0.1), deadline_s=deadline_s)

        assert choose([BUSY, pressed], card(), RULES) == chosen

    def test_when_the_oldest_cannot_be_afforded_then_no_cheaper_one_overtakes_it(self) -> None:
        device = replace(card(credit_s=6.0), costs={"a": 1.0, "b": 7.0, "c": 1.0})

        assert choose([BUSY, waiting("b", 90), waiting("c", 80)], device, RULES) == "a"

    def test_when_its_turn_has_just_begun_then_it_is_not_taken_away(self) -> None:
        new = replace(card(), turn_s=RULES.turn_s - 0.1)

        assert choose([BUSY, waiting("b", 1000)], new, RULES) == "a"
        assert choose([IDLE, waiting("b", 1000)], new, RULES) == "b"


class TestGivenClasses:
    def test_when_a_class_is_higher_then_its_waits_count_more(self) -> None:
        assert [weight_of(priority) for priority in (0, 4, 9)] == [1.0, 2.0, 3.25]


class TestGivenCredit:
    @given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), max_size=30))
    def test_when_time_and_switches_pass_then_savings_and_debt_are_bounded(
        self, steps: list[tuple[float, float]]
    ) -> None:
        credit = Credit.full(COSTS, RULES)

        for elapsed_s, cost_s in steps:
            credit = credit.grown(elapsed_s, COSTS, RULES).spent(cost_s, COSTS)

            assert -10.0 <= credit.seconds <= Credit.most(COSTS, RULES) == 300.0


class TestGivenMeasuredSwitches:
    def test_when_none_was_measured_then_the_cost_is_a_guess_then_that_of_others_then_its_own(self) -> None:
        costs = SwitchCosts(["a", "b"])
        assert costs.expected() == {"a": UNKNOWN_S, "b": UNKNOWN_S}

        costs.note("a", 4.0)
        assert costs.expected() == {"a": 4.0, "b": 4.0}

        for cost_s in (100.0, *[2.0] * NUM_LAST):
            costs.note("b", cost_s)
        assert costs.expected() == {"a": 4.0, "b": 2.0}


@st.composite
def days(draw: st.DrawFn) -> tuple[dict[str, ModelLoad], TurnRules, list[Job]]:
    """Two or three models, any rules and any arrivals, among them more than the device can do for a while."""
    names = NAMES[: draw(st.integers(2, 3))]
    loads = {name: ModelLoad(switch_s=draw(st.floats(0.5, 5)), step_s=0.02, places=4) for name in names}
    rules = TurnRules(share=draw(st.floats(0.1, 1)), patience_s=draw(st.floats(1, 30)), turn_s=draw(st.floats(5, 20)))
    arrivals = st.tuples(st.sampled_from(names), st.floats(0, 200), st.integers(1, 2000), st.integers(0, 9))
    jobs = [
        Job(model=model, at_s=at_s, prompt_tokens=50, output_tokens=output, priority=priority)
        for model, at_s, output, priority in draw(st.lists(arrivals, min_size=1, max_size=60))
    ]
    return loads, rules, jobs


class TestGivenAnyArrivals:
    @settings(max_examples=examples(60))
    @given(days())
    def test_when_they_are_simulated_then_none_starves_and_switches_keep_their_share(
        self, day: tuple[dict[str, ModelLoad], TurnRules, list[Job]]
    ) -> None:
        loads, rules, jobs = day
        costs = {name: load.switch_s for name, load in loads.items()}
        num, most_s = len(costs), max(costs.values())
        # From the deepest debt to a switch, for each one before; its shortest turn; a look, a tick.
        turn_s = num * most_s / rules.share + most_s + rules.turn_s + 1.1

        outcome = Simulation(loads, choose, rules).run(jobs, until_s=7200)

        assert all(job.end_s is not None for job in jobs)
        assert outcome.longest_wait_s <= rules.patience_s + num * turn_s
        assert outcome.lost_s <= rules.share * outcome.span_s + Credit.most(costs, rules)

    @settings(max_examples=examples(60))
    @given(days())
    def test_when_one_model_alone_has_work_then_it_is_never_taken_from_it(
        self, day: tuple[dict[str, ModelLoad], TurnRules, list[Job]]
    ) -> None:
        loads, rules, jobs = day
        alone = [replace_model(job, "b") for job in jobs]

        outcome = Simulation(loads, choose, rules).run(alone, until_s=7200)

        assert outcome.num_switches == 1
        assert outcome.longest_wait_s <= 1.1, "it comes at the first look"


def replace_model(job: Job, model: str) -> Job:
    """The same job for another model."""
    return Job(
        model=model,
        at_s=job.at_s,
        prompt_tokens=job.prompt_tokens,
        output_tokens=job.output_tokens,
        priority=job.priority,
    )
