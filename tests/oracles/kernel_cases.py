"""Random inputs for the kernels, float64 references, and rounding bounds.

Shared by the kernels' tests (small, interpreted) and `benchmarks gpu` (on a GPU). Every byte that a kernel must not
read is NaN, or an id far outside.

A bound counts roundings, from the *same rounded inputs*: two in the output's dtype, plus 8 * sqrt(n) float32 roundings
of a sum of n terms, relative to the sum of their magnitudes (not to the sum, which may cancel).
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.linear.grouped import GROUP
from sluice.kernels.linear.int8 import dequantized
from sluice.kernels.linear.reference import linear_reference
from sluice.kernels.linear.words import BIASES, WordWeight
from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.layout import KVCache, allocate_plain
from sluice.kernels.paged_attention.narrow import FP8, from_8_bits, to_8_bits
from sluice.kernels.paged_attention.reference import paged_attention_reference
from sluice.kernels.penalties import Penalties
from sluice.kernels.rms_norm.reference import rms_norm_reference
from sluice.kernels.sample import SampleOptions
from sluice.kernels.sample.reference import kept_set_reference
from sluice.kernels.soft_cap.reference import soft_cap_reference
from sluice.kernels.write_kv import HeadNorm
from sluice.kernels.write_kv.reference import write_kv_reference

FLOAT32_UNIT = 2.0**-24
UNITS = {torch.float32: FLOAT32_UNIT, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a dtype."""

NO_BLOCK = 2**30
"""In a block table: an entry that must not be read."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Accuracy of a result."""

    worst: float
    """The largest error, or their RMS, as a fraction of what rounding allows. Over 1, or NaN, is wrong."""

    rms: float
    """RMS of the error over RMS of the reference: shows a bias hidden in single errors."""

    @property
    def holds(self) -> bool:
        """Whether every element is within its bound."""
        return self.worst <= 1.0

    def and_also(self, other: "Agreement") -> "Agreement":
        """Return the worse of both."""
        return Agreement(_worse(self.worst, other.worst), _worse(self.rms, other.rms))


EXACT = Agreement(0.0, 0.0)


def _worse(a: float, b: float) -> float:
    return a if a != a or a > b else b


def agreement(actual: Tensor, expected: Tensor, slack: Tensor | float) -> Agreement:
    """Compare with a float64 `expected`; `slack` is what float32 arithmetic inside may add to two output roundings."""
    if actual.numel() == 0:
        return EXACT
    smallest = torch.finfo(actual.dtype).smallest_normal * 2.0**-8
    error = (actual.double() - expected).abs()
    bound = 2 * UNITS[actual.dtype] * expected.abs() + slack + smallest
    rms = error.square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    # Each error may be as large as its bound, but not all of them.
    of_rms_bound = rms / (2 * UNITS[actual.dtype] + 64 * FLOAT32_UNIT)
    return Agreement(_worse(float((error / bound).max()), float(of_rms_bound)), float(rms))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals NaN, and -0 is not 0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_tensor(*shape: int, dtype: torch.dtype, generator: torch.Generator, spread: float = 1.0) -> Tensor:
    """Return normal numbers, rounded to `dtype`, on the generator's device."""
    return (torch.randn(shape, generator=generator, device=generator.device) * spread).to(dtype)


def generator_on(device: str, seed: int = 0) -> torch.Generator:
    """Return a generator of random tensors on `device`."""
    return torch.Generator(device=device).manual_seed(seed)


# Paged attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One batch: sequence s computes the last `query_lens[s]` of its `context_lens[s]` tokens."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: Sequence[float] | None = None
    num_padding: int = 0
    """Rows of queries after those of the last sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The tensors of a case."""

    query: Tensor
    kv_cache: KVCache
    block_tables: Tensor
    query_start_locs: Tensor
    context_lens: Tensor
    scale: float
    max_query_len: int
    max_context_len: int
    sliding_window: int
    soft_cap: float = 0.0
    sinks: Tensor | None = None

    def call(self, out: Tensor | None = None) -> AttentionCall:
        """The call of a kernel that writes to `out`, or to memory that was NaN."""
        if out is None:
            out = torch.full(self.query.shape, float("nan"), dtype=self.query.dtype, device=self.query.device)
        return AttentionCall(**{field.name: getattr(self, field.name) for field in fields(self)}, out=out)


def make_attention(
    case: AttentionCase, kv_cache: KVCache, dtype: torch.dtype, generator: torch.Generator
) -> AttentionInputs:
    """Fill `kv_cache` with NaN, then the slots that `case` may see, in blocks assigned at random."""
    device = generator.device
    contexts = torch.tensor(case.context_lens, dtype=torch.int64)
    num_blocks = -(-contexts // case.block_size)
    table = torch.full((len(contexts), int(num_blocks.max()) + 1), NO_BLOCK, dtype=torch.int32)
    dealt = torch.randperm(kv_cache.num_blocks, generator=torch.Generator().manual_seed(1))
    fill_with_nan(kv_cache)
    ends = num_blocks.cumsum(0)
    for s, (query_len, context_len) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        first_seen = max(0, context_len - query_len - case.sliding_window + 1) if case.sliding_window else 0
        blocks = dealt[int(ends[s] - num_blocks[s]) : int(ends[s])]
        table[s, first_seen // case.block_size : len(blocks)] = blocks[first_seen // case.block_size :]
        slots = torch.arange(first_seen, context_len)
        at = (blocks[slots // case.block_size].to(device), (slots % case.block_size).to(device))
        shape = (len(slots), case.num_kv_heads, case.head_size)
        _put(kv_cache.keys, kv_cache.key_scales, at, random_tensor(*shape, dtype=dtype, generator=generator))
        _put(kv_cache.values, kv_cache.value_scales, at, random_tensor(*shape, dtype=dtype, generator=generator))
    starts = torch.tensor([0, *case.query_lens]).cumsum(0)
    num_tokens = int(starts[-1])
    # A slice of a wider row, like the query of a fused product.
    wide = random_tensor(
        num_tokens + case.num_padding, case.num_heads + 2, case.head_size, dtype=dtype, generator=generator
    )
    wide[num_tokens:] = float("nan")
    wide[:, case.num_heads :] = float("nan")
    return AttentionInputs(
        query=wide[:, : case.num_heads],
        kv_cache=kv_cache,
        block_tables=table.to(device),
        query_start_locs=starts.to(device, torch.int32),
        context_lens=contexts.to(device, torch.int32),
        scale=case.head_size**-0.5,
        max_query_len=max(case.query_lens),
        max_context_len=max(case.context_lens),
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=None if case.sinks is None else torch.tensor(case.sinks, dtype=torch.float32, device=device),
    )


def sinks_of(num_heads: int) -> list[float]:
    """Return a logit for each head, of either sign: some take much of the weight, some almost none."""
    return [4 * math.sin(5 * head) for head in range(num_heads)]


def fill_with_nan(kv_cache: KVCache) -> None:
    """Set every element, or in fp8 every element and its scale, to NaN."""
    for elements, scales in ((kv_cache.keys, kv_cache.key_scales), (kv_cache.values, kv_cache.value_scales)):
        if scales is None:
            elements.fill_(float("nan"))
        else:
            elements.view(torch.uint8).fill_(0x7F)
            scales.fill_(float("nan"))


def _put(elements: Tensor, scales: Tensor | None, at: tuple[Tensor, Tensor], heads: Tensor) -> None:
    """Write heads `[K, G, D]` to slots, in the dtype of the cache."""
    if scales is None:
        elements[at] = heads
        return
    # Of very different sizes, which scales are for.
    sizes = torch.logspace(-1, 0.5, heads.shape[1], device=heads.device)[:, None] if heads.shape[1] > 1 else 1.0
    narrow, scales[at] = to_8_bits(heads * sizes, FP8)
    elements.view(torch.uint8)[at] = narrow.view(torch.uint8)


def widened(kv_cache: KVCache) -> KVCache:
    """Return the values of `kv_cache`, in float64."""
    keys, values = kv_cache.keys.double(), kv_cache.values.double()
    if kv_cache.key_scales is not None and kv_cache.value_scales is not None:
        keys = from_8_bits(kv_cache.keys, kv_cache.key_scales, torch.float64)
        values = from_8_bits(kv_cache.values, kv_cache.value_scales, torch.float64)
    return replace(kv_cache, keys=keys, values=values, key_scales=None, value_scales=None)


def blocks_needed(case: AttentionCase) -> int:
    """Return the number of blocks that a cache for `case` needs."""
    return sum(-(-length // case.block_size) for length in case.context_lens)


def attention_agreement(inputs: AttentionInputs, out: Tensor) -> Agreement:
    """Compare `out` with dense attention in float64."""
    cache = widened(inputs.kv_cache)
    query = torch.nan_to_num(inputs.query.double())
    expected = _attended(inputs, query, cache)
    magnitude = _attended(inputs, query, replace(cache, values=cache.values.abs()))  # sum p * |v|
    largest_score = float(inputs.scale * query.norm(dim=-1).max() * torch.nan_to_num(cache.keys).norm(dim=-1).max())
    units = 8 * inputs.max_context_len**0.5 + 16 * query.shape[-1] ** 0.5 * largest_score
    # The tanh has 10, and its factor one more.
    units += 2 * 11 * min(inputs.soft_cap, largest_score)
    if inputs.sinks is not None:
        # A sink that is further from all scores has all of the weight, or none.
        units += 4 * (largest_score + 100)
    weight_error = 0.0 if out.dtype == torch.float32 else UNITS[out.dtype]
    return agreement(out, expected, (units * FLOAT32_UNIT + weight_error) * magnitude)


def _attended(inputs: AttentionInputs, query: Tensor, kv_cache: KVCache) -> Tensor:
    return paged_attention_reference(
        query,
        kv_cache,
        inputs.block_tables,
        inputs.query_start_locs,
        inputs.context_lens,
        scale=inputs.scale,
        sliding_window=inputs.sliding_window,
        soft_cap=inputs.soft_cap,
        sinks=inputs.sinks,
    )


# Norm, rotation, gate


def layer_norm_agreement(out: Tensor, total: Tensor, weight: Tensor, eps: float) -> Agreement:
    """Compare `out` with the layer norm of `total` in float64."""
    expected = rms_norm_reference(total.double(), weight.double(), eps=eps, is_centered=True)
    # What the mean loses: its own rounding, on the scale of the row's deviation.
    wide = total.double()
    lost = (
        FLOAT32_UNIT * 8 * wide.abs().amax(-1, keepdim=True) / (wide.var(-1, correction=0, keepdim=True) + eps).sqrt()
    )
    return agreement(out, expected, lost * weight.double().abs())


def norm_agreement(out: Tensor, total: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Agreement:
    """Compare `out` with the norm of `total` in float64."""
    expected = rms_norm_reference(total.double(), weight.double(), eps=eps, weight_offset=weight_offset)
    return agreement(out, expected, (8 * total.shape[-1] ** 0.5 + 8) * FLOAT32_UNIT * expected.abs())


def added_norm_agreement(
    total: Tensor, x: Tensor, residual: Tensor, added_weight: Tensor, eps: float, weight_offset: float
) -> Agreement:
    """Compare `total` with `residual` plus the norm of `x` in float64; the norm is rounded before it is added."""
    normed = rms_norm_reference(x.double(), added_weight.double(), eps=eps, weight_offset=weight_offset)
    unit = UNITS[total.dtype] + (8 * x.shape[-1] ** 0.5 + 8) * FLOAT32_UNIT
    return agreement(total, residual.double() + normed, unit * normed.abs())


def soft_cap_agreement(out: Tensor, x: Tensor, cap: float) -> Agreement:
    """Compare `out` with the cap of `x` in float64."""
    expected = soft_cap_reference(x.double(), cap=cap)
    # Ten units of the tanh, one of its factor, four of its argument: x * tanh'(x) is at most tanh(x).
    return agreement(out, expected, 15 * FLOAT32_UNIT * expected.abs())


def gate_agreement(out: Tensor, gate_up: Tensor, activation: Activation) -> Agreement:
    """Compare `out` with the gate in float64."""
    expected = gated_activation_reference(gate_up.double(), activation=activation)
    gate, up = gate_up.double().chunk(2, dim=-1)
    # The argument of exp, up to 88 before the gate is 0, has its own rounding; the reference's 1 + tanh cancels.
    return agreement(out, expected, 512 * FLOAT32_UNIT * expected.abs() + 1e-15 * (gate * up).abs())


def make_cos_sin(num_positions: int, rotary_size: int, device: torch.device) -> Tensor:
    """Return a table of plain angles, `[P, R]` float32."""
    rates = 10000.0 ** -(torch.arange(0, rotary_size, 2, dtype=torch.float64) / max(rotary_size, 1))
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def _pair_size(rotated: Tensor, rotary_size: int) -> Tensor:
    """Return the length of each rotated pair, at both of its elements; for the others, the element's own."""
    first, second = rotated[..., :rotary_size].chunk(2, dim=-1)
    length = torch.hypot(first, second)
    return torch.cat([length, length, rotated[..., rotary_size:].abs()], dim=-1)


# Products


def product_agreement(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Agreement:
    """Compare `out` with the product of `x` and the weight that int8 and scales represent, in float64."""
    exact = dequantized(weight, scales, torch.float64)
    expected = linear_reference(x.double(), exact, None if bias is None else bias.double())
    magnitude = linear_reference(x.double().abs(), exact.abs(), None if bias is None else bias.double().abs())
    return agreement(out, expected, 8 * x.shape[-1] ** 0.5 * FLOAT32_UNIT * magnitude)


def packed_agreement(out: Tensor, x: Tensor, weight: WordWeight, bias: Tensor | None, *, is_rounded: bool) -> Agreement:
    """Compare `out` with the product of `x` and the numbers of a weight in words, in float64.

    What may be rounded: sums of a group beside the biases of its codes, all sums, the result; if `is_rounded`, the
    numbers of the weight to the dtype of `x`, too.
    """
    if not out.numel():
        return EXACT
    exact = weight.dequantized(torch.float64)
    expected = linear_reference(x.double(), exact, None if bias is None else bias.double())
    scales, minimums = weight.scales.double().abs().unbind(2)
    sizes = (scales * (max(BIASES[weight.num_bits]) + 2**weight.num_bits) + minimums).repeat_interleave(weight.span, 1)
    magnitude = x.double().abs() @ exact.abs().T
    bound = 2 * UNITS[out.dtype] * expected.abs() + 8 * FLOAT32_UNIT * x.shape[1] ** 0.5 * magnitude
    bound += FLOAT32_UNIT * (GROUP * x.double().square() @ sizes.square().T).sqrt()
    if is_rounded:
        bound += UNITS[out.dtype] * magnitude
    error = (out.double() - expected).abs()
    rms = error.square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    return Agreement(float((error / bound).nan_to_num(torch.inf).max()), float(rms))


# Write of keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteInputs:
    """The tensors of one write."""

    qkv: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cos_sin: Tensor
    head_norm: HeadNorm | None
    num_heads: int


def make_write(
    kv_cache: KVCache,
    *,
    num_tokens: int,
    num_heads: int,
    rotary_size: int,
    norm_offset: float | None,
    generator: torch.Generator,
) -> WriteInputs:
    """Fill `kv_cache` with NaN; every third token has no slot, the others one each, at random.

    Heads are normalised unless `norm_offset` is None.
    """
    device, dtype = generator.device, kv_cache.keys.dtype
    head_size, num_kv_heads = kv_cache.head_size, kv_cache.num_kv_heads
    fill_with_nan(kv_cache)
    width = (num_heads + 2 * num_kv_heads) * head_size
    qkv = random_tensor(num_tokens, width + 3, dtype=dtype, generator=generator)[:, :width]
    slots = torch.randperm(kv_cache.num_blocks * kv_cache.block_size, generator=torch.Generator().manual_seed(2))
    slots = slots[:num_tokens].clone()
    # The first and the last slot of all are where a wrong sign or an off-by-one shows.
    slots[:2] = torch.tensor([0, kv_cache.num_blocks * kv_cache.block_size - 1])[: len(slots[:2])]
    slots[2::3] = -1
    head_norm = None
    if norm_offset is not None:
        query_weight, key_weight = random_tensor(2, head_size, dtype=dtype, generator=generator).unbind()
        head_norm = HeadNorm(query_weight, key_weight, 1e-6, norm_offset)
    positions = torch.randint(0, 512, (num_tokens,), generator=torch.Generator().manual_seed(3))
    return WriteInputs(
        qkv=qkv,
        positions=positions.to(device),
        slot_mapping=_distinct(slots).to(device),
        cos_sin=make_cos_sin(512, rotary_size, device),
        head_norm=head_norm,
        num_heads=num_heads,
    )


def _distinct(slots: Tensor) -> Tensor:
    """Return `slots` with -1 for each that came before."""
    seen: set[int] = set()
    return torch.tensor([-1 if s in seen or seen.add(s) else s for s in slots.tolist()], dtype=torch.int64)


def write_agreement(inputs: WriteInputs, kv_cache: KVCache, out: Tensor) -> Agreement:
    """Compare queries, keys and values with the steps one after another; other slots must still be NaN."""
    exact = _exact_write(inputs, out.dtype)
    expected_cache = replace(
        kv_cache,
        keys=torch.full_like(kv_cache.keys, float("nan"), dtype=exact.qkv.dtype),
        values=torch.full_like(kv_cache.values, float("nan"), dtype=exact.qkv.dtype),
    )
    query = write_kv_reference(
        exact.qkv, exact.positions, exact.slot_mapping, exact.cos_sin, expected_cache, head_norm=exact.head_norm
    )
    unit = _write_unit(inputs, kv_cache.head_size, out.dtype)
    rotary_size = inputs.cos_sin.shape[1]
    result = agreement(out, query.double(), unit * _pair_size(query.double(), rotary_size))
    written = ~expected_cache.keys.isnan()
    keys, expected_keys = torch.nan_to_num(kv_cache.keys), torch.nan_to_num(expected_cache.keys.double())
    result = result.and_also(agreement(keys, expected_keys, unit * _pair_size(expected_keys, rotary_size)))
    untouched = torch.equal(~kv_cache.keys.isnan(), written)
    if not (untouched and same_bits(kv_cache.values, expected_cache.values.to(kv_cache.values.dtype))):
        return Agreement(float("inf"), result.rms)
    return result


def _exact_write(inputs: WriteInputs, dtype: torch.dtype) -> WriteInputs:
    """Return what the reference takes: float64 for float32, else the same, since the norm is rounded to the dtype."""
    if dtype != torch.float32:
        return inputs
    norm = inputs.head_norm
    if norm is not None:
        norm = replace(norm, query_weight=norm.query_weight.double(), key_weight=norm.key_weight.double())
    return replace(inputs, qkv=inputs.qkv.double(), head_norm=norm)


def _write_unit(inputs: WriteInputs, head_size: int, dtype: torch.dtype) -> float:
    """Return the error that a pair may have before its last rounding, relative to its length."""
    if inputs.head_norm is None:
        return UNITS[dtype]
    # In 16 bits the norm may round to a neighbour: one more rounding of each element of the pair. In float32 its sum of
    # squares counts, as in `norm_agreement`, and a rounding of each product of the rotation.
    return (8 * head_size**0.5 + 9) * FLOAT32_UNIT if dtype == torch.float32 else 4 * UNITS[dtype]


def fp8_copy(kv_cache: KVCache) -> KVCache:
    """Return a cache in fp8, full of NaN, parallel to `kv_cache`."""
    sizes = (kv_cache.num_blocks, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_size)
    narrow = allocate_plain(*sizes, dtype=FP8, device=kv_cache.keys.device)
    fill_with_nan(narrow)
    return narrow


def fp8_write_agreement(inputs: WriteInputs, kv_cache: KVCache, out: Tensor) -> Agreement:
    """Compare a write in fp8 with a rounded write in float64; queries are checked as before.

    Values, and keys that are stored unchanged, have the reference's bytes; the others represent the nearest value, or
    its neighbour.
    """
    rounded = fp8_copy(kv_cache)
    tokens = (inputs.qkv, inputs.positions, inputs.slot_mapping, inputs.cos_sin)
    query = write_kv_reference(*tokens, rounded, head_norm=inputs.head_norm)
    rotary_size = inputs.cos_sin.shape[1]
    unit = _write_unit(inputs, kv_cache.head_size, out.dtype)
    result = agreement(out, query.double(), unit * _pair_size(query.double(), rotary_size))
    is_exact = _same_bytes(kv_cache.values, kv_cache.value_scales, rounded.values, rounded.value_scales)
    if rotary_size == 0 and inputs.head_norm is None:
        is_exact &= _same_bytes(kv_cache.keys, kv_cache.key_scales, rounded.keys, rounded.key_scales)
    keys, expected_keys = widened(kv_cache).keys, widened(rounded).keys
    is_exact &= torch.equal(keys.isnan(), expected_keys.isnan())
    keys, expected_keys = torch.nan_to_num(keys), torch.nan_to_num(expected_keys)
    largest = expected_keys.abs().amax(dim=-1, keepdim=True)
    # A step of e4m3 is an eighth of a number's power of two, or 2**-9 of the scale.
    slack = expected_keys.abs() / 8 + largest / 448 * 2**-9 + 4 * unit * largest
    is_near = bool(((keys - expected_keys).abs() <= slack).all())
    # Nearly all of them are identical: a bias of one step would show here.
    is_near &= float((keys - expected_keys).abs().sum()) <= 0.01 * float(expected_keys.abs().sum())
    return result if is_exact and is_near else Agreement(float("inf"), result.rms)


def _same_bytes(elements: Tensor, scales: Tensor | None, other: Tensor, other_scales: Tensor | None) -> bool:
    assert scales is not None
    assert other_scales is not None
    written = ~other_scales.isnan()
    same_places = torch.equal(~scales.isnan(), written)
    bytes_of, bytes_wanted = elements.view(torch.uint8), other.view(torch.uint8)
    return same_places and torch.equal(bytes_of, bytes_wanted) and torch.equal(scales[written], other_scales[written])


# Sampling


def make_options(rows: Sequence[dict[str, float]], device: torch.device | str, position: int = 0) -> SampleOptions:
    """Build options of rows from names and values; omitted options are off."""

    def column(name: str, off: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row.get(name, off) for row in rows], dtype=dtype, device=device)

    return SampleOptions(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.tensor([int(row.get("seed", i)) for i, row in enumerate(rows)], dtype=torch.int64, device=device),
        position=torch.full((len(rows),), position, dtype=torch.int32, device=device),
        counter_2=torch.zeros(len(rows), dtype=torch.int32, device=device),
        has_filters=any(row.keys() & {"top_k", "top_p", "min_p"} for row in rows),
    )


def make_penalties(num_rows: int, vocab_size: int, per_row: int, generator: torch.Generator) -> Penalties:
    """Return penalties of `num_rows` rows, each of which has seen `per_row` tokens besides two extras, or one twice."""
    device = generator.device
    shape = (num_rows, per_row)
    order = torch.rand(num_rows + 1, vocab_size, generator=generator, device=device).argsort(dim=1)
    seen = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
    counts = torch.randint(1, 8, shape, generator=generator, device=device, dtype=torch.int32)
    seen[1:].scatter_(1, order[1:, :per_row], counts)
    extras = torch.randint(-1, vocab_size, (num_rows, 2), generator=generator, device=device, dtype=torch.int32)
    extras[::2, 1] = extras[::2, 0]

    def spread(low: float, high: float) -> Tensor:
        return torch.rand(num_rows, generator=generator, device=device) * (high - low) + low

    return Penalties(
        seen=seen,
        # The first place is another sequence's.
        places=torch.arange(num_rows, 0, -1, dtype=torch.int32, device=device),
        extras=extras,
        repetition=spread(0.5, 2),
        frequency=spread(-2, 2),
        presence=spread(-2, 2),
    )


def penalties_agreement(out: Tensor, logits: Tensor, penalties: Penalties) -> Agreement:
    """Compare with the same in float64; a logit of a token that was not seen must keep its bits."""
    seen = penalties.seen[penalties.places.long()]
    for row, extras in enumerate(penalties.extras.tolist()):
        for token in extras:
            if token >= 0:
                seen[row, token] += 2
    counts = (seen >> 1).double()
    repetition, frequency, presence = (
        strength.double()[:, None] for strength in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    values, named = logits.double(), seen != 0
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    expected = torch.where(named, scaled - (frequency * counts + presence * (counts > 0)), values)
    magnitude = scaled.abs() + frequency.abs() * counts + presence.abs()
    if not same_bits(out[~named], logits[~named]):
        return Agreement(float("inf"), 0.0)
    return agreement(out, expected, 8 * FLOAT32_UNIT * magnitude)


def kept_set_differs(logits: Tensor, options: SampleOptions, row: int, kept: Tensor) -> str | None:
    """Return why `kept` (`[V]` bool) is not the row's kept set, or None.

    A device's exp may differ from the reference's in the last place: if the mass of the tokens kept by both is `top_p`
    within
    1e-5, the next token may be kept or not.
    """
    z = logits[row].float() / options.temperature[row]
    top_k, top_p, min_p = int(options.top_k[row]), float(options.top_p[row]), float(options.min_p[row])
    before = kept_set_reference(z, top_k=top_k, min_p=min_p)
    expected = torch.zeros_like(kept)
    expected[kept_set_reference(z, top_k=top_k, top_p=top_p, min_p=min_p)] = True
    num_differing = int((expected != kept).sum())
    mass = torch.exp((z - z.max()).double())
    reached = float(mass[expected & kept].sum() / mass[before].sum())
    if num_differing == 0 or (num_differing == 1 and top_p < 1 and abs(reached - top_p) < 1e-5):
        return None
    return f"row {row}: {num_differing} tokens differ; what both keep has {reached:.7f} of the mass"
