# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The plain search for a row's cut, over the whole row, for rows with numbers that `scale_plain` cannot divide.

A radix search, two bits of the value at a time, over counts for top-k and over integer masses for top-p.
"""

import triton
import triton.language as tl

from sluice.kernels.sample.row import (
    LAST_ID,
    NO_KEY,
    is_kept,
    key_of,
    load_logits,
    mass_of,
    scale,
    target_of,
    ties_to,
    value_of,
)


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
            z = scale(load_logits(row_ptr, offsets, V), temperature)
            key = key_of(z)
            kept = is_kept(key, offsets, cut_key, cut_id)
            weight = (tl.where(kept, mass_of(z, z_max), 0) if BY_MASS else kept).to(tl.int64)
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
        key = key_of(scale(load_logits(row_ptr, offsets, V), temperature))
        equal = (key == key_wanted) & is_kept(key, offsets, cut_key, cut_id)
        rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        found = tl.maximum(found, tl.max(tl.where(equal & (rank <= count), offsets, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return found


@triton.jit
def _total_mass(row_ptr, V, temperature, z_max, cut_key, cut_id, BLOCK: tl.constexpr):
    """Return the mass of the kept tokens."""
    masses = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z = scale(load_logits(row_ptr, offsets, V), temperature)
        kept = is_kept(key_of(z), offsets, cut_key, cut_id)
        masses += tl.where(kept, mass_of(z, z_max), 0).to(tl.int64)
    return tl.sum(masses, axis=0)


@triton.jit
def cut_of_row(row_ptr, V, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Return the last kept value (as a key, int64) and the last kept id among its equals."""
    cut_key = (temperature * 0).to(tl.uint32) + NO_KEY
    cut_id = top_k * 0 - 1
    maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        maxima = tl.maximum(maxima, scale(load_logits(row_ptr, start + tl.arange(0, BLOCK), V), temperature))
    z_max = tl.max(maxima, axis=0)

    if min_p > 0:
        cut_key = tl.maximum(cut_key, key_of(z_max + tl.log(min_p)))
        cut_id = tl.where(cut_key > NO_KEY, LAST_ID, -1)
    if top_k > 0:
        target = top_k.to(tl.int64)
        key, above = _find_cut_key(row_ptr, V, temperature, z_max, cut_key, cut_id, target, False, BLOCK)
        if key > 0:
            count = top_k - above.to(tl.int32)
            cut_id = _find_cut_id(row_ptr, V, temperature, key, cut_key, cut_id, count, BLOCK)
            cut_key = key
    if top_p < 1:
        target = target_of(top_p, _total_mass(row_ptr, V, temperature, z_max, cut_key, cut_id, BLOCK))
        key, above = _find_cut_key(row_ptr, V, temperature, z_max, cut_key, cut_id, target, True, BLOCK)
        if key > 0:
            count = ties_to(target, above, mass_of(value_of(key), z_max), V)
            cut_id = _find_cut_id(row_ptr, V, temperature, key, cut_key, cut_id, count, BLOCK)
            cut_key = key
    return cut_key.to(tl.int64), cut_id
