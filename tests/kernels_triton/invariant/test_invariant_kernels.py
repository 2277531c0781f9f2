"""Kernels of a deterministic process: right, and the same bits for a row in any batch."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.linear import invariant as product
from sluice.kernels.linear.invariant import InvariantConfig, arrivals, invariant_config, invariant_product
from sluice.kernels.logprobs.kernel import logprobs_triton
from sluice.kernels.logprobs.reference import logprobs_reference
from sluice.kernels.paged_attention import FP8, invariant
from sluice.kernels.paged_attention.invariant import paged_attention_invariant
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from tests.examples import examples
from tests.grids import fast_only, grid
from tests.kernels_triton.devices import DEVICES
from tests.kernels_triton.invariant.matrix_unit import matrix_unit
from tests.oracles.kernel_cases import (
    AttentionCase,
    AttentionInputs,
    agreement,
    attention_agreement,
    blocks_needed,
    generator_on,
    make_attention,
    random_tensor,
    same_bits,
    sinks_of,
)

SEGMENT = 64
"""Keys of the first segment in these tests, which others are four times as long as: contexts that the interpreter can
afford have several. Tiles of 16 bits have as many."""

ROWS = (1, 3, 17, 64)
SMALL = InvariantConfig(block_n=16, block_t=16, block_k=16, part_size=32, num_warps=4, num_stages=2)
TALL = replace(SMALL, block_t=64)


@contextmanager
def short_segments() -> Generator[None]:
    """Let segments be short, and products those of a matrix unit."""
    usual = invariant.SEGMENT_TOKENS, invariant.SHORT_SEGMENTS
    invariant.SEGMENT_TOKENS, invariant.SHORT_SEGMENTS = SEGMENT, 1
    try:
        with matrix_unit():
            yield
    finally:
        invariant.SEGMENT_TOKENS, invariant.SHORT_SEGMENTS = usual


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: InvariantConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """The product, into memory that was NaN, between guards that must stay NaN; its counters must be zero again."""
    out_size = weight.shape[0] // (1 if activation is None else 2)
    out = torch.full((x.shape[0] + 2, out_size), float("nan"), dtype=x.dtype, device=x.device)
    arrived = arrivals(x.device)
    with matrix_unit():
        invariant_product(x, weight, bias, arrived=arrived, out=out[1:-1], activation=activation, config=config)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    assert not arrived.any()
    return out[1:-1]


@contextmanager
def adding_by(*, one_program: bool) -> Generator[None]:
    """Let one program add the parts of K, even if there are few."""
    usual = product.ENOUGH_PROGRAMS
    product.ENOUGH_PROGRAMS = 0 if one_program else usual
    try:
        yield
    finally:
        product.ENOUGH_PROGRAMS = usual


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAProduct:
    @pytest.mark.parametrize(
        ("num_tokens", "out_size", "in_size"),
        fast_only([(3, 33, 70)], [(0, 8, 8), (1, 1, 1), (16, 48, 47), (17, 130, 64), (65, 16, 90), (40, 70, 200)]),
    )
    def test_when_rows_are_multiplied_then_they_agree(
        self, device: str, dtype: torch.dtype, num_tokens: int, out_size: int, in_size: int
    ) -> None:
        generator = generator_on(device)
        weight = random_tensor(out_size, in_size, dtype=dtype, generator=generator)
        # A slice of a wider buffer: what lies next to a row is not read.
        x = random_tensor(num_tokens, in_size + 3, dtype=dtype, generator=generator)
        x[:, in_size:] = float("nan")
        x = x[:, :in_size]
        bias = random_tensor(out_size, dtype=dtype, generator=generator) if num_tokens % 2 else None

        for config in (None, SMALL):
            out = multiply(x, weight, bias, config)

            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            slack = 8 * in_size**0.5 * 2.0**-24 * (x.double().abs() @ weight.double().abs().T + 1)
            assert agreement(out, expected, slack).worst <= 1.0

    @pytest.mark.parametrize(
        ("out_size", "in_size"), fast_only([(10, 40)], [(1, 1), (20, 100), (16, 64), (70, 33), (20, 200)])
    )
    def test_when_rows_join_or_leave_then_a_row_keeps_its_bits(
        self, device: str, dtype: torch.dtype, out_size: int, in_size: int
    ) -> None:
        generator = generator_on(device)
        weight = random_tensor(out_size, in_size, dtype=dtype, generator=generator)
        x = random_tensor(66, in_size, dtype=dtype, generator=generator)
        bias = random_tensor(out_size, dtype=dtype, generator=generator)
        with adding_by(one_program=True):
            many = multiply(x, weight, bias, SMALL)

        for num_rows in ROWS:
            for first in (0, 66 - num_rows):
                rows = slice(first, first + num_rows)
                assert same_bits(multiply(x[rows], weight, bias, SMALL), many[rows])
                assert same_bits(multiply(x[rows], weight, bias, TALL), many[rows])

    @pytest.mark.parametrize(
        ("out_size", "in_size", "rows"),
        fast_only(
            [(40, 1100, (1, 17))],
            [(64, 64, ROWS), (130, 300, ROWS), (40, 1100, ROWS), (100, 2100, (1, 16, 17, 64, 65, 128, 129, 300))],
        ),
    )
    def test_when_the_rules_choose_then_a_row_keeps_its_bits(
        self, device: str, dtype: torch.dtype, out_size: int, in_size: int, rows: Sequence[int]
    ) -> None:
        generator = generator_on(device)
        weight = random_tensor(out_size, in_size, dtype=dtype, generator=generator)
        x = random_tensor(max(rows), in_size, dtype=dtype, generator=generator)
        most = multiply(x, weight, None)

        assert all(same_bits(multiply(x[:n], weight, None), most[:n]) for n in rows)

    @pytest.mark.parametrize(
        ("activation", "out_size", "in_size", "num_tokens"),
        fast_only(
            [("silu", 2 * 19, 70, 3)],
            [("gelu_tanh", 2 * 8, 64, 17), ("swiglu_clamped", 2 * 70, 40, 40), ("silu", 2 * 33, 1100, 5)],
        ),
    )
    def test_when_it_gates_then_the_bits_are_those_of_two_steps(
        self, device: str, dtype: torch.dtype, activation: Activation, out_size: int, in_size: int, num_tokens: int
    ) -> None:
        generator = generator_on(device)
        weight = random_tensor(out_size, in_size, dtype=dtype, generator=generator)
        x = random_tensor(num_tokens, in_size, dtype=dtype, generator=generator)
        bias = random_tensor(out_size, dtype=dtype, generator=generator) if num_tokens % 2 else None
        expected = x.new_empty(num_tokens, out_size // 2)

        for config in (None, SMALL):
            gated_activation_triton(multiply(x, weight, bias, config), activation=activation, out=expected)

            assert same_bits(multiply(x, weight, bias, config, activation), expected)


class TestGivenTheRulesOfAProduct:
    @pytest.mark.parametrize("element_bytes", [2, 4])
    @pytest.mark.parametrize("out_size", [1, 64, 3072, 4096, 28_672, 151_936])
    def test_when_one_is_chosen_then_what_determines_bits_does_not_depend_on_the_rows(
        self, out_size: int, element_bytes: int
    ) -> None:
        for in_size in (1, 64, 1000, 4096, 14_336):
            configs = [
                invariant_config(out_size=out_size, in_size=in_size, num_tokens=rows, element_bytes=element_bytes)
                for rows in (1, 16, 17, 64, 65, 256, 8192)
            ]

            assert len({(one.block_k, one.part_size) for one in configs}) == 1
            assert configs[0].part_size % configs[0].block_k == 0


def inputs_for(
    device: str, dtype: torch.dtype, lens: Sequence[tuple[int, int]], *, is_fp8: bool = False, **options: Any
) -> AttentionInputs:  # Any: fields of a case
    """New tokens and contexts of sequences, with two query heads for one key-value head."""
    query_lens, context_lens = zip(*lens, strict=True)
    case = AttentionCase(
        query_lens=query_lens,
        context_lens=context_lens,
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        **options,
    )
    cache_dtype = FP8 if is_fp8 else dtype
    cache = allocate_cuda(blocks_needed(case) + 2, 16, 1, 16, dtype=cache_dtype, device=torch.device(device))
    return make_attention(case, cache, dtype, generator_on(device))


def attend(inputs: AttentionInputs) -> Tensor:
    """The kernels' output, into memory that was NaN."""
    call = inputs.call()
    paged_attention_invariant(call)
    return call.out


def part_of(inputs: AttentionInputs, sequence: int, first: int, last: int) -> AttentionInputs:
    """The new tokens `first` to `last` of one sequence, alone, when those before them have been computed."""
    start, end = inputs.query_start_locs[sequence : sequence + 2].tolist()
    context = int(inputs.context_lens[sequence]) - (end - start) + last
    return replace(
        inputs,
        query=inputs.query[start + first : start + last],
        block_tables=inputs.block_tables[sequence : sequence + 1],
        query_start_locs=torch.tensor([0, last - first], dtype=torch.int32, device=inputs.query.device),
        context_lens=torch.tensor([context], dtype=torch.int32, device=inputs.query.device),
        max_query_len=last - first,
        max_context_len=context,
    )


MIXED = [(1, 5 * SEGMENT + 9), (20, 70), (0, 7), (1, 5), (2, SEGMENT + 1)]
"""A long decode, a chunk with context before it, a sequence that computes nothing, a short decode, a draft."""

EXTRAS = ((0, 0.0, False), (24, 0.0, False), (0, 2.0, True), (SEGMENT, 2.0, True))
"""Sliding window, soft cap, and whether there are sinks."""


def options_of(window: int, soft_cap: float, *, has_sinks: bool) -> dict[str, Any]:  # fields of a case
    return {"sliding_window": window, "soft_cap": soft_cap, "sinks": sinks_of(2) if has_sinks else None}


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAttention:
    @pytest.mark.parametrize(("window", "soft_cap", "has_sinks"), fast_only(EXTRAS[:1], EXTRAS[1:]))
    def test_when_lengths_are_mixed_then_every_row_agrees_and_padding_is_zero(
        self, device: str, dtype: torch.dtype, window: int, soft_cap: float, *, has_sinks: bool
    ) -> None:
        options = options_of(window, soft_cap, has_sinks=has_sinks)
        inputs = inputs_for(device, dtype, [*MIXED, (1, 0), (17, 0)], num_padding=5, **options)

        with short_segments():
            out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert torch.equal(out[-23:], torch.zeros_like(out[-23:]))

    @pytest.mark.parametrize(
        ("window", "soft_cap", "has_sinks", "is_fp8"),
        grid(EXTRAS, [False, True], fast=[(*EXTRAS[3], False)]),
    )
    def test_when_a_token_is_alone_among_others_or_in_a_chunk_then_it_has_the_same_bits(
        self, device: str, dtype: torch.dtype, window: int, soft_cap: float, *, has_sinks: bool, is_fp8: bool
    ) -> None:
        options = options_of(window, soft_cap, has_sinks=has_sinks)
        inputs = inputs_for(device, dtype, MIXED, is_fp8=is_fp8, **options)

        with short_segments():
            together = attend(inputs)
            for sequence, (num_new, _) in enumerate(MIXED):
                start = int(inputs.query_start_locs[sequence])
                edges = sorted({0, 1, 18, num_new} & set(range(num_new + 1)))
                for first, last in pairwise(edges):
                    alone = attend(part_of(inputs, sequence, first, last))

                    assert same_bits(alone, together[start + first : start + last])

    @pytest.mark.long
    def test_when_the_batch_is_permuted_then_the_output_is_permuted_bit_by_bit(
        self, device: str, dtype: torch.dtype
    ) -> None:
        inputs = inputs_for(device, dtype, [(1, 9), (1, 150), (1, 1), (1, SEGMENT)])
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


def test_any_division_of_a_prompt_into_chunks_gives_the_same_bits() -> None:
    """Interpreted, in float32: any cuts, beside any neighbour."""
    inputs = inputs_for("cpu", torch.float32, [(40, 90), (1, 66)], sliding_window=60)
    with short_segments():
        whole = attend(inputs)

        @settings(max_examples=examples(6), deadline=None, database=None)
        @given(cuts=st.sets(st.integers(1, 39), max_size=2))
        def check(cuts: set[int]) -> None:
            for first, last in pairwise([0, *sorted(cuts), 40]):
                assert same_bits(attend(part_of(inputs, 0, first, last)), whole[first:last])

        check()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenANorm:
    def test_when_rows_join_or_leave_then_a_row_keeps_its_bits(self, device: str, dtype: torch.dtype) -> None:
        generator = generator_on(device)
        x, residual = (random_tensor(20, 100, dtype=dtype, generator=generator) for _ in "xr")
        weight = random_tensor(100, dtype=dtype, generator=generator)

        def normed(rows: slice) -> Tensor:
            out = torch.empty_like(x[rows])
            rms_norm_triton(x[rows], weight, residual=residual[rows].clone(), eps=1e-6, out=out)
            return out

        together = normed(slice(None))

        assert all(same_bits(normed(slice(at, at + size)), together[at : at + size]) for at, size in ((0, 1), (3, 17)))


@pytest.mark.parametrize(("device", "dtype"), [one for one in DEVICES if "float32" in str(one.id)])
class TestGivenLogprobs:
    def test_when_logits_are_equal_then_the_lowest_id_comes_first_and_values_agree(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = (2 * random_tensor(5, 700, dtype=dtype, generator=generator_on(device))).round() / 2
        logits[0, :7] = float("-inf")
        token_ids = torch.tensor([9, 0, 699, 17, 3], device=device)

        found = logprobs_triton(logits, torch.arange(5, device=device), token_ids, count=6)

        expected = logprobs_reference(logits, token_ids, count=6)
        assert torch.equal(found[2], expected[2])
        torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-6, atol=1e-5)

    def test_when_rows_join_or_leave_then_a_row_keeps_its_bits(self, device: str, dtype: torch.dtype) -> None:
        logits = random_tensor(9, 4500, dtype=dtype, generator=generator_on(device))
        token_ids = torch.arange(9, device=device)
        all_rows = torch.arange(9, device=device)
        together = logprobs_triton(logits, all_rows, token_ids, count=4)

        for rows in (slice(0, 1), slice(4, 7)):
            alone = logprobs_triton(logits, all_rows[rows], token_ids[rows], count=4)

            assert all(same_bits(one, all_of[rows]) for one, all_of in zip(alone, together, strict=True))
