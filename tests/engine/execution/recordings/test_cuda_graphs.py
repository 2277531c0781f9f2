"""Recorded steps on a real model, over a recorder that computes anew: same logits to the last bit, nothing harmed."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from sluice import worker
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.errors import EngineBroken
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.recordings.buckets import Bucket, Buckets, pad
from sluice.engine.execution.recordings.cuda_graphs import (
    PATIENCE,
    CaptureFailed,
    CudaGraphRecorder,
    Recording,
    record_eagerly,
)
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer
from tests.engine.given import Transcripts, note
from tests.grids import fast_only

FOLDER = Path(worker.__file__).parent / "small_model"
PROMPTS = [7, 60, 1, 33, 200, 18, 5, 90, 2, 41, 12]
ASKED = [
    Request(
        id=f"r{n}",
        prompt_token_ids=tuple((7 * n + 13 * i) % 900 for i in range(size)),
        sampling=Sampling(
            temperature=0.8 * (n % 2),
            seed=n,
            max_tokens=5 + 7 * (n % 4),
            ignore_eos=True,
            logprobs=2 if n == 3 else None,
        ),
    )
    for n, size in enumerate(PROMPTS)
]


def load(
    *,
    graphs: bool,
    dtype: str = "bfloat16",
    device: str = "cpu",
    max_num_seqs: int = 9,
    block_size: int = 16,
    lag: Literal[0, 1] | None = None,
) -> ModelRunner:
    options = ModelOptions(
        path=FOLDER,
        device=device,
        dtype=dtype,
        block_size=block_size,
        num_blocks=150 * 16 // block_size,
        num_threads=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        graphs=graphs,
        lag=lag,
    )
    return load_model_runner(options)


def keep_logits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that each step draws from, as they come."""
    kept: list[Tensor] = []
    compute = runner._computed  # pyright: ignore[reportPrivateUsage]

    def computed(batch: Batch) -> tuple[Tensor, Tensor | None]:
        found, drawn = compute(batch)
        kept.append(found[: sum(row.samples for row in batch.rows)].clone())
        return found, drawn

    monkeypatch.setattr(runner, "_computed", computed)
    return kept


def pad_as(runner: ModelRunner, other: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `runner` compute the padding too that `other` has: of tokens and of logits."""
    buckets = other._buckets  # pyright: ignore[reportPrivateUsage]

    def computed(batch: Batch) -> tuple[Tensor, None]:
        bucket = buckets.of(batch)
        assert bucket is not None
        laid = runner.lay_out(pad(batch, bucket))
        rows = torch.zeros_like(laid.context_lens, dtype=laid.logit_rows.dtype)
        rows[: len(laid.logit_rows)] = laid.logit_rows
        return runner.forward(laid._replace(logit_rows=rows))[: len(laid.logit_rows)], None

    monkeypatch.setattr(runner, "_computed", computed)


def run(runner: ModelRunner, asked: list[Request]) -> dict[str, list[int]]:
    engine = LLMEngine(runner, load_tokenizer(FOLDER), EngineConfig(max_num_seqs=9, max_num_batched_tokens=256))
    engine.add(asked)
    transcripts: Transcripts = {}
    while not engine.is_idle:
        note(transcripts, engine.advance())
        engine.check_invariants()
    return {name: transcript.token_ids for (name, _), transcript in transcripts.items()}


@pytest.fixture
def _records_nothing_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buckets, "first", ())


def record_all_that_is_wanted(runner: ModelRunner) -> None:
    while runner.has_preparations:
        runner.prepare()


class TestGivenAModelWithAndWithoutRecordings:
    @pytest.mark.parametrize("dtype", fast_only(["bfloat16"], ["float32"]))
    def test_when_the_same_requests_run_then_every_step_s_logits_are_bitwise_equal(
        self, monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        plain, recorded = load(graphs=False, dtype=dtype), load(graphs=True, dtype=dtype)
        run(recorded, ASKED)
        record_all_that_is_wanted(recorded)
        graphs = recorded.graphs
        assert graphs is not None
        if dtype == "float32" or not plain.decoder.has_native_step:
            # Such products sum in an order that depends on the number of rows: it is given the same.
            pad_as(plain, recorded, monkeypatch)
        expected_logits, logits = keep_logits(plain, monkeypatch), keep_logits(recorded, monkeypatch)
        num_before = graphs.num_replays

        expected, actual = run(plain, ASKED), run(recorded, ASKED)

        assert graphs.num_replays - num_before == len(logits), "every step was replayed"
        assert {bucket.max_query_len for bucket in graphs.recorded} == {1, 256}
        assert actual == expected
        assert len(logits) == len(expected_logits)
        for one, other in zip(logits, expected_logits, strict=True):
            assert torch.equal(one, other)

    def test_when_small_and_large_steps_alternate_then_none_reads_another_s_rows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, recorded = load(graphs=False), load(graphs=True)
        first, second = ASKED[:2], ASKED
        for asked in (first, second):
            run(recorded, asked)
            record_all_that_is_wanted(recorded)

        for asked in (second, first, second):
            assert run(recorded, asked) == run(plain, asked)


class TestGivenTablesTooWideToBeSentWhole:
    @pytest.mark.parametrize("lag", fast_only([1], [0]))
    def test_when_steps_are_recorded_then_tokens_are_those_of_steps_that_are_not(self, lag: Literal[0, 1]) -> None:
        plain, recorded = (
            load(graphs=graphs, dtype="float32", block_size=4, lag=lag if graphs else 0) for graphs in (False, True)
        )
        graphs = recorded.graphs
        assert graphs is not None
        assert {graphs.inputs.sent_columns(bucket) for bucket in graphs.recorded} == {None}

        for asked in (ASKED, ASKED[:4], ASKED):
            assert run(recorded, asked) == run(plain, asked)
        assert graphs.num_replays > 0


class TestGivenMoreSequencesThanTokensOfAMixedStep:
    @pytest.mark.long
    def test_when_a_mixed_step_is_wanted_then_it_is_recorded(self) -> None:
        recorded, plain = (load(graphs=graphs, dtype="float32", max_num_seqs=300) for graphs in (True, False))
        assert recorded.graphs is not None

        run(recorded, ASKED)
        record_all_that_is_wanted(recorded)

        assert recorded.graphs.last_problem is None
        assert {bucket.max_query_len for bucket in recorded.graphs.recorded} == {1, 256}
        assert run(recorded, ASKED) == run(plain, ASKED)


class TestGivenACacheWithNumbersInIt:
    def test_when_only_padding_is_recorded_and_replayed_then_no_sequence_block_changes(self) -> None:
        runner = load(graphs=True)
        graphs, caches = runner.graphs, runner._caches  # pyright: ignore[reportPrivateUsage]
        assert graphs is not None
        for cache in caches:
            cache.keys.copy_(torch.randn(cache.keys.shape))
            cache.values.copy_(torch.randn(cache.values.shape))
        before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
        mixed = Bucket(256, 10, 256, 1024)

        with torch.inference_mode():
            for bucket in (*graphs.recorded, mixed):
                runner._record(bucket)  # pyright: ignore[reportPrivateUsage]
                assert graphs.has(bucket)
                graphs.forward(bucket)

        for cache, (keys, values) in zip(caches, before, strict=True):
            assert torch.equal(cache.keys[:150], keys[:150])
            assert torch.equal(cache.values[:150], values[:150])
            assert not torch.equal(cache.keys[150], keys[150]), "padding writes to the spare block"


@pytest.mark.usefixtures("_records_nothing_at_start")
class TestGivenStepsThatAreNotRecorded:
    def test_when_a_step_is_wanted_again_and_again_then_it_is_recorded_without_a_pause(self) -> None:
        runner = load(graphs=True)
        assert runner.graphs is not None
        long = [Request(id="a", prompt_token_ids=(5,) * 20, sampling=Sampling(max_tokens=1, ignore_eos=True))]

        for n in range(PATIENCE):
            assert runner.graphs.num_replays == 0, n
            run(runner, long)
        assert runner.graphs.num_replays == 1

        assert not runner.has_preparations

    def test_when_an_engine_has_a_pause_then_what_was_wanted_is_recorded_in_it(self) -> None:
        runner = load(graphs=True)
        engine = LLMEngine(runner, load_tokenizer(FOLDER), EngineConfig(max_num_seqs=9, max_num_batched_tokens=256))
        engine.add(ASKED)
        while not engine.is_idle:
            engine.advance()
        assert runner.graphs is not None
        num_before = len(runner.graphs.recorded)
        assert engine.idle_s == 0.0

        while engine.idle_s == 0.0:
            assert engine.advance() == []

        assert len(runner.graphs.recorded) > num_before
        assert engine.idle_s == float("inf")


class FailingGraphRecorder:
    """Records nothing: says why."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.num_asked = 0

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        self.num_asked += 1
        raise self._error


class LateFailingGraphRecorder:
    """Computes once, as a capture does first, and then fails: from the second size of decodes on."""

    def __init__(self) -> None:
        self.num_failures = 0

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        recording = record_eagerly(compute)
        if recording().shape[0] not in (1, 9):
            self.num_failures += 1
            raise RuntimeError("CUDA error: out of memory")
        return recording


@pytest.mark.usefixtures("_records_nothing_at_start")
class TestGivenStepsAheadOfTheirResults:
    def test_when_recording_fails_amid_them_then_each_reads_its_own_tokens(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failing = LateFailingGraphRecorder()
        monkeypatch.setattr("sluice.engine.execution.model_runner.record_eagerly", failing.record)
        monkeypatch.setattr("sluice.engine.execution.recordings.cuda_graphs.PATIENCE", 2)
        runner = load(graphs=True, dtype="float32", lag=1)
        num_before = failing.num_failures

        tokens = run(runner, ASKED)

        assert failing.num_failures > num_before
        assert runner.graphs is not None
        assert runner.graphs.num_replays > 0
        assert tokens == run(load(graphs=False, dtype="float32"), ASKED)


class TestGivenADeviceThatCannotRecord:
    def test_when_it_says_so_then_steps_are_computed_as_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failing = FailingGraphRecorder(
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nhint")
        )
        monkeypatch.setattr("sluice.engine.execution.model_runner.record_eagerly", failing.record)
        runner = load(graphs=True)

        assert run(runner, ASKED) == run(load_plain(monkeypatch), ASKED)

        assert runner.graphs is not None
        assert (runner.graphs.recorded, runner.graphs.num_replays) == ([], 0)
        assert runner.graphs.last_problem == (
            "RuntimeError: CUDA error: operation not permitted when stream is capturing"
        )

    def test_when_a_capture_goes_wrong_then_no_other_is_begun_and_it_is_reported_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        failing = FailingGraphRecorder(
            CaptureFailed("RuntimeError: CUDA error: operation failed due to a previous error")
        )
        monkeypatch.setattr("sluice.engine.execution.model_runner.record_eagerly", failing.record)
        runner = load(graphs=True)

        for _ in range(PATIENCE):
            run(runner, ASKED[:1])
        record_all_that_is_wanted(runner)

        assert failing.num_asked == 1
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if record.name == "sluice.engine.execution.recordings.cuda_graphs"
        ]
        assert "operation failed due to a previous error" in line

    def test_when_the_device_is_lost_meanwhile_then_the_engine_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lost = FailingGraphRecorder(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
        monkeypatch.setattr("sluice.engine.execution.model_runner.record_eagerly", lost.record)

        with pytest.raises(EngineBroken, match="the device is lost"):
            load(graphs=True)


class BrieflyFailingGraphRecorder:
    """Lacks memory while `is_short`."""

    is_short = True

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        if self.is_short:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return record_eagerly(compute)


class TestGivenADeviceThatLacksMemoryForAMoment:
    def test_when_it_has_memory_again_then_steps_are_recorded_after_a_while(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        brief = BrieflyFailingGraphRecorder()
        monkeypatch.setattr("sluice.engine.execution.model_runner.record_eagerly", brief.record)
        monkeypatch.setattr("sluice.engine.execution.recordings.cuda_graphs.PATIENCE_WITHOUT_MEMORY", 12)
        runner = load(graphs=True)
        graphs = runner.graphs
        assert graphs is not None
        expected = run(load_plain(monkeypatch), ASKED)

        assert run(runner, ASKED) == expected
        record_all_that_is_wanted(runner)
        assert graphs.recorded == []

        brief.is_short = False
        assert not runner.has_preparations, "it is not tried again at once"
        for _ in range(3):
            assert run(runner, ASKED) == expected
        assert graphs.num_replays > 0


@pytest.mark.usefixtures("_records_nothing_at_start")
class TestGivenAPauseWithoutMemory:
    @pytest.mark.parametrize("where", ["as it is laid out", "as it is copied"])
    def test_when_recording_runs_out_of_memory_then_no_job_fails_and_it_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        runner = load(graphs=True)
        engine = LLMEngine(runner, load_tokenizer(FOLDER), EngineConfig(max_num_seqs=9, max_num_batched_tokens=256))
        graphs, layout = runner.graphs, runner._layout  # pyright: ignore[reportPrivateUsage]
        assert graphs is not None
        run(runner, ASKED[:2])
        num_recorded = len(graphs.recorded)
        assert (bucket := graphs.most_used) is not None

        def raises(*_arguments: object, **_options: object) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        with monkeypatch.context() as short:
            if where == "as it is laid out":
                short.setattr(layout, "plan", raises)
            else:
                short.setattr(graphs.inputs, "fill", raises)
            while engine.idle_s == 0.0:
                assert engine.advance() == []

        assert len(graphs.recorded) == num_recorded
        run(runner, ASKED[:2])
        record_all_that_is_wanted(runner)
        assert graphs.has(bucket)


class FakeStream:
    """A stream without a GPU."""

    def wait_stream(self, other: object) -> None:
        pass


class FakeStreams:
    """torch's book of the current stream; a capture's end raises, as CUDA does after one in which something failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.default = FakeStream()
        monkeypatch.setattr(torch.cuda, "Stream", self.another)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_of)
        monkeypatch.setattr(torch.cuda, "set_stream", self.switch)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def another(self, _device: torch.device) -> FakeStream:
        return FakeStream()

    def current_of(self, _device: torch.device) -> FakeStream:
        return self.current

    def switch(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def on(self, stream: FakeStream) -> Generator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, _graph: object, *, stream: FakeStream, **_options: object) -> Generator[None]:
        self.current = stream
        yield
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class TestGivenACaptureThatCannotBeEnded:
    def test_when_it_has_failed_then_the_stream_is_the_one_of_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        streams = FakeStreams(monkeypatch)
        recorder = CudaGraphRecorder(torch.device("cuda:0"))

        with pytest.raises(CaptureFailed, match="operation failed due to a previous error"):
            recorder.record(lambda: torch.zeros(1))

        assert streams.current is streams.default


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGivenACard:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_when_steps_are_recorded_then_tokens_are_those_of_steps_that_are_not(self, dtype: str) -> None:
        plain, recorded = (load(graphs=graphs, dtype=dtype, device="cuda:0") for graphs in (False, True))
        run(recorded, ASKED)
        record_all_that_is_wanted(recorded)
        assert recorded.graphs is not None
        num_before = recorded.graphs.num_replays

        actual = run(recorded, ASKED)

        assert recorded.graphs.last_problem is None
        assert recorded.graphs.num_replays > num_before
        expected = run(plain, ASKED)
        if dtype == "float32":
            assert actual == expected
        # In bfloat16 a product may choose another kernel for a padded number of rows, and a tie fall the other way.
        assert sum(actual[name] == expected[name] for name in actual) > len(actual) / 2


def load_plain(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.undo()
    return load(graphs=False)
