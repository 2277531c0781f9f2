"""Sizes of a model, as far as its kernels depend on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sluice.kernels.decoder_shape import DecoderShape, MixtureShape
from sluice.kernels.linear.words import WordForm


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes(DecoderShape):
    """A decoder and how it is loaded; only numbers and text, so that it can be sent to a process."""

    dtype: str
    """Name of the model's dtype in torch."""

    rotary_size: int
    block_size: int
    max_model_len: int
    sliding_windows: tuple[int, ...]
    """The different ones of the layers; 0 for none."""

    is_int8: bool
    """Whether the weights of products are in int8."""

    cache: Literal["model", "fp8"]
    """Dtype of keys and values."""

    adapter_rank: int = 0
    """The largest rank of its adapters; 0 without any."""

    word_forms: tuple[WordForm, ...] = ()
    """Of packed weights; empty if there are none."""

    is_deterministic: bool = False
    """Whether a row's result must not depend on its batch."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ModelSizes":  # Any: what JSON has made of each field
        """Return the sizes whose fields were written as JSON."""
        read: dict[str, Any] = {
            **fields,
            "sliding_windows": tuple(fields["sliding_windows"]),
            "word_forms": tuple(WordForm(*form) for form in fields["word_forms"]),
        }
        if (mixture := fields["mixture"]) is not None:
            of_experts: dict[str, Any] = {**mixture, "layers": tuple(mixture["layers"])}
            read["mixture"] = MixtureShape(**of_experts)
        return cls(**read)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        return getattr(torch, self.dtype)

    @property
    def products(self) -> set[tuple[int, int, bool]]:
        """Sizes (N, K) of the different weights of products, and whether they have a bias."""
        heads, hidden = self.num_heads * self.head_size, self.hidden_size
        dense = {self.intermediate_size, 0 if self.mixture is None else self.mixture.shared_size} - {0}
        return {
            (heads + 2 * self.num_kv_heads * self.head_size, hidden, self.has_qkv_bias),
            (hidden, heads, self.has_output_bias),
            (self.vocab_size, hidden, False),
            *((2 * inner, hidden, self.has_mlp_bias) for inner in dense),
            *((hidden, inner, self.has_mlp_bias) for inner in dense),
        }
