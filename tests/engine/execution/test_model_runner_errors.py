"""A real model whose device lacks memory or is lost: torch's own errors, raised where a step computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice import worker
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.errors import EngineBroken
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.transfers import PendingCopy
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, Sampling
from sluice.engine.sequence import Sequence, batch_of
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.kernels.decoder_step import StepInputs
from tests.engine.given import Transcripts, note

FOLDER = Path(worker.__file__).parent / "small_model"
ASKED = [
    Request(
        id=f"r{n}",
        prompt_token_ids=tuple(range(20 + n, 40 + 3 * n)),
        sampling=Sampling(temperature=0.7, seed=n, max_tokens=12, ignore_eos=True),
    )
    for n in range(6)
]


@pytest.fixture
def runner() -> ModelRunner:
    return load_model_runner(ModelOptions(path=FOLDER, dtype="float32", num_blocks=200, num_threads=1))


def tokens_of(runner: ModelRunner, *, max_num_batched_tokens: int = 256) -> dict[str, list[int]]:
    """What each request gets of an engine over `runner`."""
    config = EngineConfig(max_num_batched_tokens=max_num_batched_tokens)
    engine = LLMEngine(runner, load_tokenizer(FOLDER), config)
    engine.add(ASKED)
    transcripts: Transcripts = {}
    while not engine.is_idle:
        note(transcripts, engine.advance())
        engine.check_invariants()
    return {request_id: transcript.token_ids for (request_id, _), transcript in transcripts.items()}


def break_at(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, raises: Callable[[StepInputs], None]) -> None:
    """Let `raises` look at each step before it is computed."""
    compute = runner.decoder.forward

    def forward(tensors: StepInputs, caches: list[Any]) -> torch.Tensor:
        raises(tensors)
        return compute(tensors, caches)

    monkeypatch.setattr(runner.decoder, "forward", forward)


class TestGivenADeviceWithMemoryForSmallStepsOnly:
    @pytest.mark.parametrize("room", [3, 40])
    def test_when_requests_run_then_their_tokens_are_those_of_a_large_one(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, room: int
    ) -> None:
        expected = tokens_of(runner)
        num_failures = 0

        def raises(tensors: StepInputs) -> None:
            nonlocal num_failures
            if tensors.input_ids.shape[0] > room:
                num_failures += 1
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        break_at(monkeypatch, runner, raises)

        assert tokens_of(runner) == expected
        assert num_failures > 0


class TestGivenStepsThatAreLaunchedAhead:
    """The device lacks memory only as tokens are drawn: the next step was already laid out on top of this one."""

    def test_when_one_lacks_memory_then_the_step_on_top_reads_no_missing_row(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = tokens_of(runner)
        ahead = load_model_runner(
            ModelOptions(path=FOLDER, dtype="float32", num_blocks=200, num_threads=1, lag=1, max_num_seqs=64)
        )
        sampler = ahead._sampler  # pyright: ignore[reportPrivateUsage]
        draw, num_draws = sampler.sample, 0

        def sample(logits: torch.Tensor, rows: Any, **tokens: Any) -> Any:
            nonlocal num_draws
            num_draws += 1
            if num_draws % 2 == 0:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return draw(logits, rows, **tokens)

        layout = ahead._layout  # pyright: ignore[reportPrivateUsage]
        lay_out, strays = layout.lay_out, list[int]()

        def look_and_lay_out(batch: Any, drawn_rows: dict[int, int], drawn_ids: torch.Tensor | None) -> StepInputs:
            num_drawn = 0 if drawn_ids is None else drawn_ids.shape[0]
            strays.extend(row for row in drawn_rows.values() if row >= num_drawn)
            return lay_out(batch, drawn_rows, drawn_ids)

        monkeypatch.setattr(sampler, "sample", sample)
        monkeypatch.setattr(layout, "lay_out", look_and_lay_out)

        # They join one after the other: a step has more rows than the one before.
        assert tokens_of(ahead, max_num_batched_tokens=64) == expected
        assert num_draws > 12
        assert strays == [], "a GPU would read past the ids that were drawn"


class TestGivenADeviceThatIsLost:
    @pytest.mark.parametrize(
        "error",
        [
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it."),
            torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
            RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        ],
        ids=lambda error: str(error)[:30],
    )
    def test_when_a_step_computes_then_no_request_is_blamed_and_nothing_is_tried_again(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
    ) -> None:
        num_steps = 0

        def raises(_tensors: StepInputs) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps >= 3:
                raise error

        break_at(monkeypatch, runner, raises)

        with pytest.raises(EngineBroken, match="the device is lost"):
            tokens_of(runner)

        assert num_steps == 3

    def test_when_it_is_found_only_at_the_wait_for_results_then_the_report_is_the_same(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wait(_arrival: object) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        monkeypatch.setattr("sluice.engine.execution.transfers.PendingCopy.wait", wait)

        with pytest.raises(EngineBroken, match="unspecified launch failure"):
            tokens_of(runner)


def chunk_of_a_prompt() -> Batch:
    """A step that draws nothing."""
    sequence = Sequence(
        id=1,
        request_id="r",
        choice=0,
        sampling=Sampling(),
        token_ids=list(range(20, 60)),
        num_prompt_tokens=40,
        tables=[[0, 1, 2]],
    )
    return batch_of([(sequence, 0, 16, False)])


class TestGivenAStepThatDrawsNothing:
    def test_when_it_is_collected_then_the_device_is_waited_for_all_the_same(
        self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wait, num_waits = PendingCopy.wait, 0

        def counted(pending_copy: PendingCopy) -> tuple[torch.Tensor, ...]:
            nonlocal num_waits
            num_waits += 1
            return wait(pending_copy)

        monkeypatch.setattr(PendingCopy, "wait", counted)
        launched = runner.launch(chunk_of_a_prompt())

        assert num_waits == 0
        assert launched.collect() == []
        assert num_waits == 1


class TestGivenACardByItsName:
    @pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
    def test_when_a_model_is_loaded_then_its_thread_s_own_device_is_set_by_number(
        self, monkeypatch: pytest.MonkeyPatch, device: str, index: int
    ) -> None:
        """torch takes no device without one here; and there is no GPU to load it onto."""

        def set_device(device: object) -> None:
            raise RuntimeError(f"asked for {device!r}")

        monkeypatch.setattr(torch.cuda, "set_device", set_device)

        with pytest.raises(RuntimeError, match=f"asked for {index}$"):
            load_model_runner(ModelOptions(path=FOLDER, device=device, num_blocks=200))
