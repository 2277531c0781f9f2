# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The first four launches for rows with filters: maxima, masses, a bound of the cut, and the tokens at or above it.

Programs share a row, and each writes integers, maxima or rounded sums of its own part, which the next launch joins.
Rounded sums only choose the bound, so no result depends on how a row is divided. Rows without filters return at once.
"""

import triton
import triton.language as tl

from sluice.kernels.sample.row import (
    MASS_SPAN,
    NO_KEY,
    are_plain,
    is_plain,
    key_of,
    least_kept,
    load_filters,
    load_logits,
    load_row_max,
    marked,
    real_mass_of,
    scale_plain,
    target_of,
    value_of,
)

NUM_LEVELS = 8
"""Values at or above which one program of `masses_kernel` adds up masses."""

_LEAST = tl.constexpr(-3.4028234663852886e38)
"""The least number above -inf."""

_CERTAIN = tl.constexpr(1 - 2**-12)
"""A sum in float32 times this is less than the exact sum: up to 4,000 roundings in turn, a row of 4 million tokens."""


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
            logits = load_logits(row_ptr, tile * TILE + offsets, V)
            maxima = tl.max(logits, axis=1)
            if not are_plain(logits):
                maxima = tl.max(marked(logits), axis=1)
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
    sums_ptr,  # [S, num_parts, num_bands, NUM_LEVELS] float32
    totals_ptr,  # [S, num_parts] int64
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

    Level i, from 1 on, is i steps below the largest z. The mass of all is exact, those of levels are rounded: they only
    bracket the cut.
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
            sums, total = _masses_of_part(
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
            tl.store(totals_ptr + row * tl.num_programs(1) + part, total, mask=band == 0)


@triton.jit
def _masses_of_part(
    row_ptr, maxima_ptr, V, temperature, z_max, least, step, first_level, first_tile, end_tile, TILE: tl.constexpr
):
    """Return the masses of some tiles at or above the eight levels after `first_level`, `[8]` float32, and of all."""
    offsets = tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]  # [TILE / 8, 8]
    reciprocal = tl.div_rn(1.0, temperature)
    level_1 = z_max - step * (first_level + 1)
    level_2 = z_max - step * (first_level + 2)
    level_3 = z_max - step * (first_level + 3)
    level_4 = z_max - step * (first_level + 4)
    level_5 = z_max - step * (first_level + 5)
    level_6 = z_max - step * (first_level + 6)
    level_7 = z_max - step * (first_level + 7)
    level_8 = z_max - step * (first_level + 8)
    total = tl.zeros([TILE // 8], dtype=tl.int64)
    sum_1 = tl.zeros([TILE // 8], dtype=tl.float32)
    sum_2, sum_3, sum_4, sum_5, sum_6, sum_7, sum_8 = sum_1, sum_1, sum_1, sum_1, sum_1, sum_1, sum_1
    for tile in range(first_tile, end_tile):
        if scale_plain(tl.load(maxima_ptr + tile), temperature, reciprocal) >= z_max - MASS_SPAN:
            z = scale_plain(load_logits(row_ptr, tile * TILE + offsets, V), temperature, reciprocal)
            mass = tl.where(z >= least, real_mass_of(z, z_max), 0.0)
            total += tl.sum(mass.to(tl.uint32).to(tl.int64), axis=1)
            sum_1 += _sum_from(z, level_1, mass)
            sum_2 += _sum_from(z, level_2, mass)
            sum_3 += _sum_from(z, level_3, mass)
            sum_4 += _sum_from(z, level_4, mass)
            sum_5 += _sum_from(z, level_5, mass)
            sum_6 += _sum_from(z, level_6, mass)
            sum_7 += _sum_from(z, level_7, mass)
            sum_8 += _sum_from(z, level_8, mass)
    odds = tl.join(tl.join(sum_1, sum_5), tl.join(sum_3, sum_7))
    evens = tl.join(tl.join(sum_2, sum_6), tl.join(sum_4, sum_8))
    return tl.sum(tl.reshape(tl.join(odds, evens), [TILE // 8, 8]), axis=0), tl.sum(total, axis=0)


@triton.jit
def _sum_from(z, level, mass):
    """Sum the masses of the tokens at or above a level, along the last axis."""
    # A product with 0 or 1: one instruction to compare, one to multiply and add.
    return tl.sum((z >= level).to(tl.float32) * mass, axis=1)


@triton.jit
def _bracket_of_mass(
    sums_ptr,
    totals_ptr,
    row,
    num_parts,
    num_levels,
    V,
    z_max,
    top_p,
    step,
    MAX_PARTS: tl.constexpr,
    MAX_LEVELS: tl.constexpr,
):
    """Find the two levels between which top-p cuts.

    Returns:
        The lower level, at or above which the mass certainly is; the upper one, or +inf, where it probably is not; the
        mass to reach.
    """
    parts = tl.arange(0, MAX_PARTS)
    totals = tl.load(totals_ptr + row * num_parts + parts, mask=parts < num_parts, other=0)
    target = target_of(top_p, tl.sum(totals, axis=0))
    levels = tl.arange(0, MAX_LEVELS)
    at = (row * num_parts + parts[:, None]) * num_levels + levels[None, :]
    inside = (parts < num_parts)[:, None] & (levels < num_levels)[None, :]
    sums = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), axis=0)  # [MAX_LEVELS]
    # The integer mass of a token is less by up to 1.
    is_short = sums.to(tl.float64) * _CERTAIN - V < target.to(tl.float64)
    num_short = tl.sum((is_short & (levels < num_levels)).to(tl.int32), axis=0)
    high = tl.where(num_short > 0, z_max - step * num_short, float("inf"))
    low = tl.where(num_short < num_levels, z_max - step * (num_short + 1), z_max - MASS_SPAN)
    return low, high, target


@triton.jit(do_not_specialize=["num_mass_parts", "num_levels"])
def bracket_kernel(
    lows_ptr,  # [S] float32
    highs_ptr,  # [S] float32
    targets_ptr,  # [S] int64
    sums_ptr,  # [S, num_mass_parts, num_levels] float32
    totals_ptr,  # [S, num_mass_parts] int64
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
    """One program per row: the z at or above which its cut must lie, and the one below which it probably does.

    For top-k the first is a bound. For top-p alone they are levels, and the mass to reach comes with them. A row
    without such a search has low = +inf.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, is_filtered = load_filters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V
    )
    low, high = temperature * 0 + float("inf"), temperature * 0 + float("inf")
    target = row * 0
    if is_filtered & ((top_k > 0) | (top_p < 1)):
        row_max = load_row_max(tile_maxima_ptr, row, num_tiles, MAX_TILES)
        if is_plain(row_max, temperature):
            z_max = tl.div_rn(row_max, temperature)
            if top_k > 0:
                num_groups = num_tiles * (TILE // GROUP)
                bound = _reached_by(group_maxima_ptr, row, num_groups, top_k, MAX_TILES * (TILE // GROUP))
                low = tl.div_rn(bound, temperature)
            else:
                step = _level_step(top_p, log2_vocab_size, num_levels)
                low, high, target = _bracket_of_mass(
                    sums_ptr, totals_ptr, row, num_mass_parts, num_levels, V, z_max, top_p, step, MAX_PARTS, MAX_LEVELS
                )
            low = tl.maximum(tl.maximum(low, least_kept(z_max, min_p)), _LEAST)
    tl.store(lows_ptr + row, low)
    tl.store(highs_ptr + row, high)
    tl.store(targets_ptr + row, target)


@triton.jit(do_not_specialize=["tiles_per_part"])
def candidates_kernel(
    counts_ptr,  # [S, num_tiles] int32
    values_ptr,  # [S, num_tiles, TILE] float32
    offsets_ptr,  # [S, num_tiles, TILE] int16
    lows_ptr,  # [S] float32
    tile_maxima_ptr,  # [S, num_tiles] float32
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S] float32
    V,
    num_tiles,
    tiles_per_part,
    logits_stride_row,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per (row, part): the tokens of each tile at or above `low`, among them all kept ones, in order of id.

    A tile's list has their number, their z and their places in the tile. A thread has runs of LANES tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_part
    row_ptr = logits_ptr + row * logits_stride_row
    runs, lanes = tl.arange(0, TILE // LANES), tl.arange(0, LANES)[None, :]
    offsets = runs[:, None] * LANES + lanes  # [TILE / LANES, LANES]
    low = tl.load(lows_ptr + row)
    if low < float("inf"):
        temperature = tl.load(temperature_ptr + row)
        reciprocal = tl.div_rn(1.0, temperature)
        for tile in range(first, tl.minimum(first + tiles_per_part, num_tiles)):
            at = row * num_tiles + tile
            if scale_plain(tl.load(tile_maxima_ptr + at), temperature, reciprocal) >= low:
                z = scale_plain(load_logits(row_ptr, tile * TILE + offsets, V), temperature, reciprocal)
                count = tl.sum((z >= low).to(tl.int32), axis=1)
                end = tl.cumsum(count, axis=0)
                tl.store(counts_ptr + at + runs * 0, end, mask=runs == TILE // LANES - 1)
                slots = end - count
                # One store of all lanes would first move them between threads (Triton 3.6 cannot compile it).
                for lane in tl.static_range(LANES):
                    # The compiler sees that all other summands are 0.
                    bits = tl.sum(tl.where(lanes == lane, z.to(tl.int32, bitcast=True), 0), axis=1)
                    value = bits.to(tl.float32, bitcast=True)
                    is_in = value >= low
                    tl.store(values_ptr + at * TILE + slots, value, mask=is_in)
                    tl.store(offsets_ptr + at * TILE + slots, (runs * LANES + lane).to(tl.int16), mask=is_in)
                    slots += is_in.to(tl.int32)
            else:
                tl.store(counts_ptr + at, 0)
