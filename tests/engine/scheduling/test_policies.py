"""Who goes first."""

from sluice.engine.config import EngineConfig
from sluice.engine.request import SamplingParams
from sluice.engine.scheduling.policies import FirstComeFirstServed, Priority, make_policy
from sluice.engine.sequence import Sequence


def sequence_of(sequence_id: int, *, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    return Sequence(
        id=sequence_id,
        request_id="r",
        choice=0,
        sampling=SamplingParams(),
        priority=priority,
        arrival_s=arrival_s,
        token_ids=[1],
        num_prompt_tokens=1,
    )


class TestGivenFirstComeFirstServed:
    def test_when_a_later_one_claims_more_then_it_still_comes_after(self) -> None:
        policy = FirstComeFirstServed()

        assert policy.order(sequence_of(1)) < policy.order(sequence_of(2, priority=9, arrival_s=-5.0))


class TestGivenPriority:
    """A point of priority is worth ten seconds."""

    policy = Priority(10.0)

    def test_when_both_came_together_then_the_higher_goes_first(self) -> None:
        assert self.policy.order(sequence_of(2, priority=1)) < self.policy.order(sequence_of(1))

    def test_when_the_lower_one_has_waited_past_its_deficit_then_it_goes_first(self) -> None:
        low = sequence_of(1, arrival_s=0.0)

        assert self.policy.order(sequence_of(2, priority=2, arrival_s=19.0)) < self.policy.order(low)
        assert self.policy.order(sequence_of(2, priority=2, arrival_s=21.0)) > self.policy.order(low)


class TestGivenAConfig:
    def test_when_it_names_a_policy_then_that_one_is_made(self) -> None:
        assert isinstance(make_policy(EngineConfig()), FirstComeFirstServed)
        assert isinstance(make_policy(EngineConfig(policy="priority")), Priority)

    def test_when_settings_are_wrong_then_each_is_named(self) -> None:
        problems = EngineConfig(policy="luck", max_num_seqs=0, max_num_batched_tokens=-1).problems()

        assert [problem.split()[0] for problem in problems] == ["max_num_seqs", "max_num_batched_tokens", "policy"]
