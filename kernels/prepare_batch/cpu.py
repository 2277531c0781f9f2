"""Ids, positions and slots of a step's tokens on the CPU, by arithmetic over whole arrays."""

import numpy as np
import torch
from torch import Tensor

from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan


def prepare_batch_cpu(plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int) -> PreparedTokens:
    """Compute the tokens; see `sluice.kernels.prepare_batch.prepare_batch`."""
    token_ids, starts = plan.token_ids.numpy(), plan.query_start_locs.numpy()
    num_tokens = int(starts[-1])
    before = plan.context_lens.numpy() - starts[1:]  # [S]: a token's position minus its index
    sequences = np.repeat(np.arange(len(before)), starts[1:] - starts[:-1])  # [T]
    of_sequences = np.arange(num_tokens) + before[sequences]
    all_tables = [plan.block_tables.numpy()[None]]
    if plan.window_tables is not None:
        all_tables.append(plan.window_tables.numpy())
    blocks = [tables[:, sequences, of_sequences // block_size].astype(np.int64, order="C") for tables in all_tables]
    all_slots = [of * block_size + of_sequences % block_size for of in blocks]  # [1, T], [W, T]
    input_ids, positions = token_ids.astype(np.int64), of_sequences
    if num_tokens < len(token_ids):
        rest = ((0, 0), (0, len(token_ids) - num_tokens))
        input_ids[num_tokens:] = 0
        positions = np.pad(positions, rest[1])
        all_slots = [np.pad(slots, rest, constant_values=-1) for slots in all_slots]
    if input_ids.size > 0 and input_ids.min() < 0:
        is_padding = input_ids == PADDING
        for slots in all_slots:
            slots[:, is_padding] = spare_slot
        input_ids[is_padding] = 0
        if drawn_ids is not None:
            fed = input_ids < 0
            input_ids[fed] = np.maximum(drawn_ids.numpy()[-1 - input_ids[fed]], 0)
    return PreparedTokens(
        torch.from_numpy(input_ids),
        torch.from_numpy(positions),
        torch.from_numpy(all_slots[0][0]),
        None if plan.window_tables is None else torch.from_numpy(all_slots[1]),
    )


def prepare_batch_torch(
    plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int
) -> PreparedTokens:
    """Compute `prepare_batch_cpu` with torch operators, on any device, without reading a tensor on the host."""
    num_sequences, num_tokens = plan.context_lens.shape[0], plan.token_ids.shape[0]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=plan.token_ids.device)
    if num_sequences == 0:
        nothing = torch.zeros_like(tokens).long()
        windowed = None if plan.window_tables is None else (nothing - 1).expand(plan.window_tables.shape[0], -1)
        return PreparedTokens(nothing, nothing.clone(), nothing - 1, windowed)
    ends = plan.query_start_locs[1:]
    sequences = torch.searchsorted(ends, tokens, right=True)  # [T]; S after the last sequence's
    is_tail = sequences == num_sequences
    sequences = sequences.clamp(max=num_sequences - 1)
    of_sequences = plan.context_lens[sequences] - ends[sequences] + tokens
    positions = torch.where(is_tail, 0, of_sequences).long()
    is_padding = ~is_tail & (plan.token_ids == PADDING)

    def slots_by(tables: Tensor) -> Tensor:
        slots = tables[..., sequences, positions // block_size].long() * block_size + positions % block_size
        return torch.where(is_tail, -1, torch.where(is_padding, spare_slot, slots)).contiguous()

    input_ids = plan.token_ids.long()
    if drawn_ids is not None:
        drawn = drawn_ids[(-1 - input_ids).clamp(0, drawn_ids.shape[0] - 1)]
        input_ids = torch.where(input_ids < 0, drawn, input_ids)
    input_ids = torch.where(is_tail | is_padding, 0, input_ids.clamp(min=0))
    windowed = None if plan.window_tables is None else slots_by(plan.window_tables)
    return PreparedTokens(input_ids, positions, slots_by(plan.block_tables), windowed)
