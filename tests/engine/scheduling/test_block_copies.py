"""Requests that share a beginning which does not end with a block: how much is computed, and what may go wrong."""

from typing import Any

import pytest

from sluice.engine.batch import Batch, BlockCopy, Sampled, ScheduledRow
from sluice.engine.errors import OutOfMemory
from sluice.engine.null_model import NullModelConfig
from tests.engine.given import Checked, CheckingModel, Transcripts, engine_over, lagging, note, request, undisturbed

SHARED = b"You are a patient judge of short answers; say yes or no."
BLOCK_SIZE = 16
"""Of three full blocks and one with eight tokens is `SHARED`."""


TAIL = b" Is water wet, and is ice?"
"""So long that half a step without memory is still a step with its sequence."""


class WatchingModel(CheckingModel):
    """Fails at a step with a copy on request, and notes the batches that have some."""

    num_failures = 0
    error: Exception = RuntimeError("injected failure")
    writes_first = False

    def __init__(self, config: NullModelConfig) -> None:
        super().__init__(config)
        self.copying: list[Batch] = []

    def launch(self, batch: Batch) -> Checked:
        if not batch.copies:
            return super().launch(batch)
        self.copying.append(batch)
        if self.num_failures == 0:
            return super().launch(batch)
        self.num_failures -= 1
        if self.writes_first:
            super().launch(batch)
        raise self.error


class Run:
    """An engine over a model that is watched."""

    def __init__(self, lag: int, *, num_blocks: int = 200, block_size: int = BLOCK_SIZE, **options: Any) -> None:
        self.model = WatchingModel(NullModelConfig(num_blocks=num_blocks, block_size=block_size))
        self.engine = engine_over(lagging(self.model) if lag else self.model, **options)
        self.transcripts: Transcripts = {}

    def step(self) -> None:
        note(self.transcripts, self.engine.advance())
        self.engine.check_invariants()

    def fail_copying(self, num_failures: int, *, writes_first: bool = False, error: Exception | None = None) -> None:
        """Let the next attempts at a step with copies fail."""
        self.model.num_failures, self.model.writes_first = num_failures, writes_first
        self.model.error = error or RuntimeError("injected failure")

    def to_the_end(self) -> None:
        for _ in range(1000):
            if self.engine.is_idle:
                break
            self.step()
        assert self.engine.stats.kv_tokens_used == 0, "an idle engine holds blocks"

    def check(self, *prompts: tuple[str, bytes]) -> None:
        """To the end: each of `prompts` says what it says alone."""
        self.to_the_end()
        for request_id, prompt in prompts:
            expected = undisturbed(request(request_id, prompt, max_tokens=6))
            assert self.transcripts[request_id, 0].token_ids == expected[request_id, 0].token_ids


def with_first(lag: int, **options: Any) -> Run:
    """One request runs, its prompt computed and committed."""
    started = Run(lag, **options)
    started.engine.add([request("first", SHARED, max_tokens=40)])
    for _ in range(3):
        started.step()
    return started


@pytest.mark.parametrize("lag", [0, 1])
class TestGivenSixteenPromptsThatShareAThousandTokens:
    """Each has four tokens more; one token is generated."""

    @pytest.mark.parametrize(
        ("block_size", "num_expected"),
        [
            # 1000 = 62 * 16 + 8: all compute 4 in addition to the first, 8 fewer than where blocks are not copied.
            (16, 1004 + 15 * 4),
            # 1000 = 7 * 128 + 104.
            (128, 1004 + 15 * 4),
            # Nothing to copy: the shared part ends with a block.
            (8, 1004 + 15 * 4),
        ],
    )
    @pytest.mark.parametrize("is_burst", [True, False])
    def test_when_they_come_at_once_or_later_then_each_shared_token_is_computed_once(
        self, lag: int, block_size: int, num_expected: int, is_burst: bool
    ) -> None:
        started = Run(
            lag,
            num_blocks=3000 // block_size,
            block_size=block_size,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
        )
        shared = bytes(n * 7 % 251 for n in range(1000))
        asked = [request(f"r{n}", shared + bytes([n, 1, 2, 3]), max_tokens=1) for n in range(16)]

        for part in [asked] if is_burst else [asked[:1], asked[1:]]:
            started.engine.add(part)
            started.to_the_end()

        assert started.model.num_computed_tokens == num_expected
        assert started.model.num_copies == (0 if block_size == 8 else 15)

    def test_when_they_answer_one_prompt_then_one_token_each_is_computed_for_its_logits(self, lag: int) -> None:
        started = Run(lag, max_num_seqs=16, max_num_batched_tokens=2048)
        prompt = bytes(n * 7 % 251 for n in range(1000))

        started.engine.add([request("r", prompt, num_choices=16, max_tokens=1)])
        started.to_the_end()

        assert started.model.num_computed_tokens == 1000 + 15

    def test_when_a_prompt_ends_with_a_block_then_each_further_answer_computes_one_token(self, lag: int) -> None:
        started = Run(lag, max_num_seqs=16, max_num_batched_tokens=2048)
        prompt = bytes(n * 7 % 251 for n in range(992))

        started.engine.add([request("r", prompt, num_choices=16, max_tokens=1)])
        started.to_the_end()

        assert started.model.num_computed_tokens == 992 + 15


@pytest.mark.parametrize("lag", [0, 1])
class TestGivenASequenceThatFillsItsBlock:
    """Its prompt is computed, eight tokens of its last block among it, and it generates into that block."""

    def test_when_others_continue_its_prompt_then_they_copy_it_and_tokens_are_unchanged(self, lag: int) -> None:
        started = with_first(lag)

        started.engine.add([request(f"r{n}", SHARED + bytes([65 + n]), max_tokens=6) for n in range(3)])

        started.check(*((f"r{n}", SHARED + bytes([65 + n])) for n in range(3)))
        assert started.model.num_copies == 3

    def test_when_a_prompt_is_as_long_as_what_is_known_then_its_last_token_is_computed(self, lag: int) -> None:
        started = with_first(lag)
        num_computed = started.model.num_computed_tokens

        started.engine.add([request("r", SHARED, max_tokens=1)])
        started.engine.abort(["first"])
        started.to_the_end()

        assert started.transcripts["r", 0].deltas[0].stats.num_cached_tokens == len(SHARED) - 1
        assert started.model.num_computed_tokens <= num_computed + 2

    def test_when_it_is_aborted_before_the_copy_is_made_then_the_copy_is_right(self, lag: int) -> None:
        started = with_first(lag, num_blocks=9)
        started.fail_copying(1, error=OutOfMemory("injected"))
        started.engine.add([request("r", SHARED + TAIL, max_tokens=6)])

        started.step()
        started.engine.abort(["first"])
        # What takes blocks that are free now.
        started.engine.add([request("other", b"x" * 30, max_tokens=6)])

        started.check(("r", SHARED + TAIL), ("other", b"x" * 30))

    @pytest.mark.parametrize("salt", ["", "another"])
    def test_when_the_salt_differs_then_nothing_is_copied(self, lag: int, salt: str) -> None:
        started = with_first(lag)

        started.engine.add([request("r", SHARED + b"A", max_tokens=6, cache_salt=salt)])
        started.to_the_end()

        assert started.model.num_copies == (0 if salt else 1)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("writes_first", [False, True])
class TestGivenAStepWithCopiesThatFails:
    """Before it has copied anything, or after it has copied and written behind the copies."""

    @pytest.mark.parametrize("num_failures", [1, 2, 3])
    def test_when_it_is_retried_in_parts_then_each_part_makes_its_copies_again(
        self, lag: int, writes_first: bool, num_failures: int
    ) -> None:
        started = with_first(lag, max_step_retries=1)
        started.fail_copying(num_failures, writes_first=writes_first)

        prompts = [(f"r{n}", SHARED + bytes([65 + n])) for n in range(3)]
        started.engine.add([request(request_id, prompt, max_tokens=6) for request_id, prompt in prompts])

        started.check(*prompts)
        assert len(started.model.copying) > num_failures
        for batch in started.model.copying:
            assert {copy.sequence_id for copy in batch.copies} <= {row.sequence_id for row in batch.rows}

    def test_when_there_is_no_memory_for_it_then_the_next_one_has_its_copies(
        self, lag: int, writes_first: bool
    ) -> None:
        started = with_first(lag, max_step_retries=0)
        started.fail_copying(1, writes_first=writes_first, error=OutOfMemory("injected"))

        started.engine.add([request("r", SHARED + TAIL, max_tokens=6)])

        started.check(("r", SHARED + TAIL))
        assert [len(batch.copies) for batch in started.model.copying] == [1, 1]
        assert started.engine.stats.num_preemptions == 0

    def test_when_the_sequence_for_the_copy_is_aborted_then_nothing_is_held(self, lag: int, writes_first: bool) -> None:
        started = with_first(lag, max_step_retries=0)
        started.fail_copying(1, writes_first=writes_first, error=OutOfMemory("injected"))
        started.engine.add([request("r", SHARED + TAIL, max_tokens=6)])
        started.step()

        started.engine.abort(["r"])

        started.to_the_end()
        started.engine.add([request("again", SHARED + b"A", max_tokens=6)])
        started.check(("again", SHARED + b"A"))


class SickModel(CheckingModel):
    """Has no numbers for any sequence that was requested, and notes the blocks of the one that was not."""

    def __init__(self, config: NullModelConfig) -> None:
        super().__init__(config)
        self.probed: list[tuple[int, ...]] = []

    def launch(self, batch: Batch) -> Checked:
        checked = super().launch(batch)
        if all(row.sequence_id >= 0 for row in batch.rows):
            return checked._replace(rows=[Sampled((), error="not finite") for _ in checked.rows])
        self.probed += [admission.block_ids for admission in batch.admissions]
        return checked


class TestGivenAStepOfWhichNothingWentWell:
    def test_when_the_device_is_checked_then_no_block_that_may_be_copied_is_written(self) -> None:
        model = SickModel(NullModelConfig(num_blocks=20, block_size=BLOCK_SIZE))
        engine = engine_over(model)
        engine.add([request("r", SHARED)])

        engine.advance()

        assert model.probed == [(20,)]


class TestGivenABatchWithCopies:
    def test_when_it_is_divided_then_each_part_has_the_copies_of_its_own_sequences(self) -> None:
        rows = tuple(ScheduledRow(slot=n, sequence_id=n, start=0, num_tokens=1, samples=True) for n in range(3))
        copies = (BlockCopy(0, 5, 6), BlockCopy(2, 5, 7))
        batch = Batch(rows, num_joined=3, copies=copies)

        assert batch.part(rows[:1]).copies == copies[:1]
        assert batch.part(rows[1:]).copies == copies[1:]
        assert batch.part(rows[1:2]).copies == ()
