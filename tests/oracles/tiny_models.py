"""Small random models of every family and rope type, made by transformers' own classes and saved as folders.

transformers' classes of models take seconds to import, so only a process that makes one does.
"""

# transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 97

SIZES: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A family and what its config says beyond the sizes."""

    family: str
    config: Mapping[str, object] = field(default_factory=dict[str, object])

    def build(self) -> "PreTrainedModel":
        """The model in float32, with the same random weights each time."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(7)
        config = AutoConfig.for_model(self.family, **(SIZES | dict(self.config)))
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
        # Norm weights and biases that are not their neutral values, or a missing one would not show.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith(("bias", "sinks")):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
        """Write the folder; returns the model."""
        model = self.build()
        torch.nn.Module.to(model, dtype)
        model.save_pretrained(folder)
        return model


def _rope(rope_type: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **parameters}}


# Small caps and windows, so that scores, logits and contexts reach them; a scale of attention not of a head's size.
GEMMA2: dict[str, object] = {
    "head_dim": 16,
    "sliding_window": 11,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3: dict[str, object] = {
    "head_dim": 16,
    "sliding_window": 11,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
    },
}

GRANITE: dict[str, object] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}
OLMO3: dict[str, object] = {
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
        },
    },
}
EXAONE4: dict[str, object] = {"sliding_window": 11, "sliding_window_pattern": 2}
COHERE: dict[str, object] = {"logit_scale": 0.3, "tie_word_embeddings": False, "layer_norm_eps": 1e-3}
COHERE2: dict[str, object] = {**COHERE, "sliding_window": 11, "sliding_window_pattern": 2}
# Its longest sequences are longer than those of the pretraining; a part of a head is not rotated.
PHI3_LONG: dict[str, object] = {
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.3],
        "long_factor": [1.0, 3.0],
    },
}
MIXTRAL: dict[str, object] = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2_MOE: dict[str, object] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 56,
}
QWEN3_MOE: dict[str, object] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
# Scores, so that some are beyond the cut of the activation.
GPT_OSS: dict[str, object] = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "initializer_range": 0.3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 40,
    },
}
_LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama-tied": TinyModel("llama", {"tie_word_embeddings": True}),
    "llama-biases": TinyModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-size": TinyModel("llama", {"head_dim": 16}),
    "llama-one-group": TinyModel("llama", {"num_key_value_heads": 6}),
    "llama-linear": TinyModel("llama", _rope("linear", factor=3.0)),
    "llama-dynamic": TinyModel("llama", _rope("dynamic", factor=3.0)),
    "llama-yarn": TinyModel("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=40)),
    "llama-yarn-mscale": TinyModel(
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=40,
            mscale=0.8,
            mscale_all_dim=0.4,
            beta_fast=16,
            truncate=False,
        ),
    ),
    "llama-longrope": TinyModel(
        "llama", _rope("longrope", factor=4.0, original_max_position_embeddings=40, **_LONG_FACTORS)
    ),
    "llama-llama3": TinyModel(
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=40),
    ),
    "mistral": TinyModel("mistral", {"sliding_window": None}),
    "mistral-window": TinyModel("mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2": TinyModel("qwen2"),
    "qwen2-window": TinyModel("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": TinyModel("qwen3", {"head_dim": 16}),
    "qwen3-tied": TinyModel("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": TinyModel("mixtral", MIXTRAL),
    "mixtral-window": TinyModel("mixtral", {**MIXTRAL, "sliding_window": 11, "head_dim": 16}),
    "qwen2_moe": TinyModel("qwen2_moe", QWEN2_MOE),
    "qwen2_moe-window": TinyModel(
        "qwen2_moe",
        {
            **QWEN2_MOE,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen3_moe": TinyModel("qwen3_moe", QWEN3_MOE),
    "qwen3_moe-window": TinyModel("qwen3_moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9}),
    "qwen3_moe-dense": TinyModel("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gemma2": TinyModel("gemma2", GEMMA2),
    "gemma2-no-caps": TinyModel(
        "gemma2",
        GEMMA2
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "gemma3": TinyModel("gemma3_text", GEMMA3),
    "gemma3-untied": TinyModel(
        "gemma3_text",
        GEMMA3
        | {
            "tie_word_embeddings": False,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 3.0,
            "rope_parameters": None,
        },
    ),
    "ministral": TinyModel(
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "seed_oss": TinyModel("seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": TinyModel("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "smollm3-window": TinyModel(
        "smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}
    ),
    "granite": TinyModel("granite", GRANITE),
    "granitemoe": TinyModel("granitemoe", {**GRANITE, **MIXTRAL}),
    "gpt_oss": TinyModel("gpt_oss", GPT_OSS),
    "phi3": TinyModel("phi3", {"sliding_window": 11}),
    "phi3-longrope": TinyModel("phi3", PHI3_LONG),
    "olmo2": TinyModel("olmo2"),
    "olmo2-biases": TinyModel("olmo2", {"attention_bias": True}),
    "olmo3": TinyModel("olmo3", OLMO3),
    "exaone4": TinyModel("exaone4", EXAONE4),
    "exaone4-no-window": TinyModel(
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
    ),
    "cohere": TinyModel("cohere", COHERE),
    "cohere2": TinyModel("cohere2", COHERE2),
    "glm": TinyModel("glm", {"head_dim": 16}),
    "glm4": TinyModel("glm4", {"head_dim": 16, "attention_bias": False}),
    "gemma": TinyModel("gemma", {"head_dim": 16}),
    "gemma-untied": TinyModel("gemma", {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
}


def save_text_and_images(folder: Path, prefix: str) -> "PreTrainedModel":
    """Write a Gemma 3 of text and images whose tensors of the text part begin with `prefix`; returns the model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(7)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=SIZES | GEMMA3,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = cast("PreTrainedModel", AutoModelForImageTextToText.from_config(config, dtype=torch.float32)).eval()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name.replace("language_model.model.", prefix): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    return model
