# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Common parts of the sampling kernels: how a row is read, scaled, ordered and weighed."""

import os

import triton
import triton.language as tl

TILE = 1024
"""Consecutive tokens that a program reads at once: a tile of a row."""

GROUP = 64
"""Consecutive tokens whose largest logit is kept; divides `TILE`."""

LAST_ID = tl.constexpr(2147483647)
NO_KEY = tl.constexpr(8388607)
"""The key of -inf: with an id below all others, everything above -inf is kept."""

MASS_SPAN = tl.constexpr(21.0)
"""Further below the largest z, mass rounds to 0."""

MARK = tl.constexpr(3.4028234663852886e38)
"""In place of a logit for which `scale_plain` might not be exact."""

_MASS_ONE = tl.constexpr(1073741824.0)
_LARGEST_PLAIN = tl.constexpr(1.2676506002282294e30)
_SMALLEST_PLAIN = tl.constexpr(8.077935669463161e-28)
"""2**100 and 2**-90."""

_SMALLEST_BITS = tl.constexpr(310378496)
_NUM_PLAIN_BITS = tl.constexpr(1593835520)
"""The bits of the smallest, and how far from them those of the largest are."""

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_logits(row_ptr, offsets, V):
    """Load logits of one row at `offsets`, float32; -inf past the end."""
    return tl.load(row_ptr + offsets, mask=offsets < V, other=float("-inf")).to(tl.float32)


@triton.jit
def load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V):
    """Load a row's temperature, top-k (0: none), top-p and min-p, and whether the row has any of these."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < V, top_k, 0)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    return temperature, top_k, top_p, min_p, (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


@triton.jit
def load_row_max(tile_maxima_ptr, row, num_tiles, MAX_TILES: tl.constexpr):
    """Load the largest marked logit of a row."""
    tiles = tl.arange(0, MAX_TILES)
    maxima = tl.load(tile_maxima_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    return tl.max(maxima, axis=0)


@triton.jit
def scale(logits, temperature):
    """Compute z = logit / temperature, correctly rounded as on the CPU; NaN becomes -inf (its row fails elsewhere)."""
    logits = tl.where(logits == logits, logits, float("-inf"))
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)


@triton.jit
def scale_plain(logits, temperature, reciprocal):
    """Compute `scale` of a plain row, with a third of the instructions: two corrections of a quotient (Markstein).

    Neither a quotient nor a remainder of a plain row is subnormal, so each remainder is exact.
    """
    if _IS_INTERPRETED:
        # Its fma rounds twice.
        return scale(logits, temperature)
    quotient = logits * reciprocal
    quotient = tl.fma(tl.fma(quotient, -temperature, logits), reciprocal, quotient)
    quotient = tl.fma(tl.fma(quotient, -temperature, logits), reciprocal, quotient)
    return tl.where(logits > float("-inf"), quotient, float("-inf"))


@triton.jit
def are_plain(logits):
    """Whether all logits `[A, B]` are numbers that `marked` leaves as they are, not 0: a test in few instructions."""
    bits = tl.abs(logits).to(tl.uint32, bitcast=True)
    # Smaller ones wrap around.
    return tl.max(tl.max(bits - _SMALLEST_BITS, axis=1), axis=0) <= _NUM_PLAIN_BITS


@triton.jit
def marked(logits):
    """Replace NaN by +inf, and numbers too large or too small for `scale_plain` by MARK."""
    size = tl.abs(logits)
    is_unusual = ((size > _LARGEST_PLAIN) & (size < float("inf"))) | ((size < _SMALLEST_PLAIN) & (size > 0))
    return tl.where(is_unusual, MARK, tl.where(logits == logits, logits, float("inf")))


@triton.jit
def is_plain(row_max, temperature):
    """Whether a row with this largest marked logit has numbers for `scale_plain`, at least one above -inf."""
    is_usual = (temperature > 1e-6) & (temperature < 1e6)
    return is_usual & (row_max > float("-inf")) & (row_max <= _LARGEST_PLAIN)


@triton.jit
def key_of(z):
    """Map float32 to uint32 of the same order; -0 and 0 are equal."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def value_of(key):
    """Return the float32 of a key, of any integer type."""
    bits = key.to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(key, token_id, cut_key, cut_id):
    """Whether a token is in the prefix of the order that ends at (`cut_key`, `cut_id`)."""
    return (key > cut_key) | ((key == cut_key) & (token_id <= cut_id))


@triton.jit
def least_kept(z_max, min_p):
    """Return the least value that min-p keeps."""
    return tl.where(min_p > 0, z_max + tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))


@triton.jit
def mass_of(z, z_max):
    """Return a token's integer mass for top-p: floor(exp(z - z_max) * 2**30), uint32."""
    return real_mass_of(z, z_max).to(tl.uint32)


@triton.jit
def real_mass_of(z, z_max):
    """Return a token's mass before it becomes an integer, float32."""
    return tl.exp(z - z_max) * _MASS_ONE


@triton.jit
def target_of(top_p, total):
    """Return the smallest integer not below top_p * total, at least 1: both are exact in float64."""
    wanted = top_p.to(tl.float64) * total.to(tl.float64)
    target = wanted.to(tl.int64)
    return tl.maximum(target + (target.to(tl.float64) < wanted).to(tl.int64), 1)


@triton.jit
def ties_to(target, above, mass, V):
    """Return how many tokens of one value reach `target`, if those above it weigh `above`; at most V, below 2**24."""
    mass = tl.maximum(mass, 1).to(tl.int64)
    # Without a division of 64 bits, which is a call.
    too_few = target * 0
    for step in range(24):
        more = too_few + (1 << (23 - step))
        too_few = tl.where(above + more * mass < target, more, too_few)
    return tl.minimum(too_few + 1, V).to(tl.int32)
