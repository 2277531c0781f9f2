"""A matrix unit for the interpreter: every element of a product is summed along K in one order, wherever it is.

The interpreter multiplies with numpy's library, whose sums for a row depend on the row's place in the tile. Those of a
GPU's matrix unit do not, and what is tested with it is that nothing else does.
"""

# triton's language is not typable.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float


@contextmanager
def matrix_unit() -> Generator[None]:
    """Let interpreted products of floats have this unit's bits; compiled ones are not changed."""
    with patch.object(InterpreterBuilder, "create_dot", _dot):
        yield


def _numbers(operand):
    """Return an operand's numbers: the interpreter keeps FP8 as bytes."""
    if not operand.dtype.scalar.is_fp8():
        return operand.data
    return _convert_float(operand.data, operand.dtype.scalar, tl.float16, None).view(np.float16)


def _dot(_builder, a, b, d, _input_precision, _max_num_imprecise_acc):
    wide = d.data.dtype
    rows, columns = (_numbers(operand).astype(wide) for operand in (a, b))
    # A sum over an axis that is not the last adds its planes one after another.
    products = rows[:, :, None] * columns[None, :, :]  # [M, K, N]
    return TensorHandle(products.sum(axis=1, dtype=wide) + d.data, d.dtype.scalar)
