"""Adapters of tiny models, saved as PEFT saves them."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sluice.engine.adapters.modules import modules_of
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.text.json_files import Json


def module_sizes(model: Path) -> dict[str, tuple[int, int]]:
    """The shapes of a model's linear layers, by name."""
    config = parse_config(open_model_folder(model).config)
    return {
        name: (size, product.sizes.in_size)
        for product in modules_of(config)
        for name, size in zip(product.names, product.sizes.part_sizes, strict=True)
    }


def save_adapter(
    folder: Path, model: Path, *, rank: int = 4, seed: int = 0, std: float = 0.1, **config: object
) -> Path:
    """Write an adapter with random weights for all linear layers that it targets; return its folder."""
    stated: Json = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", **config}
    target, generator = stated["target_modules"], torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (out_size, in_size) in module_sizes(model).items():
        if isinstance(target, str) or name.rpartition(".")[2] in list(target):  # pyright: ignore[reportArgumentType]
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_size, generator=generator) * std
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_size, rank, generator=generator) * std
    write_adapter(folder, stated, tensors)
    return folder


def write_adapter(folder: Path, config: Json, tensors: Mapping[str, Tensor]) -> None:
    """Write the files of an adapter."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
