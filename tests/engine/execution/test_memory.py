"""Memory of a step, measured before the KV cache is sized: what is measured, and what the share means then."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from sluice import worker
from sluice.engine.batch import MAX_DRAFTS
from sluice.engine.errors import NotEnoughMemory
from sluice.engine.execution import kv_cache
from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.execution.memory import free_memory_bytes, peak_bytes
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start import model_loading
from sluice.engine.execution.start.largest_step import largest_batches
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.models.decoder import Decoder
from sluice.kernels.decoder_step import StepInputs
from sluice.kernels.paged_attention import KVCache

FOLDER = Path(worker.__file__).parent / "small_model"
CPU = torch.device("cpu")
MIB = 2**20


def touched(num_bytes: int) -> torch.Tensor:
    """Memory that is really there."""
    return torch.ones(num_bytes, dtype=torch.uint8)


class TestGivenAComputation:
    def test_when_it_takes_memory_and_gives_it_back_then_its_peak_is_measured(self) -> None:
        def compute() -> None:
            large = touched(200 * MIB)
            del large
            touched(50 * MIB)

        assert 195 * MIB <= peak_bytes(CPU, compute) <= 260 * MIB

    def test_when_it_takes_nothing_then_what_was_taken_before_does_not_count(self) -> None:
        before = touched(200 * MIB)
        del before

        assert peak_bytes(CPU, lambda: None) < 20 * MIB

    def test_when_the_c_library_has_kept_as_much_then_what_it_takes_counts_all_the_same(self) -> None:
        # To have freed large pieces is why the C library keeps later ones.
        for size in (20, 20, 4):
            before = [touched(size * MIB) for _ in range(8)]
            kept = before[::3]
            del before

        assert peak_bytes(CPU, lambda: touched(8 * MIB)) >= 7 * MIB
        assert kept


GROUP = "sys/fs/cgroup/pod/worker"
GROUP_1 = "sys/fs/cgroup/memory"
UNLIMITED = {f"{GROUP}/memory.max": "max", f"{GROUP}/memory.current": 0}


class TestGivenACPUOfAMachineWithFreeMemory:
    """100 MiB are free. Its cgroups are files below a temporary root."""

    @pytest.mark.parametrize(
        ("cgroup", "files", "num_free"),
        [
            ("0::/pod/worker", {}, 100 * MIB),
            ("0::/pod/worker", UNLIMITED, 100 * MIB),
            ("0::/pod/worker", UNLIMITED | {f"{GROUP}/memory.max": 900 * MIB}, 100 * MIB),
            ("0::/pod/worker", UNLIMITED | {f"{GROUP}/memory.max": 90 * MIB}, 90 * MIB),
            ("0::/pod/worker", UNLIMITED | {f"{GROUP}/memory.max": 90, f"{GROUP}/memory.current": 100}, 0),
            (
                "0::/pod/worker",
                {
                    f"{GROUP}/memory.max": 90 * MIB,
                    f"{GROUP}/memory.current": 50 * MIB,
                    f"{GROUP}/memory.stat": f"anon 5\ninactive_file {10 * MIB}",
                },
                50 * MIB,
            ),
            (
                "\nnot a cgroup\n",
                {},
                100 * MIB,
            ),
            (
                "0::/pod/worker",
                {
                    f"{GROUP}/memory.max": "max",
                    f"{GROUP}/memory.high": 60 * MIB,
                    f"{GROUP}/memory.current": 30 * MIB,
                    f"{GROUP}/memory.stat": f"active_file {10 * MIB}",
                },
                35 * MIB,
            ),
            (
                "0::/pod/worker/child",
                {
                    "sys/fs/cgroup/pod/memory.max": 30 * MIB,
                    "sys/fs/cgroup/pod/memory.current": 10 * MIB,
                    **UNLIMITED,
                },
                20 * MIB,
            ),
            (
                "2:cpu,cpuacct:/docker/1\n1:memory:/docker/1\n0::/",
                {
                    f"{GROUP_1}/memory.limit_in_bytes": 70 * MIB,
                    f"{GROUP_1}/memory.usage_in_bytes": 50 * MIB,
                    f"{GROUP_1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}",
                },
                30 * MIB,
            ),
        ],
        ids=[
            "none",
            "max",
            "large",
            "limit",
            "over",
            "page-cache",
            "no-line",
            "high",
            "parent",
            "version-1-in-a-container",
        ],
    )
    def test_when_cgroups_limit_the_process_then_their_room_counts(
        self, tmp_path: Path, cgroup: str, files: dict[str, int | str], num_free: int
    ) -> None:
        machine = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {100 * 1024} kB", "proc/self/cgroup": cgroup}
        for name, content in (machine | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")

        assert free_memory_bytes(CPU, tmp_path) == num_free


class TestGivenTheLargestBatches:
    @pytest.mark.parametrize(
        ("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
        [(64, 2048, 8192), (3, 100, 20), (256, 256, 40_000)],
    )
    def test_when_made_then_one_has_all_tokens_and_one_all_sequences_with_long_contexts(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        prompts, decodes = largest_batches(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=16,
        )

        assert prompts.num_tokens == min(max_num_batched_tokens, max_num_seqs * max_model_len)
        assert len(prompts.rows) == len(decodes.rows) == max_num_seqs
        for batch in (prompts, decodes):
            for row, admission in zip(batch.rows, batch.admissions, strict=True):
                end = row.start + row.num_tokens
                assert row.samples
                assert end == len(admission.token_ids) <= max_model_len
                assert len(admission.block_ids) * 16 >= end
        assert {row.start + 1 for row in decodes.rows} == {max_model_len}

    @pytest.mark.parametrize(
        ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_drafts"),
        [(256, 8192, 40_000, 64), (5, 100, 20, 64), (1, 2048, 40, 39), (256, 256, 40_000, 0)],
    )
    def test_when_steps_have_drafts_then_each_adds_a_token_within_the_limits(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int
    ) -> None:
        prompts, decodes = largest_batches(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=16,
            max_drafts=64,
        )

        assert prompts.num_drafts == decodes.num_drafts == num_drafts
        assert prompts.num_tokens == min(max_num_batched_tokens, max_num_seqs * max_model_len)
        assert decodes.num_tokens == max_num_seqs + num_drafts
        for batch in (prompts, decodes):
            ends = [row.start + row.num_tokens + len(batch.drafts.get(row.sequence_id, ())) for row in batch.rows]
            assert max(ends) <= max_model_len
        assert set(ends) == {max_model_len}


class Scales:
    """In the place of what measures memory: reports what a test sets, and keeps what was really there."""

    def __init__(self, *, free: int = 40 * MIB, peak: int | None = None) -> None:
        self._free = free
        self._peak = peak
        self.measured: list[int] = []

    def free(self, _device: torch.device) -> int:
        return self._free

    def peak(self, device: torch.device, compute: Callable[[], object]) -> int:
        self.measured.append(peak_bytes(device, compute))
        return self.measured[-1] if self._peak is None else self._peak

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_cache, "free_memory_bytes", self.free)
        monkeypatch.setattr(model_loading, "peak_bytes", self.peak)


def num_blocks(*, measures: bool = True, max_num_seqs: int = 64, given: int | None = None) -> int:
    """Of the KV cache of a model loaded so, half of the free memory being for cache and steps."""
    return load_model_runner(options(measures=measures, max_num_seqs=max_num_seqs, given=given)).limits.num_blocks


def options(*, measures: bool = True, max_num_seqs: int = 64, given: int | None = None) -> ModelOptions:
    return ModelOptions(
        path=FOLDER,
        dtype="float32",
        num_threads=1,
        memory_fraction=0.5,
        measures_steps=measures,
        max_num_seqs=max_num_seqs,
        num_blocks=given,
    )


class TestGivenAModelWhoseStepsAreMeasured:
    def test_when_its_cache_is_sized_then_the_step_s_memory_is_left_out_of_the_share(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Scales(free=40 * MIB, peak=5 * MIB).put_in(monkeypatch)

        plain, measured = num_blocks(measures=False), num_blocks()

        assert measured == pytest.approx(plain * 15 / 20, abs=1)

    def test_when_measured_for_real_then_it_is_at_least_what_its_logits_take(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scales = Scales(free=400 * MIB)
        scales.put_in(monkeypatch)

        num_blocks(max_num_seqs=512)

        vocab_size = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
        assert scales.measured[0] >= 512 * vocab_size * 4

    def test_when_it_speculates_then_a_step_has_logits_of_drafts_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        num_logits: list[int] = []
        forward = Decoder.forward

        def counted(decoder: Decoder, tensors: StepInputs, caches: list[KVCache]) -> torch.Tensor:
            num_logits.append(len(tensors.logit_rows))
            return forward(decoder, tensors, caches)

        monkeypatch.setattr(Decoder, "forward", counted)
        small = replace(options(max_num_seqs=2), max_num_batched_tokens=80, max_model_len=100)

        load_model_runner(small)
        load_model_runner(replace(small, speculates=True))

        assert num_logits == [2, 2, 2 + MAX_DRAFTS, 2 + MAX_DRAFTS]

    def test_when_the_step_takes_all_of_the_share_then_the_operator_is_informed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Scales(free=40 * MIB, peak=30 * MIB).put_in(monkeypatch)

        with pytest.raises(NotEnoughMemory, match=r"may take 0\.0 MiB"):
            num_blocks()

    def test_when_there_is_no_memory_for_a_step_then_the_error_names_the_settings(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forward(*_arguments: object) -> torch.Tensor:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr("sluice.engine.models.decoder.Decoder.forward", forward)

        with pytest.raises(NotEnoughMemory, match="a step of 2048 tokens and 64 sequences"):
            num_blocks()

    def test_when_blocks_are_given_then_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scales = Scales()
        scales.put_in(monkeypatch)

        assert num_blocks(given=9) == 9
        assert scales.measured == []


class TestGivenMoreMemoryThanRunningSequencesCanFill:
    """Two sequences of 64 tokens fill 8 blocks."""

    FEW = replace(options(measures=False, max_num_seqs=2), max_model_len=64)

    def test_when_a_share_is_asked_for_then_the_prefix_cache_gets_the_rest_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Scales(free=80 * MIB).put_in(monkeypatch)

        limits = load_model_runner(replace(self.FEW, cpu_cache_bytes=None)).limits

        assert limits.num_blocks == 40 * MIB // limits.block_bytes
        assert limits.num_blocks > 8

    def test_when_none_is_asked_for_then_the_bound_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Scales(free=80 * MIB).put_in(monkeypatch)

        limits = load_model_runner(replace(self.FEW, cpu_cache_bytes=10 * MIB)).limits

        assert limits.num_blocks == 10 * MIB // limits.block_bytes

    def test_when_running_sequences_can_fill_more_than_the_bound_then_they_get_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Scales(free=80 * MIB).put_in(monkeypatch)

        assert load_model_runner(replace(self.FEW, cpu_cache_bytes=1)).limits.num_blocks == 8

    def test_when_it_is_made_then_it_takes_no_memory_yet(self) -> None:
        decoder = load_model_runner(replace(self.FEW, num_blocks=8)).decoder
        large = partial(make_caches, decoder.config, num_blocks=2**16, block_size=16, dtype=torch.float32)

        kept: list[object] = []
        grown = peak_bytes(CPU, lambda: kept.append(large(device=CPU)))

        assert grown < 8 * MIB
