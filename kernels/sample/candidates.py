# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The first four launches for rows with filters: maxima, masses, a bracket of the cut, and the tokens in it.

Programs share a row, and each writes integers or maxima of its own part, which the next launch adds up. So no result
depends on how a row is divided. Rows without filters return at once.
"""

import triton
import triton.language as tl

from sluice.kernels.sample.row import (
    MASS_SPAN,
    NO_KEY,
    is_plain,
    key_of,
    least_kept,
    load_filters,
    load_logits,
    load_row_max,
    marked,
    mass_of,
    scale_plain,
    target_of,
    value_of,
)

NUM_LEVELS = 8
"""Values at or above which one program of `masses_kernel` adds up masses."""


@triton.jit(do_not_specialize=["tiles_per_part"])
def maxima_kernel(
    tile_maxima_ptr,  # [S, num_tiles] float32
    group_maxima_ptr,  # [S, num_tiles, TILE / GROUP] float32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32; so are top_p and min_p
    top_k_ptr,  # [S] int32
    top_p_ptr,
    min_p_ptr,
    V,
    num_tiles,
    tiles_per_part,
    logits_stride_row,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program per (row, part): the largest marked logit of each tile and of each group."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_part
    row_ptr = logits_ptr + row * logits_stride_row
    groups = tl.arange(0, TILE // GROUP)  # [TILE / GROUP]
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [TILE / GROUP, GROUP]
    _, _, _, _, is_filtered = load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V)
    if is_filtered:
        for tile in range(first, tl.minimum(first + tiles_per_part, num_tiles)):
            maxima = tl.max(marked(load_logits(row_ptr, tile * TILE + offsets, V)), axis=1)
            at = row * num_tiles + tile
            tl.store(group_maxima_ptr + at * (TILE // GROUP) + groups, maxima)
            tl.store(tile_maxima_ptr + at, tl.max(maxima, axis=0))


@triton.jit
def _level_step(top_p, log2_vocab_size, num_levels):
    """Return the distance between levels, with few enough bits that its multiples are exact.

    The levels reach down to where fewer than 1 - top_p of the mass can lie, or where mass is 0.
    """
    exponent = ((1.0 - top_p).to(tl.int32, bitcast=True) >> 23) - 127
    span = (log2_vocab_size - exponent).to(tl.float32) * 0.6953125
    return tl.minimum(span, MASS_SPAN) / num_levels


@triton.jit
def _reached_by(group_maxima_ptr, row, num_groups, count, MAX_GROUPS: tl.constexpr):
    """Return a logit that `count` tokens reach: the count-th largest maximum of a group, or slightly less."""
    groups = tl.arange(0, MAX_GROUPS)
    maxima = tl.load(group_maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    keys = (key_of(maxima) >> 16).to(tl.int32)  # 16 bits are enough for a bound
    found = count * 0
    for step in range(8):
        shift = 14 - 2 * step
        one, two, three = found | (1 << shift), found | (2 << shift), found | (3 << shift)
        # Three counts in one number.
        reached = (keys >= one).to(tl.int64) + ((keys >= two).to(tl.int64) << 20) + ((keys >= three).to(tl.int64) << 40)
        total = tl.sum(reached, axis=0)
        if (total >> 40) >= count:
            found = three
        elif ((total >> 20) & 0xFFFFF) >= count:
            found = two
        elif (total & 0xFFFFF) >= count:
            found = one
    return value_of(tl.maximum(found.to(tl.int64) << 16, NO_KEY + 1))


@triton.jit(do_not_specialize=["tiles_per_part"])
def masses_kernel(
    sums_ptr,  # [S, num_parts, num_bands, NUM_LEVELS] int64
    tile_maxima_ptr,  # [S, num_tiles] float32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32; so are top_p and min_p
    top_k_ptr,  # [S] int32
    top_p_ptr,
    min_p_ptr,
    V,
    log2_vocab_size,
    num_tiles,
    tiles_per_part,
    logits_stride_row,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
):
    """One program per (row, part, band of levels): the masses at or above each level, for a row with top-p alone.

    Level 0 is -inf, level i is i steps below the largest z.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    band = tl.program_id(2)
    temperature, top_k, top_p, min_p, is_filtered = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V
    )
    if is_filtered & (top_k <= 0) & (top_p < 1):
        row_max = load_row_max(tile_maxima_ptr, row, num_tiles, MAX_TILES)
        if is_plain(row_max, temperature):
            z_max = tl.div_rn(row_max, temperature)
            sums = _masses_of_part(
                logits_ptr + row * logits_stride_row,
                tile_maxima_ptr + row * num_tiles,
                V,
                temperature,
                z_max,
                least_kept(z_max, min_p),
                _level_step(top_p, log2_vocab_size, tl.num_programs(2) * NUM_LEVELS),
                band * NUM_LEVELS,
                part * tiles_per_part,
                tl.minimum((part + 1) * tiles_per_part, num_tiles),
                TILE,
            )
            at = ((row * tl.num_programs(1) + part) * tl.num_programs(2) + band) * NUM_LEVELS
            tl.store(sums_ptr + at + tl.arange(0, NUM_LEVELS), sums)


@triton.jit
def _masses_of_part(
    row_ptr, maxima_ptr, V, temperature, z_max, least, step, first_level, first_tile, end_tile, TILE: tl.constexpr
):
    """Return the masses of some tiles at or above eight levels, `[8]` int64."""
    offsets = tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]  # [TILE / 8, 8]
    reciprocal = tl.div_rn(1.0, temperature)
    level_0 = tl.where(first_level == 0, float("-inf"), z_max - step * first_level)
    level_1 = z_max - step * (first_level + 1)
    level_2 = z_max - step * (first_level + 2)
    level_3 = z_max - step * (first_level + 3)
    level_4 = z_max - step * (first_level + 4)
    level_5 = z_max - step * (first_level + 5)
    level_6 = z_max - step * (first_level + 6)
    level_7 = z_max - step * (first_level + 7)
    sum_0 = tl.zeros([TILE // 8], dtype=tl.int64)
    sum_1, sum_2, sum_3, sum_4, sum_5, sum_6, sum_7 = sum_0, sum_0, sum_0, sum_0, sum_0, sum_0, sum_0
    for tile in range(first_tile, end_tile):
        if tl.div_rn(tl.load(maxima_ptr + tile), temperature) >= z_max - MASS_SPAN:
            z = scale_plain(load_logits(row_ptr, tile * TILE + offsets, V), temperature, reciprocal)
            mass = tl.where(z >= least, mass_of(z, z_max), 0)
            sum_0 += _sum_from(z, level_0, mass)
            sum_1 += _sum_from(z, level_1, mass)
            sum_2 += _sum_from(z, level_2, mass)
            sum_3 += _sum_from(z, level_3, mass)
            sum_4 += _sum_from(z, level_4, mass)
            sum_5 += _sum_from(z, level_5, mass)
            sum_6 += _sum_from(z, level_6, mass)
            sum_7 += _sum_from(z, level_7, mass)
    evens = tl.join(tl.join(sum_0, sum_4), tl.join(sum_2, sum_6))
    odds = tl.join(tl.join(sum_1, sum_5), tl.join(sum_3, sum_7))
    return tl.sum(tl.reshape(tl.join(evens, odds), [TILE // 8, 8]), axis=0)


@triton.jit
def _sum_from(z, level, mass):
    """Sum the masses of the tokens at or above a level, along the last axis."""
    return tl.sum(tl.where(z >= level, mass, 0).to(tl.int64), axis=1)


@triton.jit
def _bracket_of_mass(
    sums_ptr,
    row,
    num_parts,
    num_levels,
    z_max,
    top_p,
    log2_vocab_size,
    MAX_PARTS: tl.constexpr,
    MAX_LEVELS: tl.constexpr,
):
    """Find the two levels between which top-p cuts.

    Returns:
        The lower level; the upper one, or +inf; the mass at or above the upper; the mass to reach.
    """
    parts = tl.arange(0, MAX_PARTS)[:, None]
    levels = tl.arange(0, MAX_LEVELS)[None, :]
    at = (row * num_parts + parts) * num_levels + levels
    sums = tl.load(sums_ptr + at, mask=(parts < num_parts) & (levels < num_levels), other=0)
    sums = tl.sum(sums, axis=0)  # [MAX_LEVELS]
    numbers = tl.arange(0, MAX_LEVELS)
    target = target_of(top_p, tl.max(sums, axis=0))
    is_short = (numbers > 0) & (numbers < num_levels) & (sums < target)
    above = tl.max(tl.where(is_short, sums, 0), axis=0)
    num_short = tl.sum(is_short.to(tl.int32), axis=0)
    step = _level_step(top_p, log2_vocab_size, num_levels)
    high = tl.where(num_short > 0, z_max - step * num_short, float("inf"))
    low = tl.where(num_short + 1 < num_levels, z_max - step * (num_short + 1), z_max - MASS_SPAN)
    return low, high, above, target


@triton.jit(do_not_specialize=["num_mass_parts", "num_levels"])
def bracket_kernel(
    lows_ptr,  # [S] float32
    highs_ptr,  # [S] float32
    aboves_ptr,  # [S] int64
    targets_ptr,  # [S] int64
    sums_ptr,  # [S, num_mass_parts, num_levels] int64
    tile_maxima_ptr,  # [S, num_tiles] float32
    group_maxima_ptr,  # [S, num_tiles, TILE / GROUP] float32
    temperature_ptr,  # [S] float32; so are top_p and min_p
    top_k_ptr,  # [S] int32
    top_p_ptr,
    min_p_ptr,
    V,
    log2_vocab_size,
    num_tiles,
    num_mass_parts,
    num_levels,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MAX_LEVELS: tl.constexpr,
):
    """One program per row: the values of z among which its cut must lie, from `low` to below `high`.

    For top-k these are all from a bound on, for top-p alone those between two levels, with the mass above them and the
    mass to reach. A row without such a search has low = +inf.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, is_filtered = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V
    )
    low, high = temperature * 0 + float("inf"), temperature * 0 + float("inf")
    above, target = row * 0, row * 0
    if is_filtered & ((top_k > 0) | (top_p < 1)):
        row_max = load_row_max(tile_maxima_ptr, row, num_tiles, MAX_TILES)
        if is_plain(row_max, temperature):
            z_max = tl.div_rn(row_max, temperature)
            if top_k > 0:
                num_groups = num_tiles * (TILE // GROUP)
                bound = _reached_by(group_maxima_ptr, row, num_groups, top_k, MAX_TILES * (TILE // GROUP))
                low = tl.div_rn(bound, temperature)
            else:
                low, high, above, target = _bracket_of_mass(
                    sums_ptr, row, num_mass_parts, num_levels, z_max, top_p, log2_vocab_size, MAX_PARTS, MAX_LEVELS
                )
            low = tl.maximum(low, least_kept(z_max, min_p))
    tl.store(lows_ptr + row, low)
    tl.store(highs_ptr + row, high)
    tl.store(aboves_ptr + row, above)
    tl.store(targets_ptr + row, target)


@triton.jit(do_not_specialize=["tiles_per_part"])
def candidates_kernel(
    counts_ptr,  # [S, num_tiles] int32
    values_ptr,  # [S, num_tiles, TILE] float32
    offsets_ptr,  # [S, num_tiles, TILE] int16
    lows_ptr,  # [S] float32
    highs_ptr,  # [S] float32
    tile_maxima_ptr,  # [S, num_tiles] float32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32
    V,
    num_tiles,
    tiles_per_part,
    logits_stride_row,
    TILE: tl.constexpr,
):
    """One program per (row, part): the tokens of each tile among which the cut must lie, in order of id.

    A tile's list has their number, their z and their places in the tile.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_part
    row_ptr = logits_ptr + row * logits_stride_row
    offsets = tl.arange(0, TILE)  # [TILE]
    low = tl.load(lows_ptr + row)
    if low < float("inf"):
        high = tl.load(highs_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        reciprocal = tl.div_rn(1.0, temperature)
        for tile in range(first, tl.minimum(first + tiles_per_part, num_tiles)):
            at = row * num_tiles + tile
            count = tile * 0
            if tl.div_rn(tl.load(tile_maxima_ptr + at), temperature) >= low:
                z = scale_plain(load_logits(row_ptr, tile * TILE + offsets, V), temperature, reciprocal)
                is_in = (z >= low) & (z < high) & (z > float("-inf"))
                ranks = tl.cumsum(is_in.to(tl.int32), axis=0) - 1
                count = tl.max(ranks, axis=0) + 1
                tl.store(values_ptr + at * TILE + ranks, z, mask=is_in)
                tl.store(offsets_ptr + at * TILE + ranks, offsets.to(tl.int16), mask=is_in)
            tl.store(counts_ptr + at, count)
