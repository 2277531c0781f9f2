"""The device's own limits: section "roof" of `benchmarks gpu`.

Other sections state bytes and operations per second as fractions of the fastest copy and of a large product here.
"""

import platform
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

import torch
import triton
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Call, Scale

SKINNY_SHAPES = {
    "0.6B gate_up 6144 x 1024": (6144, 1024),
    "1B qkv 3072 x 2048": (3072, 2048),
    "1B gate_up 16384 x 2048": (16384, 2048),
    "1B down 2048 x 8192": (2048, 8192),
    "8B qkv 6144 x 4096": (6144, 4096),
    "8B gate_up 28672 x 4096": (28672, 4096),
    "8B down 4096 x 14336": (4096, 14336),
}
"""Products of a decode step, outputs by inputs: whether the library reads their weights at the memory's rate."""


def groups(scale: Scale) -> Groups:
    """Return the software and the device, its rates, and the skinny products of decode steps."""
    return {name: partial(lines, scale) for name, lines in (
        ("environment", environment), ("rates", rates), ("products", products)
    )}  # fmt: skip


def environment(scale: Scale) -> Iterator[Line]:
    """Report software and device."""
    versions: dict[str, float | str] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "transformers": version("transformers"),
        "cuda": str(torch.version.cuda),
    }
    yield Line("software", versions)
    if scale.is_toy:
        yield Line("device", {"name": "CPU, kernels interpreted"})
        return
    card = torch.cuda.get_device_properties(scale.device)
    figures: dict[str, float | str] = {
        "name": card.name,
        "processors": card.multi_processor_count,
        "GiB": card.total_memory / 2**30,
        "capability": f"{card.major}.{card.minor}",
    }
    yield Line("device", figures)


def rates(scale: Scale) -> Iterator[Line]:
    """Measure ways to copy, a large read, and a square product."""
    copies = scale.copies()
    scale.known_rates["copy"] = max(copies.values())
    yield Line("copy", {"GB/s": scale.copy_rate() / 1e9, **{f"{way} GB/s": rate / 1e9 for way, rate in copies.items()}})
    source = torch.randn(2**13 if scale.is_toy else 2**31, device=scale.device, dtype=scale.dtype)
    us = scale.timer.device_us(lambda: torch.amax(source, dim=0))
    yield Line("read", scale.rates(us, num_bytes=source.nbytes))
    yield Line("product, square", {"TFLOP/s": scale.product_rate() / 1e12})


def products(scale: Scale) -> Iterator[Line]:
    """Measure the library's products of decode steps, over several weights in turn as in the layers of a model."""
    for name, (out_size, in_size) in ({"toy": (64, 48)} if scale.is_toy else SKINNY_SHAPES).items():
        weight_bytes = scale.dtype.itemsize * out_size * in_size
        for rows in scale.pick([1, 8, 32, 64, 128, 256], [2]):
            x = torch.randn(rows, in_size, device=scale.device).to(scale.dtype)

            def make(x: Tensor = x, out_size: int = out_size) -> Call:
                weight = torch.randn(out_size, x.shape[1], device=x.device).to(x.dtype)
                return lambda: F.linear(x, weight)

            us = scale.in_turn_us(make, weight_bytes)
            num_bytes = weight_bytes + scale.dtype.itemsize * rows * (out_size + in_size)
            yield Line(f"product, {name}, {rows} rows", scale.rates(us, num_bytes=num_bytes))
