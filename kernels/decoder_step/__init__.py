"""A whole step of a decoder in one native call: the operations of one layer after another, without a gap between them.

What it means is engine/models/decoder.py's `forward`, operation by operation, which also does the work wherever this
cannot be had; its tokens are the same to the bit where both multiply by kernels/linear/native.py. The weights' types
are here since both compute with them, and kernels know nothing of the engine.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.gated_activation import Activation
from kernels.linear import Linear
from kernels.write_kv import HeadNorm

__all__ = ["DecoderWeights", "LayerWeights", "StepInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block's weights, ready to be used."""

    attention_norm: Tensor
    """`[M]`."""

    qkv: Linear
    """M to (H + 2 * G) * D."""

    head_norm: HeadNorm | None
    """None where heads are not normalised."""

    cos_sin: Tensor
    """`[positions, R]` float32."""

    attention_output: Linear
    """H * D to M."""

    attention_post_norm: Tensor | None
    """`[M]`, of what attention computed, before it is added to the residual; None where it is added as it is."""

    mlp_norm: Tensor
    gated: Linear
    """M to I, through the gate."""

    down: Linear
    mlp_post_norm: Tensor | None
    """As `attention_post_norm`, of the feed-forward; both or none."""

    sliding_window: int
    """How far a token sees, itself included; 0: everything before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder's sizes and weights, ready to be used."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    norm_offset: float
    """What is added to the weights of norms; those of heads have their own."""

    activation: Activation
    attention_scale: float
    """Factor on the scores of attention."""

    attention_soft_cap: float
    """0: none."""

    final_soft_cap: float
    """Of logits. 0: none."""

    embedding_scale: float
    """In the dtype of the model."""

    embedding: Tensor
    """`[V, M]`."""

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Linear
    """M to V."""


class StepInputs(NamedTuple):
    """T tokens of S sequences, as `paged_attention` and `write_kv` take them; `logit_rows` `[R]` ascends."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start_locs: Tensor
    context_lens: Tensor
    logit_rows: Tensor
