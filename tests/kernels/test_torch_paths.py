"""What a GPU falls back to when a kernel does not work: torch's operators, here on the CPU, against the definitions."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable

import pytest
import torch

from sluice.kernels import chain
from sluice.kernels.chain import Path, path_of
from sluice.kernels.gated_activation.cpu import gated_activation_torch
from sluice.kernels.linear.cuda import Int8Linear
from sluice.kernels.paged_attention.cpu import paged_attention_torch
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.rms_norm.cpu import rms_norm_torch
from sluice.kernels.sample.plain import sample_torch
from sluice.kernels.sample.reference import sample_reference
from sluice.kernels.soft_cap.cpu import soft_cap_torch
from sluice.kernels.write_kv.cpu import write_kv_torch
from tests.engine.execution.synchronisation import NoSynchronisation
from tests.oracles.kernel_cases import (
    AttentionCase,
    attention_agreement,
    blocks_needed,
    fp8_copy,
    fp8_write_agreement,
    generator_on,
    make_attention,
    make_options,
    make_write,
    random_tensor,
    write_agreement,
)

CPU = torch.device("cpu")
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.0},
    {"top_k": 10**6, "min_p": 1.0},
]
ROWS = [row | {"seed": -(2**63) + 12345 * n} for n, row in enumerate(FILTERS * 6)]


def cache_of_a_gpu(num_blocks: int) -> KVCache:
    return allocate_cuda(num_blocks, 16, 2, 32, dtype=torch.float32, device=CPU)


class TestGivenACacheInTheLayoutOfAGpu:
    @pytest.mark.parametrize("num_tokens", [1, 3, 40])
    @pytest.mark.parametrize("is_fp8", [False, True])
    def test_when_tokens_are_written_then_only_their_slots_change(self, num_tokens: int, *, is_fp8: bool) -> None:
        cache = cache_of_a_gpu(6)
        inputs = make_write(
            cache, num_tokens=num_tokens, num_heads=4, rotary_size=16, norm_offset=0.0, generator=generator_on("cpu")
        )
        target = fp8_copy(cache) if is_fp8 else cache
        out = torch.empty(num_tokens, 4, 32)

        tokens = (inputs.qkv, inputs.positions, inputs.slot_mapping, inputs.cos_sin)
        write_kv_torch(*tokens, target, head_norm=inputs.head_norm, out=out)

        compare = fp8_write_agreement if is_fp8 else write_agreement
        assert compare(inputs, target, out).holds

    @pytest.mark.parametrize("slots", [[-1, -1], []])
    def test_when_no_token_has_a_slot_then_nothing_changes(self, slots: list[int]) -> None:
        cache = cache_of_a_gpu(2)
        cache.keys.fill_(3.0)
        qkv, positions = torch.randn(len(slots), 8 * 32), torch.zeros(len(slots), dtype=torch.int64)

        write_kv_torch(
            qkv,
            positions,
            torch.tensor(slots, dtype=torch.int64),
            torch.ones(1, 32),
            cache,
            head_norm=None,
            out=torch.empty(len(slots), 4, 32),
        )

        assert bool((cache.keys == 3.0).all())
        assert bool((cache.values == 0.0).all())

    @pytest.mark.parametrize("sliding_window", [0, 100])
    def test_when_a_prompt_is_longer_than_a_chunk_then_it_attends_as_a_whole(self, sliding_window: int) -> None:
        case = AttentionCase(
            query_lens=(700, 1, 0, 5),
            context_lens=(730, 40, 3, 5),
            num_heads=4,
            num_kv_heads=2,
            head_size=32,
            sliding_window=sliding_window,
            num_padding=3,
        )
        inputs = make_attention(case, cache_of_a_gpu(blocks_needed(case)), torch.float32, generator_on("cpu"))
        call = inputs.call()

        paged_attention_torch(call)

        assert attention_agreement(inputs, call.out).holds


class TestGivenRowsWithEveryFilter:
    @pytest.mark.parametrize("vocab_size", [1, 97, 20_003])
    @pytest.mark.parametrize("spread", [0.0, 8.0])
    def test_when_they_are_sampled_then_tokens_equal_the_reference(self, vocab_size: int, spread: float) -> None:
        logits = random_tensor(48, vocab_size, dtype=torch.bfloat16, generator=generator_on("cpu"), spread=spread)
        logits[3] = float("nan")
        logits[4] = -float("inf")
        logits[5, -1] = float("inf")
        options = make_options(ROWS, "cpu", position=7)
        out = torch.empty(48, dtype=torch.int64)

        sample_torch(logits, options, out=out)

        assert out.tolist() == sample_reference(logits, options).tolist()


META = torch.device("meta")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def norm_on_meta() -> None:
    x, residual, out, weight = on_meta(3, 8), on_meta(3, 8), on_meta(3, 8), on_meta(8)
    rms_norm_torch(x, weight, residual=residual, eps=1e-6, weight_offset=1.0, added_weight=weight, out=out)


def gate_on_meta() -> None:
    gated_activation_torch(on_meta(3, 8), activation="silu", out=on_meta(3, 4))


def cap_on_meta() -> None:
    soft_cap_torch(on_meta(3, 8), cap=3.0)


def write_on_meta() -> None:
    cache = allocate_cuda(4, 16, 2, 32, dtype=torch.float32, device=META)
    ids, out = on_meta(3, dtype=torch.int64), on_meta(3, 4, 32)
    write_kv_torch(on_meta(3, 8 * 32), ids, ids, on_meta(9, 32), cache, head_norm=None, out=out)


def sample_on_meta() -> None:
    sample_torch(on_meta(48, 90_000), make_options(ROWS, META), out=on_meta(48, dtype=torch.int64))


ON_META: dict[str, Callable[[], None]] = {
    "gated_activation": gate_on_meta,
    "rms_norm": norm_on_meta,
    "sample": sample_on_meta,
    "soft_cap": cap_on_meta,
    "write_kv": write_on_meta,
}


class TestGivenAnOperationOfARecordedStep:
    @pytest.mark.parametrize("operation", ON_META)
    def test_when_it_steps_down_then_nothing_waits_for_the_device(self, operation: str) -> None:
        assert chain.OPERATIONS[operation]
        with NoSynchronisation():
            ON_META[operation]()


class TestGivenAChain:
    @pytest.fixture(autouse=True)
    def whole_again(self) -> object:
        yield
        chain.step_down({})

    def test_when_an_operation_steps_down_then_it_is_named_and_others_stay(self) -> None:
        chain.step_down({"rms_norm": "wrong", "paged_attention": "died"})

        assert chain.stepped_down() == {"paged_attention": "died", "rms_norm": "wrong"}
        assert chain.description() == "triton, torch for paged_attention rms_norm"
        assert not chain.can_record()

    def test_when_nothing_steps_down_then_steps_can_be_recorded(self) -> None:
        chain.step_down({})

        assert (chain.description(), chain.can_record()) == ("triton", True)

    def test_when_an_operation_is_unknown_then_it_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="there is no operation tanh"):
            chain.step_down({"tanh": "missing"})

    def test_when_a_tensor_is_on_the_cpu_then_its_path_is_the_cpu_s(self) -> None:
        assert path_of("rms_norm", torch.zeros(1)) is Path.CPU

    @pytest.mark.parametrize("num_rows", [3, 300])
    def test_when_the_int8_product_steps_down_then_its_result_is_right(
        self, monkeypatch: pytest.MonkeyPatch, num_rows: int
    ) -> None:
        def torch_path(_operation: str, _tensor: torch.Tensor) -> Path:
            return Path.TORCH

        monkeypatch.setattr("sluice.kernels.linear.cuda.path_of", torch_path)
        weight, x = torch.randn(48, 32).bfloat16(), torch.randn(num_rows, 32).bfloat16()

        found = Int8Linear(weight, None)(x)

        assert torch.allclose(found.float(), x.float() @ weight.float().T, atol=0.3, rtol=0.05)
