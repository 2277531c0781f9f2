"""What the kernels of a decoder depend on, besides its weights."""

from dataclasses import dataclass

from sluice.kernels.gated_activation import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes and switches of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    norm_offset: float
    """Added to the weights of norms, including those of heads."""

    has_post_norms: bool
    """Whether a block's output is normalised before it is added to the residual."""

    activation: Activation
    attention_scale: float
    """Factor on the attention scores."""

    attention_soft_cap: float
    """Soft cap (tanh) of attention scores. 0: none."""

    final_soft_cap: float
    """Soft cap of logits. 0: none."""

    has_qkv_bias: bool
    has_output_bias: bool
    """Whether the attention's output projection has a bias."""

    has_mlp_bias: bool
    has_head_norm: bool
    """Whether query and key heads are RMS-normalised before the rotation."""
