# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Sampling in seven Triton launches: five find the cut of each row's kept set, two draw. Without filters, only these.

The kept set is a prefix of the order (value descending, token id ascending), so a row's filters reduce to one cut: the
last kept value, and the last kept id among its equals. It is found without sorting, over counts for top-k and over
integer masses for top-p. Sums of integers depend on neither tiles nor batch composition, so each launch divides a row
among as many programs as a GPU needs.
"""

import torch
import triton
from torch import Tensor

from sluice.kernels.checks import check
from sluice.kernels.sample import SampleOptions
from sluice.kernels.sample.candidates import NUM_LEVELS, bracket_kernel, candidates_kernel, masses_kernel, maxima_kernel
from sluice.kernels.sample.cut import NUM_LINES, cut_kernel
from sluice.kernels.sample.draw import choose_kernel, draw_kernel
from sluice.kernels.sample.row import GROUP, TILE

_NUM_PROGRAMS = 2048
"""Programs of four warps that keep a GPU busy. More would cost rows without filters, whose programs return at once."""

_MAX_VOCAB_SIZE = 2**21
"""For more tokens, the margin for roundings of `bracket_kernel` is not proven."""

_MAX_MASS_PARTS = 32
_MAX_BANDS = 4
"""A power of two, as every number of bands: the distance of levels must have few bits."""

_WHOLE_ROW_BLOCK = 2048


def _divide(num_rows: int, num_tiles: int, max_parts: int, *, num_warps: int = 4) -> tuple[int, int]:
    """Return the tiles of a part, and the parts of a row."""
    num_parts = min(max_parts, max(1, 4 * _NUM_PROGRAMS // num_warps // num_rows))
    tiles_per_part = -(-num_tiles // num_parts)
    return tiles_per_part, -(-num_tiles // tiles_per_part)


def _num_bands(num_programs: int, num_tiles: int) -> int:
    """Return in how many bands the levels are divided: more leave fewer candidates, if there are programs for them.

    A short row has few candidates anyway.
    """
    spare = max(1, min(_MAX_BANDS, _NUM_PROGRAMS // num_programs, num_tiles // 16))
    return 1 << (spare.bit_length() - 1)


def find_kept_sets(logits: Tensor, options: SampleOptions) -> tuple[Tensor, Tensor]:
    """Return the end of each row's kept set.

    Returns:
        The key of the last kept value, `[S]` int64 (values in order, as unsigned 32-bit numbers), and the last kept id
        among the tokens of that value, `[S]` int32.
    """
    *_, cut_keys, cut_ids = _find_cuts(logits, options)
    return cut_keys, cut_ids


def _find_cuts(logits: Tensor, options: SampleOptions) -> tuple[Tensor, ...]:
    """Return what `draw_kernel` reads of rows with filters: maxima of tiles, lists of tokens, keys and ids of cuts."""
    num_rows, vocab_size = logits.shape
    check(vocab_size <= _MAX_VOCAB_SIZE, "a vocabulary of {} tokens is too large to filter", vocab_size)
    num_tiles = triton.cdiv(vocab_size, TILE)
    max_tiles = triton.next_power_of_2(num_tiles)
    tiles_per_part, num_parts = _divide(num_rows, num_tiles, num_tiles, num_warps=1)
    mass_tiles, mass_parts = _divide(num_rows, num_tiles, _MAX_MASS_PARTS)
    num_bands = _num_bands(num_rows * mass_parts, num_tiles)
    num_levels = num_bands * NUM_LEVELS
    log2_vocab_size = (vocab_size - 1).bit_length()
    filters = (options.temperature, options.top_k, options.top_p, options.min_p)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tile_maxima, group_maxima = scratch(num_rows, num_tiles), scratch(num_rows, num_tiles, TILE // GROUP)
    maxima_kernel[(num_rows, num_parts)](
        tile_maxima,
        group_maxima,
        logits,
        *filters,
        vocab_size,
        num_tiles,
        tiles_per_part,
        logits.stride(0),
        TILE=TILE,
        GROUP=GROUP,
        num_warps=1,
    )
    sums, totals = scratch(num_rows, mass_parts, num_levels), scratch(num_rows, mass_parts, dtype=torch.int64)
    masses_kernel[(num_rows, mass_parts, num_bands)](
        sums,
        totals,
        tile_maxima,
        logits,
        *filters,
        vocab_size,
        log2_vocab_size,
        num_tiles,
        mass_tiles,
        logits.stride(0),
        TILE=TILE,
        MAX_TILES=max_tiles,
        NUM_LEVELS=NUM_LEVELS,
        num_warps=4,
    )
    lows, highs, targets = scratch(num_rows), scratch(num_rows), scratch(num_rows, dtype=torch.int64)
    bracket_kernel[(num_rows,)](
        lows,
        highs,
        targets,
        sums,
        totals,
        tile_maxima,
        group_maxima,
        *filters,
        vocab_size,
        log2_vocab_size,
        num_tiles,
        mass_parts,
        num_levels,
        TILE=TILE,
        GROUP=GROUP,
        MAX_TILES=max_tiles,
        MAX_PARTS=_MAX_MASS_PARTS,
        MAX_LEVELS=_MAX_BANDS * NUM_LEVELS,
        num_warps=4,
    )
    counts = scratch(num_rows, num_tiles, dtype=torch.int32)
    values, offsets = scratch(num_rows, num_tiles, TILE), scratch(num_rows, num_tiles, TILE, dtype=torch.int16)
    candidates_kernel[(num_rows, num_parts)](
        counts,
        values,
        offsets,
        lows,
        tile_maxima,
        logits,
        options.temperature,
        vocab_size,
        num_tiles,
        tiles_per_part,
        logits.stride(0),
        TILE=TILE,
        LANES=16 // logits.element_size(),
        num_warps=1,
    )
    cut_keys, cut_ids = scratch(num_rows, dtype=torch.int64), scratch(num_rows, dtype=torch.int32)
    cut_kernel[(num_rows,)](
        cut_keys,
        cut_ids,
        counts,
        values,
        offsets,
        lows,
        highs,
        targets,
        tile_maxima,
        logits,
        *filters,
        vocab_size,
        num_tiles,
        logits.stride(0),
        BLOCK=_WHOLE_ROW_BLOCK,
        TILE=TILE,
        LINES=max(1, min(TILE // 4, NUM_LINES // max_tiles)),
        MAX_TILES=max_tiles,
        num_warps=8,
    )
    return tile_maxima, lows, counts, values, offsets, cut_keys, cut_ids


def sample_triton(logits: Tensor, options: SampleOptions, *, out: Tensor) -> None:
    """Launch the kernels; see `sluice.kernels.sample.sample`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    if options.has_filters:
        cuts = _find_cuts(logits, options)
    else:
        # Not read, but of the right types, so that this is no variant of its own.
        real, ids = options.temperature, options.top_k
        cuts = (real, real, ids, real, options.seed.view(torch.int16), options.seed, ids)
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles_per_part, num_parts = _divide(num_rows, num_tiles, num_tiles)
    best_scores = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    draw_kernel[(num_rows, num_parts)](
        best_scores,
        best_ids,
        logits,
        *cuts,
        options.temperature,
        options.seed,
        options.position,
        options.counter_2,
        vocab_size,
        num_tiles,
        tiles_per_part,
        logits.stride(0),
        int(options.has_filters),
        TILE=TILE,
        num_warps=4,
    )
    choose_kernel[(num_rows,)](
        out,
        best_scores,
        best_ids,
        num_parts,
        out.stride(0),
        MAX_PARTS=triton.next_power_of_2(num_tiles),
        num_warps=4,
    )
