"""Matrices in the published formats, written from their descriptions, and folders of tiny models with them.

Those of compressed-tensors are written by its own package.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, in each place of a word."""


@dataclass(frozen=True, slots=True)
class Written:
    """A matrix in a format: its tensors by their last names, and the numbers that they stand for."""

    tensors: Mapping[str, Tensor]
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format with its settings, as a config states them."""

    config: Mapping[str, object]
    write: Callable[[Tensor], Written]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix `[N, K]` as codes."""

    codes: Tensor
    """`[N, K]` from 0 on."""

    scales: Tensor
    """`[N, groups]`."""

    zeros: Tensor
    """`[N, groups]`: the codes of zero."""

    group_of: Tensor
    """`[K]`."""

    @property
    def numbers(self) -> Tensor:
        """What the codes stand for, in float32."""
        return (self.codes - self.zeros[:, self.group_of]) * self.scales.float()[:, self.group_of]


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool, group_of: Tensor | None = None) -> Rounded:
    """Round to the nearest codes, of groups of `group` elements of K (-1: all)."""
    group = weight.shape[1] if group == -1 else group
    group_of = torch.arange(weight.shape[1]) // group if group_of is None else group_of
    most = 2**bits - 1
    scales, zeros = [], []
    for each in range(int(group_of.max()) + 1):
        part = weight[:, group_of == each]
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).clamp(min=1e-4).half()
        scales.append(scale)
        zeros.append(
            torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scale.float()).round().clamp(0, most)
        )
    scale_of, zero_of = torch.stack(scales, dim=1), torch.stack(zeros, dim=1).long()
    codes = (weight / scale_of.float()[:, group_of]).round() + zero_of[:, group_of]
    return Rounded(codes.clamp(0, most).long(), scale_of, zero_of, group_of)


def words(codes: Tensor, bits: int, *, along: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes `[., .]` in words of 32 bits along a dimension: place i of a word has its code number `order[i]`."""
    per_word = 32 // bits
    codes = codes if along == 1 else codes.T
    packed = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        packed |= codes[:, number::per_word] << (bits * place)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return (packed if along == 1 else packed.T).contiguous()


def gptq(
    bits: int = 4, group: int = 32, *, version: int = 1, symmetric: bool = False, orders: Iterable[int] = ()
) -> Scheme:
    """GPTQ. Version 1 stores zeros less one; `orders`: seeds by which each matrix has its groups spread over K."""
    seeds = iter(orders)

    def write(weight: Tensor) -> Written:
        spread, seed = None, next(seeds, None)
        if seed is not None:
            shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
            spread = (torch.arange(weight.shape[1]) // group)[shuffled]
        codes = rounded(weight, bits, group, symmetric=symmetric, group_of=spread)
        zeros = words(codes.zeros.T, bits, along=1)
        tensors = {
            "qweight": words(codes.codes.T, bits, along=0),
            "qzeros": zeros - (0x11111111 if bits == 4 else 0x01010101) if version == 1 else zeros,
            "scales": codes.scales.T.contiguous(),
            "g_idx": codes.group_of.int(),
        }
        return Written(tensors, codes.numbers)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": orders != (), "sym": symmetric}
    return Scheme(config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write)


def awq(group: int = 32) -> Scheme:
    """AWQ, version gemm."""

    def write(weight: Tensor) -> Written:
        codes = rounded(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": words(codes.codes.T, 4, along=1, order=AWQ_ORDER),
            "qzeros": words(codes.zeros.T, 4, along=1, order=AWQ_ORDER),
            "scales": codes.scales.T.contiguous(),
        }
        return Written(tensors, codes.numbers)

    return Scheme({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, write)


def fp8(block: int = 128) -> Scheme:
    """`quant_method` fp8: a scale for each block."""

    def write(weight: Tensor) -> Written:
        rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
        scales = torch.empty(rows, columns)
        narrow, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for row in range(rows):
            for column in range(columns):
                part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scales[row, column] = weight[part].abs().max() / 448
                narrow[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
                numbers[part] = narrow[part].float() * scales[row, column]
        return Written({"weight": narrow, "weight_scale_inv": scales}, numbers)

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    return Scheme({**config, "activation_scheme": "dynamic"}, write)


def compressed(
    stored: str,
    weights: Mapping[str, object],
    *,
    activations: Mapping[str, object] | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Scheme:
    """A format of compressed-tensors, by its own package."""
    quantization, utils, compressors = (
        pytest.importorskip(f"compressed_tensors.{name}")
        for name in ("quantization", "quantization.utils", "compressors")
    )
    scheme = quantization.QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(stored)

    def write(weight: Tensor) -> Written:
        parts = _parts(weight, scheme.weights)
        scales, zeros = utils.calculate_qparams(parts.amin(dim=-1), parts.amax(dim=-1), scheme.weights)
        scales = scales.to(scale_dtype).float()
        state = {"weight": weight, "weight_scale": scales}
        if not scheme.weights.symmetric:
            state["weight_zero_point"] = zeros.round().to(torch.int8)
        tensors = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(tensors), scheme)["weight"]
        tensors["weight_scale"] = tensors["weight_scale"].to(scale_dtype)
        return Written({name: tensor.contiguous() for name, tensor in tensors.items()}, numbers.float())

    groups = {"group_0": scheme.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, "ignore": ["lm_head"]}
    return Scheme({**config, "quantization_status": "compressed"}, write)


def _parts(weight: Tensor, settings: Any) -> Tensor:
    """The elements that share a scale, in the last dimension."""
    match settings.strategy:
        case "tensor":
            return weight.reshape(1, -1)
        case "channel":
            return weight[:, None]
        case "group":
            return weight.unflatten(1, (-1, settings.group_size))
        case "block":
            height, width = settings.block_structure
            size = [-(-n // each) * each for n, each in zip(weight.shape, (height, width), strict=True)]
            padded = torch.nn.functional.pad(weight, (0, size[1] - weight.shape[1], 0, size[0] - weight.shape[0]))
            return padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)
        case _:
            raise AssertionError(settings.strategy)


def write_folders(plain: Path, scheme: Scheme, out: Path) -> tuple[Path, Path]:
    """Quantize the projections of a folder; return the quantized folder, and one of their numbers in float32."""
    quantized, numbers = out / "quantized", out / "numbers"
    shutil.copytree(plain, quantized)
    shutil.copytree(plain, numbers)
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        exact[name] = tensor
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        written = scheme.write(tensor.float())
        exact[name] = written.numbers
        stored |= {f"{name.removesuffix('.weight')}.{last}": each for last, each in written.tensors.items()}
    save_file(stored, quantized / "model.safetensors")
    save_file(exact, numbers / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": dict(scheme.config)}))
    return quantized, numbers
