# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The draw: the best token of each part of a row, then the best of all parts.

A row with lists of tokens, among them all kept ones, is drawn from its lists. Of other rows, all logits are read. The
noise of a token is costly: two logarithms. A cheap upper bound of each score, -log(v) being above -log(-log(1 - v)),
shows the tiles of which no token can win. Only of the others, about the logarithm of their number, the scores are
computed.
"""

import triton
import triton.language as tl

from sluice.kernels.philox.kernel import gumbel, random_words
from sluice.kernels.sample.row import LAST_ID, NO_KEY, is_kept, key_of, load_logits, scale, value_of

_WORD = tl.constexpr(2.3283064365386963e-10)
"""2**-32."""

_SLACK = tl.constexpr(4.76837158203125e-07)
"""2**-21: more than the relative error of a product with the reciprocal temperature."""

_LOG_SLOPE = tl.constexpr(-8.262958294867817e-08)
_LOG_ZERO = tl.constexpr(88.0306921)
"""-log(2) / 2**23, and 127 * log(2) with 0.001 for rounding: -log of a float32 is less than this line over its bits."""


@triton.jit
def _words(groups, lanes, seed, position, counter_2):
    """Return the random word of a lane of each group, of the shape to which both broadcast."""
    x0, x1, x2, x3 = random_words(groups, seed, position, counter_2)
    low = tl.where(lanes == 0, x0, x1)
    high = tl.where(lanes == 2, x2, x3)
    return tl.where(lanes < 2, low, high)


@triton.jit
def _score_bounds(logits, words, reciprocal, z_cut):
    """Return an upper bound of each score: +inf if the logit is NaN or +inf, -inf if it is certainly not kept."""
    z = logits * reciprocal
    z = tl.fma(tl.abs(z), _SLACK, z)  # NaN of -inf
    v = tl.fma(words.to(tl.float32), _WORD, 0.5 * _WORD)
    noise = tl.fma(v.to(tl.int32, bitcast=True).to(tl.float32), _LOG_SLOPE, _LOG_ZERO)
    bounds = tl.where(z >= z_cut, z + noise, float("-inf"))
    return tl.where(logits < float("inf"), bounds, float("inf"))


@triton.jit
def _best_of_tile(scores, token_ids, is_bad):
    """Return the best score and the lowest id that has it; +inf and -1 if the tile has a bad logit."""
    best = tl.max(tl.max(scores, axis=1), axis=0)
    winners = tl.where(scores == best, token_ids, LAST_ID)
    best_id = tl.min(tl.min(winners, axis=1), axis=0)
    has_bad = tl.max(tl.max(is_bad.to(tl.int32), axis=1), axis=0) > 0
    return tl.where(has_bad, float("inf"), best), tl.where(has_bad, -1, best_id)


@triton.jit
def _best_of_lists(
    values_ptr, offsets_ptr, counts_ptr, first, end, seed, position, counter_2, cut_key, cut_id, TILE: tl.constexpr
):
    """Return the best score of the kept tokens in the lists of some tiles, and the lowest id that has it."""
    slots = tl.arange(0, 32)[None, :]
    best_scores = tl.full([8, 32], float("-inf"), dtype=tl.float32)
    best_ids = tl.full([8, 32], LAST_ID, dtype=tl.int32)
    for first_of_eight in range(first, end, 8):
        tiles = first_of_eight + tl.arange(0, 8)
        counts = tl.load(counts_ptr + tiles, mask=tiles < end, other=0)
        for start in range(0, tl.max(counts, axis=0), 32):
            at = tiles[:, None] * TILE + start + slots
            inside = start + slots < counts[:, None]
            z = tl.load(values_ptr + at, mask=inside, other=float("-inf"))
            token_ids = tiles[:, None] * TILE + tl.load(offsets_ptr + at, mask=inside, other=0).to(tl.int32)
            noise = gumbel(_words(token_ids >> 2, token_ids & 3, seed, position, counter_2))
            is_better = is_kept(key_of(z), token_ids, cut_key, cut_id) & (z + noise > best_scores)
            best_scores = tl.where(is_better, z + noise, best_scores)
            best_ids = tl.where(is_better, token_ids, best_ids)
    return _best_of_tile(best_scores, best_ids, best_scores == float("inf"))


@triton.jit(do_not_specialize=["tiles_per_part", "has_cuts"])
def draw_kernel(
    best_scores_ptr,  # [S, parts] float32
    best_ids_ptr,  # [S, parts] int32
    logits_ptr,  # [S, V]
    tile_maxima_ptr,  # [S, num_tiles] float32; only of rows that have a filter
    lows_ptr,  # [S] float32; +inf: the row has no lists
    counts_ptr,  # [S, num_tiles] int32
    values_ptr,  # [S, num_tiles, TILE] float32
    offsets_ptr,  # [S, num_tiles, TILE] int16
    cut_keys_ptr,  # [S] int64
    cut_ids_ptr,  # [S] int32
    temperature_ptr,  # [S] float32
    seed_ptr,  # [S] int64
    position_ptr,  # [S] int32
    counter_2_ptr,  # [S] int64
    V,
    num_tiles,
    tiles_per_part,
    logits_stride_row,
    has_cuts,  # 0: none is read, and everything is kept
    TILE: tl.constexpr,
):
    """One program per (row, part): the best score of the kept tokens, and the lowest id that has it.

    A NaN or +inf gives score +inf and id -1, which no other part can beat. Nothing kept gives -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride_row
    lanes = tl.arange(0, 4)  # [4]
    first_groups = tl.arange(0, TILE // 4)  # [TILE / 4]
    temperature = tl.load(temperature_ptr + row)
    first = part * tiles_per_part
    end = tl.minimum(first + tiles_per_part, num_tiles)
    best = temperature * 0 + float("-inf")
    best_id = first * 0 + LAST_ID
    if temperature > 0:
        low = tl.load(lows_ptr + row, mask=has_cuts != 0, other=float("inf"))
        cut_key = tl.load(cut_keys_ptr + row, mask=has_cuts != 0, other=NO_KEY).to(tl.uint32)
        cut_id = tl.load(cut_ids_ptr + row, mask=has_cuts != 0, other=-1)
        seed, position, counter_2 = tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(counter_2_ptr + row)
        if low < float("inf"):
            values_ptr += row * num_tiles * TILE
            offsets_ptr += row * num_tiles * TILE
            counts_ptr += row * num_tiles
            best, best_id = _best_of_lists(
                values_ptr, offsets_ptr, counts_ptr, first, end, seed, position, counter_2, cut_key, cut_id, TILE
            )
            end = first
        z_cut = value_of(cut_key)
        reciprocal = tl.div_rn(1.0, temperature)
        for tile in range(first, end):
            is_wanted = True
            if z_cut > float("-inf"):
                is_wanted = tl.div_rn(tl.load(tile_maxima_ptr + row * num_tiles + tile), temperature) >= z_cut
            if is_wanted:
                groups = tile * (TILE // 4) + first_groups
                token_ids = groups[:, None] * 4 + lanes[None, :]  # [TILE / 4, 4]
                logits = load_logits(row_ptr, token_ids, V)
                words = _words(groups[:, None], lanes[None, :], seed, position, counter_2)
                bounds = _score_bounds(logits, words, reciprocal, z_cut)
                bound = tl.max(tl.max(bounds, axis=1), axis=0)
                if (bound >= best) & (bound > float("-inf")):
                    scores = scale(logits, temperature)
                    kept = is_kept(key_of(scores), token_ids, cut_key, cut_id)
                    scores = tl.where(kept, scores + gumbel(words), float("-inf"))
                    score, token_id = _best_of_tile(scores, token_ids, bounds == float("inf"))
                    if (score > best) | ((score == best) & (token_id < best_id)):
                        best, best_id = score, token_id
    else:
        best_logits = tl.full([TILE // 4, 4], float("-inf"), dtype=tl.float32)
        best_ids = tl.full([TILE // 4, 4], LAST_ID, dtype=tl.int32)
        for tile in range(first, end):
            token_ids = tile * TILE + first_groups[:, None] * 4 + lanes[None, :]
            logits = load_logits(row_ptr, token_ids, V)
            logits = tl.where(logits == logits, logits, float("inf"))
            is_better = logits > best_logits
            best_logits = tl.where(is_better, logits, best_logits)
            best_ids = tl.where(is_better, token_ids, best_ids)
        best, best_id = _best_of_tile(best_logits, best_ids, best_logits == float("inf"))
    at = row * tl.num_programs(1) + part
    tl.store(best_scores_ptr + at, best)
    tl.store(best_ids_ptr + at, best_id)


@triton.jit(do_not_specialize=["num_parts"])
def choose_kernel(
    out_ptr,  # [S] int64
    best_scores_ptr,  # [S, num_parts] float32
    best_ids_ptr,  # [S, num_parts] int32
    num_parts,
    out_stride,
    MAX_PARTS: tl.constexpr,
):
    """One program per row: the best of its parts, the lowest id among equals, -1 if the row failed."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, MAX_PARTS)  # [MAX_PARTS]
    inside = offsets < num_parts
    scores = tl.load(best_scores_ptr + row * num_parts + offsets, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * num_parts + offsets, mask=inside, other=LAST_ID)
    best = tl.max(scores, axis=0)
    token_id = tl.min(tl.where(scores == best, ids, LAST_ID), axis=0)
    tl.store(out_ptr + row * out_stride, tl.where(best > float("-inf"), token_id, -1).to(tl.int64))
