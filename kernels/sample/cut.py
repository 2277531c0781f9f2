# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The last launch of the search for a cut: a search among a row's candidates.

A pass over the candidates takes the weights at or above three values that divide an interval of keys, and keeps the
quarter in which the cut lies, shrunk to the candidates that the interval has.
"""

import triton
import triton.language as tl

from sluice.kernels.sample.row import (
    LAST_ID,
    NO_KEY,
    is_plain,
    key_of,
    least_kept,
    load_filters,
    load_row_max,
    mass_of,
    target_of,
    ties_to,
    value_of,
)
from sluice.kernels.sample.whole_row import cut_of_row

NUM_LINES = 512
"""Lines of four candidates that are read at once: LINES of each tile."""


@triton.jit
def _load_candidates(values_ptr, counts, start, TILE: tl.constexpr, LINES: tl.constexpr):
    """Load some candidates of each tile, from slot `start` on: `[lines, 4]`; -inf where there are none."""
    lines = tl.arange(0, counts.shape[0])
    first_slots = (start + (lines % LINES) * 4)[:, None]
    slots = first_slots + tl.arange(0, 4)[None, :]
    offsets = (lines // LINES)[:, None] * TILE + slots
    # Lines are read as a whole, with what is in unused slots.
    values = tl.load(values_ptr + offsets, mask=first_slots < counts[:, None], other=float("-inf"))
    return tl.where(slots < counts[:, None], values, float("-inf"))


@triton.jit
def _mass_above(values_ptr, counts, max_count, z_max, z, TILE: tl.constexpr, LINES: tl.constexpr):
    """Return the mass of the candidates above `z`."""
    total = tl.zeros([counts.shape[0]], dtype=tl.int64)
    for start in range(0, max_count, 4 * LINES):
        values = _load_candidates(values_ptr, counts, start, TILE, LINES)
        total += tl.sum(tl.where(values > z, mass_of(values, z_max), 0).to(tl.int64), axis=1)
    return tl.sum(total, axis=0)


@triton.jit
def _search(
    values_ptr,
    counts,
    max_count,
    z_max,
    low,
    high,
    guess,
    above,
    target,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    LINES: tl.constexpr,
):
    """Find the largest key at or above which candidates weigh `target`, and the weight above it.

    A token weighs its mass, or 1. The candidates at or above `low` weigh enough, those above `high` too little, namely
    `above`. The key is probably below `guess`, so values below it are tried first.
    """
    while low < high:
        width = tl.where(low < guess, tl.minimum(guess, high), high) - low
        one = low + ((width + 3) >> 2)
        two = low + ((width + 1) >> 1)
        three = low + ((3 * width + 3) >> 2)
        sum_one = tl.zeros([counts.shape[0]], dtype=tl.int64)
        sum_two, sum_three = sum_one, sum_one
        least = tl.full([counts.shape[0]], float("inf"), dtype=tl.float32)
        greatest = tl.full([counts.shape[0]], float("-inf"), dtype=tl.float32)
        for start in range(0, max_count, 4 * LINES):
            values = _load_candidates(values_ptr, counts, start, TILE, LINES)
            weight = mass_of(values, z_max) if BY_MASS else tl.full(values.shape, 1, dtype=tl.uint32)
            sum_one += tl.sum(tl.where(values >= value_of(one), weight, 0).to(tl.int64), axis=1)
            sum_two += tl.sum(tl.where(values >= value_of(two), weight, 0).to(tl.int64), axis=1)
            sum_three += tl.sum(tl.where(values >= value_of(three), weight, 0).to(tl.int64), axis=1)
            least = tl.minimum(least, tl.min(tl.where(values >= value_of(low), values, float("inf")), axis=1))
            greatest = tl.maximum(greatest, tl.max(tl.where(values <= value_of(high), values, float("-inf")), axis=1))
        least_key = key_of(tl.min(least, axis=0)).to(tl.int64)
        greatest_key = key_of(tl.max(greatest, axis=0)).to(tl.int64)
        weight_one = tl.sum(sum_one, axis=0)
        weight_two = tl.sum(sum_two, axis=0)
        weight_three = tl.sum(sum_three, axis=0)
        # The weight at or above a key falls as the key rises.
        if weight_three >= target:
            low = three
        elif weight_two >= target:
            low, high, above = two, three - 1, weight_three
        elif weight_one >= target:
            low, high, above = one, two - 1, weight_two
        else:
            high, above = one - 1, weight_one
        low, high = tl.maximum(low, least_key), tl.minimum(high, greatest_key)
    return low, above


@triton.jit
def _id_of_tie(
    values_ptr, offsets_ptr, counts_ptr, counts, max_count, key, number, TILE: tl.constexpr, LINES: tl.constexpr
):
    """Return the id of the `number`-th candidate with this key, in order of id (the last one, if there are fewer)."""
    value = value_of(key)
    found = tl.zeros([counts.shape[0]], dtype=tl.int32)
    for start in range(0, max_count, 4 * LINES):
        found += tl.sum((_load_candidates(values_ptr, counts, start, TILE, LINES) == value).to(tl.int32), axis=1)
    found = tl.sum(tl.reshape(found, [counts.shape[0] // LINES, LINES]), axis=1)  # [tiles]
    number = tl.minimum(number, tl.sum(found, axis=0))
    until = tl.cumsum(found, axis=0)
    tiles = tl.arange(0, counts.shape[0] // LINES)
    has_it = (until >= number) & (until - found < number)
    tile = tl.max(tl.where(has_it, tiles, 0), axis=0)
    number -= tl.max(tl.where(has_it, until - found, 0), axis=0)

    slots = tl.arange(0, TILE)
    inside = slots < tl.load(counts_ptr + tile)
    equal = tl.load(values_ptr + tile * TILE + slots, mask=inside, other=float("-inf")) == value
    slot = tl.max(tl.where(equal & (tl.cumsum(equal.to(tl.int32), axis=0) == number), slots, 0), axis=0)
    return tile * TILE + tl.load(offsets_ptr + tile * TILE + slot).to(tl.int32)


@triton.jit
def _cut_by_count(
    values_ptr, offsets_ptr, counts_ptr, counts, max_count, z_max, low, top_k, TILE: tl.constexpr, LINES: tl.constexpr
):
    """Return the key of the `top_k`-th candidate, its id, and the number of kept tokens with this key."""
    target = top_k.to(tl.int64)
    high = key_of(z_max).to(tl.int64)
    zero = target * 0
    key, above = _search(values_ptr, counts, max_count, z_max, low, high, high, zero, target, False, TILE, LINES)
    num_ties = top_k - above.to(tl.int32)
    token_id = _id_of_tie(values_ptr, offsets_ptr, counts_ptr, counts, max_count, key, num_ties, TILE, LINES)
    return key, token_id, num_ties


@triton.jit
def cut_kernel(
    cut_keys_ptr,  # [S] int64
    cut_ids_ptr,  # [S] int32
    counts_ptr,  # [S, num_tiles] int32
    values_ptr,  # [S, num_tiles, TILE] float32
    offsets_ptr,  # [S, num_tiles, TILE] int16
    lows_ptr,  # [S] float32
    highs_ptr,  # [S] float32
    targets_ptr,  # [S] int64
    tile_maxima_ptr,  # [S, num_tiles] float32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32; so are top_p and min_p
    top_k_ptr,  # [S] int32
    top_p_ptr,
    min_p_ptr,
    V,
    num_tiles,
    logits_stride_row,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LINES: tl.constexpr,
    MAX_TILES: tl.constexpr,
):
    """One program per row: the last kept value (as a key) and the last kept id among its equals."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, is_filtered = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V
    )
    cut_key = row * 0 + NO_KEY
    cut_id = top_k * 0 - 1
    row_max = temperature * 0 + float("-inf")
    if is_filtered:
        row_max = load_row_max(tile_maxima_ptr, row, num_tiles, MAX_TILES)
    if is_filtered & is_plain(row_max, temperature):
        z_max = tl.div_rn(row_max, temperature)
        if min_p > 0:
            cut_key = tl.maximum(cut_key, key_of(least_kept(z_max, min_p)).to(tl.int64))
            cut_id = tl.where(cut_key > NO_KEY, LAST_ID, -1)

        values_ptr += row * num_tiles * TILE
        offsets_ptr += row * num_tiles * TILE
        counts_ptr += row * num_tiles
        tiles = tl.arange(0, MAX_TILES * LINES) // LINES
        counts = tl.load(counts_ptr + tiles, mask=tiles < num_tiles, other=0)
        counts = tl.where((top_k > 0) | (top_p < 1), counts, 0)
        max_count = tl.max(counts, axis=0)
        # The interval of keys to search by mass, the mass above it, and the mass to reach; 0: nothing to search.
        low, high = key_of(tl.load(lows_ptr + row)).to(tl.int64), key_of(z_max).to(tl.int64)
        guess = key_of(tl.load(highs_ptr + row)).to(tl.int64)
        above, target = row * 0, tl.load(targets_ptr + row)
        if top_k > 0:
            z_cut = z_max * 0 + float("-inf")
            num_ties = top_k * 0
            if tl.sum(counts, axis=0) >= top_k * LINES:
                cut_key, cut_id, num_ties = _cut_by_count(
                    values_ptr, offsets_ptr, counts_ptr, counts, max_count, z_max, low, top_k, TILE, LINES
                )
                z_cut = value_of(cut_key)
                low = cut_key
            if top_p < 1:
                heavier = _mass_above(values_ptr, counts, max_count, z_max, z_cut, TILE, LINES)
                target = target_of(top_p, heavier + num_ties * mass_of(z_cut, z_max).to(tl.int64))
                if (target > heavier) & (num_ties > 0):
                    # The cut is among the ties that top-k keeps.
                    high, above = low, heavier
                elif num_ties > 0:
                    low += 1
        if target > 0:
            cut_key, above = _search(
                values_ptr, counts, max_count, z_max, low, high, guess, above, target, True, TILE, LINES
            )
            num_ties = ties_to(target, above, mass_of(value_of(cut_key), z_max), V)
            cut_id = _id_of_tie(values_ptr, offsets_ptr, counts_ptr, counts, max_count, cut_key, num_ties, TILE, LINES)
    elif is_filtered & (row_max > float("-inf")) & (row_max < float("inf")):
        row_ptr = logits_ptr + row * logits_stride_row
        cut_key, cut_id = cut_of_row(row_ptr, V, temperature, top_k, top_p, min_p, BLOCK)
    tl.store(cut_keys_ptr + row, cut_key)
    tl.store(cut_ids_ptr + row, cut_id)
