# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""A device function of rotary position embedding."""

import triton
import triton.language as tl


@triton.jit
def load_angles(cos_sin_ptr, position, pairs, inside, R: tl.constexpr):
    """Load cosines and sines `[1, R / 2]` of `position` from the table `[P, R]`."""
    angles_ptr = cos_sin_ptr + position * R
    cos = tl.load(angles_ptr + pairs, mask=inside, other=0.0)
    sin = tl.load(angles_ptr + R // 2 + pairs, mask=inside, other=0.0)
    return cos[None, :], sin[None, :]
