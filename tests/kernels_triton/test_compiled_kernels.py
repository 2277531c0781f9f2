"""Every configuration compiled for Hopper, in bfloat16: what the interpreter does not check (types, sizes, spills)."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
import re
from collections.abc import Sequence

import pytest
import torch

from sluice.kernels.adapters import AdapterBank, RowPlaces
from sluice.kernels.adapters.kernel import add_adapters_triton
from sluice.kernels.experts import Router, Stacked, StackedExperts
from sluice.kernels.experts.kernel import experts_triton, route_triton
from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.linear.few_rows import few_rows_triton
from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.float8_row import float8_row_triton
from sluice.kernels.linear.float8_tiles import float8_tiles_triton
from sluice.kernels.linear.invariant import invariant_config, invariant_product
from sluice.kernels.linear.kernel import int8_product_triton, widen_triton
from sluice.kernels.linear.word_row import word_row_triton
from sluice.kernels.linear.word_tiles import widen_words_triton, word_tiles_triton
from sluice.kernels.linear.words import WordWeight
from sluice.kernels.paged_attention import decode, kernel
from sluice.kernels.paged_attention.call import Chunks
from sluice.kernels.paged_attention.config import decode_config
from sluice.kernels.paged_attention.hopper import attend_chunks_on_hopper
from sluice.kernels.paged_attention.invariant import paged_attention_invariant
from sluice.kernels.paged_attention.kernel import allocate_cuda, paged_attention_triton
from sluice.kernels.paged_attention.narrow import FP8
from sluice.kernels.penalties.kernel import apply_penalties_triton
from sluice.kernels.prepare_batch import StepPlan
from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from sluice.kernels.sample.kernel import sample_triton
from sluice.kernels.soft_cap.kernel import soft_cap_triton
from sluice.kernels.token_masks.kernel import apply_token_masks_triton
from sluice.kernels.write_kv import HeadNorm
from sluice.kernels.write_kv.kernel import write_kv_triton
from tests.grids import cross_section, fast_only, grid
from tests.kernels_triton.compiler import CUOBJDUMP, SHARED_MEMORY_BYTES, Compiled, CompileInstead
from tests.oracles.block_copies import copy_by_kernel
from tests.oracles.kernel_cases import AttentionInputs, generator_on, make_options, make_penalties

RUNS_COMPILED = True

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no NVIDIA compiler"),
    pytest.mark.filterwarnings("default"),  # a compiler's advice is not an error of ours
]


def check_fits(compiled: list[Compiled]) -> None:
    """No register spills, and shared memory for at least one block."""
    assert compiled
    for one in compiled:
        assert one.stack_bytes == 0, one.name
        assert one.shared_bytes <= SHARED_MEMORY_BYTES, one.name


def on_132_processors(_device: torch.device, programs_per_processor: int) -> int:
    """Programs on a GPU of so many processors."""
    return 132 * programs_per_processor


WORDS = [(4, 32, torch.float16), (4, 128, torch.float32), (8, 32, torch.float16), (8, 4096, torch.float32)]
"""Bits, elements of a span and dtype of scales."""


def words_of(out_size: int, in_size: int, num_bits: int, span: int, dtype: torch.dtype) -> WordWeight:
    """A weight of which one element stands for all."""
    return WordWeight(
        codes=torch.zeros(1, dtype=torch.int32).expand(out_size, in_size * num_bits // 32),
        scales=torch.zeros(out_size, in_size // span, 2, dtype=dtype),
        num_bits=num_bits,
    )


def float8_of(out_size: int, in_size: int, span: int) -> Float8Weight:
    """A weight in FP8."""
    num_spans = in_size // span if span else 1
    codes = torch.zeros(1, dtype=torch.uint8).expand(out_size, in_size).view(FP8)
    return Float8Weight(codes=codes, scales=torch.zeros(out_size, num_spans))


def compile_attention(
    dtype: torch.dtype,
    *,
    head_size: int,
    max_query_len: int,
    max_context_len: int,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    has_sinks: bool = False,
    is_fp8: bool = False,
    num_sequences: int = 1,
) -> list[Compiled]:
    cache = allocate_cuda(4, 16, 8, head_size, dtype=FP8 if is_fp8 else dtype, device=torch.device("cpu"))
    query = torch.zeros(64, 48, head_size, dtype=dtype)[:, :32]
    lengths = torch.zeros(num_sequences + 1, dtype=torch.int32)
    with CompileInstead() as compiled:
        inputs = AttentionInputs(
            query=query,
            kv_cache=cache,
            block_tables=torch.zeros(num_sequences, 32, dtype=torch.int32),
            query_start_locs=lengths,
            context_lens=lengths[:-1],
            scale=0.1,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=torch.zeros(32) if has_sinks else None,
        )
        paged_attention_triton(inputs.call(torch.zeros(64, 32, head_size, dtype=dtype)))
    return compiled


def compile_invariant_attention(
    dtype: torch.dtype, *, head_size: int, max_query_len: int, is_fp8: bool = False, sliding_window: int = 0
) -> list[Compiled]:
    cache = allocate_cuda(4, 16, 8, head_size, dtype=FP8 if is_fp8 else dtype, device=torch.device("cpu"))
    lengths = torch.zeros(3, dtype=torch.int32)
    with CompileInstead() as compiled:
        inputs = AttentionInputs(
            query=torch.zeros(64, 48, head_size, dtype=dtype)[:, :32],
            kv_cache=cache,
            block_tables=torch.zeros(2, 32, dtype=torch.int32),
            query_start_locs=lengths,
            context_lens=lengths[:-1],
            scale=0.1,
            max_query_len=max_query_len,
            max_context_len=9000,
            sliding_window=sliding_window,
        )
        paged_attention_invariant(inputs.call(torch.zeros(64, 32, head_size, dtype=dtype)))
    return compiled


@pytest.mark.long
class TestGivenPagedAttentionThatIsIndependentOfTheBatch:
    @pytest.mark.parametrize(("head_size", "is_fp8"), [(64, False), (128, False), (256, False), (128, True)])
    def test_when_it_is_compiled_then_it_fits_and_decodes_and_prompts_share_one_kernel(
        self, head_size: int, *, is_fp8: bool
    ) -> None:
        decodes, prompts = (
            compile_invariant_attention(torch.bfloat16, head_size=head_size, max_query_len=longest, is_fp8=is_fp8)
            for longest in (1, 64)
        )

        check_fits(decodes)
        assert [one.name for one in decodes] == ["attend_kernel", "merge_kernel"]
        assert "cp.async" in decodes[0].ptx
        assert [one.ptx for one in decodes] == [one.ptx for one in prompts]
        # A product that is fused with a sum is rounded once, and the two kernels might fuse other ones.
        assert not re.search(r"fma\.rn\.f32", decodes[1].ptx)


def compile_invariant_product(
    out_size: int,
    in_size: int,
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation | None = None,
) -> Compiled:
    # One element stands for all.
    element = torch.zeros(1, dtype=dtype)
    weight, out = element.expand(out_size, in_size), element.expand(num_tokens, out_size // (2 if activation else 1))
    x, arrived = torch.zeros(num_tokens, in_size, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    with CompileInstead() as compiled:
        invariant_product(x, weight, weight[:, 0], arrived=arrived, out=out, activation=activation)
    return compiled[0]


WEIGHTS: Sequence[tuple[int, int, Activation | None]] = (
    (4096, 4096, None),
    (28_672, 4096, "silu"),
    (6144, 1024, "gelu_tanh"),
    (1024, 3072, None),
)
"""Of 8 B and of 0.6 B; K in one part and in several."""


class TestGivenProductsThatAreIndependentOfTheBatch:
    @pytest.mark.long
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_when_they_are_compiled_then_each_fits_and_all_sum_by_the_same_instruction(
        self, dtype: torch.dtype
    ) -> None:
        compiled = [
            compile_invariant_product(out_size, in_size, num_tokens, dtype=dtype, activation=activation)
            for out_size, in_size, activation in WEIGHTS
            for num_tokens in (1, 40, 100, 200, 3000)
        ]

        check_fits(compiled)
        kinds = {
            re.sub(r"m64n\d+k16", "m64k16", kind)
            for one in compiled
            for kind in re.findall(r"wgmma\.mma_async\S+", one.ptx)
        }
        assert len(kinds) == 1, kinds
        assert all("wgmma.mma_async" in one.ptx for one in compiled)

    def test_when_parts_have_programs_then_the_last_one_sees_what_all_have_stored(self) -> None:
        compiled = compile_invariant_product(1024, 2048, 1)

        assert compiled.grid == (1, 16, 4)
        before, after = compiled.ptx.split("atom.global.gpu.acq_rel.add")
        # The threads' stores, a barrier, one thread's release and acquire, a barrier, the threads' loads.
        assert "bar.sync" in before[before.rindex("st.global") :]
        assert "bar.sync" in after[: after.index("ld.global.cg")]

    @pytest.mark.long
    @pytest.mark.parametrize(("out_size", "in_size", "activation"), WEIGHTS)
    @pytest.mark.parametrize("num_tokens", [1, 64])
    def test_when_rows_are_few_then_enough_bytes_are_on_their_way_on_each_processor(
        self, num_tokens: int, out_size: int, in_size: int, activation: Activation | None
    ) -> None:
        """What the memory delivers in its latency, three quarters of 4.3 TB/s in 0.8 microseconds."""
        compiled = compile_invariant_product(out_size, in_size, num_tokens, activation=activation)

        config = invariant_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens, element_bytes=2)
        num_processors = min(math.prod(compiled.grid), 132)
        waited = max(int(groups) for groups in re.findall(r"cp\.async\.wait_group\s+(\d+);", compiled.ptx))
        in_flight = waited // 2 * config.block_n * config.block_k * 2
        assert waited // 2 == config.num_stages - 2
        assert num_processors * in_flight >= 0.75 * 4.3e12 * 0.8e-6


class TestGivenPagedAttention:
    @pytest.mark.parametrize("head_size", fast_only([128], [64, 256]))
    def test_when_a_decode_is_compiled_then_it_fits_and_keeps_two_tiles_in_flight(self, head_size: int) -> None:
        compiled = compile_attention(torch.bfloat16, head_size=head_size, max_query_len=1, max_context_len=9000)

        check_fits(compiled)
        assert [one.name for one in compiled] == ["decode_kernel", "merge_kernel"]
        assert "cp.async" in compiled[0].ptx

    def test_when_lengths_are_mixed_then_the_programs_are_one_wave_for_any_of_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A recorded step is laid out for the longest context; programs without a key would outnumber the others."""

        monkeypatch.setattr(decode, "num_programs", on_132_processors)

        compiled = compile_attention(
            torch.bfloat16, head_size=128, max_query_len=1, max_context_len=131_072, num_sequences=64
        )

        config = decode_config(element_bytes=2, head_size=128, group=4)
        threads = 32 * config.num_warps * config.programs_per_processor
        assert compiled[0].grid == (132 * config.programs_per_processor,)
        assert threads * compiled[0].registers <= 65_536
        assert compiled[0].shared_bytes * config.programs_per_processor <= SHARED_MEMORY_BYTES
        assert compiled[1].grid == (64, 32)

    @pytest.mark.long
    def test_when_chunks_join_then_decodes_are_launched_as_without_them(self) -> None:
        mixed, alone = (
            compile_attention(
                torch.bfloat16, head_size=128, max_query_len=longest, max_context_len=2000, num_sequences=2
            )
            for longest in (500, 1)
        )

        assert [one.name for one in mixed] == ["decode_kernel", "merge_kernel", "prefill_kernel"]
        assert mixed[0].ptx == alone[0].ptx

    @pytest.mark.parametrize("sliding_window", fast_only([4096], [0]))
    @pytest.mark.parametrize("head_size", fast_only([128], [64, 96, 256]))
    def test_when_a_prefill_is_compiled_then_it_fits_and_copies_while_it_computes(
        self, head_size: int, sliding_window: int
    ) -> None:
        compiled = compile_attention(
            torch.bfloat16,
            head_size=head_size,
            max_query_len=500,
            max_context_len=2000,
            sliding_window=sliding_window,
        )

        check_fits(compiled)
        assert "wgmma.mma_async" in compiled[0].ptx
        # Keys and values of the next tile are in flight while one is waited for.
        assert re.search(r"cp\.async\.wait_group\s+2;", compiled[0].ptx)

    @pytest.mark.parametrize(
        ("head_size", "is_fp8"), fast_only([(128, False)], [(64, False), (256, False), (128, True)])
    )
    def test_when_short_chunks_are_compiled_then_they_fit_in_one_wave(
        self, head_size: int, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "num_programs", on_132_processors)

        compiled = compile_attention(
            torch.bfloat16, head_size=head_size, max_query_len=500, max_context_len=131_072, is_fp8=is_fp8
        )

        attended, joined = compiled[:2]
        check_fits(compiled)
        assert [one.name for one in compiled] == ["short_chunk_kernel", "join_kernel", "prefill_kernel"]
        assert attended.grid == (132,)
        # Of 8 heads: a block of queries may have as many segments as there are programs for its head.
        assert joined.grid[0] == 132 // 8 * 8
        assert "wgmma.mma_async" in attended.ptx
        assert "cp.async" in attended.ptx

    @pytest.mark.parametrize("group", fast_only([4], [1, 2, 8, 64]))
    def test_when_the_prefill_for_hopper_is_compiled_then_it_fits_and_moves_registers(self, group: int) -> None:
        cache = allocate_cuda(4, 16, 2, 128, dtype=torch.bfloat16, device=torch.device("cpu"))
        query, lengths = torch.zeros(64, 2 * group, 128, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
        inputs = AttentionInputs(
            query=query,
            kv_cache=cache,
            block_tables=torch.zeros(4, 32, dtype=torch.int32),
            query_start_locs=lengths,
            context_lens=lengths[:-1],
            scale=0.1,
            max_query_len=500,
            max_context_len=9000,
            sliding_window=0,
        )

        with CompileInstead() as compiled:
            attend_chunks_on_hopper(inputs.call(query), Chunks(5))

        check_fits(compiled)
        assert "setmaxnreg.inc" in compiled[0].ptx
        # After the queries, and after each wait for keys or values, in both groups.
        assert compiled[0].ptx.count("fence.proxy.async") >= 2 * 5

    def test_when_drafts_are_compiled_then_they_fit_and_use_the_large_matrix_unit(self) -> None:
        compiled = compile_attention(torch.bfloat16, head_size=128, max_query_len=16, max_context_len=2000)

        check_fits(compiled)
        assert "wgmma.mma_async" in compiled[0].ptx

    @pytest.mark.long
    @pytest.mark.parametrize("max_query_len", [1, 500])
    def test_when_a_window_is_compiled_then_it_fits(self, max_query_len: int) -> None:
        check_fits(
            compile_attention(
                torch.bfloat16,
                head_size=128,
                max_query_len=max_query_len,
                max_context_len=9000,
                sliding_window=4096,
            )
        )

    @pytest.mark.parametrize(
        ("head_size", "max_query_len", "dtype"),
        grid(
            [(64, 1), (128, 1), (256, 1), (128, 500), (256, 500)],
            [torch.bfloat16, torch.float16],
            fast=[(128, 1, torch.bfloat16)],
        ),
    )
    def test_when_the_cache_is_in_fp8_then_it_fits_and_reads_ahead(
        self, dtype: torch.dtype, head_size: int, max_query_len: int
    ) -> None:
        compiled = compile_attention(
            dtype, head_size=head_size, max_query_len=max_query_len, max_context_len=9000, is_fp8=True
        )

        check_fits(compiled)
        assert "cp.async" in compiled[0].ptx
        assert "e4m3" in compiled[0].ptx

    @pytest.mark.parametrize(
        ("head_size", "max_query_len", "is_fp8", "sliding_window"),
        grid(
            [(64, 1), (128, 1), (256, 1), (256, 16), (128, 500), (256, 500)],
            [False, True],
            [0, 4096],
            fast=[(128, 500, False, 4096)],
        ),
    )
    def test_when_there_are_a_soft_cap_and_sinks_then_it_fits(
        self, head_size: int, max_query_len: int, is_fp8: bool, sliding_window: int
    ) -> None:
        compiled = compile_attention(
            torch.bfloat16,
            head_size=head_size,
            max_query_len=max_query_len,
            max_context_len=9000,
            sliding_window=sliding_window,
            soft_cap=50.0,
            has_sinks=True,
            is_fp8=is_fp8,
        )

        check_fits(compiled)

    @pytest.mark.long
    @pytest.mark.parametrize("max_query_len", [500, 1])
    def test_when_it_is_compiled_in_float32_then_it_fits_and_has_no_tf32(self, max_query_len: int) -> None:
        compiled = compile_attention(torch.float32, head_size=128, max_query_len=max_query_len, max_context_len=9000)

        check_fits(compiled)
        assert "tf32" not in compiled[0].ptx


class TestGivenTheOtherKernels:
    def test_when_the_norms_and_the_cap_are_compiled_then_they_fit(self) -> None:
        x = torch.zeros(8, 8192, dtype=torch.bfloat16)

        with CompileInstead() as compiled:
            rms_norm_triton(x, x[0], eps=1e-6, out=x)
            rms_norm_triton(x, x[0], residual=x, eps=1e-6, out=x)
            rms_norm_triton(x, x[0], residual=x, eps=1e-6, weight_offset=1.0, added_weight=x[1], out=x)
            rms_norm_triton(x, x[0], residual=x, eps=1e-6, is_centered=True, out=x)
            rms_norm_triton(x, None, residual=x, eps=1e-6, added_weight=x[1], out=x)
            soft_cap_triton(x, cap=30.0)

        check_fits(compiled)

    def test_when_the_gate_is_compiled_then_it_fits(self) -> None:
        gate_up = torch.zeros(8, 2 * 1408, dtype=torch.bfloat16)

        with CompileInstead() as compiled:
            gated_activation_triton(gate_up, activation="silu", out=gate_up[:, :1408])
            gated_activation_triton(gate_up, activation="gelu_tanh", out=gate_up[:, :1408])

        check_fits(compiled)

    @pytest.mark.parametrize("cache_dtype", fast_only([FP8], [torch.bfloat16]))
    @pytest.mark.parametrize(("has_norm", "rotary_size"), fast_only([(True, 64)], [(False, 128), (True, 128)]))
    def test_when_the_write_is_compiled_then_it_fits(
        self, has_norm: bool, rotary_size: int, cache_dtype: torch.dtype
    ) -> None:
        cache = allocate_cuda(4, 16, 8, 128, dtype=cache_dtype, device=torch.device("cpu"))
        qkv, integers = torch.zeros(8, 48 * 128, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
        head_norm = HeadNorm(qkv[0, :128], qkv[0, :128], 1e-6) if has_norm else None

        with CompileInstead() as compiled:
            write_kv_triton(
                qkv,
                integers,
                integers,
                torch.zeros(100, rotary_size),
                cache,
                head_norm=head_norm,
                out=torch.zeros(8, 32, 128, dtype=torch.bfloat16),
            )

        check_fits(compiled)
        # Scales, bytes and norms are divided and rooted as IEEE says: the same on every device.
        assert "div.full" not in compiled[0].ptx
        assert "approx" not in compiled[0].ptx

    @pytest.mark.parametrize("dtype", fast_only([torch.bfloat16], [torch.float32]))
    @pytest.mark.parametrize("vocab_size", fast_only([128_256], [151_936, 262_144]))
    def test_when_sampling_is_compiled_then_it_fits(self, vocab_size: int, dtype: torch.dtype) -> None:
        options = make_options([{"top_p": 0.9}] * 4, "cpu")

        with CompileInstead() as compiled:
            sample_triton(torch.zeros(4, vocab_size, dtype=dtype), options, out=torch.zeros(4, dtype=torch.int64))

        check_fits(compiled)
        search = ["maxima_kernel", "masses_kernel", "bracket_kernel", "candidates_kernel", "cut_kernel"]
        assert [one.name for one in compiled] == [*search, "draw_kernel", "choose_kernel"]

    @pytest.mark.parametrize(("out_size", "in_size"), fast_only([(4096, 14_336)], [(28_672, 4096), (3072, 896)]))
    @pytest.mark.parametrize("num_tokens", fast_only([16], [8, 64]))
    def test_when_a_product_in_int8_is_compiled_then_it_multiplies_int8_and_reads_ahead(
        self, out_size: int, in_size: int, num_tokens: int
    ) -> None:
        x = torch.zeros(num_tokens, in_size, dtype=torch.bfloat16)
        weight, scales = torch.zeros(out_size, in_size, dtype=torch.int8), torch.zeros(out_size)

        with CompileInstead() as compiled:
            out = torch.zeros(num_tokens, out_size, dtype=torch.bfloat16)
            int8_product_triton(x, weight, scales, x[0, :1].expand(out_size), out=out)

        check_fits(compiled)
        product = next(one.ptx for one in compiled if one.name == "_int8_product_kernel")
        assert "s32.s8.s8" in product
        assert "cp.async" in product
        assert "ld.shared.b8" not in product

    @pytest.mark.parametrize("weight_dtype", fast_only([torch.int8], [torch.bfloat16]))
    @pytest.mark.parametrize("num_tokens", fast_only([4], [1]))
    def test_when_a_product_of_few_rows_is_compiled_then_it_keeps_them_in_registers(
        self, num_tokens: int, weight_dtype: torch.dtype
    ) -> None:
        x, weight = torch.zeros(num_tokens, 3072, dtype=torch.bfloat16), torch.zeros(1024, 3072, dtype=weight_dtype)
        scales = torch.zeros(1024) if weight_dtype == torch.int8 else None

        with CompileInstead() as compiled:
            few_rows_triton(x, weight, scales, None, out=torch.zeros(num_tokens, 1024, dtype=torch.bfloat16))

        check_fits(compiled)
        # What the four warps exchange for their sums, and no tile.
        assert compiled[0].shared_bytes <= 64

    def test_when_the_widening_is_compiled_then_it_fits(self) -> None:
        weight = torch.zeros(8, 4096, dtype=torch.int8)

        with CompileInstead() as compiled:
            widen_triton(weight, torch.zeros(8), out=torch.zeros(8, 4096, dtype=torch.bfloat16))

        check_fits(compiled)

    @pytest.mark.parametrize(("num_bits", "span", "dtype"), fast_only(WORDS[:1], WORDS[1:]))
    @pytest.mark.parametrize("num_tokens", fast_only([16], [1, 64, 300]))
    def test_when_a_product_of_packed_tiles_is_compiled_then_codes_go_from_shared_memory_to_the_matrix_unit(
        self, num_tokens: int, num_bits: int, span: int, dtype: torch.dtype
    ) -> None:
        x, weight = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16), words_of(28_672, 4096, num_bits, span, dtype)

        with CompileInstead() as compiled:
            out = torch.zeros(1, dtype=torch.bfloat16).expand(num_tokens, 28_672)
            word_tiles_triton(x, weight, x[0, :1].expand(28_672), out=out)

        check_fits(compiled)
        product = compiled[0].ptx
        assert "wgmma.mma_async" in product
        # Four words at once, copied while others are multiplied; and no tile of the numbers in shared memory.
        assert re.search(r"cp\.async\.cg\.shared\.global.*0x10", product)
        # Of 128 rows the next step's copies are waited for only once a step is computed.
        assert num_tokens > 64 or re.search(r"cp\.async\.wait_group\s+[1-9]", product)
        assert "stmatrix" not in product.split("wgmma.mma_async")[1]

    @pytest.mark.long
    @pytest.mark.parametrize("num_tokens", [1, 40, 300])
    def test_when_packed_tiles_are_compiled_then_all_sum_by_the_same_instruction(self, num_tokens: int) -> None:
        x, weight = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16), words_of(4096, 4096, 4, 32, torch.float16)

        with CompileInstead() as compiled:
            word_tiles_triton(x, weight, None, out=torch.zeros(1, dtype=torch.bfloat16).expand(num_tokens, 4096))

        check_fits(compiled)
        kinds = re.findall(r"wgmma\.mma_async\S+", compiled[0].ptx)
        assert {re.sub(r"m64n\d+k16", "m64k16", kind) for kind in kinds} == {
            "wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16"
        }

    @pytest.mark.long
    @pytest.mark.parametrize(("num_bits", "span", "dtype"), WORDS)
    def test_when_a_product_of_one_packed_row_is_compiled_then_it_keeps_it_in_registers(
        self, num_bits: int, span: int, dtype: torch.dtype
    ) -> None:
        x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), words_of(28_672, 4096, num_bits, span, dtype)

        with CompileInstead() as compiled:
            word_row_triton(x, weight, None, out=torch.zeros(1, 28_672, dtype=torch.bfloat16))

        check_fits(compiled)
        # What the four warps exchange for their sums or scales of rows, and no tile of codes.
        assert compiled[0].shared_bytes <= (128 if span < 4096 else 4096)

    @pytest.mark.long
    @pytest.mark.parametrize("span", [0, 128])
    @pytest.mark.parametrize(
        ("num_tokens", "out_size"), [(1, 4096), (16, 28_672), (64, 4096), (300, 28_672), (300, 4096)]
    )
    def test_when_a_product_in_fp8_is_compiled_then_the_matrix_unit_multiplies_fp8_by_one_instruction(
        self, num_tokens: int, out_size: int, span: int
    ) -> None:
        x, weight = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16), float8_of(out_size, 4096, span)

        with CompileInstead() as compiled:
            out = torch.zeros(1, dtype=torch.bfloat16).expand(num_tokens, out_size)
            float8_tiles_triton(x, weight, x[0, :1].expand(out_size), out=out)

        check_fits(compiled)
        product = next(one.ptx for one in compiled if one.name == "_float8_tiles_kernel")
        kinds = {re.sub(r"m64n\d+k32", "m64k32", kind) for kind in re.findall(r"wgmma\.mma_async\S+", product)}
        assert kinds == {"wgmma.mma_async.sync.aligned.m64k32.f32.e4m3.e4m3"}
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", product)

    @pytest.mark.long
    @pytest.mark.parametrize("span", [0, 128])
    def test_when_a_product_of_one_row_in_fp8_is_compiled_then_it_widens_pairs(self, span: int) -> None:
        x = torch.zeros(1, 4096, dtype=torch.bfloat16)

        with CompileInstead() as compiled:
            out = torch.zeros(1, 28_672, dtype=torch.bfloat16)
            float8_row_triton(x, float8_of(28_672, 4096, span), None, out=out)

        check_fits(compiled)
        assert "cvt.rn.f16x2.e4m3x2" in compiled[0].ptx

    def test_when_the_widening_of_packed_weights_is_compiled_then_it_fits(self) -> None:
        with CompileInstead() as compiled:
            out = torch.zeros(1, dtype=torch.bfloat16).expand(8, 4096)
            widen_words_triton(words_of(8, 4096, 4, 32, torch.float16), out=out)

        check_fits(compiled)

    @pytest.mark.parametrize("has_drawn", [False, True])
    def test_when_the_preparation_is_compiled_then_it_fits(self, has_drawn: bool) -> None:
        integers, tables = torch.zeros(9, dtype=torch.int32), torch.zeros(8, 32, dtype=torch.int32)
        plan = StepPlan(token_ids=integers, query_start_locs=integers, context_lens=integers[:8], block_tables=tables)

        with CompileInstead() as compiled:
            drawn = torch.zeros(8, dtype=torch.int64) if has_drawn else None
            prepare_batch_triton(plan, drawn, block_size=16, spare_slot=0)

        check_fits(compiled)

    @pytest.mark.parametrize(("block_size", "head_size", "is_aligned"), [(16, 128, True), (5, 3, False)])
    def test_when_block_copies_are_compiled_then_they_move_the_widest_aligned_words(
        self, block_size: int, head_size: int, is_aligned: bool
    ) -> None:
        caches = [allocate_cuda(3, block_size, 1, head_size, dtype=torch.float16, device=torch.device("cpu"))]

        with CompileInstead() as compiled:
            copy_by_kernel(caches, [(0, 1)])

        check_fits(compiled)
        assert ("ld.global.v2.b64" in compiled[0].ptx) == is_aligned

    def test_when_the_penalties_are_compiled_then_they_fit(self) -> None:
        with CompileInstead() as compiled:
            apply_penalties_triton(torch.zeros(2, 300), make_penalties(2, 300, 5, generator_on("cpu")))

        check_fits(compiled)

    def test_when_the_masks_are_compiled_then_they_fit(self) -> None:
        with CompileInstead() as compiled:
            apply_token_masks_triton(torch.zeros(2, 300), torch.tensor([1]), torch.zeros(1, 10, dtype=torch.int32))

        check_fits(compiled)


class TestGivenAdapters:
    """Query, key and value of an 8 B model, stacked."""

    @pytest.mark.parametrize(("rank", "dtype"), cross_section([8, 64], [torch.bfloat16, torch.float32]))
    def test_when_they_are_compiled_then_they_fit(self, rank: int, dtype: torch.dtype) -> None:
        like = torch.zeros(33, 4096, dtype=dtype)
        bank = AdapterBank((4096, 1024, 1024), 4096, rank=rank, num_places=2, like=like)
        rows = RowPlaces(torch.zeros(33, dtype=torch.int32), (0,))

        with CompileInstead() as compiled:
            add_adapters_triton(torch.zeros(33, 6144, dtype=dtype), like, bank, rows)

        check_fits(compiled)


class TestGivenAMixtureOfExperts:
    """The sizes of Qwen3 30B-A3B."""

    @pytest.mark.parametrize(("num_tokens", "is_int8"), cross_section([1, 512], [False, True]))
    def test_when_its_kernels_are_compiled_then_they_fit(self, num_tokens: int, is_int8: bool) -> None:
        x = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
        weight = torch.zeros(128, 2048, dtype=torch.bfloat16)
        router = Router(weight=weight, bias=None, num_chosen=8, is_normalised=True, has_shared=False)
        element = torch.int8 if is_int8 else torch.bfloat16

        def stacked(out_size: int, in_size: int) -> Stacked:
            # One element stands for all.
            weight = torch.zeros(1, dtype=element).expand(128, out_size, in_size)
            return Stacked(weight=weight, scales=torch.zeros(128, out_size) if is_int8 else None, bias=None)

        experts = StackedExperts(gate_up=stacked(1536, 2048), down=stacked(2048, 768), activation="silu")
        with CompileInstead() as compiled:
            experts_triton(x, route_triton(x, router), None, experts=experts)

        assert len(compiled) == 6
        check_fits(compiled)
