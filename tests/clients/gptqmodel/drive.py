"""GPTQModel: random matrices that it packs, and the numbers that it reads from them.

drive.py FOLDER    writes a file of tensors for each case; prints its name and its quantization_config
"""

import itertools
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

with redirect_stdout(sys.stderr):  # the package prints a banner
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear, dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

ROWS, COLUMNS = 128, 256


def scales_and_zeros(weight: torch.Tensor, groups: torch.Tensor, bits: int, *, symmetric: bool) -> list[torch.Tensor]:
    """Return the scale and the zero of each row and group, `[N, groups]`."""
    most, pairs = 2**bits - 1, []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).half().float()
        zero = torch.full_like(scale, (most + 1) // 2) if symmetric else (-low / scale).round().clamp(0, most)
        pairs.append((scale, zero))
    return [torch.stack(each, dim=1) for each in zip(*pairs, strict=True)]


def gptq(bits: int, size: int, symmetric: bool, ordered: bool, version: int) -> tuple[dict, dict]:
    """Return a packed matrix with its numbers, and the config that states its form."""
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    groups = torch.arange(COLUMNS) // size
    groups = groups[torch.randperm(COLUMNS)] if ordered else groups
    packed = TorchLinear(
        bits=bits, group_size=size, sym=symmetric, desc_act=ordered, in_features=COLUMNS, out_features=ROWS
    )
    pair = scales_and_zeros(linear.weight.data, groups, bits, symmetric=symmetric)
    packed.pack_original(linear, *pair, groups.int())
    numbers = packed.dequantize_weight().T
    if version == 1:
        convert_gptq_v2_to_v1_format_module(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "sym": symmetric}
    tensors = {name: getattr(packed, name).data for name in ("qweight", "qzeros", "scales", "g_idx")}
    return {**tensors, "numbers": numbers}, config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}


def awq(size: int) -> tuple[dict, dict]:
    """Return `gptq` of AWQ's format."""
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    packed = AwqTorchLinear(bits=4, group_size=size, sym=False, desc_act=False, in_features=COLUMNS, out_features=ROWS)
    groups = torch.arange(COLUMNS) // size
    packed.pack(linear, *scales_and_zeros(linear.weight.data, groups, 4, symmetric=False))
    tensors = {name: getattr(packed, name).data for name in ("qweight", "qzeros", "scales")}
    numbers = dequantize_gemm(**tensors, bits=4, group_size=size).T
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return {**tensors, "numbers": numbers}, config


def main(folder: Path) -> None:
    """Write all cases."""
    torch.manual_seed(0)
    with redirect_stdout(sys.stderr):
        cases = {
            f"gptq-{bits}-{size}-{symmetric}-{ordered}-{version}": gptq(bits, size, symmetric, ordered, version)
            for bits, size, symmetric, ordered, version in itertools.product(
                (4, 8), (32, 128), (True, False), (False, True), (1, 2)
            )
        } | {f"awq-{size}": awq(size) for size in (32, 128)}
    for name, (tensors, config) in cases.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        print(json.dumps({"name": name, "config": config}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]))
