"""Speed: the device's own limits, each kernel, a whole decode step. Speed sections of `benchmarks gpu`.

Bytes and operations are counted: the minimum that an algorithm must move and compute, over its time, as a fraction of
the rate of a plain copy and a plain matrix product on the same device in the same run.
"""

# torch's, transformers' and triton's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
import triton
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from benchmarks.gpu.checks.accuracy import attend
from benchmarks.gpu.checks.block_copies import on_device
from benchmarks.gpu.models import (
    cache_bytes_per_token,
    decode_tensors,
    random_decoder,
    triton_in_place_of_cpu,
    weight_bytes,
)
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Call, Scale
from benchmarks.kernels.cases import AttentionInputs, generator_on, make_cos_sin, make_options, make_penalties
from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.decoder import Decoder
from sluice.kernels.copy_blocks import block_runs
from sluice.kernels.copy_blocks.kernel import copy_blocks_triton
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.linear.cuda import Int8Linear
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.penalties.cpu import apply_penalties_cpu
from sluice.kernels.penalties.kernel import apply_penalties_triton
from sluice.kernels.prepare_batch import StepPlan
from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
from sluice.kernels.rms_norm.kernel import add_rms_norm_triton, rms_norm_triton
from sluice.kernels.sample.kernel import sample_triton
from sluice.kernels.soft_cap.kernel import soft_cap_triton
from sluice.kernels.write_kv import HeadNorm
from sluice.kernels.write_kv.kernel import write_kv_triton

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


def environment(scale: Scale) -> Iterator[Line]:
    """Report software and device."""
    import transformers

    versions: dict[str, float | str] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "transformers": transformers.__version__,
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


def roof(scale: Scale) -> Iterator[Line]:
    """Measure a copy, a square product, and the skinny products of decode steps."""
    yield Line("copy", {"GB/s": scale.copy_rate() / 1e9})
    yield Line("product, square", {"TFLOP/s": scale.product_rate() / 1e12})
    for name, (out_size, in_size) in ({"toy": (64, 48)} if scale.is_toy else SKINNY_SHAPES).items():
        weight = torch.randn(out_size, in_size, device=scale.device).to(scale.dtype)
        for rows in scale.pick([1, 8, 32, 64, 128], [2]):
            x = torch.randn(rows, in_size, device=scale.device).to(scale.dtype)
            # Several weights in turn, more than the cache holds, as in the layers of a model.
            copies = 1 if scale.is_toy else max(1, 2**28 // weight.nbytes)
            weights = [weight.clone() for _ in range(copies)]
            us = scale.timer.device_us(lambda x=x, weights=weights: [F.linear(x, w) for w in weights]) / copies
            num_bytes = scale.dtype.itemsize * (out_size * in_size + rows * (out_size + in_size))
            yield Line(f"product, {name}, {rows} rows", scale.rates(us, num_bytes=num_bytes))


# Kernels


def kernel_times(scale: Scale) -> Iterator[Line]:
    """Measure each kernel at decode and prefill sizes, compared with torch's own operator if there is one."""
    yield from _attention_decode(scale)
    yield from _attention_prefill(scale)
    yield from _attention_soft_cap(scale)
    yield from _norms(scale)
    yield from _gates(scale)
    yield from _soft_caps(scale)
    yield from _writes(scale)
    yield from _products(scale)
    yield from _sampling(scale)
    yield from _small_ones(scale)
    yield from _block_copies(scale)


def plain_attention(
    scale: Scale,
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int, int],
    *,
    is_fp8: bool = False,
) -> AttentionInputs:
    """Return inputs without NaN and without a loop over tokens, for large sizes; blocks of 16, assigned at random."""
    num_heads, num_kv_heads, head_size = heads
    block_size = 16
    blocks_each = [-(-length // block_size) for length in context_lens]
    dtype = FP8 if is_fp8 else scale.dtype
    cache = allocate_cuda(sum(blocks_each), block_size, num_kv_heads, head_size, dtype=dtype, device=scale.device)
    _fill(cache)
    dealt = torch.randperm(sum(blocks_each), generator=torch.Generator().manual_seed(0)).split(blocks_each)
    tables = torch.nn.utils.rnn.pad_sequence(list(dealt), batch_first=True)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionInputs(
        query=torch.randn(int(starts[-1]), num_heads, head_size, device=scale.device).to(scale.dtype),
        kv_cache=cache,
        block_tables=tables.to(scale.device, torch.int32),
        query_start_locs=starts.to(scale.device, torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=scale.device),
        scale=head_size**-0.5,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        sliding_window=0,
    )


def _fill(cache: KVCache) -> None:
    """Fill it with numbers of about one."""
    for elements, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        if scales is None:
            elements.normal_()
        else:
            elements.view(torch.uint8).random_(0, 0x70)
            scales.fill_(1 / 64)


def _attention_decode(scale: Scale) -> Iterator[Line]:
    shapes = {"toy": (4, 2, 16)} if scale.is_toy else {"8B": (32, 8, 128), "1B": (32, 8, 64), "0.6B": (16, 8, 128)}
    contexts = scale.pick([512, 2048, 8192, 32_768], [70])
    for (name, heads), context_len in product(shapes.items(), contexts):
        for batch in scale.pick([1, 8, 32, 128], [2]):
            num_bytes = 2 * batch * context_len * heads[1] * heads[2] * scale.dtype.itemsize
            if num_bytes > 20e9 or (name != "8B" and context_len in (512, 32_768)):
                continue
            inputs = plain_attention(scale, [1] * batch, [context_len] * batch, heads)
            out = torch.empty_like(inputs.query)
            us = scale.timer.device_us(lambda inputs=inputs, out=out: attend(inputs, out))
            figures = scale.rates(us, num_bytes=num_bytes + 2 * out.nbytes)
            yield Line(f"attention, decode, {name}, {batch} x {context_len}", figures)
            if name in ("8B", "toy"):
                yield _attention_fp8(scale, batch, context_len, heads)


def _attention_fp8(scale: Scale, batch: int, context_len: int, heads: tuple[int, int, int]) -> Line:
    inputs = plain_attention(scale, [1] * batch, [context_len] * batch, heads, is_fp8=True)
    out = torch.empty_like(inputs.query)
    us = scale.timer.device_us(lambda: attend(inputs, out))
    # One byte per element, four for each head's scale.
    num_bytes = 2 * batch * context_len * heads[1] * (heads[2] + 4) + 2 * out.nbytes
    return Line(f"attention, decode, fp8 cache, {batch} x {context_len}", scale.rates(us, num_bytes=num_bytes))


def _attention_prefill(scale: Scale) -> Iterator[Line]:
    batches = {"toy": ([20], [30])} if scale.is_toy else PREFILLS
    heads = (4, 2, 16) if scale.is_toy else (32, 8, 128)
    for name, (query_lens, context_lens) in batches.items():
        inputs = plain_attention(scale, query_lens, context_lens, heads)
        out = torch.empty_like(inputs.query)
        us = scale.timer.device_us(lambda inputs=inputs, out=out: attend(inputs, out))
        # Pairs of a query and a key that it sees.
        pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
        figures = scale.rates(us, num_flops=4 * heads[0] * heads[2] * pairs)
        if len(query_lens) == 1 and query_lens == context_lens:
            figures["us of torch"] = _torch_attention_us(scale, inputs)
        yield Line(f"attention, {name}", figures)


def _attention_soft_cap(scale: Scale) -> Iterator[Line]:
    """Heads of Gemma 2 9B, with its soft cap and without."""
    heads = (4, 2, 16) if scale.is_toy else (16, 8, 256)
    batches = {"decode, 32 x 4096": ([1] * 32, [4096] * 32), "prefill of 2048": ([2048], [2048])}
    if scale.is_toy:
        batches = {"toy": ([1], [30])}
    for name, (query_lens, context_lens) in batches.items():
        inputs = plain_attention(scale, query_lens, context_lens, heads)
        out = torch.empty_like(inputs.query)
        capped = replace(inputs, soft_cap=50.0)
        without_us, us = (scale.timer.device_us(lambda x=x, out=out: attend(x, out)) for x in (inputs, capped))
        yield Line(f"attention, soft cap, {name}", {"us": us, "us without": without_us})


PREFILLS: dict[str, tuple[list[int], list[int]]] = {
    "prefill of 8192": ([8192], [8192]),
    "prefill of 2048": ([2048], [2048]),
    "prefills, 16 of 512": ([512] * 16, [512] * 16),
    "chunk of 512 after 7680": ([512], [8192]),
    "chunk of 2048 after 30720": ([2048], [32_768]),
    "mixed, 63 decodes at 2048 and a chunk of 448": ([1] * 63 + [448], [2048] * 63 + [448]),
}
"""Name to query lengths and context lengths."""


def _torch_attention_us(scale: Scale, inputs: AttentionInputs) -> float:
    """Return torch's own attention over the same query, keys and values contiguous: without paging."""
    query = inputs.query.transpose(0, 1).unsqueeze(0).contiguous()  # [1, H, T, D]
    shape = (1, inputs.kv_cache.num_kv_heads, *query.shape[2:])
    key, value = (_random(scale, *shape) for _ in "kv")
    return scale.timer.device_us(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    )


def _random(scale: Scale, *shape: int) -> Tensor:
    return torch.randn(shape, device=scale.device).to(scale.dtype)


def _norms(scale: Scale) -> Iterator[Line]:
    size = 64 if scale.is_toy else 4096
    for num_tokens in scale.pick([1, 32, 256, 4096, 16_384], [2]):
        x, residual, out = (_random(scale, num_tokens, size) for _ in range(3))
        weight = _random(scale, size)
        us = scale.timer.device_us(lambda x=x, w=weight, o=out: rms_norm_triton(x, w, eps=1e-6, out=o))
        figures = scale.rates(us, num_bytes=2 * x.nbytes)
        figures["us of torch"] = scale.timer.device_us(lambda x=x, w=weight: F.rms_norm(x, (size,), w, 1e-6))
        yield Line(f"rms_norm, {num_tokens} x {size}", figures)
        us = scale.timer.device_us(
            lambda x=x, r=residual, w=weight, o=out: add_rms_norm_triton(x, r, w, eps=1e-6, out=o)
        )
        yield Line(f"add_rms_norm, {num_tokens} x {size}", scale.rates(us, num_bytes=4 * x.nbytes))


def _gates(scale: Scale) -> Iterator[Line]:
    size = 64 if scale.is_toy else 14_336
    for num_tokens in scale.pick([1, 32, 256, 4096], [2]):
        gate_up = _random(scale, num_tokens, 2 * size)
        out = _random(scale, num_tokens, size)
        us = scale.timer.device_us(lambda g=gate_up, o=out: gated_activation_triton(g, out=o))
        figures = scale.rates(us, num_bytes=3 * out.nbytes)
        figures["us of torch"] = scale.timer.device_us(lambda g=gate_up: F.silu(g[:, :size]) * g[:, size:])
        yield Line(f"gated_activation, {num_tokens} x {size}", figures)


def _soft_caps(scale: Scale) -> Iterator[Line]:
    """Measure logits of Gemma 2's vocabulary, in place."""
    vocab_size = 300 if scale.is_toy else 256_000
    for batch in scale.pick([1, 32, 256], [2]):
        logits = _random(scale, batch, vocab_size)
        us = scale.timer.device_us(lambda logits=logits: soft_cap_triton(logits, cap=30.0))
        yield Line(f"soft_cap, {batch} x {vocab_size}", scale.rates(us, num_bytes=2 * logits.nbytes))


def _writes(scale: Scale) -> Iterator[Line]:
    for num_tokens, has_norm in product(scale.pick([1, 32, 256, 4096, 16_384], [2]), (False, True)):
        write, num_bytes = _write_of(scale, num_tokens, has_norm=has_norm)
        figures = scale.rates(scale.timer.device_us(write), num_bytes=num_bytes)
        yield Line(f"write_kv{' with norm' if has_norm else ''}, {num_tokens} tokens", figures)


def _products(scale: Scale) -> Iterator[Line]:
    """Measure weights in int8 compared with the library's product over the same in two bytes, to find the crossover."""
    for name, (out_size, in_size) in ({"toy": (64, 48)} if scale.is_toy else SKINNY_SHAPES).items():
        weight = _random(scale, out_size, in_size)
        # More weights than the GPU's cache holds, as in the layers of a model.
        copies = 1 if scale.is_toy else max(1, 2**28 // weight.numel())
        linears = [Int8Linear(weight, None) for _ in range(copies)]
        weights = [weight.clone() for _ in range(copies)]
        for rows in scale.pick([1, 16, 64, 256, 512], [2]):
            x = _random(scale, rows, in_size)
            us = scale.timer.device_us(lambda x=x, linears=linears: [linear(x) for linear in linears]) / copies
            num_bytes = out_size * in_size + scale.dtype.itemsize * rows * (out_size + in_size)
            figures = scale.rates(us, num_bytes=num_bytes)
            figures["us of torch"] = (
                scale.timer.device_us(lambda x=x, weights=weights: [F.linear(x, w) for w in weights]) / copies
            )
            yield Line(f"int8 product, {name}, {rows} rows", figures)


def _write_of(scale: Scale, num_tokens: int, *, has_norm: bool) -> tuple[Call, int]:
    """Return a write of so many tokens into slots in random order, and the bytes that it must move."""
    num_heads, num_kv_heads, head_size = (4, 2, 16) if scale.is_toy else (32, 8, 128)
    num_blocks = -(-num_tokens // 16)
    cache = allocate_cuda(num_blocks, 16, num_kv_heads, head_size, dtype=scale.dtype, device=scale.device)
    qkv = _random(scale, num_tokens, (num_heads + 2 * num_kv_heads) * head_size)
    out = _random(scale, num_tokens, num_heads, head_size)
    head_norm = HeadNorm(_random(scale, head_size), _random(scale, head_size), 1e-6) if has_norm else None
    cos_sin = make_cos_sin(num_tokens, head_size, scale.device)
    positions = torch.arange(num_tokens, device=scale.device)
    slots = torch.randperm(num_tokens, device=scale.device)

    def write() -> None:
        write_kv_triton(qkv, positions, slots, cos_sin, cache, head_norm=head_norm, out=out)

    return write, 2 * qkv.nbytes + cos_sin.nbytes


SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9, min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


def _sampling(scale: Scale) -> Iterator[Line]:
    vocab_size = 300 if scale.is_toy else 128_256
    for batch, (name, options) in product(scale.pick([1, 32, 256], [1]), SAMPLING.items()):
        logits = _random(scale, batch, vocab_size) * 3
        rows = make_options([options] * batch, scale.device)
        out = torch.empty(batch, dtype=torch.int64, device=scale.device)
        us = scale.timer.device_us(lambda logits=logits, rows=rows, out=out: sample_triton(logits, rows, out=out))
        figures = scale.rates(us, num_bytes=logits.nbytes)
        if name == "greedy":
            figures["us of torch"] = scale.timer.device_us(lambda logits=logits: logits.argmax(dim=-1))
        yield Line(f"sample, {name}, {batch} x {vocab_size}", figures)


def _small_ones(scale: Scale) -> Iterator[Line]:
    """Measure launch-bound kernels compared with the launches that they replace."""
    vocab_size, per_row = (300, 7) if scale.is_toy else (128_256, 1000)
    for batch in scale.pick([1, 256], [2]):
        logits = _random(scale, batch, vocab_size).float()
        penalties = make_penalties(batch, vocab_size, per_row, generator_on(scale.device.type))
        us = scale.timer.device_us(lambda logits=logits, p=penalties: apply_penalties_triton(logits, p))
        figures: dict[str, float | str] = {"us": us}
        figures["us of torch"] = scale.timer.device_us(
            lambda logits=logits, p=penalties: apply_penalties_cpu(logits, p)
        )
        yield Line(f"penalties, {batch} x {per_row} tokens", figures)
        tensors = decode_tensors(batch, 100, 16, scale.device)
        plan = StepPlan(
            token_ids=tensors.input_ids.int(),
            query_start_locs=tensors.query_start_locs,
            context_lens=tensors.context_lens,
            block_tables=tensors.block_tables,
        )
        us = scale.timer.device_us(lambda plan=plan: prepare_batch_triton(plan, None, block_size=16, spare_slot=0))
        yield Line(f"prepare_batch, {batch} decodes", {"us": us})


def _block_copies(scale: Scale) -> Iterator[Line]:
    """Measure block copies in all layers of an 8B model, as in a step that copies one prompt's block."""
    num_layers, num_blocks, num_kv_heads, head_size = (2, 9, 1, 16) if scale.is_toy else (32, 2048, 8, 128)
    sizes = (num_blocks, 16, num_kv_heads, head_size)
    caches = [allocate_cuda(*sizes, dtype=scale.dtype, device=scale.device) for _ in range(num_layers)]
    runs, block_bytes = block_runs(caches), sum(cache.num_bytes for cache in caches) // num_blocks
    for num_pairs in scale.pick([1, 16, 256], [3]):
        pairs = on_device([(at, num_blocks - 1 - at) for at in range(num_pairs)], scale.device)
        us = scale.timer.device_us(lambda pairs=pairs: copy_blocks_triton(runs, pairs))
        figures = scale.rates(us, num_bytes=2 * num_pairs * block_bytes)
        yield Line(f"copy_blocks, {num_pairs} x {num_layers} layers", figures)


# A whole step


def step_times(scale: Scale) -> Iterator[Line]:
    """Measure a decode step of random weights: launched by Python, in a CUDA graph, and the device's bound."""
    if scale.is_toy:
        with triton_in_place_of_cpu():
            yield from _steps_of(scale, "toy", [2])
        return
    for shape, batches in (("8B", [1, 32, 256]), ("0.6B", [1, 8, 32, 128]), ("1B", [1, 8, 32, 128])):
        yield from _steps_of(scale, shape, batches)


def _steps_of(scale: Scale, shape: str, batches: Sequence[int]) -> Iterator[Line]:
    max_model_len = 128 if scale.is_toy else 8192
    decoder = random_decoder(shape, scale.device, max_model_len=max_model_len, max_tokens=256)
    for batch, context_len in product(batches, scale.pick([512, 2048, 8192], [40])):
        if batch * context_len <= 600_000:
            yield _step(scale, shape, decoder, batch, context_len)


def least_ms(scale: Scale, config: DecoderConfig, batch: int, context_len: int) -> float:
    """Return the lower bound of a decode step, in milliseconds.

    Its products at the rate of the memory or of a large product, whichever is slower for so many rows; then keys and
    values at the memory's rate.
    """
    element_bytes = scale.dtype.itemsize
    num_weight_bytes = weight_bytes(config, element_bytes)
    num_flops = 2 * batch * num_weight_bytes // element_bytes
    products_s = max(num_weight_bytes / scale.copy_rate(), num_flops / scale.product_rate())
    cache_s = batch * context_len * cache_bytes_per_token(config, element_bytes) / scale.copy_rate()
    return 1e3 * (products_s + cache_s)


def _step(scale: Scale, shape: str, decoder: Decoder, batch: int, context_len: int) -> Line:
    config, block_size = decoder.config, 16
    tensors = decode_tensors(batch, context_len, block_size, scale.device)
    caches = make_caches(
        config, num_blocks=tensors.block_tables.numel(), block_size=block_size, dtype=scale.dtype, device=scale.device
    )
    options = make_options([{"temperature": 0.0}] * batch, scale.device)
    out = torch.empty(batch, dtype=torch.int64, device=scale.device)

    def step() -> None:
        sample_triton(decoder.forward(tensors, caches), options, out=out)

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
