# Triton's language is not typable.
# pyright: basic
"""A device function that rounds to FP8."""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x):
    """Round float32 `x` to e4m3, ties to even, as uint8; magnitudes above 448 become 448, NaN stays NaN.

    With integers, not the device's conversion: GPUs before sm_89 have none, and the interpreter's is wrong.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half a unit minus one, plus one if the last kept bit is odd; a carry correctly raises the exponent.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the steps are 2**-9, which is what float32 has left next to 2**14.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
