"""Checks that every operation makes of its arguments: one line at the call, one sentence in the error."""

from torch import Tensor


def check(holds: bool, problem: str) -> None:
    """Raise ValueError with `problem` unless `holds`."""
    if not holds:
        raise ValueError(problem)


def check_rows(name: str, x: Tensor) -> None:
    """Check that the last dimension of `x` is contiguous, so that a row can be read by a pointer and a length."""
    check(x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be contiguous in its last dimension")
