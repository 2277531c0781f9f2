"""A cache in 8-bit floats: the bytes that are written, and attention over what they stand for."""

# torch's types are partial; triton's language is not typable.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportMissingTypeStubs=false, reportGeneralTypeIssues=false, reportArgumentType=false

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.e4m3 import to_e4m3
from sluice.kernels.paged_attention import kernel
from sluice.kernels.paged_attention.kernel import allocate_cuda, paged_attention_triton
from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.paged_attention.narrow import FP8, from_8_bits, to_8_bits
from sluice.kernels.write_kv import HeadNorm
from sluice.kernels.write_kv.kernel import write_kv_triton
from tests.grids import cross_section, fast_only, grid
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import (
    AttentionCase,
    AttentionInputs,
    attention_agreement,
    blocks_needed,
    fill_with_nan,
    fp8_write_agreement,
    generator_on,
    make_attention,
    make_write,
    random_tensor,
    same_bits,
    sinks_of,
)


@triton.jit
def _round_kernel(out_ptr, x_ptr, N, BLOCK: tl.constexpr):  # noqa: N803 - as in kernels
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0)
    tl.store(out_ptr + offsets, to_e4m3(x), mask=offsets < N)


def fp8_cache(case: AttentionCase, device: str) -> KVCache:
    sizes = (blocks_needed(case) + 2, case.block_size, case.num_kv_heads, case.head_size)
    return allocate_cuda(*sizes, dtype=FP8, device=torch.device(device))


def inputs_for(case: AttentionCase, device: str, dtype: torch.dtype) -> AttentionInputs:
    return make_attention(case, fp8_cache(case, device), dtype, generator_on(device))


def attend(inputs: AttentionInputs, *, segment: int = 32) -> Tensor:
    """The kernel's output into memory that was NaN; the shortest segments have `segment` keys."""
    call = inputs.call()
    usual = kernel.SEGMENT_TOKENS
    kernel.SEGMENT_TOKENS = segment
    try:
        paged_attention_triton(call)
    finally:
        kernel.SEGMENT_TOKENS = usual
    return call.out


class TestGivenHeads:
    def test_when_they_are_kept_in_fp8_then_each_element_is_within_half_a_step(self) -> None:
        heads = torch.randn(40, 3, 64, generator=generator_on("cpu")) * torch.logspace(-6, 6, 40)[:, None, None]
        heads[7] = 0

        found = from_8_bits(*to_8_bits(heads, FP8), torch.float64)

        largest = heads.double().abs().amax(dim=-1, keepdim=True)
        assert ((found - heads.double()).abs() <= heads.double().abs() / 16 + largest / 448 * 2.0**-10 * 1.001).all()
        assert torch.allclose(found.abs().amax(dim=-1), largest[..., 0], rtol=1e-6)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_when_an_element_is_not_finite_then_only_its_head_reads_as_nan(self, value: float) -> None:
        heads = torch.ones(2, 2, 8)
        heads[1, 0, 3] = value

        found = from_8_bits(*to_8_bits(heads, FP8), torch.float32)

        assert found[1, 0].isnan().all()
        assert (found[0] == 1).all()
        assert (found[1, 1] == 1).all()


@pytest.mark.parametrize(("device", "dtype"), [DEVICES[0], DEVICES[2]])
class TestGivenFloats:
    def test_when_heads_are_rounded_then_bytes_and_scales_are_those_of_ieee_division(
        self, device: str, dtype: torch.dtype
    ) -> None:
        heads = random_tensor(500, 16, dtype=dtype, generator=generator_on(device))
        largest = heads.abs().amax(dim=-1).cpu().double()

        narrow, scales = to_8_bits(heads, FP8)

        assert torch.equal(scales.cpu(), (largest / 448).float())
        assert same_bits(narrow.cpu(), (heads.cpu() / scales.cpu()[:, None]).to(FP8))

    def test_when_they_become_bytes_then_they_are_the_nearest_with_ties_to_even(
        self, device: str, dtype: torch.dtype
    ) -> None:
        codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        between = (codes[1:] + codes[:-1]) / 2
        near = torch.cat([torch.nextafter(between, torch.tensor(end)) for end in (0.0, 1e9)])
        some = torch.randn(4000, generator=generator_on("cpu")) * torch.logspace(-4, 2.2, 4000)
        x = torch.cat([codes, between, near, some.clamp(-448, 448), torch.tensor([463.0, float("nan")])])
        x = torch.cat([x, -x]).to(device)
        found = torch.zeros(len(x), dtype=torch.uint8, device=device)

        _round_kernel[(triton.cdiv(len(x), 1024),)](found, x, len(x), BLOCK=1024)

        expected = x.clamp(-448, 448).to(FP8)
        assert torch.equal(found.view(FP8).isnan() if device == "cuda" else (found & 0x7F) == 0x7F, x.isnan())
        finite = ~x.isnan()
        assert torch.equal(found[finite], expected.view(torch.uint8)[finite])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenACacheInFp8:
    @pytest.mark.parametrize(
        ("num_tokens", "num_heads", "num_kv_heads", "head_size", "rotary_size", "has_norm"),
        cross_section(
            [
                (1, 1, 1, 16, 16),
                (7, 4, 2, 32, 32),
                (3, 6, 3, 64, 16),
                (5, 7, 1, 80, 80),
                (9, 2, 2, 24, 0),
                (0, 2, 1, 16, 16),
            ],
            [False, True],
        ),
    )
    def test_when_tokens_are_written_then_bytes_and_scales_are_the_reference_s(
        self,
        device: str,
        dtype: torch.dtype,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary_size: int,
        has_norm: bool,
    ) -> None:
        plain, cache = (
            allocate_cuda(4, 16, num_kv_heads, head_size, dtype=kind, device=torch.device(device))
            for kind in (dtype, FP8)
        )
        fill_with_nan(cache)
        inputs = make_write(
            plain,
            num_tokens=num_tokens,
            num_heads=num_heads,
            rotary_size=rotary_size,
            norm_offset=1.0 if has_norm else None,
            generator=generator_on(device),
        )
        if num_tokens > 3:
            inputs.qkv[0, -head_size:] = 0  # a head of zeros has no scale to divide by
        out = torch.full((num_tokens, num_heads, head_size), float("nan"), dtype=dtype, device=device)

        write_kv_triton(
            inputs.qkv,
            inputs.positions,
            inputs.slot_mapping,
            inputs.cos_sin,
            cache,
            head_norm=inputs.head_norm,
            out=out,
        )

        assert fp8_write_agreement(inputs, cache, out).holds

    @pytest.mark.parametrize(
        ("query_lens", "context_lens", "window"),
        fast_only(
            [([1, 1, 1], [1, 17, 200], 0), ([18, 1, 0], [60, 50, 5], 16)],
            [([1, 1], [100, 64], 33), ([20, 1, 5], [50, 70, 5], 0)],
        ),
    )
    def test_when_it_is_attended_to_then_the_result_is_that_of_what_it_stands_for(
        self, device: str, dtype: torch.dtype, query_lens: list[int], context_lens: list[int], window: int
    ) -> None:
        case = AttentionCase(
            query_lens=query_lens,
            context_lens=context_lens,
            num_heads=6,
            num_kv_heads=2,
            head_size=24,
            sliding_window=window,
            num_padding=2,
        )
        inputs = inputs_for(case, device, dtype)

        out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert not out[-2:].any()

    @pytest.mark.parametrize(
        ("soft_cap", "has_sinks", "query_lens", "context_lens", "window", "head_size"),
        grid(
            [(2.0, False), (0.0, True), (2.0, True)],
            [
                ([1, 1, 1], [1, 17, 200], 0),
                ([1, 1], [100, 64], 33),
                ([20, 1, 5], [50, 70, 5], 0),
                ([18, 1], [60, 50], 16),
            ],
            [24, 64, 256],
            fast=[(2.0, True, [1, 1], [100, 64], 33, 24), (2.0, True, [18, 1], [60, 50], 16, 64)],
        ),
    )
    def test_when_there_is_a_soft_cap_or_a_sink_then_it_sees_what_the_cache_stands_for(
        self,
        device: str,
        dtype: torch.dtype,
        query_lens: list[int],
        context_lens: list[int],
        window: int,
        head_size: int,
        soft_cap: float,
        has_sinks: bool,
    ) -> None:
        case = AttentionCase(
            query_lens=query_lens,
            context_lens=context_lens,
            num_heads=6,
            num_kv_heads=2,
            head_size=head_size,
            sliding_window=window,
            soft_cap=soft_cap,
            sinks=sinks_of(6) if has_sinks else None,
            num_padding=2,
        )
        inputs = inputs_for(case, device, dtype)

        out = attend(inputs)

        assert attention_agreement(inputs, out).holds
        assert not out[-2:].any()

    def test_when_weights_are_tiny_then_the_scales_of_values_do_not_lose_them(
        self, device: str, dtype: torch.dtype
    ) -> None:
        """Many keys of equal weight, and values far below one: together they are below what float16 resolves."""
        case = AttentionCase(query_lens=[1], context_lens=[900], num_heads=1, num_kv_heads=1, head_size=16)
        inputs = inputs_for(case, device, dtype)
        cache = inputs.kv_cache
        assert cache.value_scales is not None
        cache.value_scales.mul_(0.01)
        flat = replace(inputs, query=inputs.query * 0)

        assert attention_agreement(flat, attend(flat, segment=512)).holds

    def test_when_queries_and_values_are_large_or_differ_widely_then_every_row_agrees(
        self, device: str, dtype: torch.dtype
    ) -> None:
        """Beyond float16, in which decodes are multiplied: queries of bfloat16, and values of 2**17 times a weight."""
        sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16}
        inputs = inputs_for(AttentionCase(query_lens=[1, 1], context_lens=[100, 33], **sizes), device, dtype)
        cache = inputs.kv_cache
        assert cache.value_scales is not None
        cache.value_scales.mul_(torch.logspace(-18, 12, 16, base=2, device=device)[None, :, None])
        inputs.query[0].mul_(1e4 if dtype == torch.float16 else 1e5)

        assert attention_agreement(inputs, attend(inputs)).holds

    def test_when_one_sequence_has_a_broken_key_then_the_others_do_not_notice(
        self, device: str, dtype: torch.dtype
    ) -> None:
        case = AttentionCase(query_lens=[1, 1], context_lens=[40, 70], num_heads=2, num_kv_heads=1, head_size=16)
        inputs = inputs_for(case, device, dtype)
        undisturbed = attend(inputs)
        cache = inputs.kv_cache
        assert cache.key_scales is not None
        cache.key_scales[int(inputs.block_tables[0, 1]), 3] = float("inf")

        out = attend(inputs)

        assert out[0].isnan().all()
        assert same_bits(out[1], undisturbed[1])

    def test_when_others_join_the_batch_then_a_row_keeps_its_bits(self, device: str, dtype: torch.dtype) -> None:
        case = AttentionCase(query_lens=[1, 1], context_lens=[40, 150], num_heads=2, num_kv_heads=1, head_size=16)
        inputs = inputs_for(case, device, dtype)
        alone = replace(
            inputs,
            query=inputs.query[:1],
            block_tables=inputs.block_tables[:1],
            query_start_locs=inputs.query_start_locs[:2],
            context_lens=inputs.context_lens[:1],
            max_context_len=40,
        )

        assert same_bits(attend(inputs)[:1], attend(alone))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAWriteAndThenAttention:
    def test_when_a_token_is_not_finite_then_its_own_sequence_alone_is_lost(
        self, device: str, dtype: torch.dtype
    ) -> None:
        cache = allocate_cuda(2, 16, 1, 16, dtype=FP8, device=torch.device(device))
        qkv = random_tensor(2, 3 * 16, dtype=dtype, generator=generator_on(device))
        qkv[0, 40] = float("nan")
        ids = torch.tensor([0, 16], device=device)
        weight = torch.ones(16, dtype=dtype, device=device)
        query = torch.empty(2, 1, 16, dtype=dtype, device=device)
        tables = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
        lens = torch.ones(2, dtype=torch.int32, device=device)
        angles = torch.ones(1, 16, device=device)
        out = torch.empty_like(query)

        write_kv_triton(qkv, ids * 0, ids, angles, cache, head_norm=HeadNorm(weight, weight, 1e-6), out=query)
        inputs = AttentionInputs(
            query=query,
            kv_cache=cache,
            block_tables=tables,
            query_start_locs=starts,
            context_lens=lens,
            scale=0.25,
            max_query_len=1,
            max_context_len=1,
            sliding_window=0,
        )
        paged_attention_triton(inputs.call(out))

        assert not out[0].isfinite().any()
        assert ((out[1, 0] - qkv[1, 32:]).abs() <= qkv[1, 32:].abs() / 8 + 0.01).all()
