"""Keys and values in int8 on the CPU: what is stored, and attention over it, on every path."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.kernels.copy_blocks import block_runs, copy_blocks
from sluice.kernels.paged_attention import INT8
from sluice.kernels.paged_attention.layout import unpacked
from sluice.kernels.paged_attention.narrow import from_8_bits, to_8_bits
from sluice.kernels.write_kv import write_kv
from tests.kernels.test_cpu_attention import (
    MIXED,
    NAN,
    Case,
    attend,
    check,
    check_batch_invariance,
    make,
    nan_cache,
    sinks_of,
)

NARROW = Case(lengths=MIXED, dtype=torch.bfloat16, cache_dtype=INT8)
NO_ROTATION = torch.zeros(1, 0)


class TestGivenHeads:
    @settings(max_examples=100, deadline=None)
    @given(
        numbers=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40), power=st.integers(-40, 40)
    )
    def test_when_they_are_rounded_then_each_number_is_within_half_a_step(
        self, numbers: list[float], power: int
    ) -> None:
        heads = torch.tensor([numbers]) * 2.0**power

        codes, scales = to_8_bits(heads, INT8)

        off = (from_8_bits(codes, scales, torch.float64) - heads.double()).abs()
        # The scale of numbers below the least normal one may be rounded to 0.
        assert bool((off <= scales.double()[..., None] * 0.5000001 + 2.0**-126).all())

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_when_one_number_is_not_finite_then_its_head_is_nan_and_no_other(self, bad: float) -> None:
        heads = torch.ones(3, 8)
        heads[1, 4] = bad

        found = from_8_bits(*to_8_bits(heads, INT8), torch.float32)

        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("path")
class TestGivenTokensToWrite:
    @pytest.mark.parametrize("head_size", [2, 16, 20, 64, 128, 256])
    @pytest.mark.parametrize("block_size", [4, 5, 16])
    def test_when_they_are_written_then_codes_and_scales_are_those_of_the_definition(
        self, head_size: int, block_size: int
    ) -> None:
        cache = nan_cache(3, block_size, 2, head_size, INT8)
        num_tokens = 2 * block_size
        qkv = (torch.randn(num_tokens, 5 * head_size) * 3).bfloat16()
        qkv[1, head_size:] = 0

        write_kv(qkv, torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), NO_ROTATION, cache)

        plain, heads = unpacked(cache), qkv.unflatten(1, (5, head_size))
        for codes, scales, expected in (
            (plain.keys, plain.key_scales, heads[:, 1:3]),
            (plain.values, plain.value_scales, heads[:, 3:5]),
        ):
            assert scales is not None
            right, right_scales = to_8_bits(expected, INT8)
            assert torch.equal(codes[:2].flatten(0, 1), right)
            assert torch.equal(scales[:2].flatten(0, 1), right_scales)
            assert bool(scales[2].isnan().all())

    def test_when_a_block_is_copied_then_its_scales_are_too(self) -> None:
        cache = make(NARROW).cache
        plain = unpacked(cache)

        copy_blocks(block_runs([cache]), [(1, 0)])

        copied = unpacked(cache)
        assert torch.equal(copied.keys[0], plain.keys[1])
        assert copied.value_scales is not None
        assert plain.value_scales is not None
        assert torch.equal(
            copied.value_scales[0],
            plain.value_scales[1],
        ) or bool(plain.value_scales[1].isnan().any())


@pytest.mark.usefixtures("path")
class TestGivenAMixedBatch:
    @pytest.mark.parametrize("block_size", [1, 4, 5, 16, 24, 32])
    def test_when_blocks_are_of_any_size_then_it_equals_the_reference(self, block_size: int) -> None:
        check(replace(NARROW, block_size=block_size))

    @pytest.mark.parametrize("head_size", [2, 20, 64, 80, 96, 128, 256])
    def test_when_heads_are_of_any_size_then_it_equals_the_reference(self, head_size: int) -> None:
        check(replace(NARROW, head_size=head_size, block_size=16))

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (5, 1), (14, 2), (20, 1)])
    @pytest.mark.parametrize(("window", "soft_cap", "has_sinks"), [(0, 0.0, False), (17, 1.5, True), (5, 0.0, True)])
    def test_when_it_has_every_option_then_it_equals_the_reference(
        self, num_heads: int, num_kv_heads: int, window: int, soft_cap: float, *, has_sinks: bool
    ) -> None:
        sinks = sinks_of(num_heads) if has_sinks else None
        of_heads = replace(NARROW, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=16)
        check(replace(of_heads, window=window, soft_cap=soft_cap, sinks=sinks))

    def test_when_a_sequence_has_neighbours_then_its_bits_do_not_change(self) -> None:
        check_batch_invariance(NARROW)

    def test_when_a_key_is_nan_then_only_its_own_sequence_suffers(self) -> None:
        case = replace(NARROW, lengths=((1, 20), (1, 20)))
        inputs = make(case)
        slot = int(inputs.block_tables[1, 2]) * case.block_size
        qkv = torch.full((1, 5 * 16), NAN, dtype=torch.bfloat16)
        write_kv(qkv, torch.zeros(1, dtype=torch.int64), torch.tensor([slot]), NO_ROTATION, inputs.cache)

        actual = attend(inputs, case)

        assert actual[0].isfinite().all()
        assert actual[1].isnan().all()


class TestGivenAnyShapes:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        lengths=st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 150)).map(lambda pair: (pair[0], sum(pair))),
            min_size=1,
            max_size=5,
        ),
        block_size=st.integers(1, 40),
        group=st.integers(1, 9),
        window=st.one_of(st.just(0), st.integers(1, 60)),
        seed=st.integers(0, 1000),
    )
    def test_when_a_batch_is_attended_to_then_it_equals_the_reference(
        self, lengths: list[tuple[int, int]], block_size: int, group: int, window: int, seed: int
    ) -> None:
        case = replace(NARROW, lengths=tuple(lengths), block_size=block_size, num_heads=2 * group, window=window)
        check(case, seed)
