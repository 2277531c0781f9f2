"""Drafts of a model: what it reads, what it holds, and when it rests. Its cache is checked in each of its steps."""

from collections.abc import Callable
from random import Random

import pytest

from sluice.engine.batch import Batch, Sampled
from sluice.engine.config import EngineConfig, StepLimits
from sluice.engine.errors import EngineBroken
from sluice.engine.executor import Computed, Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.draft_rows import KEPT_FOR, DraftRows
from sluice.engine.speculation.model_drafts import ModelDrafts
from sluice.engine.speculation.source import MAX_DEPTH, Worth
from sluice.worker.tune.replay import SimulatedExecutor, VirtualClock
from tests.engine.given import (
    CheckingModel,
    Transcripts,
    checking_model,
    engine_over,
    lagging,
    note,
    request,
    run,
    undisturbed,
)
from tests.grids import fast_only

LIMITS = StepLimits(8, 32)
PROMPT = "a prompt of thirty characters.."
SURE = Worth(0.5)


def no_time() -> float:
    """A clock for engines in which guesses cost nothing."""
    return 0.0


def drafts_of(model: CheckingModel, limits: StepLimits = LIMITS) -> ModelDrafts:
    return ModelDrafts(model, limits, vocab_size=257, clock=no_time)


def outputs(transcripts: Transcripts) -> dict[tuple[str, int], list[int]]:
    return {key: one.token_ids for key, one in transcripts.items()}


def expected_of(asked: list[Request]) -> dict[tuple[str, int], list[int]]:
    return {key: token_ids for one in asked for key, token_ids in outputs(undisturbed(one)).items()}


def run_checked(engine: LLMEngine, source: ModelDrafts) -> Transcripts:
    transcripts: Transcripts = {}
    while not engine.is_idle:
        note(transcripts, engine.advance())
        engine.check_invariants()
        source.rows.check_invariants()
    return transcripts


def sequence_of(token_ids: list[int], number: int = 0) -> Sequence:
    return Sequence(
        id=number,
        request_id=str(number),
        choice=0,
        sampling=Sampling(),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
    )


def rows_over(model: CheckingModel, limits: StepLimits = LIMITS, *, vocab_size: int = 257) -> DraftRows:
    return DraftRows(model, limits, vocab_size=vocab_size, clock=no_time)


class TestGivenADraftModelThatIsTheModelItself:
    """The same tokens follow for requests of the seed that it has."""

    def test_when_it_guesses_then_all_guesses_are_right(self) -> None:
        asked = [request(f"r{n}", f"{PROMPT} {n}", max_tokens=60) for n in range(3)]
        source = drafts_of(checking_model(num_blocks=256))
        engine = engine_over(checking_model(num_blocks=256), clock=no_time, draft_source=source)
        engine.add(asked)

        transcripts = run_checked(engine, source)

        assert outputs(transcripts) == expected_of(asked)
        assert engine.stats.num_drafted_tokens == engine.stats.num_accepted_tokens > 120
        assert engine.stats.num_steps < 30

    def test_when_sequences_leave_early_then_tokens_are_the_same_and_all_is_freed(self) -> None:
        asked = [request(f"r{n}", f"prompt {n}", max_tokens=60, seed=n % 2) for n in range(8)]
        source = drafts_of(checking_model(num_blocks=40))
        engine = engine_over(checking_model(num_blocks=44), clock=no_time, draft_source=source)
        engine.add(asked)
        transcripts: Transcripts = {}
        for _ in range(6):
            note(transcripts, engine.advance())
            source.rows.check_invariants()
        engine.abort(["r1"])
        engine.drop(["r2"])
        while not engine.is_idle:
            note(transcripts, engine.advance())
            source.rows.check_invariants()

        expected = expected_of(asked)
        for key, token_ids in outputs(transcripts).items():
            assert token_ids == (expected[key][: len(token_ids)] if key[0] in ("r1", "r2") else expected[key])
        assert engine.stats.num_preemptions > 0
        assert engine.stats.num_accepted_tokens > 0
        assert source.rows.num_held == 0

    def test_when_the_device_could_run_ahead_then_steps_do_not_overlap(self) -> None:
        model = lagging(checking_model())
        engine = engine_over(model, draft_model=checking_model(), speculation="suffix")
        asked = request("r", PROMPT, max_tokens=20)
        engine.add([asked])

        assert outputs(run(engine)) == expected_of([asked])
        assert not model.num_lagged

    def test_when_speculation_is_off_then_the_settings_contradict_each_other(self) -> None:
        with pytest.raises(ValueError, match="needs speculation"):
            engine_over(checking_model(), draft_model=checking_model())


class TestGivenLongPrompts:
    def test_when_they_are_to_be_guessed_then_a_step_computes_a_bounded_part(self) -> None:
        asked = [request("long", PROMPT * 8, max_tokens=60), request("short", "hello", max_tokens=60)]
        draft_model = checking_model(num_blocks=256)
        source = drafts_of(draft_model)
        engine = engine_over(checking_model(num_blocks=256), clock=no_time, draft_source=source)
        engine.add(asked)

        transcripts = run_checked(engine, source)

        assert outputs(transcripts) == expected_of(asked)
        assert draft_model.largest_batch == LIMITS.max_num_batched_tokens
        assert engine.stats.num_accepted_tokens > 60


class TestGivenRowsOfADraftModel:
    """Guesses for single sequences, from a model that checks what its cache has."""

    def test_when_some_guesses_were_right_then_only_the_others_are_computed_again(self) -> None:
        model = checking_model()
        rows, sequence = rows_over(model), sequence_of([1, 2, 3, 4])
        first = rows.guess([(sequence, 5)])[0]
        sequence.token_ids += [*first[:2], 7]
        rows.note(sequence, 4 + 2)
        before = model.num_computed_tokens

        second = rows.guess([(sequence, 1)])[0]

        assert len(first) == 5
        assert len(second) == 1
        assert model.num_computed_tokens == before + 1

    def test_when_no_token_has_come_then_the_same_is_guessed(self) -> None:
        rows, sequence = rows_over(checking_model()), sequence_of([1, 2, 3])

        assert rows.guess([(sequence, 3)]) == rows.guess([(sequence, 3)])

    def test_when_all_blocks_are_held_then_only_idle_sequences_lose_theirs(self) -> None:
        rows = rows_over(checking_model(num_blocks=4))
        one, other = sequence_of(list(range(10)), 1), sequence_of(list(range(10)), 2)
        rows.guess([(one, 2)])
        at_once = rows.guess([(other, 2)])
        for _ in range(KEPT_FOR - 1):
            rows.guess([(other, 2)])
        later = rows.guess([(other, 2)])
        rows.check_invariants()

        assert at_once == {}
        assert later.keys() == {2}
        assert rows.num_held == 1

    def test_when_sequences_fill_the_cache_together_then_some_are_guessed_later(self) -> None:
        rows = rows_over(checking_model(num_blocks=24))
        both = [sequence_of(list(range(10)), number) for number in (1, 2)]
        guessed: list[int] = []
        for _ in range(75):
            found = rows.guess([(sequence, 2) for sequence in both])
            guessed.append(len(found))
            for sequence in both:
                sequence.token_ids.append(7)
        rows.check_invariants()

        assert guessed[0] == 2
        assert guessed.count(0) <= KEPT_FOR + 2
        assert guessed[-1] == 1

    def test_when_a_sequence_is_longer_than_the_model_reads_then_it_is_not_guessed(self) -> None:
        rows = rows_over(checking_model(max_model_len=8))

        assert rows.guess([(sequence_of([1] * 5), 4)])[0]
        assert rows.guess([(sequence_of([1] * 6, 1), 4)]) == {}

    def test_when_the_vocabularies_have_other_sizes_then_no_id_is_beyond_either(self) -> None:
        rows = rows_over(checking_model(), vocab_size=100)

        guesses = rows.guess([(sequence_of([5, 6], 1), 20), (sequence_of([5, 300], 2), 20)])

        assert len(guesses.get(1, ())) < 20
        assert all(guess < 100 for guess in guesses.get(1, ()))
        assert 2 not in guesses


class FailingModel(CheckingModel):
    """Fails in the third step."""

    num_steps = 0
    error: Callable[[], Exception] = RuntimeError

    def launch(self, batch: Batch) -> Launched:  # pyright: ignore[reportIncompatibleMethodOverride] - as `Executor`
        self.num_steps += 1
        if self.num_steps == 3:
            raise self.error()
        return super().launch(batch)


class TestGivenADraftModelThatFails:
    def test_when_its_step_raises_then_generation_goes_on_without_it(self) -> None:
        draft_model = FailingModel(NullModelConfig(num_blocks=64, block_size=4))
        source = drafts_of(draft_model)
        engine = engine_over(checking_model(), clock=no_time, draft_source=source)
        asked = request("r", PROMPT, max_tokens=60)
        engine.add([asked])

        assert outputs(run_checked(engine, source)) == expected_of([asked])
        assert draft_model.num_steps == 3
        assert engine.stats.num_failed_attempts == 0

    def test_when_earlier_guesses_turn_out_right_then_it_rests_as_long(self) -> None:
        draft_model = FailingModel(NullModelConfig(num_blocks=64, block_size=4))
        draft_model.num_steps = 3
        source, one, other = drafts_of(draft_model), sequence_of([1] * 8, 1), sequence_of([2] * 8, 2)
        _, guesses = source.propose([one, other], room=12, worth=Worth(0.3))
        other.token_ids += guesses
        draft_model.num_steps = 2
        source.propose([one], room=12, worth=Worth(0.3))

        for _ in range(20):
            source.propose([one, other], room=12, worth=Worth(0.3))
            one.token_ids.append(7)
            other.token_ids.append(7)

        assert guesses
        assert draft_model.num_steps == 3

    def test_when_the_device_is_lost_then_so_is_the_engine(self) -> None:
        draft_model = FailingModel(NullModelConfig(num_blocks=64, block_size=4))
        draft_model.error = EngineBroken
        engine = engine_over(checking_model(), clock=no_time, draft_source=drafts_of(draft_model))
        engine.add([request("r", PROMPT, max_tokens=60)])

        with pytest.raises(EngineBroken):
            run(engine)


STEP, TOKEN = 0.02, 0.0002
"""Seconds of a step of the model."""


class Partly(SimulatedExecutor):
    """The model itself with other step times, and with a share of right guesses."""

    def __init__(self, step_time: StepTime, clock: VirtualClock, cache: NullModelConfig, share: float) -> None:
        super().__init__(step_time, clock, cache)
        self._share, self._random = share, Random(1)

    def launch(self, batch: Batch) -> Computed:
        rows = super().launch(batch).rows
        return Computed([row if self._random.random() < self._share else Sampled((1,)) for row in rows])


class TestGivenTimeThatGuessesTake:
    """A model whose step takes 20 ms and 0.2 ms a token, in virtual time."""

    def rate(self, num_seqs: int, cost: float | None = None, share: float = 1.0) -> float:
        """Return tokens per second, with a draft model whose steps cost a part of those of the model, or without."""
        clock, cache, max_tokens = VirtualClock(), NullModelConfig(num_blocks=4096), 300
        source = None
        if cost is not None:
            draft_model = Partly(StepTime(fixed_s=STEP * cost, token_s=TOKEN * cost), clock, cache, share)
            source = ModelDrafts(draft_model, StepLimits(num_seqs, 512), vocab_size=257, clock=clock.now_s)
        engine = LLMEngine(
            SimulatedExecutor(StepTime(fixed_s=STEP, token_s=TOKEN), clock, cache),
            NullTokenizer(),
            EngineConfig(max_num_seqs=num_seqs),
            clock=clock.now_s,
            draft_source=source,
        )
        engine.add([request(f"r{n}", f"{PROMPT} {n}", max_tokens=max_tokens) for n in range(num_seqs)])
        while not engine.is_idle:
            engine.advance()
        return num_seqs * max_tokens / clock.now_s()

    @pytest.mark.parametrize(
        ("num_seqs", "share", "gain"),
        fast_only([(1, 0.8, 2.2), (16, 0.5, 1.1)], [(1, 0.95, 3.5), (1, 0.5, 1.35), (8, 0.8, 1.6), (16, 0.95, 1.8)]),
    )
    def test_when_guesses_are_often_right_then_it_yields_more(self, num_seqs: int, share: float, gain: float) -> None:
        assert self.rate(num_seqs, 0.1, share) >= gain * self.rate(num_seqs)

    @pytest.mark.parametrize(
        ("num_seqs", "cost"), fast_only([(1, 0.2), (64, 0.2)], [(1, 0.05), (8, 0.1), (16, 0.2), (64, 0.05)])
    )
    def test_when_all_guesses_are_wrong_then_it_turns_itself_off(self, num_seqs: int, cost: float) -> None:
        assert self.rate(num_seqs, cost, 0.0) >= 0.97 * self.rate(num_seqs)

    def test_when_it_is_as_slow_as_the_model_then_it_turns_itself_off(self) -> None:
        assert self.rate(4, 1.0) >= 0.97 * self.rate(4)


class TestGivenNoRoom:
    def test_when_a_step_has_no_tokens_left_then_no_guess_is_computed(self) -> None:
        model = checking_model()
        source = drafts_of(model)

        assert source.propose([sequence_of([1, 2])], room=0, worth=SURE) == [()]
        assert model.num_computed_tokens == 0

    def test_when_few_tokens_are_left_then_no_more_guesses_are_computed(self) -> None:
        source = drafts_of(checking_model())
        sequences = [sequence_of([1, 2], number) for number in range(4)]

        guesses = source.propose(sequences, room=6, worth=Worth(0.1))

        assert sum(map(len, guesses)) == 6

    def test_when_all_was_right_then_a_sequence_gets_at_most_the_most(self) -> None:
        source = drafts_of(checking_model(num_blocks=1024, max_model_len=8192))
        sequence = sequence_of([1, 2])
        depths: list[int] = []
        for _ in range(40):
            [found] = source.propose([sequence], room=64, worth=Worth(0.05))
            depths.append(len(found))
            sequence.token_ids += found
            sequence.token_ids.append(Sampled((int(NullModel().limits.vocab_size) - 200,)).token_ids[0])

        assert max(depths) == MAX_DEPTH
