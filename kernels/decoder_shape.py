"""What the kernels of a decoder depend on, besides its weights."""

from dataclasses import dataclass

from sluice.kernels.gated_activation import Activation
from sluice.kernels.rms_norm import NormOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """Sizes and switches of the feed-forwards that are mixtures of experts."""

    layers: tuple[bool, ...]
    """Whether each layer has such a feed-forward."""

    num_experts: int
    num_chosen: int
    """Experts of each row."""

    intermediate_size: int
    """Of an expert."""

    shared_size: int = 0
    """Intermediate size of an expert that computes every row; 0 if there is none."""

    is_normalised: bool = True
    """Whether the shares of the chosen experts sum to one. Otherwise those of all experts do."""

    has_bias: bool = False
    """Whether the router and the experts' products have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes and switches of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of dense feed-forwards; 0 if all layers have mixtures."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    """Added to the mean square by norms of the residual and of what is added to it."""

    head_norm_eps: float
    norm_offset: float
    """Added to the weights of norms, including those of heads."""

    is_norm_centered: bool
    """Whether norms subtract the mean first: layer norms without a bias."""

    has_pre_norms: bool
    """Whether the residual is normalised before a block reads it."""

    has_post_norms: bool
    """Whether a block's output is normalised before it is added to the residual."""

    is_parallel: bool
    """Whether the feed-forward reads what attention has read, not the residual with the attention's output."""

    activation: Activation
    attention_scale: float
    """Factor on the attention scores."""

    attention_soft_cap: float
    """Soft cap (tanh) of attention scores. 0: none."""

    final_soft_cap: float
    """Soft cap of logits. 0: none."""

    logit_scale: float
    """Factor on logits, before their soft cap."""

    has_sinks: bool = False
    """Whether attention has a sink for each head."""

    has_qkv_bias: bool
    has_output_bias: bool
    """Whether the attention's output projection has a bias."""

    has_mlp_bias: bool
    has_head_norm: bool
    """Whether query and key heads are RMS-normalised before the rotation."""

    has_row_norm: bool
    """Whether all query heads, and all key heads, are RMS-normalised together before the rotation."""

    mixture: MixtureShape | None = None
    """Of the layers that have experts."""

    @property
    def norm_options(self) -> NormOptions:
        """How norms of the residual, and of what is added to it, are computed."""
        return {"eps": self.norm_eps, "weight_offset": self.norm_offset, "is_centered": self.is_norm_centered}
