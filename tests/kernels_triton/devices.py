"""Where and in which dtypes the kernels are tested: interpreted on the CPU, compiled on a GPU."""

import pytest
import torch

ON_CPU = [("cpu", torch.float32), ("cpu", torch.float16)]
"""The interpreter's bfloat16 is not to be trusted: it computes with bit patterns."""

ON_CUDA = [("cuda", torch.float32), ("cuda", torch.float16), ("cuda", torch.bfloat16)]

DEVICES = [
    pytest.param(*ON_CPU[0], id="cpu-float32"),
    pytest.param(*ON_CPU[1], id="cpu-float16", marks=pytest.mark.long),
    *(
        pytest.param(
            *pair,
            id=f"{pair[0]}-{str(pair[1])[6:]}",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        )
        for pair in ON_CUDA
    ),
]
"""Pairs of device and dtype, for `pytest.mark.parametrize(("device", "dtype"), DEVICES)`."""
