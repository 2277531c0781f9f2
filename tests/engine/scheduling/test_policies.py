"""Who goes first."""

from sluice.engine.config import EngineConfig
from sluice.engine.request import Sampling
from sluice.engine.scheduling.policies import MAX_YIELDS, Policy, Priority, make_policy
from sluice.engine.sequence import Sequence


def sequence_of(sequence_id: int, *, priority: int = 0) -> Sequence:
    return Sequence(
        id=sequence_id,
        request_id="r",
        choice=0,
        sampling=Sampling(),
        priority=priority,
        token_ids=[1],
        num_prompt_tokens=1,
    )


class TestGivenPolicy:
    def test_when_a_later_one_claims_more_then_it_still_comes_after(self) -> None:
        policy = Policy()

        assert policy.order(sequence_of(1)) < policy.order(sequence_of(2, priority=9))


class TestGivenPriority:
    policy = Priority()

    def test_when_the_lower_one_came_first_then_the_higher_still_goes_first(self) -> None:
        assert self.policy.order(sequence_of(2, priority=1)) < self.policy.order(sequence_of(1))

    def test_when_both_are_of_one_class_then_the_first_to_come_goes_first(self) -> None:
        assert self.policy.order(sequence_of(1, priority=1)) < self.policy.order(sequence_of(2, priority=1))

    def test_when_a_higher_one_comes_then_the_last_of_the_lowest_class_gives_way(self) -> None:
        running = [sequence_of(9, priority=5), sequence_of(1), sequence_of(4)]

        assert self.policy.victim(sequence_of(10, priority=1), running) is running[2]
        assert self.policy.victim(sequence_of(10), running) is None

    def test_when_one_gave_way_often_enough_then_another_does(self) -> None:
        running = [sequence_of(9, priority=5), sequence_of(1), sequence_of(4)]
        running[2].num_yields = MAX_YIELDS
        urgent = sequence_of(10, priority=9)

        assert self.policy.victim(urgent, running) is running[1]
        assert self.policy.yielding(running) == [running[1]]
        running[1].num_yields = MAX_YIELDS
        assert self.policy.victim(urgent, running) is running[0]
        assert self.policy.yielding(running) == [running[0]]


class TestGivenAConfig:
    def test_when_it_names_a_policy_then_that_one_is_made(self) -> None:
        assert isinstance(make_policy(EngineConfig()), Priority)
        assert isinstance(make_policy(EngineConfig(policy="fcfs")), Policy)

    def test_when_settings_are_wrong_then_each_is_named(self) -> None:
        problems = EngineConfig(policy="luck", max_num_seqs=0, max_num_batched_tokens=-1).problems()

        assert [problem.split()[0] for problem in problems] == ["max_num_seqs", "max_num_batched_tokens", "policy"]
