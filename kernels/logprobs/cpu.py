"""Log-probabilities on the CPU: native.c, or torch operators without the library."""

import torch
from torch import Tensor

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.scratch import row_scratch

SIGNATURE = ("sluice_logprobs", "iplppppppllli")


def logprobs_cpu(logits: Tensor, rows: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sluice.kernels.logprobs.logprobs`."""
    dtype, native = DTYPE_CODES.get(logits.dtype), native_function(*SIGNATURE)
    if dtype is None or native is None:
        return logprobs_torch(logits, rows, token_ids, count=count)
    (num_asked,), vocab_size, num_threads = rows.shape, logits.shape[1], torch.get_num_threads()
    chosen = torch.empty(num_asked, 1, dtype=torch.float32)
    values = torch.empty(num_asked, count, dtype=torch.float32)
    ids = torch.empty(num_asked, count, dtype=torch.int64)
    results, scratch = (chosen, values, ids), row_scratch(num_threads, vocab_size)
    inputs = (logits.data_ptr(), logits.stride(0), rows.data_ptr(), token_ids.data_ptr())
    outputs = [tensor.data_ptr() for tensor in (*results, scratch)]
    native(dtype, *inputs, *outputs, num_asked, count, vocab_size, num_threads)
    return results


def logprobs_torch(logits: Tensor, rows: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sluice.kernels.logprobs.logprobs` with torch's operators, on any device; equal logits in torch's order.

    On the CPU torch computes each row alone; on a GPU it chooses by the number of rows.
    """
    wide = logits.index_select(0, rows).float()  # [A, V]
    normaliser = wide.logsumexp(dim=-1, keepdim=True)  # [A, 1]
    top = (wide - normaliser).topk(count, dim=-1)
    return wide.gather(1, token_ids[:, None]) - normaliser, top.values, top.indices
