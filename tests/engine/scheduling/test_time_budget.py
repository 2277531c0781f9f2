"""How many prompt tokens a step computes beside its decodes, given what steps have taken so far."""

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise

import pytest

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.config import EngineConfig, StepTargets
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import LatencyTargets
from sluice.engine.scheduling.timing.measured_steps import MeasuredSteps
from sluice.engine.scheduling.timing.step_time import StepTime, StepWork
from sluice.engine.scheduling.timing.time_budget import LEAST_CHUNK
from sluice.worker.config import WorkerConfig
from sluice.worker.model.load import engine_config
from sluice.worker.tune.replay import Arrival, Replay, simulate

TWO_CORES = StepTime(fixed_s=14.2e-3, token_s=204e-6, kv_token_s=440e-9, pair_s=181e-9)
"""The 100 M model of `benchmarks engines` (docs/lab/tuning.md): a step of 2,048 prompt tokens takes 0.8 s."""

CHATS = [Arrival(at_s=0.0, num_prompt_tokens=50, num_output_tokens=400) for _ in range(8)]
SEEN_S = 4.0
"""The first of the long prompts has been computed."""

LONG = [Arrival(at_s=1.0 + 3.5 * n, num_prompt_tokens=4000, num_output_tokens=4) for n in range(3)]


def replayed(arrivals: Items[Arrival], config: EngineConfig, step_time: StepTime = TWO_CORES) -> Replay:
    cache = NullModelConfig(num_blocks=4096, block_size=16, max_model_len=8192)
    return simulate(arrivals, step_time, config, cache)


def targeting(**targets: float) -> EngineConfig:
    return EngineConfig(max_num_batched_tokens=2048, step_targets=StepTargets(**targets))


def longest_gap_s(replay: Replay, *, after_s: float = 0.0) -> float:
    """The longest gap between two tokens of the chats."""
    times = [one.token_times_s for one in replay.completed if one.arrival.num_output_tokens > 4]
    pairs = [pair for one in times for pair in pairwise(one)]
    return max(later - earlier for earlier, later in pairs if earlier >= after_s)


def chunks_of(replay: Replay) -> list[int]:
    """Prompt tokens of each step in which the chats decode."""
    # The first step computes the prompts of the chats.
    works = [one.work for one in replay.steps[1:]]
    return [one.num_tokens - len(CHATS) for one in works if one.num_pairs and one.num_rows >= len(CHATS)]


class TestGivenALongPromptAmongChats:
    """Prompts of 4,000 tokens arrive while eight chats run on two cores."""

    def test_when_a_worker_has_its_defaults_then_no_step_stalls_the_chats(self) -> None:
        replay = replayed([*CHATS, *LONG], engine_config(WorkerConfig()))

        # The first long prompt shows what attention to a long context costs.
        assert longest_gap_s(replay) <= 0.13
        assert longest_gap_s(replay, after_s=SEEN_S) <= 0.102

    def test_when_there_is_no_limit_then_they_wait_for_the_whole_budget(self) -> None:
        replay = replayed([*CHATS, *LONG], EngineConfig(max_num_batched_tokens=2048))

        assert longest_gap_s(replay) > 0.7

    def test_when_tpot_has_a_target_then_every_step_keeps_it(self) -> None:
        replay = replayed([*CHATS, *LONG], targeting(tpot_s=0.05))

        assert 0.045 < longest_gap_s(replay, after_s=SEEN_S) <= 0.051

    @pytest.mark.parametrize("own", [None, StepTargets(), StepTargets(tpot_s=0.4), StepTargets(mixed_step_s=0.02)])
    def test_when_their_queue_has_a_target_for_tpot_then_every_step_keeps_that(self, own: StepTargets | None) -> None:
        """Whatever the worker's own settings are."""
        chats = [replace(chat, targets=LatencyTargets(tpot_s=0.05)) for chat in CHATS]

        replay = replayed([*chats, *LONG], EngineConfig(max_num_batched_tokens=2048, step_targets=own))

        assert 0.045 < longest_gap_s(replay, after_s=SEEN_S) <= 0.051

    def test_when_one_of_them_has_a_target_then_all_steps_keep_it_until_it_ends(self) -> None:
        """The strictest of those that run counts; afterwards the worker's own."""
        strict = replace(CHATS[0], num_output_tokens=300, targets=LatencyTargets(tpot_s=0.06))
        loose = replace(CHATS[1], num_output_tokens=2000, targets=LatencyTargets(tpot_s=0.5))
        late = [replace(prompt, at_s=prompt.at_s + 20) for prompt in LONG]

        replay = replayed([strict, loose, *CHATS[2:], *LONG, *late], targeting(tpot_s=0.2))

        end_s = replay.completed[0].token_times_s[-1]
        times = replay.completed[1].token_times_s
        gaps = [(later, later - earlier) for earlier, later in pairwise(times) if earlier >= SEEN_S]
        assert max(gap_s for at_s, gap_s in gaps if at_s <= end_s) <= 0.061
        assert max(gap_s for at_s, gap_s in gaps if at_s > end_s) > 0.19

    def test_when_their_queue_has_a_target_for_ttft_then_a_step_takes_at_most_half_of_it(self) -> None:
        chats = [replace(chat, targets=LatencyTargets(ttft_s=0.6)) for chat in CHATS]

        replay = replayed([*chats, *LONG], targeting(ttft_s=5.0))

        assert 0.25 < longest_gap_s(replay, after_s=SEEN_S) <= 0.306

    def test_when_ttft_has_a_target_then_a_step_takes_at_most_half_of_it(self) -> None:
        replay = replayed([*CHATS, *LONG], targeting(ttft_s=0.6))

        assert 0.25 < longest_gap_s(replay, after_s=SEEN_S) <= 0.306

    def test_when_decodes_alone_are_over_the_target_then_prompts_still_advance(self) -> None:
        replay = replayed([*CHATS, *LONG], targeting(tpot_s=0.001))

        # A long prompt that is done decodes, too.
        assert {LEAST_CHUNK} <= set(chunks_of(replay)) <= {LEAST_CHUNK, LEAST_CHUNK + 1}

    def test_when_decodes_alone_take_long_then_prompts_take_half_as_long(self) -> None:
        slow = StepTime(fixed_s=0.3, token_s=204e-6)

        replay = replayed([*CHATS, *LONG], targeting(), slow)

        assert max(chunks_of(replay)) * slow.token_s == pytest.approx(0.5 * (0.3 + 8 * slow.token_s), rel=0.02)

    def test_when_nothing_else_runs_then_the_prompt_takes_the_whole_budget(self) -> None:
        replay = replayed(LONG[:1], engine_config(WorkerConfig()))

        assert [one.work.num_tokens for one in replay.steps[:2]] == [2048, 4000 - 2048]


class TestGivenStepsOfAnEngine:
    """Each takes as long as `TWO_CORES` says."""

    def steps(self) -> MeasuredSteps:
        steps = MeasuredSteps()
        for n in range(40):
            self.note(steps, num_decodes=1 + n % 8, num_prompt_tokens=(n % 5) * 40)
        return steps

    def note(self, steps: MeasuredSteps, *, num_decodes: int, num_prompt_tokens: int, slower: float = 1.0) -> None:
        rows = [ScheduledRow(n, n, 100 + 7 * n, 1, samples=True) for n in range(num_decodes)]
        if num_prompt_tokens:
            rows.append(ScheduledRow(99, 99, 30, num_prompt_tokens, samples=False))
        num_pairs = num_prompt_tokens * 30 + num_prompt_tokens * (num_prompt_tokens + 1) // 2
        num_kv_tokens = sum(row.start + row.num_tokens for row in rows)
        work = StepWork(num_decodes + num_prompt_tokens, num_kv_tokens, num_pairs, num_decodes)
        steps.note(Batch(tuple(rows)), TWO_CORES.of(work) * slower)

    def predicted_s(self, steps: MeasuredSteps) -> float:
        return steps.step_time.of(StepWork(308, 2000, 300 * 301 // 2, 8))

    def test_when_it_predicts_a_larger_one_then_it_is_near(self) -> None:
        assert self.predicted_s(self.steps()) == pytest.approx(TWO_CORES.of(StepWork(308, 2000, 45150, 8)), rel=0.05)

    def test_when_only_decodes_follow_for_long_then_it_still_knows_what_a_prompt_costs(self) -> None:
        steps = self.steps()
        before_s = self.predicted_s(steps)

        for n in range(5000):
            self.note(steps, num_decodes=1 + n % 8, num_prompt_tokens=0)

        assert self.predicted_s(steps) == pytest.approx(before_s, rel=0.05)

    def test_when_a_step_is_disturbed_then_that_changes_little(self) -> None:
        steps = self.steps()
        before_s = self.predicted_s(steps)

        self.note(steps, num_decodes=4, num_prompt_tokens=100, slower=30.0)

        assert self.predicted_s(steps) == pytest.approx(before_s, rel=0.05)

    def test_when_the_machine_becomes_slower_then_it_learns_that(self) -> None:
        steps = self.steps()
        before_s = self.predicted_s(steps)

        for n in range(400):
            self.note(steps, num_decodes=1 + n % 8, num_prompt_tokens=(n % 5) * 40, slower=2.0)

        assert self.predicted_s(steps) == pytest.approx(2 * before_s, rel=0.1)

    def test_when_there_is_none_then_a_step_takes_no_time(self) -> None:
        assert MeasuredSteps().step_time == StepTime(fixed_s=0.0)


class TestGivenTimeForPrompts:
    def test_when_tokens_are_asked_for_then_they_take_that_time(self) -> None:
        for start in (0, 100, 10_000):
            num_tokens = TWO_CORES.num_prompt_tokens(start, 0.08)

            pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
            taken_s = num_tokens * TWO_CORES.token_s + (start + num_tokens) * TWO_CORES.kv_token_s
            assert taken_s + pairs * TWO_CORES.pair_s == pytest.approx(0.08)

    def test_when_there_is_none_then_there_are_no_tokens(self) -> None:
        assert TWO_CORES.num_prompt_tokens(0, 0.0) == 0
        assert TWO_CORES.num_prompt_tokens(10_000, 0.004) == 0
