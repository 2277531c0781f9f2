"""Paged attention against dense attention in float64, with NaN wherever nothing may be read."""

# torch's types are partial; triton's language is not typable.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.paged_attention import kernel, paged_attention
from sluice.kernels.paged_attention.config import attention_config, decode_config, decode_rows, max_decode_tokens
from sluice.kernels.paged_attention.decode import MAX_PARTS, _segments_of  # pyright: ignore[reportPrivateUsage]
from sluice.kernels.paged_attention.kernel import allocate_cuda, paged_attention_triton
from sluice.kernels.paged_attention.layout import KVCache, Layout
from tests.grids import cross_section, fast_only, grid
from tests.kernels_triton.devices import DEVICES, ON_CPU
from tests.oracles.kernel_cases import (
    AttentionCase,
    AttentionInputs,
    attention_agreement,
    blocks_needed,
    generator_on,
    make_attention,
    same_bits,
    sinks_of,
)

SEGMENT = 32
"""Keys of the shortest segment in these tests: contexts that the interpreter can afford are split too."""


@contextmanager
def short_segments(tokens: int = SEGMENT) -> Generator[None]:
    """Let the shortest segments have `tokens` keys."""
    usual = kernel.SEGMENT_TOKENS
    kernel.SEGMENT_TOKENS = tokens
    try:
        yield
    finally:
        kernel.SEGMENT_TOKENS = usual


def case_with(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    sliding_window: int = 0,
    num_padding: int = 0,
) -> AttentionCase:
    """A small case."""
    return AttentionCase(
        query_lens=query_lens,
        context_lens=context_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        sliding_window=sliding_window,
        num_padding=num_padding,
    )


CAP_ALONE, SINKS_ALONE, BOTH = EXTRAS = (2.0, False), (0.0, True), (2.0, True)
"""The soft cap, and whether there are sinks. Most scores here are below two, some above: the cap bends them well."""


def bent(case: AttentionCase, soft_cap: float, has_sinks: bool) -> AttentionCase:
    """`case` with a soft cap, with a sink for each head, or with both."""
    return replace(case, soft_cap=soft_cap, sinks=sinks_of(case.num_heads) if has_sinks else None)


def inputs_for(case: AttentionCase, device: str, dtype: torch.dtype) -> AttentionInputs:
    cache = allocate_cuda(
        blocks_needed(case) + 2,
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        dtype=dtype,
        device=torch.device(device),
    )
    return make_attention(case, cache, dtype, generator_on(device))


def attend(inputs: AttentionInputs) -> Tensor:
    """The kernel's output, into memory that was NaN."""
    call = inputs.call()
    paged_attention_triton(call)
    return call.out


def second_alone(inputs: AttentionInputs, context_len: int) -> AttentionInputs:
    """The second of some decodes, which has this context, without the others."""
    return replace(
        inputs,
        query=inputs.query[1:2],
        block_tables=inputs.block_tables[1:2],
        query_start_locs=inputs.query_start_locs[:2],
        context_lens=inputs.context_lens[1:2],
        max_context_len=context_len,
    )


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenDecodes:
    """One new token per sequence."""

    @pytest.mark.parametrize("context_len", fast_only([1, 16, 65], [15, 17, 63, 64, 200]))
    def test_when_contexts_end_anywhere_in_a_block_then_they_agree(
        self, device: str, dtype: torch.dtype, context_len: int
    ) -> None:
        inputs = inputs_for(case_with([1, 1], [context_len, 7]), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_size"),
        fast_only([(2, 2, 64), (5, 1, 24), (8, 1, 80), (24, 1, 16)], [(3, 1, 16), (7, 1, 32), (16, 1, 16)]),
    )
    def test_when_heads_share_keys_in_any_number_then_they_agree(
        self, device: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int
    ) -> None:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        inputs = inputs_for(case_with([1, 1], [33, 80], **sizes), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize("block_size", fast_only([8], [32, 128]))
    def test_when_blocks_are_smaller_or_larger_than_a_tile_then_they_agree(
        self, device: str, dtype: torch.dtype, block_size: int
    ) -> None:
        inputs = inputs_for(case_with([1, 1, 1], [130, 5, 64], block_size=block_size), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds

    @pytest.mark.parametrize("window", fast_only([1, 100], [16, 99, 101]))
    def test_when_a_window_hides_old_keys_then_neither_they_nor_their_blocks_are_read(
        self, device: str, dtype: torch.dtype, window: int
    ) -> None:
        inputs = inputs_for(case_with([1, 1], [100, 20], sliding_window=window), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    def test_when_a_decode_verifies_drafts_then_the_split_serves_it_too(self, device: str, dtype: torch.dtype) -> None:
        inputs = inputs_for(case_with([8, 1, 3], [150, 90, 3]), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize("context_len", fast_only([16 * SEGMENT + 1], [64 * SEGMENT, 64 * SEGMENT + 1]))
    def test_when_a_context_is_long_then_its_segments_are_too(
        self, device: str, dtype: torch.dtype, context_len: int
    ) -> None:
        case = case_with([1, 2], [context_len, 3 * SEGMENT], num_heads=1, num_kv_heads=1)
        inputs = inputs_for(case, device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    def test_when_it_is_split_then_unused_scratch_does_not_matter(self, device: str, dtype: torch.dtype) -> None:
        """The shorter sequence leaves most segments empty; fresh memory is full of NaN."""
        inputs = inputs_for(case_with([1, 1], [4 * SEGMENT + 1, SEGMENT], sliding_window=SEGMENT), device, dtype)

        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        try:
            with short_segments():
                out = attend(inputs)
        finally:
            torch.use_deterministic_algorithms(False)

        assert attention_agreement(inputs, out).holds

    def test_when_others_join_the_batch_then_a_row_keeps_its_bits(self, device: str, dtype: torch.dtype) -> None:
        inputs = inputs_for(case_with([1, 1, 1], [150, 40, 300]), device, dtype)
        alone = second_alone(inputs, 40)

        with short_segments():
            together, apart = attend(inputs), attend(alone)

        assert same_bits(together[1:2], apart)

    def test_when_the_batch_is_permuted_then_the_output_is_permuted_bit_by_bit(
        self, device: str, dtype: torch.dtype
    ) -> None:
        inputs = inputs_for(case_with([1, 1, 1, 1], [9, 150, 1, 64]), device, dtype)
        order = torch.tensor([2, 0, 3, 1], device=device)
        permuted = replace(
            inputs,
            query=inputs.query[order],
            block_tables=inputs.block_tables[order],
            context_lens=inputs.context_lens[order],
        )

        with short_segments():
            first, second = attend(inputs), attend(permuted)

        assert same_bits(first[order], second)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAMixedBatch:
    """Chunks of prompts, with and without context before them, and decodes, in one launch."""

    @pytest.mark.parametrize(
        ("query_lens", "context_lens"),
        [
            ([40], [40]),
            ([1, 40, 1], [90, 40, 5]),
            ([20, 33, 2], [70, 33, 64]),
            ([17, 0, 0, 16], [17, 5, 0, 200]),
        ],
    )
    def test_when_it_runs_then_every_row_agrees(
        self, device: str, dtype: torch.dtype, query_lens: list[int], context_lens: list[int]
    ) -> None:
        inputs = inputs_for(case_with(query_lens, context_lens), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_size"), fast_only([(3, 3, 16), (7, 1, 80)], [(3, 1, 64), (20, 1, 16)])
    )
    def test_when_heads_share_keys_in_any_number_then_they_agree(
        self, device: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int
    ) -> None:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        inputs = inputs_for(case_with([25, 1, 9], [30, 70, 9], **sizes), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds

    @pytest.mark.parametrize("window", fast_only([16], [1, 15, 40]))
    def test_when_a_window_hides_old_keys_then_neither_they_nor_their_blocks_are_read(
        self, device: str, dtype: torch.dtype, window: int
    ) -> None:
        inputs = inputs_for(case_with([25, 1, 40], [100, 100, 40], sliding_window=window), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds

    def test_when_a_chunk_joins_decodes_then_their_rows_keep_their_bits(self, device: str, dtype: torch.dtype) -> None:
        inputs = inputs_for(case_with([1, 1, 40], [150, 40, 70]), device, dtype)
        rows, sequences = slice(0, 2), slice(0, 2)
        decodes = replace(
            inputs,
            query=inputs.query[rows],
            block_tables=inputs.block_tables[sequences],
            query_start_locs=inputs.query_start_locs[:3],
            context_lens=inputs.context_lens[sequences],
            max_query_len=1,
            max_context_len=150,
        )

        with short_segments():
            mixed, alone = attend(inputs), attend(decodes)

        assert same_bits(mixed[rows], alone)

    @pytest.mark.parametrize("query_lens", [[1, 1], [30, 1]])
    def test_when_rows_are_padding_then_they_become_zeros(
        self, device: str, dtype: torch.dtype, query_lens: list[int]
    ) -> None:
        """Of two kinds: rows past the last sequence's, and rows of a sequence without context."""
        inputs = inputs_for(case_with(query_lens, [200, 0], num_padding=5), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert torch.equal(out[-6:], torch.zeros_like(out[-6:]))

    def test_when_there_are_no_sequences_then_all_rows_become_zeros(self, device: str, dtype: torch.dtype) -> None:
        inputs = inputs_for(case_with([2], [2]), device, dtype)
        empty = replace(
            inputs,
            block_tables=inputs.block_tables[:0],
            query_start_locs=inputs.query_start_locs[:1],
            context_lens=inputs.context_lens[:0],
        )

        for query in (empty.query, empty.query[:0]):
            arguments = {field.name: getattr(empty, field.name) for field in fields(empty)} | {"query": query}
            assert torch.equal(paged_attention(**arguments), torch.zeros_like(query))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenASoftCapOrSinks:
    @pytest.mark.parametrize(
        ("soft_cap", "has_sinks", "window", "block_size"), cross_section(EXTRAS, [0, 1, 16, 100], [8, 16])
    )
    def test_when_decodes_are_split_or_not_then_every_row_agrees(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool, window: int, block_size: int
    ) -> None:
        case = case_with([1, 1, 3, 1], [200, 64, 65, 1], sliding_window=window, block_size=block_size)
        inputs = inputs_for(bent(case, soft_cap, has_sinks), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize(("soft_cap", "has_sinks", "window"), cross_section(EXTRAS, [0, 1, 16, 40]))
    def test_when_prompts_and_decodes_are_mixed_then_every_row_agrees(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool, window: int
    ) -> None:
        case = case_with([25, 1, 40, 0, 3], [100, 100, 40, 5, 64], sliding_window=window)
        inputs = inputs_for(bent(case, soft_cap, has_sinks), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds

    @pytest.mark.parametrize(
        ("soft_cap", "has_sinks", "num_heads", "num_kv_heads", "head_size", "query_lens"),
        cross_section(EXTRAS, [(3, 1, 64), (7, 1, 80), (4, 2, 128), (4, 2, 256)], [[1, 1, 1], [25, 1, 9]]),
    )
    def test_when_heads_share_keys_in_any_number_then_each_has_its_own_sink(
        self,
        device: str,
        dtype: torch.dtype,
        soft_cap: float,
        has_sinks: bool,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        query_lens: list[int],
    ) -> None:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        case = case_with(query_lens, [30, 130, 9], **sizes)
        inputs = inputs_for(bent(case, soft_cap, has_sinks), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize(("soft_cap", "has_sinks", "query_lens"), cross_section(EXTRAS, [[1, 1], [30, 1]]))
    def test_when_rows_are_padding_then_they_become_zeros(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool, query_lens: list[int]
    ) -> None:
        case = case_with(query_lens, [200, 0], num_padding=5)
        inputs = inputs_for(bent(case, soft_cap, has_sinks), device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert torch.equal(out[-6:], torch.zeros_like(out[-6:]))

    @pytest.mark.parametrize(("soft_cap", "has_sinks"), fast_only([BOTH], [CAP_ALONE, SINKS_ALONE]))
    def test_when_others_join_or_the_batch_is_permuted_then_a_row_keeps_its_bits(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool
    ) -> None:
        inputs = inputs_for(bent(case_with([1, 1, 1], [150, 40, 300]), soft_cap, has_sinks), device, dtype)
        order = torch.tensor([2, 0, 1], device=device)
        permuted = replace(
            inputs,
            query=inputs.query[order],
            block_tables=inputs.block_tables[order],
            context_lens=inputs.context_lens[order],
        )
        alone = second_alone(inputs, 40)

        with short_segments():
            together, moved, apart = attend(inputs), attend(permuted), attend(alone)

        assert same_bits(together[order], moved)
        assert same_bits(together[1:2], apart)

    @pytest.mark.parametrize(("soft_cap", "has_sinks"), fast_only([BOTH], [CAP_ALONE, SINKS_ALONE]))
    def test_when_a_segment_is_of_the_usual_size_then_what_crosses_it_agrees(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool
    ) -> None:
        inputs = inputs_for(bent(case_with([1, 1, 1], [63, 64, 129]), soft_cap, has_sinks), device, dtype)

        assert attention_agreement(inputs, attend(inputs)).holds


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenASoftCap:
    @pytest.mark.parametrize(
        ("soft_cap", "query_lens"),
        grid(
            [1e-20, 0.01, 5.0, 50.0, 1e4, 1e20], [[1, 1, 1], [20, 1, 3]], fast=[(50.0, [20, 1, 3]), (1e20, [1, 1, 1])]
        ),
    )
    def test_when_scores_are_far_beyond_it_or_far_below_then_they_agree(
        self, device: str, dtype: torch.dtype, soft_cap: float, query_lens: list[int]
    ) -> None:
        """Scores of up to a thousand, and of a thousandth."""
        case = replace(case_with(query_lens, [90, 33, 150]), soft_cap=soft_cap)
        inputs = inputs_for(case, device, dtype)
        inputs.query[0].mul_(300)
        inputs.query[1].mul_(1e-3)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenSinks:
    @pytest.mark.parametrize("query_lens", [[1, 1], [20, 1]])
    def test_when_they_are_of_any_size_then_they_agree(
        self, device: str, dtype: torch.dtype, query_lens: list[int]
    ) -> None:
        logits = [-float("inf"), -3e38, -1e4, -50.0, 0.0, 50.0, 1e4, 3e38]
        case = replace(case_with(query_lens, [90, 33], num_heads=8), sinks=logits)
        inputs = inputs_for(case, device, dtype)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert not out[:, -2:].any()

    @pytest.mark.parametrize("query_lens", [[1, 1], [20, 1]])
    def test_when_all_are_minus_infinity_then_the_bits_are_those_without(
        self, device: str, dtype: torch.dtype, query_lens: list[int]
    ) -> None:
        inputs = inputs_for(case_with(query_lens, [90, 33]), device, dtype)
        none = torch.full((4,), -float("inf"), device=device)

        with short_segments():
            without, with_none = attend(inputs), attend(replace(inputs, sinks=none))

        assert same_bits(with_none, without)


@pytest.mark.parametrize(("device", "dtype"), ON_CPU[1:])
class TestGivenAPoolOfMoreThanTwoToThe31Elements:
    def test_when_a_sequence_lies_at_its_end_then_it_is_found(self, device: str, dtype: torch.dtype) -> None:
        """Memory that is never touched costs nothing: the pool is made, only its end is used."""
        small = inputs_for(case_with([1, 3], [20, 40], num_heads=2, num_kv_heads=1), device, dtype)
        cache = small.kv_cache
        block_elements = 2 * cache.block_size * cache.head_size
        first_block = 2**31 // block_elements + 3
        memory = torch.empty((first_block + cache.num_blocks) * block_elements, dtype=dtype)
        shape = (first_block + cache.num_blocks, cache.block_size, 1, cache.head_size)
        strides = (block_elements, cache.head_size, block_elements // 2, 1)
        keys = memory.as_strided(shape, strides)
        values = memory.as_strided(shape, strides, block_elements // 2)
        keys[first_block:], values[first_block:] = cache.keys, cache.values
        large = KVCache(
            keys=keys,
            values=values,
            num_blocks=shape[0],
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=cache.head_size,
            layout=Layout.PLAIN,
        )

        out = attend(replace(small, kv_cache=large, block_tables=small.block_tables + first_block))

        assert same_bits(out, attend(small))


class TestGivenTheConfigurations:
    @pytest.mark.parametrize("element_bytes", [2, 4])
    @pytest.mark.parametrize("max_query_len", [2, 8, 40, 4096])
    def test_when_one_is_chosen_for_chunks_then_it_holds_a_group(self, element_bytes: int, max_query_len: int) -> None:
        for head_size, group in product([16, 64, 80, 96, 128, 256], [1, 2, 3, 5, 7, 8, 16, 24, 71]):
            config = attention_config(
                element_bytes=element_bytes, head_size=head_size, group=group, max_query_len=max_query_len
            )

            assert config.block_rows >= max(16, group)
            assert config.block_rows & (config.block_rows - 1) == 0

    @pytest.mark.parametrize("element_bytes", [2, 4])
    @pytest.mark.parametrize("is_fp8", [False, True])
    def test_when_one_is_chosen_for_decodes_then_it_holds_all_rows_and_fills_segments(
        self, element_bytes: int, is_fp8: bool
    ) -> None:
        for head_size, group in product([16, 64, 80, 96, 128, 256], [1, 2, 3, 5, 7, 8, 16, 24, 71]):
            config = decode_config(element_bytes=element_bytes, head_size=head_size, group=group, is_fp8=is_fp8)

            assert decode_rows(group) >= max_decode_tokens(group) * group
            assert kernel.SEGMENT_TOKENS % config.tile == 0
            assert config.programs_per_processor >= 1


@triton.jit
def _segments_kernel(
    sizes_ptr,
    counts_ptr,
    query_lens_ptr,
    contexts_ptr,
    MAX_PARTS: tl.constexpr,  # noqa: N803 - as in kernels
    BLOCK: tl.constexpr,  # noqa: N803 - as in kernels
):
    offsets = tl.arange(0, BLOCK)
    sizes, counts = _segments_of(
        tl.load(query_lens_ptr + offsets), tl.load(contexts_ptr + offsets), MAX_PARTS, BLOCK_QUERIES=4, SEGMENT=64
    )
    tl.store(sizes_ptr + offsets, sizes)
    tl.store(counts_ptr + offsets, counts)


@pytest.mark.parametrize(("device", "dtype"), [DEVICES[0], DEVICES[2]])
class TestGivenTheSplit:
    def test_when_contexts_have_any_length_then_few_segments_cover_them(self, device: str, dtype: torch.dtype) -> None:
        edges = torch.tensor([64, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072])
        contexts = torch.cat([edges - 1, edges, edges + 1, torch.arange(1, 9)]).repeat(2).int().to(device)
        query_lens = torch.tensor([1, 4]).repeat_interleave(32).int().to(device)
        sizes, counts = torch.zeros_like(contexts), torch.zeros_like(contexts)

        _segments_kernel[(1,)](sizes, counts, query_lens, contexts, MAX_PARTS=MAX_PARTS, BLOCK=64)

        assert (sizes * counts >= contexts).all()
        assert (sizes * (counts - 1) < contexts).all()
        assert (counts * query_lens <= MAX_PARTS).all()
        assert (sizes % 64 == 0).all()
        # A program walks at most this many keys one after the other where the longest context is alone.
        assert sizes[query_lens == 1].max() <= 131_072 // MAX_PARTS + 256


class TestGivenTheLayout:
    def test_when_a_cache_is_allocated_then_a_heads_keys_of_a_block_are_one_run(self) -> None:
        cache = allocate_cuda(3, 16, 2, 32, dtype=torch.float16, device=torch.device("cpu"))

        assert cache.keys.shape == cache.values.shape == (3, 16, 2, 32)
        assert cache.keys.stride() == cache.values.stride() == (2 * 2 * 16 * 32, 32, 16 * 32, 1)
        assert not cache.keys.any()
