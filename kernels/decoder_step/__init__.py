"""A whole step of a decoder in one native call: the operations of one layer after another, without a gap between them.

What it means is engine/models/decoder.py's `forward`, operation by operation, which also does the work wherever this
cannot be had; its tokens are the same to the bit where both multiply by kernels/linear/native.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.gated_activation import Activation
from kernels.linear import Linear
from kernels.write_kv import HeadNorm

__all__ = ["StepInputs", "StepLayer", "StepModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayer:
    """One block: norms `[M]` bfloat16, products, and how far a token sees (0: everything before it)."""

    attention_norm: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    attention_output: Linear
    mlp_norm: Tensor
    gated: Linear
    down: Linear
    sliding_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A decoder: sizes and weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    activation: Activation
    embedding: Tensor
    """`[V, M]`."""

    layers: Sequence[StepLayer]
    final_norm: Tensor
    output: Linear
    cos_sin: Tensor
    """`[positions, R]` float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """T tokens of S sequences, as `paged_attention` and `write_kv` take them; `logit_rows` `[R]` ascends."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start_locs: Tensor
    context_lens: Tensor
    logit_rows: Tensor
