# Triton's language is not typable.
# pyright: basic
"""tanh in float32, as a Triton device function."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh in float32, to a relative error of 10 * 2**-24 where exp2 and division are accurate to 2**-22.

    (1 - e) / (1 + e), e = exp(-2 |x|), overflows nowhere but cancels near 0. Below 0.55, where it would lose a bit or
    more, an odd polynomial of degree 9 is used instead, fitted to a relative error of 4e-8.
    """
    size = tl.abs(x)
    e = tl.exp2(size * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    slope = ((0.016437566 * square - 0.052671805) * square + 0.13320725) * square - 0.33332947
    return tl.where(size < 0.55, x + x * (square * slope), tl.where(x < 0.0, -far, far))
