"""A whole decode step of random weights: section "step" of `benchmarks gpu`."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch

from benchmarks.gpu.models import (
    cache_bytes_per_token,
    decode_tensors,
    random_decoder,
    triton_in_place_of_cpu,
    weight_bytes,
)
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Call, Scale
from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.decoder import Decoder
from sluice.kernels.decoder_step import StepInputs
from sluice.kernels.sample.kernel import sample_triton
from tests.oracles.kernel_cases import make_options

BLOCK_SIZE = 16


def groups(scale: Scale) -> Groups:
    """Return the decode steps of each model: launched by Python, in a CUDA graph, and the device's bound."""
    batches = {"toy": [2]} if scale.is_toy else {"8B": [1, 32, 256], "0.6B": [1, 8, 32, 128], "1B": [1, 8, 32, 128]}
    return {shape: partial(_steps_of, scale, shape, batch) for shape, batch in batches.items()}


def _steps_of(scale: Scale, shape: str, batches: Sequence[int]) -> Iterator[Line]:
    max_model_len = 128 if scale.is_toy else 8192
    with triton_in_place_of_cpu() if scale.is_toy else nullcontext():
        decoder = random_decoder(shape, scale.device, max_model_len=max_model_len, max_tokens=512)
        for batch, context_len in product(batches, scale.pick([2048, 512, 8192], [40])):
            if batch * context_len <= 600_000:
                yield _step(scale, shape, decoder, batch, context_len)


def least_ms(scale: Scale, config: DecoderConfig, batch: int, context_len: int) -> float:
    """Return the lower bound of a decode step, in milliseconds.

    Its products at the rate of the memory or of a large product, whichever is slower for these rows; then keys and
    values at the memory's rate.
    """
    element_bytes = scale.dtype.itemsize
    num_weight_bytes = weight_bytes(config, element_bytes)
    num_flops = 2 * batch * num_weight_bytes // element_bytes
    products_s = max(num_weight_bytes / scale.copy_rate(), num_flops / scale.product_rate())
    cache_s = batch * context_len * cache_bytes_per_token(config, element_bytes) / scale.copy_rate()
    return 1e3 * (products_s + cache_s)


def _step(scale: Scale, shape: str, decoder: Decoder, batch: int, context_len: int) -> Line:
    config = decoder.config
    step = stepping(scale, decoder, decode_tensors(batch, context_len, BLOCK_SIZE, scale.device))
    element_bytes = scale.dtype.itemsize
    num_bytes = weight_bytes(config, element_bytes) + batch * context_len * cache_bytes_per_token(config, element_bytes)
    least = least_ms(scale, config, batch, context_len)
    device_ms = scale.timer.device_us(step) / 1e3
    figures: dict[str, float | str] = {
        "ms in a graph": device_ms,
        "ms eager": scale.timer.eager_us(step) / 1e3,
        "ms of host": scale.timer.host_us(step) / 1e3,
        "MB": num_bytes / 1e6,
        "least ms": least,
        "times least": device_ms / least,
        "tokens/s": batch / device_ms * 1e3,
    }
    return Line(f"{shape}, {batch} x {context_len}", figures)


def stepping(scale: Scale, decoder: Decoder, tensors: StepInputs) -> Call:
    """Return a step over a cache of its own: forward and greedy sampling."""
    num_rows, num_blocks = len(tensors.logit_rows), tensors.block_tables.numel()
    caches = make_caches(
        decoder.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=scale.dtype, device=scale.device
    )
    options = make_options([{"temperature": 0.0}] * num_rows, scale.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=scale.device)
    return lambda: sample_triton(decoder.forward(tensors, caches), options, out=out)
