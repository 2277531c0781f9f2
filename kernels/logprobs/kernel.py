# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Log-probabilities on a GPU: the normaliser of a row in one Triton program, the likeliest tokens by torch's `topk`.

The tiles of a row are summed in one order, and equal logits are ordered by id: torch does either in an order that it
chooses by the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_ID_BITS = 32


@triton.jit
def _logsumexp_kernel(
    out_ptr,  # [A] float32
    logits_ptr,  # [A, V] float32
    stride_row,
    V,
    BLOCK: tl.constexpr,
):
    """One program per row: log(sum(exp(logits)))."""
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_row
    offsets = tl.arange(0, BLOCK)  # [BLOCK]
    maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        maxima = tl.maximum(maxima, tl.load(row_ptr + start + offsets, mask=start + offsets < V, other=float("-inf")))
    largest = tl.max(maxima, axis=0)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + offsets, mask=start + offsets < V, other=float("-inf"))
        sums += tl.exp(x - largest)
    tl.store(out_ptr + tl.program_id(0), largest + tl.log(tl.sum(sums, axis=0)))


def logprobs_triton(logits: Tensor, rows: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; see `sluice.kernels.logprobs.logprobs`."""
    wide = logits.index_select(0, rows).float()  # [A, V]
    num_rows, vocab_size = wide.shape
    normaliser = torch.empty(num_rows, 1, dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        _logsumexp_kernel[(num_rows,)](
            normaliser, wide, wide.stride(0), vocab_size, BLOCK=block, num_warps=max(1, block // 512)
        )
    ids = _likeliest(wide, count)
    return wide.gather(1, token_ids[:, None]) - normaliser, wide.gather(1, ids) - normaliser, ids


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the ids of each row's largest logits, `[A, count]`, the lowest first among equals.

    A logit and its id are one integer: the float's bits, in the order of its values, and the reversed id below them.
    """
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << _ID_BITS) | (last - torch.arange(last + 1, device=logits.device))
    return last - (keys.topk(count, dim=-1).values & (2**_ID_BITS - 1))
