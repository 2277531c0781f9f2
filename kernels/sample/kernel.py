# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Sampling in three Triton launches: the cut of each row's kept set, the best token of each block, the best of all.

The kept set is a prefix of the order (value descending, token id ascending), so a row's filters reduce to one cut: the
last kept value, and the last kept id among its equals. The cut is found without sorting, two bits of the value at a
time (a radix search), over counts for top-k and over integer masses for top-p. These sums of integers depend on neither
tiles nor batch composition. Rows without filters return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.philox.kernel import gumbel, random_words
from sluice.kernels.sample import SampleOptions

VOCAB_BLOCK = 1024
"""Tokens per sampling program; a multiple of 4."""

SCAN_BLOCK = 4096
"""Tokens that a program searching a cut reads at once."""

_LAST_ID = tl.constexpr(2147483647)
_NO_KEY = tl.constexpr(8388607)
"""The key of -inf: with an id below all others, everything above -inf is kept."""

_MASS_ONE = tl.constexpr(1073741824.0)


@triton.jit
def _load_logits(row_ptr, offsets, V):
    """Load logits of one row at `offsets`, float32; -inf past the end."""
    return tl.load(row_ptr + offsets, mask=offsets < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _scale(logits, temperature):
    """Compute z = logit / temperature, correctly rounded as on the CPU; NaN becomes -inf (its row fails elsewhere)."""
    logits = tl.where(logits == logits, logits, float("-inf"))
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)


@triton.jit
def _key(z):
    """Map float32 to uint32 of the same order; -0 and 0 are equal."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _is_kept(key, token_id, cut_key, cut_id):
    """Whether a token is in the prefix of the order that ends at (`cut_key`, `cut_id`)."""
    return (key > cut_key) | ((key == cut_key) & (token_id <= cut_id))


@triton.jit
def _mass(z, z_max):
    """Return a token's integer mass for top-p: floor(exp(z - z_max) * 2**30)."""
    return (tl.exp(z - z_max) * _MASS_ONE).to(tl.int64)


@triton.jit
def _find_cut_key(row_ptr, V, temperature, z_max, cut_key, cut_id, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest key at or above which kept tokens weigh `target` or more, and the weight strictly above it.

    A token weighs its mass, or 1. The key is 0 if all that is kept (up to `cut_key`, `cut_id`) weighs less. Each pass
    over the row fixes two bits.
    """
    zero = cut_key * 0
    found = zero
    above = target * 0
    for step in range(16):
        shift = zero + (30 - 2 * step)
        one = found | ((zero + 1) << shift)
        two = found | ((zero + 2) << shift)
        three = found | ((zero + 3) << shift)
        sum_one = tl.zeros([BLOCK], dtype=tl.int64)
        sum_two = tl.zeros([BLOCK], dtype=tl.int64)
        sum_three = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, V, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            z = _scale(_load_logits(row_ptr, offsets, V), temperature)
            key = _key(z)
            kept = _is_kept(key, offsets, cut_key, cut_id)
            weight = tl.where(kept, _mass(z, z_max), 0) if BY_MASS else kept.to(tl.int64)
            sum_one += tl.where(key >= one, weight, 0)
            sum_two += tl.where(key >= two, weight, 0)
            sum_three += tl.where(key >= three, weight, 0)
        weight_one = tl.sum(sum_one, axis=0)
        weight_two = tl.sum(sum_two, axis=0)
        weight_three = tl.sum(sum_three, axis=0)
        # The weight at or above a key falls as the key rises: take the highest digit that still reaches the target.
        if weight_three >= target:
            found = three
        elif weight_two >= target:
            found = two
            above = weight_three
        elif weight_one >= target:
            found = one
            above = weight_two
        else:
            above = weight_one
    return found, above


@triton.jit
def _find_cut_id(row_ptr, V, temperature, key_wanted, cut_key, cut_id, count, BLOCK: tl.constexpr):
    """Find the id of the `count`-th kept token with this key, in order of id (the last one, if there are fewer)."""
    found = cut_id * 0 - 1
    seen = count * 0
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        key = _key(_scale(_load_logits(row_ptr, offsets, V), temperature))
        equal = (key == key_wanted) & _is_kept(key, offsets, cut_key, cut_id)
        rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        found = tl.maximum(found, tl.max(tl.where(equal & (rank <= count), offsets, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return found


@triton.jit
def _kept_set_kernel(
    cut_keys_ptr,  # [S] int64
    cut_ids_ptr,  # [S] int32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32; so are top_p and min_p
    top_k_ptr,  # [S] int32
    top_p_ptr,
    min_p_ptr,
    V,
    logits_stride_row,
    BLOCK: tl.constexpr,
):
    """One program per row: the last kept value (as a key) and the last kept id among its equals."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_row
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut_key = (row * 0 + _NO_KEY).to(tl.uint32)
    cut_id = top_k * 0 - 1

    has_top_k = (top_k > 0) & (top_k < V)
    if (temperature > 0) & (has_top_k | (top_p < 1) | (min_p > 0)):
        maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            maxima = tl.maximum(maxima, _scale(_load_logits(row_ptr, offsets, V), temperature))
        z_max = tl.max(maxima, axis=0)

        if min_p > 0:
            cut_key = tl.maximum(cut_key, _key(z_max + tl.log(min_p)))
            cut_id = tl.where(cut_key > _NO_KEY, _LAST_ID, -1)
        if has_top_k:
            key, above = _find_cut_key(
                row_ptr, V, temperature, z_max, cut_key, cut_id, top_k.to(tl.int64), BY_MASS=False, BLOCK=BLOCK
            )
            if key > 0:
                count = top_k - above.to(tl.int32)
                cut_id = _find_cut_id(row_ptr, V, temperature, key, cut_key, cut_id, count, BLOCK)
                cut_key = key
        if top_p < 1:
            masses = tl.zeros([BLOCK], dtype=tl.int64)
            for start in range(0, V, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                z = _scale(_load_logits(row_ptr, offsets, V), temperature)
                kept = _is_kept(_key(z), offsets, cut_key, cut_id)
                masses += tl.where(kept, _mass(z, z_max), 0)
            # The smallest integer not below top_p * mass: both are exact in float64.
            wanted = top_p.to(tl.float64) * tl.sum(masses, axis=0).to(tl.float64)
            target = wanted.to(tl.int64)
            target = tl.maximum(target + (target.to(tl.float64) < wanted).to(tl.int64), 1)
            key, above = _find_cut_key(
                row_ptr, V, temperature, z_max, cut_key, cut_id, target, BY_MASS=True, BLOCK=BLOCK
            )
            if key > 0:
                bits = key.to(tl.int32, bitcast=True)
                z_cut = tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)
                mass = tl.maximum(_mass(z_cut, z_max), 1)
                count = tl.minimum((target - above + mass - 1) // mass, V).to(tl.int32)
                cut_id = _find_cut_id(row_ptr, V, temperature, key, cut_key, cut_id, count, BLOCK)
                cut_key = key

    tl.store(cut_keys_ptr + row, cut_key.to(tl.int64))
    tl.store(cut_ids_ptr + row, cut_id)


@triton.jit
def _draw_kernel(
    best_scores_ptr,  # [S, blocks] float32
    best_ids_ptr,  # [S, blocks] int32
    logits_ptr,  # [S, V]
    cut_keys_ptr,  # [S] int64
    cut_ids_ptr,  # [S] int32
    temperature_ptr,  # [S] float32
    seed_ptr,  # [S] int64
    position_ptr,  # [S] int32
    counter_2_ptr,  # [S] int64
    V,
    logits_stride_row,
    BLOCK: tl.constexpr,
):
    """One program per (row, block of tokens): the best score of the kept ones, and the lowest id that has it.

    A NaN or +inf gives score +inf and id -1, which no other block can beat. Nothing kept gives -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)  # [BLOCK / 4]
    lanes = tl.arange(0, 4)  # [4]
    token_ids = groups[:, None] * 4 + lanes[None, :]  # [BLOCK / 4, 4]

    logits = _load_logits(logits_ptr + row * logits_stride_row, token_ids, V)
    temperature = tl.load(temperature_ptr + row)
    is_bad = (logits != logits) | (logits == float("inf"))
    scores = _scale(logits, tl.where(temperature > 0, temperature, 1.0))
    if temperature > 0:
        cut_key = tl.load(cut_keys_ptr + row).to(tl.uint32)
        kept = _is_kept(_key(scores), token_ids, cut_key, tl.load(cut_ids_ptr + row))
        position = tl.load(position_ptr + row)
        counter_2 = tl.load(counter_2_ptr + row)
        x0, x1, x2, x3 = random_words(groups, tl.load(seed_ptr + row), position, counter_2)
        low = tl.where(lanes[None, :] == 0, x0[:, None], x1[:, None])
        high = tl.where(lanes[None, :] == 2, x2[:, None], x3[:, None])
        noise = gumbel(tl.where(lanes[None, :] < 2, low, high))
        scores = tl.where(kept, scores + noise, float("-inf"))

    best = tl.max(tl.max(scores, axis=1), axis=0)
    winners = tl.where(scores == best, token_ids, _LAST_ID)
    best_id = tl.min(tl.min(winners, axis=1), axis=0)
    has_bad = tl.max(tl.max(is_bad.to(tl.int32), axis=1), axis=0) > 0
    partial = row * tl.num_programs(1) + block
    tl.store(best_scores_ptr + partial, tl.where(has_bad, float("inf"), best))
    tl.store(best_ids_ptr + partial, tl.where(has_bad, -1, best_id))


@triton.jit
def _choose_kernel(
    out_ptr,  # [S] int64
    best_scores_ptr,  # [S, num_blocks] float32
    best_ids_ptr,  # [S, num_blocks] int32
    num_blocks,
    out_stride,
    BLOCK: tl.constexpr,
):
    """One program per row: the best of its blocks, the lowest id among equals, -1 if the row failed."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < num_blocks
    scores = tl.load(best_scores_ptr + row * num_blocks + offsets, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * num_blocks + offsets, mask=inside, other=_LAST_ID)
    best = tl.max(scores, axis=0)
    token_id = tl.min(tl.where(scores == best, ids, _LAST_ID), axis=0)
    tl.store(out_ptr + row * out_stride, tl.where(best > float("-inf"), token_id, -1).to(tl.int64))


def find_kept_sets(logits: Tensor, options: SampleOptions) -> tuple[Tensor, Tensor]:
    """Return the end of each row's kept set.

    Returns:
        The key of the last kept value, `[S]` int64 (values in order, as unsigned 32-bit numbers), and the last kept id
        among the tokens of that value, `[S]` int32.
    """
    num_sequences, vocab_size = logits.shape
    cut_keys = torch.empty(num_sequences, dtype=torch.int64, device=logits.device)
    cut_ids = torch.empty(num_sequences, dtype=torch.int32, device=logits.device)
    _kept_set_kernel[(num_sequences,)](
        cut_keys,
        cut_ids,
        logits,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        vocab_size,
        logits.stride(0),
        BLOCK=SCAN_BLOCK,
        num_warps=16,
    )
    return cut_keys, cut_ids


def sample_triton(logits: Tensor, options: SampleOptions, *, out: Tensor) -> None:
    """Launch the kernels; see `sluice.kernels.sample.sample`."""
    num_sequences, vocab_size = logits.shape
    if num_sequences == 0:
        return
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    cut_keys, cut_ids = find_kept_sets(logits, options)
    best_scores = torch.empty(num_sequences, num_blocks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_sequences, num_blocks, dtype=torch.int32, device=logits.device)
    _draw_kernel[(num_sequences, num_blocks)](
        best_scores,
        best_ids,
        logits,
        cut_keys,
        cut_ids,
        options.temperature,
        options.seed,
        options.position,
        options.counter_2,
        vocab_size,
        logits.stride(0),
        BLOCK=VOCAB_BLOCK,
        num_warps=4,
    )
    _choose_kernel[(num_sequences,)](
        out,
        best_scores,
        best_ids,
        num_blocks,
        out.stride(0),
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=4,
    )
