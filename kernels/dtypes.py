"""Element types of native kernels."""

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Numbered as in native.h."""
