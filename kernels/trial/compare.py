"""Comparison of a kernel's result with its reference: coarse, since only broken kernels are looked for here."""

from collections.abc import Sequence

import torch
from torch import Tensor

_UNITS = {torch.float32: 2.0**-16, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative rounding of a result; in float32 the order of the sums matters too."""

_ALLOWED_UNITS = 16


class WrongResult(Exception):
    """A kernel's result is not its reference's."""


def require_close(actual: Tensor, expected: Tensor) -> None:
    """Check that `actual` is within roundings of `expected`, relative to the largest magnitude.

    Raises:
        WrongResult: it is not.
    """
    if actual.numel() == 0:
        return
    exact = expected.double()
    error = float((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
    allowed = _ALLOWED_UNITS * _UNITS[actual.dtype]
    # A NaN compares false.
    if not error <= allowed:
        raise WrongResult(f"differs from its reference by {error:.2g} of the largest number; allowed is {allowed:.2g}")


def require_equal(actual: Tensor, expected: Tensor, *, max_different: int = 0) -> None:
    """Check that at most `max_different` numbers differ.

    Raises:
        WrongResult: more do.
    """
    num_different = int((actual.cpu() != expected.cpu()).sum())
    if num_different > max_different:
        raise WrongResult(f"differs from its reference in {num_different} of {actual.numel()} numbers")


def require_same_rows(batches: Sequence[Tensor]) -> None:
    """Check that the rows of each batch are the first of the largest one, bit by bit.

    Raises:
        WrongResult: one is not.
    """
    largest = max(batches, key=len)
    for batch in batches:
        if not torch.equal(batch.view(torch.uint8), largest[: len(batch)].view(torch.uint8)):
            raise WrongResult(f"a row of {len(batch)} is not bitwise identical to the same row of {len(largest)}")
