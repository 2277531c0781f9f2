"""KV write and paged attention on the CPU against their references, on every path."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice.kernels.copy_blocks import parts_of
from sluice.kernels.paged_attention import FP8, KVCache, allocate_kv_cache, paged_attention
from sluice.kernels.paged_attention.layout import Layout, unpacked
from sluice.kernels.paged_attention.narrow import from_8_bits
from sluice.kernels.paged_attention.reference import paged_attention_reference
from sluice.kernels.write_kv import HeadNorm, write_kv
from sluice.kernels.write_kv.reference import write_kv_reference

CPU = torch.device("cpu")
NAN = float("nan")
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


def nan_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> KVCache:
    """A cache whose every byte is NaN: whatever is read must have been written before."""
    cache = allocate_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=CPU)
    for part in parts_of(cache):
        # Codes of 8 bits are not NaN, but their scales are.
        part.fill_(NAN if part.is_floating_point() else 77)
    return cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mixed batch: per sequence, its new tokens and its whole context."""

    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 4
    window: int = 0
    soft_cap: float = 0.0
    sinks: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """`dtype` if None."""

    @property
    def sink_logits(self) -> Tensor | None:
        """As an argument."""
        return None if self.sinks is None else torch.tensor(self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A case's tensors. The cache holds each context, and NaN elsewhere; unused table entries point at block 0."""

    query: Tensor
    cache: KVCache
    block_tables: Tensor
    query_start_locs: Tensor
    context_lens: Tensor


def make(case: Case, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-context // case.block_size) for _, context in case.lengths]
    num_blocks = sum(blocks) + 3
    cache = nan_cache(num_blocks, case.block_size, case.num_kv_heads, case.head_size, case.cache_dtype or case.dtype)
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(blocks), max(blocks, default=0) + 2, dtype=torch.int32)
    for s, (num_new, context) in enumerate(case.lengths):
        table = [ids.pop() for _ in range(blocks[s])]
        tables[s, : len(table)] = torch.tensor(table, dtype=torch.int32)
        oldest = max(0, context - num_new - case.window + 1) if case.window else 0
        _fill(cache, table, range(oldest, context), case.dtype, generator)
    starts = torch.tensor([0] + [new for new, _ in case.lengths]).cumsum(0).int()
    num_tokens = int(starts[-1])
    return Given(
        query=torch.randn(num_tokens, case.num_heads, case.head_size, generator=generator).to(case.dtype),
        cache=cache,
        block_tables=tables,
        query_start_locs=starts,
        context_lens=torch.tensor([context for _, context in case.lengths], dtype=torch.int32),
    )


def _fill(cache: KVCache, table: list[int], positions: range, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Random keys and values at some positions of one sequence."""
    slots = torch.tensor([table[p // cache.block_size] * cache.block_size + p % cache.block_size for p in positions])
    qkv = torch.randn(len(positions), (1 + 2 * cache.num_kv_heads) * cache.head_size, generator=generator)
    no_rotation = torch.zeros(1, 0)
    write_kv(qkv.to(dtype), torch.zeros(len(positions), dtype=torch.int64), slots.long(), no_rotation, cache)


def attend(given: Given, case: Case) -> Tensor:
    return paged_attention(
        given.query,
        given.cache,
        given.block_tables,
        given.query_start_locs,
        given.context_lens,
        scale=case.head_size**-0.5,
        max_query_len=max((new for new, _ in case.lengths), default=0),
        max_context_len=max((context for _, context in case.lengths), default=0),
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        sinks=case.sink_logits,
        out=torch.full_like(given.query, NAN),
    )


def attend_reference(given: Given, case: Case) -> Tensor:
    plain = unpacked(given.cache)
    keys, values = plain.keys.double(), plain.values.double()
    if plain.key_scales is not None and plain.value_scales is not None:
        keys = from_8_bits(plain.keys, plain.key_scales, torch.float64)
        values = from_8_bits(plain.values, plain.value_scales, torch.float64)
    cache = replace(plain, keys=keys, values=values, key_scales=None, value_scales=None)
    return paged_attention_reference(
        given.query.double(),
        cache,
        given.block_tables,
        given.query_start_locs,
        given.context_lens,
        scale=case.head_size**-0.5,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        sinks=case.sink_logits,
    )


def check(case: Case, seed: int = 0) -> None:
    given = make(case, seed)

    actual = attend(given, case)

    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(actual.double(), attend_reference(given, case), rtol=tolerance, atol=tolerance)


MIXED = ((1, 1), (1, 40), (9, 9), (1, 17), (30, 33), (5, 64), (1, 200), (2, 16))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
class TestGivenAMixedBatch:
    """Decodes, whole prompts and chunks of prompts together; NaN wherever nothing was written."""

    @pytest.mark.parametrize("block_size", [1, 4, 5, 16, 24, 32])
    def test_when_blocks_are_of_any_size_then_it_equals_the_reference(
        self, block_size: int, dtype: torch.dtype
    ) -> None:
        check(Case(lengths=MIXED, block_size=block_size, dtype=dtype))

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (4, 4), (5, 1), (14, 2), (8, 1), (20, 1)])
    def test_when_heads_share_keys_in_any_way_then_it_equals_the_reference(
        self, num_heads: int, num_kv_heads: int, dtype: torch.dtype
    ) -> None:
        check(Case(lengths=MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype))

    @pytest.mark.parametrize("head_size", [2, 8, 20, 64, 80, 96, 128, 256])
    def test_when_heads_are_of_any_size_then_it_equals_the_reference(self, head_size: int, dtype: torch.dtype) -> None:
        check(Case(lengths=MIXED, head_size=head_size, block_size=16, dtype=dtype))

    @pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 100])
    @pytest.mark.parametrize("block_size", [4, 16])
    def test_when_tokens_see_a_window_then_what_is_before_it_is_not_read(
        self, window: int, block_size: int, dtype: torch.dtype
    ) -> None:
        check(Case(lengths=MIXED, window=window, block_size=block_size, dtype=dtype))

    def test_when_there_is_no_sequence_then_there_is_no_output(self, dtype: torch.dtype) -> None:
        assert attend(make(Case(lengths=(), dtype=dtype)), Case(lengths=(), dtype=dtype)).shape == (0, 6, 16)

    def test_when_a_sequence_has_no_new_tokens_then_the_others_are_right(self, dtype: torch.dtype) -> None:
        check(Case(lengths=((1, 9), (0, 12), (3, 7)), dtype=dtype))

    def test_when_rows_belong_to_no_sequence_then_they_become_zero(self, dtype: torch.dtype) -> None:
        case = Case(lengths=((1, 9), (3, 7)), dtype=dtype)
        given = make(case)
        padded = torch.cat([given.query, torch.full((5, 6, 16), NAN, dtype=dtype)])

        actual = attend(replace(given, query=padded), case)

        assert torch.equal(actual[:4], attend(given, case))
        assert torch.equal(actual[4:], torch.zeros(5, 6, 16, dtype=dtype))

    def test_when_a_context_is_empty_then_its_rows_become_zero(self, dtype: torch.dtype) -> None:
        case = Case(lengths=((1, 9), (2, 5)), dtype=dtype)
        given = make(case)
        given.context_lens[1] = 0

        actual = attend(given, case)

        assert torch.equal(actual[1:], torch.zeros(2, 6, 16, dtype=dtype))
        assert actual[:1].isfinite().all()

    def test_when_the_query_is_a_slice_of_a_wider_tensor_then_it_is_read_in_place(self, dtype: torch.dtype) -> None:
        case = Case(lengths=MIXED, dtype=dtype)
        given = make(case)
        wide = torch.full((given.query.shape[0], 11, 16), NAN, dtype=dtype)
        wide[:, 3:9] = given.query

        assert torch.equal(attend(replace(given, query=wide[:, 3:9]), case), attend(given, case))

    def test_when_a_key_is_nan_then_only_its_own_sequence_suffers(self, dtype: torch.dtype) -> None:
        case = Case(lengths=((1, 20), (1, 20)), dtype=dtype)
        given = make(case)
        slot = int(given.block_tables[1, 2]) * case.block_size
        qkv = torch.full((1, 5 * 16), NAN, dtype=dtype)
        write_kv(qkv, torch.zeros(1, dtype=torch.int64), torch.tensor([slot]), torch.zeros(1, 0), given.cache)

        actual = attend(given, case)

        assert actual[0].isfinite().all()
        assert actual[1].isnan().all()

    def test_when_scores_are_far_apart_then_nothing_overflows(self, dtype: torch.dtype) -> None:
        case = Case(lengths=((1, 50), (7, 50)), dtype=dtype)
        given = make(case)
        given.query.mul_(300)

        actual = attend(given, case)

        tolerance = TOLERANCES[dtype] * 4
        torch.testing.assert_close(actual.double(), attend_reference(given, case), rtol=tolerance, atol=tolerance)


def check_batch_invariance(case: Case) -> None:
    """Each sequence alone has the bits that it has among the others."""
    given = make(case)
    together = attend(given, case)

    for s, (new, context) in enumerate(case.lengths):
        start = int(given.query_start_locs[s])
        alone = replace(
            given,
            query=given.query[start : start + new],
            block_tables=given.block_tables[s : s + 1],
            query_start_locs=torch.tensor([0, new], dtype=torch.int32),
            context_lens=given.context_lens[s : s + 1],
        )
        assert torch.equal(attend(alone, replace(case, lengths=((new, context),))), together[start : start + new])


@pytest.mark.usefixtures("path")
class TestGivenTheSameSequenceInOtherBatches:
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    def test_when_it_has_neighbours_then_its_bits_do_not_change(self, dtype: torch.dtype) -> None:
        case = Case(lengths=MIXED, dtype=dtype)
        check_batch_invariance(case)


def sinks_of(num_heads: int) -> tuple[float, ...]:
    """Some that matter and some that hardly do, of either sign."""
    return tuple(4 * math.sin(5 * head) for head in range(num_heads))


EXTRAS = {"soft cap": (1.5, False), "sinks": (0.0, True), "both": (1.5, True)}
"""The soft cap, and whether there are sinks. Scores here are about one: the cap bends them well."""


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("soft_cap", "has_sinks"), EXTRAS.values(), ids=EXTRAS)
class TestGivenASoftCapOrSinks:
    """A mixed batch; NaN wherever nothing was written."""

    @pytest.mark.parametrize(("block_size", "window"), [(4, 0), (16, 0), (24, 0), (4, 7), (16, 1), (16, 17), (5, 100)])
    def test_when_tokens_see_a_window_or_all_then_it_equals_the_reference(
        self, block_size: int, window: int, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        sinks = sinks_of(6) if has_sinks else None
        check(Case(lengths=MIXED, block_size=block_size, window=window, soft_cap=soft_cap, sinks=sinks, dtype=dtype))

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (5, 1), (14, 2), (8, 4), (20, 1)])
    def test_when_heads_share_keys_in_any_way_then_each_has_its_own_sink(
        self, num_heads: int, num_kv_heads: int, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        sinks = sinks_of(num_heads) if has_sinks else None
        case = Case(lengths=MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
        check(replace(case, soft_cap=soft_cap, sinks=sinks))

    @pytest.mark.parametrize("head_size", [2, 20, 64, 128, 256])
    def test_when_heads_are_of_any_size_then_it_equals_the_reference(
        self, head_size: int, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        sinks = sinks_of(6) if has_sinks else None
        case = Case(lengths=MIXED, head_size=head_size, block_size=16, dtype=dtype)
        check(replace(case, soft_cap=soft_cap, sinks=sinks))

    def test_when_a_row_has_neighbours_then_its_bits_do_not_change(
        self, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        case = Case(lengths=MIXED, soft_cap=soft_cap, sinks=sinks_of(6) if has_sinks else None, dtype=dtype)
        check_batch_invariance(case)

    def test_when_a_context_is_empty_or_rows_are_padding_then_they_become_zero(
        self, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        sinks = sinks_of(6) if has_sinks else None
        case = Case(lengths=((1, 9), (2, 5)), soft_cap=soft_cap, sinks=sinks, dtype=dtype)
        given = make(case)
        given.context_lens[1] = 0
        padded = torch.cat([given.query, torch.full((5, 6, 16), NAN, dtype=dtype)])

        actual = attend(replace(given, query=padded), case)

        assert torch.equal(actual[1:], torch.zeros(7, 6, 16, dtype=dtype))
        assert actual[:1].isfinite().all()

    def test_when_a_key_is_nan_then_only_its_own_sequence_suffers(
        self, soft_cap: float, has_sinks: bool, dtype: torch.dtype
    ) -> None:
        sinks = sinks_of(6) if has_sinks else None
        case = Case(lengths=((1, 20), (1, 20)), soft_cap=soft_cap, sinks=sinks, dtype=dtype)
        given = make(case)
        slot = int(given.block_tables[1, 2]) * case.block_size
        qkv = torch.full((1, 5 * 16), NAN, dtype=dtype)
        write_kv(qkv, torch.zeros(1, dtype=torch.int64), torch.tensor([slot]), torch.zeros(1, 0), given.cache)

        actual = attend(given, case)

        assert actual[0].isfinite().all()
        assert actual[1].isnan().all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
class TestGivenASoftCap:
    @pytest.mark.parametrize("soft_cap", [1e-20, 0.01, 5.0, 50.0, 1e4, 1e20])
    def test_when_scores_are_far_beyond_it_or_far_below_then_it_equals_the_reference(
        self, soft_cap: float, dtype: torch.dtype
    ) -> None:
        """Scores of up to a thousand, and of a thousandth."""
        case = Case(lengths=((1, 50), (7, 50)), soft_cap=soft_cap, dtype=dtype)
        given = make(case)
        given.query[0].mul_(1e-3)
        given.query[1:].mul_(300)

        actual = attend(given, case)

        tolerance = TOLERANCES[dtype] * 4
        torch.testing.assert_close(actual.double(), attend_reference(given, case), rtol=tolerance, atol=tolerance)

    def test_when_there_are_two_keys_then_their_weights_are_those_of_the_formula(self, dtype: torch.dtype) -> None:
        """Scores of +-8 under a cap of 4: the weights are the logistic of +-8 tanh(2)."""
        given, case = one_query(keys=[8.0, -8.0], values=[1.0, 0.0], dtype=dtype)

        actual = attend(given, replace(case, soft_cap=4.0))

        expected = 1 / (1 + math.exp(-8 * math.tanh(2)))
        assert actual[0, 0, 0].item() == pytest.approx(expected, rel=TOLERANCES[dtype])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
class TestGivenSinks:
    @pytest.mark.parametrize("sink", [-math.inf, -3e38, -1e4, -100.0, -1.0, 0.0, 1.0, 30.0, 100.0, 1e4, 3e38])
    @pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
    def test_when_they_are_of_any_size_then_it_equals_the_reference(
        self, sink: float, size: float, dtype: torch.dtype
    ) -> None:
        case = Case(lengths=((1, 50), (7, 50)), sinks=(sink, 0.5, -0.5, 0.0, -sink, sink), dtype=dtype)
        case = replace(case, sinks=tuple(min(x, 3e38) for x in case.sinks or ()))
        given = make(case)
        given.query.mul_(size)

        actual = attend(given, case)

        tolerance = TOLERANCES[dtype] * 4
        torch.testing.assert_close(actual.double(), attend_reference(given, case), rtol=tolerance, atol=tolerance)

    def test_when_all_are_minus_infinity_then_it_is_as_without(self, dtype: torch.dtype) -> None:
        case = Case(lengths=MIXED, dtype=dtype)
        given = make(case)

        actual = attend(given, replace(case, sinks=(-math.inf,) * 6))

        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(actual, attend(given, case), rtol=tolerance, atol=tolerance)

    def test_when_there_are_two_keys_then_the_sink_takes_its_share(self, dtype: torch.dtype) -> None:
        given, case = one_query(keys=[1.0, 2.0], values=[3.0, 5.0], dtype=dtype)

        actual = attend(given, replace(case, sinks=(1.5,)))

        e = math.exp
        expected = (3 * e(1) + 5 * e(2)) / (e(1) + e(2) + e(1.5))
        assert actual[0, 0, 0].item() == pytest.approx(expected, rel=TOLERANCES[dtype])


def one_query(keys: list[float], values: list[float], dtype: torch.dtype) -> tuple[Given, Case]:
    """One head of size one, whose scores are `keys`."""
    case = Case(lengths=((1, len(keys)),), num_heads=1, num_kv_heads=1, head_size=1, dtype=dtype)
    given = make(case)
    given.query.fill_(1)
    slots = int(given.block_tables[0, 0]) * case.block_size + torch.arange(len(keys))
    qkv = torch.tensor([[0.0, k, v] for k, v in zip(keys, values, strict=True)]).to(dtype)
    write_kv(qkv, torch.zeros(len(keys), dtype=torch.int64), slots, torch.zeros(1, 0), given.cache)
    return given, case


class TestGivenAnyShapes:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        lengths=st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 150)).map(lambda t: (t[0], t[0] + t[1])),
            min_size=1,
            max_size=5,
        ),
        block_size=st.integers(1, 40),
        group=st.integers(1, 9),
        num_kv_heads=st.integers(1, 3),
        window=st.one_of(st.just(0), st.integers(1, 60)),
        soft_cap=st.one_of(st.just(0.0), st.floats(0.1, 60)),
        has_sinks=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 1000),
    )
    def test_when_a_batch_is_attended_to_then_it_equals_the_reference(
        self,
        lengths: list[tuple[int, int]],
        block_size: int,
        group: int,
        num_kv_heads: int,
        window: int,
        soft_cap: float,
        has_sinks: bool,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        case = Case(
            lengths=tuple(lengths),
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks_of(group * num_kv_heads) if has_sinks else None,
            dtype=dtype,
        )
        check(case, seed)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
class TestGivenANaNFilledCache:
    @pytest.mark.parametrize("block_size", [3, 16, 20])
    @pytest.mark.parametrize(("head_size", "rotary_size"), [(8, 8), (64, 64), (80, 32)])
    @pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
    def test_when_tokens_are_written_then_their_slots_alone_hold_what_the_reference_says(
        self, block_size: int, head_size: int, rotary_size: int, norm_offset: float | None, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        cache = nan_cache(6, block_size, 2, head_size, dtype)
        expected_cache = unpacked(nan_cache(6, block_size, 2, head_size, dtype))
        qkv = torch.randn(7, 10 * head_size + 5, generator=generator).to(dtype)[:, : 10 * head_size]
        before = qkv.clone()
        positions = torch.randint(30, (7,), generator=generator)
        slots = torch.randperm(6 * block_size, generator=generator)[:7]
        slots[2] = -1
        cos_sin = torch.randn(30, rotary_size, generator=generator)
        query_weight, key_weight = torch.rand(2, head_size, generator=generator).to(dtype)
        head_norm = None if norm_offset is None else HeadNorm(query_weight, key_weight, 1e-5, norm_offset)

        query = write_kv(qkv, positions, slots, cos_sin, cache, head_norm=head_norm)

        expected = write_kv_reference(qkv, positions, slots, cos_sin, expected_cache, head_norm=head_norm)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(query, expected, rtol=tolerance, atol=tolerance)
        written = unpacked(cache)
        for actual, wanted in ((written.keys, expected_cache.keys), (written.values, expected_cache.values)):
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert torch.equal(written.values.nan_to_num(), expected_cache.values.nan_to_num())
        assert torch.equal(qkv, before)

    def test_when_every_slot_is_negative_then_the_cache_does_not_change(self, dtype: torch.dtype) -> None:
        cache = nan_cache(3, 4, 2, 8, dtype)
        nothing = torch.full((5,), -1)

        write_kv(torch.ones(5, 80, dtype=dtype), torch.zeros(5, dtype=torch.int64), nothing, torch.ones(1, 8), cache)

        assert cache.keys.isnan().all()
        assert cache.values.isnan().all()


class TestGivenAPath:
    def test_when_a_cache_is_allocated_then_its_layout_is_that_of_the_path(self, path: str) -> None:
        cache = allocate_kv_cache(2, 16, 1, 8, dtype=torch.bfloat16, device=CPU)

        assert cache.layout is (Layout.PLAIN if path == "torch" else Layout.PACKED)


def attend_to_nothing(*, scale: float = 0.25, soft_cap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Two heads, one token, one key."""
    cache = allocate_kv_cache(1, 16, 1, 16, dtype=torch.float32, device=CPU)
    return paged_attention(
        torch.zeros(1, 2, 16),
        cache,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        scale=scale,
        max_query_len=1,
        max_context_len=1,
        soft_cap=soft_cap,
        sinks=sinks,
    )


class TestGivenArgumentsOutOfRange:
    @pytest.mark.parametrize("scale", [0.0, -0.125])
    def test_when_the_scale_is_not_above_zero_then_it_is_refused(self, scale: float) -> None:
        with pytest.raises(ValueError, match="scale must be above 0"):
            attend_to_nothing(scale=scale)

    @pytest.mark.parametrize("soft_cap", [-1.0, -1e-30, NAN, math.inf, -math.inf, 1e-21, 1e21])
    def test_when_float32_cannot_compute_the_soft_cap_then_it_is_refused(self, soft_cap: float) -> None:
        with pytest.raises(ValueError, match="soft_cap must be 0 or from"):
            attend_to_nothing(soft_cap=soft_cap)

    @pytest.mark.parametrize(
        ("sinks", "problem"),
        [
            (torch.zeros(1), r"sinks must be \[2\]"),
            (torch.zeros(1, 2), r"sinks must be \[2\]"),
            (torch.zeros(2, dtype=torch.bfloat16), "sinks must be float32"),
            (torch.zeros(4)[::2], "contiguous"),
            (torch.zeros(2, device="meta"), "sinks must be on cpu"),
        ],
    )
    def test_when_sinks_are_not_a_number_for_each_head_then_they_are_refused(self, sinks: Tensor, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            attend_to_nothing(sinks=sinks)


class TestGivenACacheInFp8:
    """Which torch's operators serve on the CPU."""

    @pytest.mark.parametrize("window", [0, 5])
    @pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.0, False), *EXTRAS.values()])
    def test_when_tokens_are_written_and_attended_to_then_both_are_the_reference_s(
        self, window: int, soft_cap: float, has_sinks: bool
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        cache, expected_cache = (allocate_kv_cache(4, 4, 2, 16, dtype=FP8, device=CPU) for _ in range(2))
        qkv = torch.randn(9, 8 * 16, generator=generator)
        positions, slots = torch.arange(9), torch.tensor([4, 5, 6, 7, 12, 13, 14, -1, 0])
        angles = torch.randn(9, 16, generator=generator)
        tables = torch.tensor([[1, 3]], dtype=torch.int32)
        sinks = torch.tensor(sinks_of(4)) if has_sinks else None
        starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)

        query = write_kv(qkv, positions, slots, angles, cache)
        out = paged_attention(
            query[:3],
            cache,
            tables,
            starts,
            lens,
            scale=0.25,
            max_query_len=3,
            max_context_len=7,
            sliding_window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )

        write_kv_reference(qkv, positions, slots, angles, expected_cache)
        expected = paged_attention_reference(
            query[:3].double(),
            cache,
            tables,
            starts,
            lens,
            scale=0.25,
            sliding_window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        assert torch.equal(cache.keys.view(torch.uint8), expected_cache.keys.view(torch.uint8))
        assert torch.equal(cache.values.view(torch.uint8), expected_cache.values.view(torch.uint8))
        torch.testing.assert_close(cache.key_scales, expected_cache.key_scales, rtol=0, atol=0)
        torch.testing.assert_close(cache.value_scales, expected_cache.value_scales, rtol=0, atol=0)
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
