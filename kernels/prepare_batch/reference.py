"""Definition of preparing a batch: a loop over sequences and their tokens."""

import torch
from torch import Tensor

from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan


def prepare_batch_reference(
    plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int
) -> PreparedTokens:
    """Compute ids, positions and slots of all tokens, one after another."""
    token_ids: list[int] = plan.token_ids.tolist()
    drawn: list[int] = [] if drawn_ids is None else drawn_ids.tolist()
    starts: list[int] = plan.query_start_locs.tolist()
    tables = [plan.block_tables, *([] if plan.window_tables is None else plan.window_tables)]
    rows: list[tuple[int, ...]] = []
    for s, context_len in enumerate(plan.context_lens.tolist()):
        for token in range(starts[s], starts[s + 1]):
            position = context_len - starts[s + 1] + token
            if token_ids[token] == PADDING:
                rows.append((0, position, *[spare_slot] * len(tables)))
                continue
            token_id = token_ids[token] if token_ids[token] >= 0 else max(drawn[-1 - token_ids[token]], 0)
            blocks = [int(table[s, position // block_size]) for table in tables]
            rows.append((token_id, position, *[block * block_size + position % block_size for block in blocks]))
    rows += [(0, 0, *[-1] * len(tables))] * (len(token_ids) - len(rows))
    table = torch.tensor(rows, dtype=torch.int64, device=plan.token_ids.device).view(-1, 2 + len(tables))
    columns = table.T.contiguous()
    ids, positions, slots = columns[:3]
    return PreparedTokens(ids, positions, slots, None if plan.window_tables is None else columns[3:])
