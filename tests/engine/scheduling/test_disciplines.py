"""What each way of batching does with the same sequences: who joins, what they hold, what is computed in vain."""

from random import Random
from typing import Any

import pytest

from sluice.engine.batch import Batch, PaddingRow, Sampled
from sluice.engine.config import DISCIPLINE_NAMES, EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import Room, Sampling
from sluice.engine.scheduling.disciplines import make_scheduler
from sluice.engine.sequence import Sequence
from tests.engine.given import CheckingModel, Transcripts, checking_model, engine_over, note, request, run

MAX_MODEL_LEN = 32
BLOCK_SIZE = 4


class Clock:
    """A time that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A scheduler under one discipline, and sequences of prompt tokens and longest outputs."""

    def __init__(self, discipline: str, *, num_blocks: int = 64, **options: Any) -> None:
        small: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
        self.clock = Clock()
        limits = ModelLimits(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=256,
            eos_token_ids=frozenset(),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
        )
        config = EngineConfig(**small | options, discipline=discipline)
        self.scheduler = make_scheduler(config, limits, clock=self.clock)
        self.sequences: list[Sequence] = []

    def add(self, num_prompt_tokens: int, max_tokens: int = 8) -> Sequence:
        sequence = Sequence(
            id=len(self.sequences),
            request_id=f"r{len(self.sequences)}",
            choice=0,
            sampling=Sampling(max_tokens=max_tokens),
            token_ids=[len(self.sequences)] * num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Batch:
        """Plan and commit a step, and let those go that have their longest output."""
        batch = self.scheduler.schedule()
        self.scheduler.commit(batch, [Sampled((7,)) for row in batch.rows if row.samples])
        self.scheduler.finish(
            [
                self.sequences[row.sequence_id]
                for row in batch.rows
                if self.sequences[row.sequence_id].num_output_tokens
                >= self.sequences[row.sequence_id].sampling.max_tokens
            ]
        )
        self.scheduler.check_invariants()
        return batch


def shares(batch: Batch) -> list[tuple[int, int]]:
    """(sequence, tokens) of each row."""
    return [(row.sequence_id, row.num_tokens) for row in batch.rows]


class TestGivenSequencesThatGenerate:
    """Two generate when a third one comes, with a long prompt."""

    def bench(self, discipline: str, num_prompt_tokens: int) -> Bench:
        bench = Bench(discipline)
        bench.add(2)
        bench.add(2)
        bench.step()
        bench.add(num_prompt_tokens)
        return bench

    @pytest.mark.parametrize("discipline", ["continuous", "slots"])
    def test_when_the_budget_cuts_prompts_then_the_first_part_goes_beside_the_decodes(self, discipline: str) -> None:
        bench = self.bench(discipline, 28)

        assert [shares(bench.step()) for _ in range(2)] == [[(0, 1), (1, 1), (2, 22)], [(0, 1), (1, 1), (2, 6)]]

    def test_when_prompts_are_computed_whole_then_all_of_it_goes_beside_the_decodes(self) -> None:
        bench = self.bench("orca", 20)

        assert shares(bench.step()) == [(0, 1), (1, 1), (2, 20)]

    def test_when_prompts_go_first_then_the_decodes_stand_still_until_it_is_computed(self) -> None:
        bench = self.bench("prefill-first", 28)

        steps = [shares(bench.step()) for _ in range(3)]

        assert steps == [[(2, 24)], [(2, 4)], [(0, 1), (1, 1), (2, 1)]]

    @pytest.mark.parametrize("discipline", ["static", "dynamic"])
    def test_when_batches_are_fixed_then_it_waits_for_the_slowest(self, discipline: str) -> None:
        bench = Bench(discipline, batch_window_s=0.0)
        bench.add(2, max_tokens=1)
        bench.add(2, max_tokens=3)
        bench.step()
        bench.add(5)

        assert [shares(bench.step()) for _ in range(3)] == [[(1, 1)], [(1, 1)], [(2, 5)]]


class TestGivenPromptsThatDoNotFitOneStep:
    """Two prompts of 15 tokens, and a budget of 24."""

    @pytest.mark.parametrize(
        ("discipline", "first", "second"),
        [
            ("continuous", [(0, 15), (1, 9)], [(0, 1), (1, 6)]),
            ("orca", [(0, 15)], [(0, 1), (1, 15)]),
            ("prefill-first", [(0, 15)], [(1, 15)]),
        ],
    )
    def test_when_they_come_together_then_a_whole_prompt_waits_for_a_step_that_holds_it(
        self, discipline: str, first: list[tuple[int, int]], second: list[tuple[int, int]]
    ) -> None:
        bench = Bench(discipline)
        bench.add(15)
        bench.add(15)

        assert [shares(bench.step()), shares(bench.step())] == [first, second]


class TestGivenABatchOfUnequalPrompts:
    """Prompts of 2, 6 and 4 tokens, which end after 1, 3 and 2 tokens."""

    def bench(self, **options: Any) -> Bench:
        bench = Bench("static", **options)
        for num_prompt_tokens, max_tokens in ((2, 1), (6, 3), (4, 2)):
            bench.add(num_prompt_tokens, max_tokens)
        return bench

    def test_when_it_runs_then_it_is_a_rectangle_until_the_slowest_ends(self) -> None:
        bench = self.bench()

        steps = [bench.step() for _ in range(3)]

        assert [batch.num_tokens for batch in steps] == [12, 2, 1]
        assert [batch.padding for batch in steps] == [
            (PaddingRow(4, 6), PaddingRow(2, 6)),
            (PaddingRow(1, 7),),
            (PaddingRow(1, 8), PaddingRow(1, 8)),
        ]

    def test_when_the_padded_batch_exceeds_the_budget_then_the_last_waits_for_the_next(self) -> None:
        bench = self.bench(max_num_batched_tokens=12)

        assert shares(bench.step()) == [(0, 2), (1, 6)]

    @pytest.mark.parametrize("discipline", ["continuous", "prefill-first", "slots", "orca"])
    def test_when_the_discipline_is_not_padded_then_nothing_is_computed_in_vain(self, discipline: str) -> None:
        bench = Bench(discipline)
        bench.add(2, max_tokens=1)
        bench.add(6, max_tokens=3)

        assert all(bench.step().padding == () for _ in range(3))


class TestGivenACacheThatIsSmall:
    """Six blocks of four tokens; each sequence has five tokens and may generate six."""

    @pytest.mark.parametrize(
        ("discipline", "num_running", "num_blocks_held"),
        [("continuous", 2, 4), ("prefill-first", 2, 4), ("orca", 2, 6), ("static", 2, 6), ("slots", 1, 6)],
    )
    def test_when_three_come_then_as_many_join_as_the_discipline_has_blocks_for(
        self, discipline: str, num_running: int, num_blocks_held: int
    ) -> None:
        bench = Bench(discipline, num_blocks=6)
        for _ in range(3):
            bench.add(5, max_tokens=6)

        bench.step()

        assert len(bench.scheduler.running) == num_running
        assert 6 - bench.scheduler.blocks.num_free_blocks == num_blocks_held

    @pytest.mark.parametrize("discipline", ["orca", "slots", "static", "dynamic"])
    def test_when_all_that_may_be_needed_is_held_then_none_is_ever_preempted(self, discipline: str) -> None:
        engine = engine_over(checking_model(num_blocks=12), discipline=discipline, batch_window_s=0.0)
        engine.add(request(f"r{n}", f"prompt {n}", max_tokens=20) for n in range(6))

        run(engine)

        assert engine.stats.num_preemptions == 0


class TestGivenABatchThatIsGathered:
    """A batch of three closes when it is full, or 0.1 s after the first came."""

    def test_when_it_is_not_full_then_it_begins_after_the_window(self) -> None:
        bench = Bench("dynamic")
        bench.add(2)
        begun = bench.step()
        bench.clock.now_s = 0.06
        bench.add(2)
        early = bench.step()

        bench.clock.now_s = 0.1

        assert begun.is_empty
        assert early.is_empty
        assert shares(bench.step()) == [(0, 2), (1, 2)]

    def test_when_it_is_asked_how_long_then_nothing_begins(self) -> None:
        bench = Bench("dynamic")
        bench.add(2)

        asked = bench.scheduler.gathering_s
        bench.clock.now_s = 0.06
        asked_later = bench.scheduler.gathering_s

        assert (asked, asked_later) == (pytest.approx(0.1), pytest.approx(0.1))
        assert bench.step().is_empty
        bench.clock.now_s = 0.15
        assert bench.step().is_empty
        bench.clock.now_s = 0.17
        assert shares(bench.step()) == [(0, 2)]

    def test_when_it_is_full_then_it_begins_at_once(self) -> None:
        bench = Bench("dynamic")
        for _ in range(3):
            bench.add(2)

        assert len(bench.step().rows) == 3

    def test_when_one_came_while_the_last_batch_ran_then_that_time_counts(self) -> None:
        bench = Bench("dynamic", batch_window_s=0.5, max_num_seqs=2)
        bench.add(2, max_tokens=3)
        bench.add(2, max_tokens=3)
        bench.step()
        bench.add(2)
        bench.step()
        bench.clock.now_s = 0.3
        bench.step()

        assert bench.scheduler.gathering_s == pytest.approx(0.2)

    def test_when_all_of_it_have_gone_then_the_next_one_has_a_window_of_its_own(self) -> None:
        bench = Bench("dynamic")
        gone = bench.add(2)
        bench.step()
        bench.scheduler.finish([gone])
        bench.step()
        bench.clock.now_s = 5.0
        bench.add(2)

        assert bench.scheduler.gathering_s == pytest.approx(0.1)

    def test_when_one_came_while_a_batch_of_one_step_ran_then_it_gathers_too(self) -> None:
        bench = Bench("dynamic")
        bench.add(2, max_tokens=1)
        bench.step()
        bench.clock.now_s = 0.1
        assert shares(bench.step()) == [(0, 2)]
        bench.clock.now_s = 0.15
        bench.add(2)

        assert bench.step().is_empty
        assert bench.scheduler.gathering_s == pytest.approx(0.1)


class PreparingModel(CheckingModel):
    """Has something to prepare until there was a pause."""

    num_prepared = 0

    @property
    def has_preparations(self) -> bool:
        return self.num_prepared == 0

    def prepare(self) -> None:
        self.num_prepared += 1


class TestGivenAnEngineUnderADiscipline:
    def test_when_a_batch_is_gathered_then_there_is_room_and_time_for_the_rest_of_it(self) -> None:
        engine = engine_over(checking_model(num_blocks=16), discipline="dynamic", batch_window_s=60.0, max_num_seqs=4)
        before = engine.idle_s
        engine.add([request("a", "12345678", max_tokens=8)])

        assert before == float("inf")
        assert 0 < engine.idle_s <= 60.0
        assert engine.room() == Room(kv_tokens=64 - 15, prefill_tokens=128 - 8, sequences=3)

    def test_when_a_batch_is_gathered_then_the_model_prepares_only_once_none_waits(
        self,
    ) -> None:
        model = PreparingModel(NullModelConfig(num_blocks=16, block_size=4))
        engine = engine_over(model, discipline="dynamic", batch_window_s=60.0)
        engine.add([request("a", max_tokens=8)])

        assert engine.advance() == []
        assert 0 < engine.idle_s <= 60.0
        engine.drop(["a"])
        assert engine.idle_s == 0.0
        engine.advance()
        assert (model.num_prepared, engine.idle_s) == (1, float("inf"))

    @pytest.mark.parametrize("discipline", ["static", "dynamic"])
    def test_when_a_fixed_batch_runs_then_there_is_no_room_until_it_has_ended(self, discipline: str) -> None:
        engine = engine_over(checking_model(), discipline=discipline, batch_window_s=0.0)
        engine.add([request("a", max_tokens=3)])
        engine.advance()

        assert engine.room() == Room(kv_tokens=0, prefill_tokens=0, sequences=0)
        assert engine.idle_s == 0

    @pytest.mark.parametrize("seed", [6, 141, 223, 282])
    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    def test_when_prompts_with_a_window_take_blocks_then_each_is_still_answered(
        self, discipline: str, seed: int
    ) -> None:
        """A prompt that grows may preempt one that the same step was about to compute."""
        numbers = Random(seed)
        window, budget = numbers.choice([16, 24, 40]), numbers.choice([4, 8, 12])
        num_blocks = numbers.choice([14, 16, 20, 30])
        model = checking_model(num_blocks=num_blocks, sliding_window=window, max_model_len=160)
        engine = engine_over(model, discipline=discipline, max_num_batched_tokens=budget, max_num_seqs=4)
        transcripts: Transcripts = {}
        for name in range(20):
            own = "".join(numbers.choices("xyz", k=numbers.randint(1, 50)))
            prompt = ("abcdefgh" * 15)[: numbers.choice([0, 20, 40, 60])] + own
            engine.add([request(str(name), prompt, max_tokens=numbers.randint(1, 20))])
            for _ in range(numbers.randint(1, 4)):
                note(transcripts, engine.advance())
                engine.check_invariants()
        while not engine.is_idle:
            note(transcripts, engine.advance())
            engine.check_invariants()

        assert len(transcripts) == 20

    def test_when_it_generates_then_a_step_has_something_to_do_at_once(self) -> None:
        engine = engine_over(checking_model())
        engine.add([request("a")])

        assert engine.idle_s == 0


class TestGivenSettings:
    def test_when_the_name_is_unknown_then_the_names_are_listed(self) -> None:
        problems = EngineConfig(discipline="luck").problems()

        assert problems == [f"discipline must be one of {', '.join(DISCIPLINE_NAMES)}, got 'luck'"]

    @pytest.mark.parametrize("discipline", ["static", "dynamic", "orca", "prefill-first"])
    def test_when_prompts_are_to_be_cut_under_whole_prompts_then_it_is_refused(self, discipline: str) -> None:
        problems = EngineConfig(discipline=discipline, long_prefill_token_threshold=64).problems()

        assert [problem.split()[0] for problem in problems] == ["long_prefill_token_threshold"]
