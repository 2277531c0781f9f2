"""Steps that fail: only the culprit is harmed."""

from typing import NamedTuple

import pytest

from sluice.engine.batch import Batch, Sampled
from sluice.engine.errors import EngineBroken
from sluice.engine.executor import Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import FinishReason
from sluice.engine.testing.fault_injection import ChaoticExecutor, Fault, FaultKind
from tests.engine.given import (
    Checked,
    CheckingModel,
    Prophet,
    Transcripts,
    checking_model,
    engine_over,
    note,
    request,
    run,
    undisturbed,
)
from tests.engine.lagging import LaggingExecutor


class CountingExecutor(ChaoticExecutor):
    """Counts how often it is asked, and for how many sequences."""

    def __init__(self, model: CheckingModel, *faults: Fault) -> None:
        super().__init__(model, faults)
        self.asked: list[int] = []

    def launch(self, batch: Batch) -> Launched:
        self.asked.append(len(batch.rows))
        return super().launch(batch)


def eight() -> list[str]:
    return [f"r{n}" for n in range(8)]


def engine_with(*faults: Fault, **options: int) -> tuple[LLMEngine, CountingExecutor]:
    executor = CountingExecutor(checking_model(), *faults)
    engine = engine_over(executor, **options)
    engine.add([request(request_id, f"prompt of {request_id}", max_tokens=6) for request_id in eight()])
    return engine, executor


def tokens(transcripts: Transcripts, request_id: str) -> list[int]:
    return transcripts[request_id, 0].token_ids


def run_the_rest(engine: LLMEngine) -> Transcripts:
    """Run to the end, leaving out what has begun before."""
    transcripts: Transcripts = {}
    while not engine.is_idle:
        note(transcripts, [delta for delta in engine.advance() if delta.request_id != "bad"])
    return transcripts


def expected(request_id: str) -> list[int]:
    return tokens(undisturbed(request(request_id, f"prompt of {request_id}", max_tokens=6)), request_id)


class TestGivenAStepThatFailsOnce:
    def test_when_it_is_tried_again_then_the_output_is_the_same(self) -> None:
        engine, executor = engine_with(Fault(kind=FaultKind.FAIL, at=3, request_id="r2", times=1))

        transcripts = run(engine)

        assert len(executor.asked) == engine.stats.num_steps + 1
        assert (engine.stats.num_failed_attempts, engine.stats.last_failure) == (1, "RuntimeError: injected failure")
        for request_id in eight():
            assert tokens(transcripts, request_id) == expected(request_id)

    def test_when_it_fails_then_nothing_has_moved(self) -> None:
        engine, _ = engine_with(Fault(kind=FaultKind.LOSE, at=0, request_id="r0", times=1))
        before = engine.stats

        with pytest.raises(EngineBroken):
            engine.advance()

        engine.check_invariants()
        assert engine.stats.num_output_tokens == before.num_output_tokens == 0
        transcripts = run(engine)
        assert [tokens(transcripts, request_id) for request_id in eight()] == [expected(r) for r in eight()]


class TestGivenARequestThatAlwaysFails:
    def test_when_it_runs_among_others_then_it_alone_ends_with_an_error(self) -> None:
        engine, _ = engine_with(Fault(kind=FaultKind.FAIL, at=3, request_id="r5"))

        transcripts = run(engine)

        finish = transcripts["r5", 0].finish
        assert finish is not None
        assert (finish.reason, finish.is_rejection) == (FinishReason.ERROR, False)
        assert finish.error == "the model failed on this request: RuntimeError: injected failure"
        assert tokens(transcripts, "r5") == expected("r5")[:3]
        for request_id in set(eight()) - {"r5"}:
            assert tokens(transcripts, request_id) == expected(request_id)

    def test_when_it_has_just_joined_then_those_that_ran_go_on_in_one_piece(self) -> None:
        executor = CountingExecutor(checking_model(), Fault(kind=FaultKind.FAIL, at=0, request_id="new"))
        engine = engine_over(executor, max_step_retries=1)
        engine.add([request(f"r{n}", max_tokens=6) for n in range(4)])
        engine.advance()
        executor.asked.clear()
        engine.add([request("new", max_tokens=6)])

        deltas = engine.advance()

        assert executor.asked == [5, 5, 4, 1]
        assert {delta.request_id for delta in deltas if delta.finish is None} == {f"r{n}" for n in range(4)}

    def test_when_three_are_culprits_then_exactly_these_fail_in_one_step(self) -> None:
        culprits = ["r1", "r2", "r7"]
        engine, _ = engine_with(*(Fault(kind=FaultKind.FAIL, at=2, request_id=r) for r in culprits))

        transcripts = run(engine)

        failed = [r for (r, _), t in transcripts.items() if t.finish and t.finish.reason is FinishReason.ERROR]
        assert sorted(failed) == culprits


class UnreadStep(NamedTuple):
    """A step that returns nothing of the prompts in some slots."""

    launched: Launched
    batch: Batch
    slots: set[int]

    def collect(self) -> list[Sampled]:
        sampling = (row for row in self.batch.rows if row.samples)
        pairs = zip(sampling, self.launched.collect(), strict=True)
        return [sampled._replace(prompt=None) if row.slot in self.slots else sampled for row, sampled in pairs]


class UnreadingExecutor(LaggingExecutor):
    """Returns nothing of the prompt of the request "unread"."""

    def __init__(self, lag: int) -> None:
        super().__init__(checking_model())
        self.lag = lag
        self._unread_slots: set[int] = set()

    def launch(self, batch: Batch) -> Launched:
        self._unread_slots |= {admission.slot for admission in batch.admissions if admission.request_id == "unread"}
        return UnreadStep(super().launch(batch), batch, self._unread_slots)


class TestGivenAnExecutorThatDoesNotReadAPrompt:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("max_tokens", [0, 3])
    def test_when_its_step_is_collected_then_that_request_alone_fails(self, max_tokens: int, lag: int) -> None:
        engine = engine_over(UnreadingExecutor(lag))
        ids = ["unread", "read"]
        engine.add([request(one, one.encode() * 5, max_tokens=max_tokens, prompt_logprobs=1) for one in ids])

        deltas = [delta for _ in range(12) for delta in engine.advance()]

        finishes = {delta.request_id: delta.finish for delta in deltas if delta.finish is not None}
        assert finishes["unread"].error == (
            "the model failed on this request: RuntimeError: "
            "the executor returned nothing of the prompt that it was to read"
        )
        assert finishes["read"].reason is FinishReason.LENGTH
        assert [delta.request_id for delta in deltas if delta.prompt is not None] == ["read"]
        assert engine.is_idle
        engine.check_invariants()

    def test_when_its_request_was_aborted_before_then_it_has_one_end(self) -> None:
        engine = engine_over(UnreadingExecutor(1))
        engine.add([request("unread", b"p" * 9, max_tokens=0, prompt_logprobs=1)])
        engine.advance()

        engine.abort(["unread"])
        deltas = [delta for _ in range(3) for delta in engine.advance()]

        assert [delta.finish and delta.finish.reason for delta in deltas] == [FinishReason.ABORTED]


class TestGivenARowWithoutNumbers:
    def test_when_it_comes_then_that_request_fails_and_the_step_is_not_repeated(self) -> None:
        engine, executor = engine_with(Fault(kind=FaultKind.NAN, at=2, request_id="r3"))

        transcripts = run(engine)

        assert len(executor.asked) == engine.stats.num_steps

        finish = transcripts["r3", 0].finish
        assert finish is not None
        assert finish.error == "the model's logits are not numbers"
        assert tokens(transcripts, "r3") == expected("r3")[:2]
        assert tokens(transcripts, "r4") == expected("r4")

    def test_when_its_prompt_comes_again_then_no_block_of_it_is_found(self) -> None:
        model = checking_model()
        engine = engine_over(ChaoticExecutor(model, [Fault(kind=FaultKind.NAN, at=1, request_id="bad")]))
        engine.add([request("bad", b"p" * 21, max_tokens=6)])
        run(engine)

        engine.add([request("good", b"p" * 21, max_tokens=1)])
        transcripts = run(engine)

        assert transcripts["good", 0].deltas[0].stats.num_cached_tokens == 0


class DyingModel(CheckingModel):
    """Computes well until its device is lost: then it raises, or has no numbers."""

    dies_by: FaultKind | None = None

    def launch(self, batch: Batch) -> Checked:
        if self.dies_by is FaultKind.FAIL:
            raise RuntimeError("the device is gone")
        launched = super().launch(batch)
        if self.dies_by is None:
            return launched
        return launched._replace(rows=[Sampled((), error="not finite") for _ in launched.rows])


class TestGivenADeviceThatIsLost:
    def test_when_the_executor_says_so_then_the_engine_is_broken(self) -> None:
        engine, _ = engine_with(Fault(kind=FaultKind.LOSE, at=1))

        with pytest.raises(EngineBroken, match="injected loss"):
            run(engine)

    @pytest.mark.parametrize("dies_by", [FaultKind.FAIL, FaultKind.NAN])
    @pytest.mark.parametrize("num_requests", [1, 3])
    def test_when_it_computes_nothing_then_the_engine_is_broken_and_no_job_fails(
        self, dies_by: FaultKind, num_requests: int
    ) -> None:
        model = DyingModel(NullModelConfig())
        engine = engine_over(model)
        engine.add([request(f"r{n}", max_tokens=9) for n in range(num_requests)])
        engine.advance()
        model.dies_by = dies_by

        with pytest.raises(
            EngineBroken, match="the device is gone" if dies_by is FaultKind.FAIL else "logits are not finite"
        ):
            engine.advance()

        engine.check_invariants()
        assert engine.stats.num_running == num_requests

    def test_when_it_returns_fewer_rows_than_sequences_then_the_step_has_failed(self) -> None:
        class Forgetful(CheckingModel):
            def launch(self, batch: Batch) -> Checked:
                launched = super().launch(batch)
                return launched._replace(rows=launched.rows[1:], sampling=launched.sampling[1:])

        engine = engine_over(Forgetful(NullModelConfig()))
        engine.add([request("r0", max_tokens=2), request("r1", max_tokens=2)])

        with pytest.raises(EngineBroken, match="rows"):
            engine.advance()


class TestGivenADeviceThatIsWell:
    @pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.NAN])
    def test_when_every_sequence_fails_by_itself_then_each_is_blamed(self, kind: FaultKind) -> None:
        engine, _ = engine_with(Fault(kind=kind, at=1), max_num_batched_tokens=1024)

        transcripts = run(engine)

        assert all(t.finish and t.finish.reason is FinishReason.ERROR for t in transcripts.values())
        assert all(len(t.token_ids) == 1 for t in transcripts.values())

    def test_when_the_only_sequence_fails_then_it_is_blamed_and_the_next_one_runs(self) -> None:
        fault = Fault(kind=FaultKind.FAIL, at=0, request_id="bad")
        engine = engine_over(ChaoticExecutor(checking_model(), [fault]), max_num_seqs=1)
        engine.add([request("bad", max_tokens=2), request("good", max_tokens=2)])

        transcripts = run(engine)

        finish = transcripts["bad", 0].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert len(transcripts["good", 0].token_ids) == 2

    def test_when_a_prompt_is_half_computed_then_the_device_check_leaves_it_unchanged(self) -> None:
        fault = Fault(kind=FaultKind.NAN, at=2, request_id="bad")
        engine = engine_over(ChaoticExecutor(checking_model(), [fault]), policy="priority", max_num_batched_tokens=16)
        engine.add([request("bad", b"b" * 4, max_tokens=4)])
        engine.advance()
        # All but its last token are computed, in its last block too, when the other one fails.
        long = request("long", b"p" * 31, max_tokens=4, priority=1)
        engine.add([long])

        transcripts = run_the_rest(engine)

        assert tokens(transcripts, "long") == tokens(undisturbed(long), "long")

    def test_when_a_prompt_is_shared_then_the_device_check_changes_none_of_its_blocks(self) -> None:
        fault = Fault(kind=FaultKind.FAIL, at=1, request_id="bad")
        engine = engine_over(ChaoticExecutor(checking_model(), [fault]))
        engine.add([request("good", b"p" * 40, max_tokens=2)])
        run(engine)
        engine.add([request("bad", b"p" * 40, max_tokens=4)])
        engine.advance()

        engine.add([request("good again", b"p" * 40, max_tokens=4)])

        transcripts = run_the_rest(engine)
        alone = undisturbed(request("good again", b"p" * 40, max_tokens=4))
        assert tokens(transcripts, "good again") == tokens(alone, "good again")


class FailsWithDrafts(CheckingModel):
    """Cannot compute a step that has drafts."""

    def launch(self, batch: Batch) -> Checked:
        if batch.drafts:
            raise RuntimeError("injected failure")
        return super().launch(batch)


class TestGivenADeviceThatCannotComputeDrafts:
    @pytest.mark.parametrize("max_step_retries", [0, 1])
    def test_when_steps_have_some_then_they_are_computed_without_and_nobody_is_blamed(
        self, max_step_retries: int
    ) -> None:
        asked = [request(f"r{n}", f"prompt {n}", max_tokens=20, seed=n) for n in range(3)]
        expected_of: Transcripts = {}
        for one in asked:
            expected_of |= undisturbed(one)
        engine = engine_over(
            FailsWithDrafts(NullModelConfig(num_blocks=64, block_size=4)),
            max_step_retries=max_step_retries,
            draft_source=Prophet(expected_of, 1.0),
        )
        engine.add(asked)

        transcripts = run(engine)

        assert engine.stats.num_failed_attempts > 0
        assert {key: one.token_ids for key, one in transcripts.items()} == {
            key: one.token_ids for key, one in expected_of.items()
        }
