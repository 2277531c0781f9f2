# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Ids, positions and slots of a step's tokens in one Triton launch.

Reads nothing on the host, so CUDA graphs can capture it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan

BLOCK = 256
"""Tokens that a program writes at once."""

_PADDING = tl.constexpr(PADDING)


_VARYING = (
    "T",
    "S",
    "spare_slot",
    "out_stride",
    "table_stride_sequence",
    "window_stride_table",
    "window_stride_sequence",
)
"""Numbers that differ from step to step: a kernel is not compiled for each."""


@triton.jit(do_not_specialize=_VARYING)
def _prepare_batch_kernel(
    out_ptr,  # [3 + W, T] int64: ids, positions, slots by each table; rows are strided
    token_ids_ptr,  # [T] int32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    block_tables_ptr,  # [S, max_blocks] int32
    window_tables_ptr,  # [W, S, max_blocks] int32
    drawn_ids_ptr,  # [R] int64; unused unless HAS_DRAWN
    T,
    S,
    spare_slot,
    out_stride,
    table_stride_sequence,
    window_stride_table,
    window_stride_sequence,
    BLOCK_SIZE: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program per table and sequence, and one for the tokens after the last."""
    number = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_locs_ptr + sequence)
    is_tail = sequence == S
    end = tl.load(query_start_locs_ptr + sequence + 1, mask=sequence < S, other=0)
    end = tl.where(is_tail, T, end)
    context_len = tl.load(context_lens_ptr + sequence, mask=sequence < S, other=0)
    table_ptr = block_tables_ptr + sequence * table_stride_sequence
    if number > 0:
        table_ptr = window_tables_ptr + (number - 1) * window_stride_table + sequence * window_stride_sequence

    for first in range(start, end, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        inside = tokens < end
        known = inside & (tokens < tl.where(is_tail, 0, end))
        token_ids = tl.load(token_ids_ptr + tokens, mask=known, other=0).to(tl.int64)
        positions = tl.where(known, context_len - end + tokens, 0)
        is_padding = token_ids == _PADDING
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=known & (token_ids != _PADDING), other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = tl.where(is_padding, spare_slot, tl.where(known, slots, -1))
        if HAS_DRAWN:
            is_fed = (token_ids < 0) & (token_ids != _PADDING)
            drawn = tl.load(drawn_ids_ptr + (-1 - token_ids), mask=is_fed, other=0)
            token_ids = tl.where(is_fed, drawn, token_ids)
        outs = out_ptr + tokens.to(tl.int64)
        tl.store(outs, tl.maximum(token_ids, 0), mask=inside & (number == 0))
        tl.store(outs + out_stride, positions.to(tl.int64), mask=inside & (number == 0))
        tl.store(outs + (2 + number) * out_stride, slots, mask=inside)


def prepare_batch_triton(
    plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int
) -> PreparedTokens:
    """Launch the kernel; see `sluice.kernels.prepare_batch.prepare_batch`."""
    num_tokens, num_sequences = plan.token_ids.shape[0], plan.context_lens.shape[0]
    windowed = plan.window_tables
    num_windowed = 0 if windowed is None else windowed.shape[0]
    # Align each row to 16 bytes, as separate tensors are: Triton compiles another kernel for unaligned inputs.
    out = torch.empty(3 + num_windowed, num_tokens + num_tokens % 2, dtype=torch.int64, device=plan.token_ids.device)[
        :, :num_tokens
    ]
    if num_tokens > 0:
        _prepare_batch_kernel[(num_sequences + 1, 1 + num_windowed)](
            out,
            plan.token_ids,
            plan.query_start_locs,
            plan.context_lens,
            plan.block_tables,
            plan.block_tables if windowed is None else windowed,
            out if drawn_ids is None else drawn_ids,
            num_tokens,
            num_sequences,
            spare_slot,
            out.stride(0),
            plan.block_tables.stride(0),
            0 if windowed is None else windowed.stride(0),
            0 if windowed is None else windowed.stride(1),
            BLOCK_SIZE=block_size,
            HAS_DRAWN=drawn_ids is not None,
            BLOCK_T=BLOCK,
            num_warps=4,
        )
    return PreparedTokens(*out[:3], out[3:] if num_windowed else None)
