"""Sampling on the CPU: native.c, or torch without the library."""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from sluice.kernels.checks import check, check_rows
from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.sample import SampleOptions, sample
from sluice.kernels.sample.reference import sample_reference
from sluice.kernels.scratch import row_scratch

SIGNATURE = ("sluice_sample", "iplppppppppplli")


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
        *_pointers(options),
        out.data_ptr(),
        row_scratch(num_threads, vocab_size).data_ptr(),
        num_rows,
        vocab_size,
        num_threads,
    )


def draws_with_cpu(options: SampleOptions) -> Callable[[Tensor], Tensor] | None:
    """Prepare sampling as `sluice.kernels.sample.draws_with`; None without the library.

    Between two steps the processor's caches hold only weights, and each tensor access costs microseconds.
    """
    native, num_rows = native_function(*SIGNATURE), options.temperature.shape[0]
    if native is None:
        return None
    pointers = _pointers(options)
    results = cycle([(memory, memory.data_ptr()) for memory in torch.empty(2, num_rows, dtype=torch.int64)])

    def draw(logits: Tensor) -> Tensor:
        dtype, (rows, vocab_size), num_threads = DTYPE_CODES.get(logits.dtype), logits.shape, torch.get_num_threads()
        if dtype is None:
            return sample(logits, options)
        check(rows == num_rows, "logits must be [{}, V], got {}", num_rows, logits.shape)
        check_rows("logits", logits)
        (result, at), scratch = next(results), row_scratch(num_threads, vocab_size).data_ptr()
        native(dtype, logits.data_ptr(), logits.stride(0), *pointers, at, scratch, num_rows, vocab_size, num_threads)
        return result

    return draw


def _pointers(options: SampleOptions) -> list[int]:
    """Return the pointers of `options` in native order.

    Raises:
        ValueError: a tensor has the wrong shape or dtype.
    """
    floats = (options.temperature, options.top_p, options.min_p)
    check(all(x.dtype == torch.float32 for x in floats), "temperature, top_p and min_p must be float32")
    check(options.top_k.dtype == options.position.dtype == torch.int32, "top_k and position must be int32")
    check(options.seed.dtype == options.counter_2.dtype == torch.int64, "seed and counter_2 must be int64")
    parts = (options.temperature, options.top_k, options.top_p, options.min_p, options.seed, options.position)
    parts = (*parts, options.counter_2)
    check(all(x.shape == options.temperature.shape and x.is_contiguous() for x in parts), "options must be [S]")
    return [x.data_ptr() for x in parts]
