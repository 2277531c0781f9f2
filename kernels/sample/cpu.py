"""Sampling on the CPU: native.c, or torch where there is no library."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import threading

import torch
from torch import Tensor

from kernels.native import DTYPE_CODES, native_function
from kernels.sample import SampleOptions
from kernels.sample.reference import sample_reference

SIGNATURE = ("sluice_sample", "iplppppppppplli")
_CANDIDATE_PADDING = 16
_of_thread = threading.local()


def sample_cpu(logits: Tensor, options: SampleOptions, *, out: Tensor) -> None:
    """Write one token per row of `logits` `[S, V]` to `out` `[S]`."""
    dtype, native = DTYPE_CODES.get(logits.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        out.copy_(sample_reference(logits, options))
        return
    num_rows, vocab_size = logits.shape
    num_threads = torch.get_num_threads()
    native(
        dtype,
        logits.data_ptr(),
        logits.stride(0),
        options.temperature.data_ptr(),
        options.top_k.data_ptr(),
        options.top_p.data_ptr(),
        options.min_p.data_ptr(),
        options.seed.data_ptr(),
        options.position.data_ptr(),
        options.counter_2.data_ptr(),
        out.data_ptr(),
        _scratch(num_threads, vocab_size).data_ptr(),
        num_rows,
        vocab_size,
        num_threads,
    )


def _scratch(num_threads: int, vocab_size: int) -> Tensor:
    """Room for every token of a row as a candidate and as two numbers, for each thread of a team.

    The caller's own, since two may sample at once; kept for its next call.
    """
    size = num_threads * 2 * (vocab_size + _CANDIDATE_PADDING)
    held: Tensor | None = getattr(_of_thread, "scratch", None)
    if held is None or held.numel() < size:
        held = _of_thread.scratch = torch.empty(size, dtype=torch.int64)
    return held
