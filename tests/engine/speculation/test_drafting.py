"""Drafts in a scheduler's steps: where they fit, what becomes of them, and what they must not disturb."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest

from sluice.engine.batch import Batch, Sampled
from sluice.engine.config import EngineConfig
from sluice.engine.interface import EngineStats
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import FinishReason
from sluice.engine.scheduling.timing.step_time import StepTime, work_of
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import DraftSource, Worth
from sluice.worker.tune.replay import VirtualClock
from tests.engine.given import (
    Prophet,
    Transcript,
    checking_model,
    engine_over,
    lagging,
    note,
    request,
    run,
    undisturbed,
)
from tests.engine.given import Transcripts as All
from tests.grids import fast_only

PROMPT = "a prompt of thirty characters.."


class TestGivenDraftsThatAreRight:
    """A source that knows the output of one request."""

    def test_when_they_are_verified_then_a_step_yields_several_tokens(self) -> None:
        asked = request("r", PROMPT, max_tokens=60)
        model = checking_model()
        engine = engine_over(model, draft_source=Prophet(undisturbed(asked), 1.0))
        engine.add([asked])

        transcripts = run(engine)

        assert transcripts["r", 0].token_ids == undisturbed(asked)["r", 0].token_ids
        assert engine.stats.num_steps <= 1 + 60 // 6 + 1
        assert engine.stats.num_accepted_tokens == engine.stats.num_drafted_tokens == model.num_drafts > 40

    def test_when_the_device_lags_then_the_sequence_waits_for_its_drafts(self) -> None:
        asked = request("r", PROMPT, max_tokens=60)
        model = lagging(checking_model())
        engine = engine_over(model, draft_source=Prophet(undisturbed(asked), 1.0))
        engine.add([asked])

        transcripts = run(engine)

        assert transcripts["r", 0].token_ids == undisturbed(asked)["r", 0].token_ids
        assert engine.stats.num_accepted_tokens > 40

    def test_when_the_prompt_is_read_in_the_same_step_then_it_is_returned(self) -> None:
        asked = request("r", "p", max_tokens=4, prompt_logprobs=1)
        engine = engine_over(NullModel(), draft_source=Prophet(undisturbed(asked), 1.0))
        engine.add([asked])

        [delta] = engine.advance()

        assert delta.token_ids == tuple(undisturbed(asked)["r", 0].token_ids)
        assert delta.prompt == undisturbed(asked)["r", 0].deltas[0].prompt is not None

    def test_when_an_end_is_among_them_then_nothing_after_it_is_returned(self) -> None:
        for seed in range(20):
            asked = request("r", PROMPT, max_tokens=50, seed=seed, stop=("e", "a t"))
            endless = request("r", PROMPT, max_tokens=50, seed=seed, ignore_eos=True)
            engine = engine_over(
                checking_model(mean_output_tokens=9),
                draft_source=Prophet(undisturbed(endless, mean_output_tokens=9), 1.0),
            )
            engine.add([asked])

            found, expected = run(engine)["r", 0], undisturbed(asked, mean_output_tokens=9)["r", 0]

            assert (found.token_ids, found.text, found.finish) == (expected.token_ids, expected.text, expected.finish)

    def test_when_the_longest_output_is_near_then_no_draft_goes_beyond_it(self) -> None:
        asked = request("r", PROMPT, max_tokens=9)
        longer = request("r", PROMPT, max_tokens=30)
        model = checking_model()
        engine = engine_over(model, draft_source=Prophet(undisturbed(longer), 1.0))
        engine.add([asked])

        end = run(engine)["r", 0]

        assert len(end.token_ids) == 9
        assert end.finish is not None
        assert end.finish.reason is FinishReason.LENGTH
        assert engine.stats.num_drafted_tokens == engine.stats.num_accepted_tokens


class TestGivenFewBlocks:
    """Two sequences that fill the cache to its last block."""

    def test_when_drafts_would_need_more_then_they_are_shortened_and_none_is_preempted(self) -> None:
        asked = [request(f"r{n}", PROMPT, max_tokens=24, seed=n) for n in range(2)]
        expected: All = {}
        for one in asked:
            expected |= undisturbed(one)
        num_blocks = 2 * -(-(31 + 24) // 4)
        engine = engine_over(checking_model(num_blocks=num_blocks), draft_source=Prophet(expected, 0.5))
        engine.add(asked)

        transcripts = run(engine)

        assert {key: one.token_ids for key, one in transcripts.items()} == {
            key: one.token_ids for key, one in expected.items()
        }
        assert engine.stats.num_preemptions == 0
        assert engine.stats.num_accepted_tokens > 0


class TestGivenASmallBudget:
    """Steps of four tokens, all of which a prompt would take."""

    def test_when_a_prompt_comes_then_drafts_take_only_what_it_leaves(self) -> None:
        asked, other = request("r", PROMPT, max_tokens=40), request("s", PROMPT[::-1], max_tokens=2)
        model = checking_model()
        engine = engine_over(
            model, max_num_seqs=4, max_num_batched_tokens=4, draft_source=Prophet(undisturbed(asked), 1.0)
        )
        engine.add([asked])
        transcripts: All = {}
        for _ in range(12):
            note(transcripts, engine.advance())
        before = engine.stats.num_drafted_tokens
        engine.add([other])
        for _ in range(7):
            note(transcripts, engine.advance())

        assert before > 0
        assert engine.stats.num_drafted_tokens == before
        assert model.largest_batch == 4


STEP_TIME = StepTime(fixed_s=0.02, token_s=0.0001)
"""A step of 64 decodes takes 26 ms, and 32 with 64 drafts."""


class TimedStep(NamedTuple):
    """A step on its way."""

    rows: list[Sampled]
    ready_s: float
    clock: VirtualClock

    def collect(self) -> list[Sampled]:
        self.clock.at_s = max(self.clock.at_s, self.ready_s)
        return self.rows


class TimedDevice:
    """A null model that computes a step after the one before, in virtual time: the host waits when it collects."""

    lag = 1
    fingerprint = ""

    def __init__(self, clock: VirtualClock) -> None:
        self._model = NullModel(NullModelConfig(num_blocks=4096))
        self._clock = clock
        self._ready_s = 0.0
        self.limits = self._model.limits
        self.steps: list[Batch] = []

    def launch(self, batch: Batch) -> TimedStep:
        self.steps.append(batch)
        self._ready_s = max(self._ready_s, self._clock.now_s()) + STEP_TIME.of(work_of(batch))
        return TimedStep(self._model.launch(batch).collect(), self._ready_s, self._clock)


class Guessing:
    """A `DraftSource` of so many guesses for each sequence and output position, all right or all wrong."""

    def __init__(self, num_guesses: Callable[[Sequence], int], expected: All | None = None) -> None:
        self._num_guesses = num_guesses
        self._expected = expected

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        return [self._guesses(one, min(room, self._num_guesses(one))) for one in sequences]

    def _guesses(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        if self._expected is None:
            return (ord("?"),) * count
        start = sequence.num_output_tokens
        return tuple(self._expected[sequence.request_id, 0].token_ids[start : start + count])

    def end(self, sequence: Sequence) -> None:
        """It keeps nothing."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run in virtual time."""

    tokens_per_s: float
    steps: list[Batch]
    stats: EngineStats
    transcripts: All


def timed(source: DraftSource | None, *, num_seqs: int = 64, max_tokens: int = 200) -> TimedRun:
    """Generate for `num_seqs` requests at once on a device that lags."""
    clock = VirtualClock()
    device = TimedDevice(clock)
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=4096)
    engine = LLMEngine(device, NullTokenizer(), config, clock=clock.now_s, draft_source=source)
    engine.add([request(f"r{n}", f"prompt {n}", max_tokens=max_tokens, seed=n) for n in range(num_seqs)])
    transcripts: All = {}
    while not engine.is_idle:
        note(transcripts, engine.advance())
    return TimedRun(num_seqs * max_tokens / clock.now_s(), device.steps, engine.stats, transcripts)


@cache
def undrafted(num_seqs: int = 64, max_tokens: int = 200) -> TimedRun:
    return timed(None, num_seqs=num_seqs, max_tokens=max_tokens)


class TestGivenAFullBatchOnADeviceThatLags:
    """64 sequences, which compute a token in each step without drafts."""

    def test_when_guesses_exceed_a_step_then_only_sequences_that_get_drafts_miss_one(self) -> None:
        expected = undrafted().transcripts
        found = timed(Guessing(lambda _: 6, expected))

        assert {key: one.token_ids for key, one in found.transcripts.items()} == {
            key: one.token_ids for key, one in expected.items()
        }
        num_idle = num_waits = 0
        for before, step, after in zip(found.steps[2:], found.steps[3:], found.steps[4:-1], strict=False):
            missing = {row.sequence_id for row in after.rows} - {row.sequence_id for row in step.rows}
            waiting = missing - before.drafts.keys()
            num_waits += len(waiting)
            num_idle += len(waiting - after.drafts.keys())
        assert num_waits > 0
        assert num_idle <= 0.05 * num_waits

    def test_when_a_sequence_that_drafted_has_one_guess_then_it_is_not_held_up(self) -> None:
        expected = {
            key: Transcript([*one.token_ids[:16], *[ord("?")] * 200]) for key, one in undrafted().transcripts.items()
        }
        found = timed(Guessing(lambda one: 6 if one.num_output_tokens < 10 else 1, expected))

        assert found.stats.num_accepted_tokens > 0
        assert found.tokens_per_s >= 0.98 * undrafted().tokens_per_s

    def test_when_a_step_drops_its_few_drafts_then_their_sequence_is_not_held_up(self) -> None:
        found = timed(Guessing(lambda one: 3 if one.request_id == "r0" else 0))

        assert found.stats.num_drafted_tokens == 0
        assert len(found.steps) == len(undrafted().steps)

    @pytest.mark.parametrize(
        ("num_seqs", "num_guesses"),
        fast_only([(64, 5), (4, 24)], [(num_seqs, count) for num_seqs in (1, 4, 64) for count in (1, 2, 3, 5, 24)]),
    )
    def test_when_all_drafts_are_wrong_then_it_is_hardly_slower(self, num_seqs: int, num_guesses: int) -> None:
        found = timed(Guessing(lambda _: num_guesses), num_seqs=num_seqs)

        assert found.tokens_per_s >= 0.97 * undrafted(num_seqs).tokens_per_s

    @pytest.mark.parametrize(("num_seqs", "gain"), [(1, 2.0), (8, 1.7), (64, 1.2)])
    def test_when_long_drafts_are_right_then_it_is_faster(self, num_seqs: int, gain: float) -> None:
        found = timed(Guessing(lambda _: 16, undrafted(num_seqs).transcripts), num_seqs=num_seqs)

        assert found.tokens_per_s >= gain * undrafted(num_seqs).tokens_per_s
