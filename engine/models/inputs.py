"""`BatchTensors`: the model's inputs of one step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """One step: T tokens of S sequences, R of which sample a token. The next layout may reuse the memory."""

    input_ids: Tensor
    """`[T]` int64."""

    positions: Tensor
    """`[T]` int64."""

    slot_mapping: Tensor
    """`[T]` int64: slot that each token's key and value are written to."""

    block_tables: Tensor
    """`[S, max_blocks]` int32."""

    query_start_locs: Tensor
    """`[S + 1]` int32."""

    context_lens: Tensor
    """`[S]` int32: context lengths including this step's tokens."""

    logit_rows: Tensor
    """`[R]` int64: rows of T whose logits are needed, in batch order; those of padding last."""

    max_query_len: int
    max_context_len: int
    window_slots: Tensor | None = None
    """`[W, T]` int64: as `slot_mapping`, for each of the W window groups; None if the model has none."""

    window_tables: Tensor | None = None
    """`[W, S, max_blocks]` int32: as `block_tables`, for each window group."""
