"""Speed of each kernel: section "timing" of `benchmarks gpu`.

Bytes and operations are counted: the minimum that an algorithm must move and compute, over its time, as a fraction of
the rate of a plain copy and a plain matrix product on the same device in the same run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from benchmarks.gpu.checks.accuracy import Heads, Lengths, attend
from benchmarks.gpu.models import decode_tensors
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import BEYOND_CACHE_BYTES, Call, Scale
from benchmarks.gpu.speed.roof import SKINNY_SHAPES
from sluice.kernels.copy_blocks import block_runs
from sluice.kernels.copy_blocks.kernel import copy_blocks_triton
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.linear.cuda import Float8Linear, HalfLinear, Int8Linear, InvariantLinear, PackedLinear
from sluice.kernels.linear.float8 import Float8Weight, random_float8
from sluice.kernels.linear.plain import Linear
from sluice.kernels.linear.words import WordForm, WordWeight, random_words
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.penalties.kernel import apply_penalties_triton
from sluice.kernels.prepare_batch import StepPlan
from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from sluice.kernels.sample import SampleOptions
from sluice.kernels.sample.kernel import sample_triton
from sluice.kernels.soft_cap.kernel import soft_cap_triton
from sluice.kernels.token_masks.kernel import apply_token_masks_triton
from sluice.kernels.write_kv import HeadNorm
from sluice.kernels.write_kv.kernel import write_kv_triton
from tests.oracles.block_copies import on_device
from tests.oracles.kernel_cases import AttentionInputs, generator_on, make_cos_sin, make_options, make_penalties

HEADS: dict[str, Heads] = {"8B": (32, 8, 128), "1B": (32, 8, 64), "0.6B": (16, 8, 128)}
TOY_HEADS: Heads = (4, 2, 16)


def groups(scale: Scale) -> Groups:
    """Return each kernel at decode and prefill sizes, compared with torch's own operator if there is one."""
    measures: dict[str, Callable[[Scale], Iterator[Line]]] = {
        "attention, decode": _attention_decode,
        "attention, mixed lengths": _attention_mixed_lengths,
        "attention, prefill": _attention_prefill,
        "norms": _norms,
        "activations": _gates,
        "writes": _writes,
        "sampling": _sampling,
        "small ones": _small_ones,
        "block copies": _block_copies,
        "int8 products": _products,
        "packed products": _packed_products,
        "attention, soft cap": _attention_soft_cap,
        "soft caps": _soft_caps,
        "attention, fp8 cache": _attention_fp8,
    }
    return {name: partial(measure, scale) for name, measure in measures.items()}


def plain_attention(
    scale: Scale,
    query_lens: list[int],
    context_lens: list[int],
    heads: Heads,
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


def _attending(scale: Scale, lens: Lengths, heads: Heads, *, is_fp8: bool = False, **options: float) -> float:
    """Return the time of one launch, with other `options` of its inputs."""

    def make() -> Call:
        inputs = replace(plain_attention(scale, *lens, heads, is_fp8=is_fp8), **options)
        out = torch.empty_like(inputs.query)
        return lambda: attend(inputs, out)

    return scale.in_turn_us(make, _attention_bytes(scale, lens, heads, is_fp8=is_fp8))


def _attention_bytes(scale: Scale, lens: Lengths, heads: Heads, *, is_fp8: bool = False) -> int:
    """Return bytes of keys, values, queries and outputs."""
    (query_lens, context_lens), (num_heads, num_kv_heads, head_size) = lens, heads
    # In fp8 one byte per element, four for each head's scale.
    head_bytes = head_size + 4 if is_fp8 else head_size * scale.dtype.itemsize
    query_bytes = num_heads * head_size * scale.dtype.itemsize
    return 2 * (sum(context_lens) * num_kv_heads * head_bytes + sum(query_lens) * query_bytes)


def _attention_decode(scale: Scale) -> Iterator[Line]:
    contexts = scale.pick([2048, 8192, 512, 32_768], [70])
    for (name, heads), context_len in product(({"toy": TOY_HEADS} if scale.is_toy else HEADS).items(), contexts):
        for batch in scale.pick([1, 8, 32, 128], [2]):
            lens = [1] * batch, [context_len] * batch
            num_bytes = _attention_bytes(scale, lens, heads)
            if num_bytes > 20e9 or (name != "8B" and context_len in (512, 32_768)):
                continue
            figures = scale.rates(_attending(scale, lens, heads), num_bytes=num_bytes)
            yield Line(f"attention, decode, {name}, {batch} x {context_len}", figures)


def _attention_fp8(scale: Scale) -> Iterator[Line]:
    heads = TOY_HEADS if scale.is_toy else HEADS["8B"]
    for context_len, batch in product(scale.pick([512, 2048, 8192, 32_768], [70]), scale.pick([1, 8, 32, 128], [2])):
        lens = [1] * batch, [context_len] * batch
        us = _attending(scale, lens, heads, is_fp8=True)
        figures = scale.rates(us, num_bytes=_attention_bytes(scale, lens, heads, is_fp8=True))
        yield Line(f"attention, decode, fp8 cache, {batch} x {context_len}", figures)


def _attention_mixed_lengths(scale: Scale) -> Iterator[Line]:
    """Measure decodes of different lengths: as laid out for the longest, and for more, as in a recorded step."""
    heads = TOY_HEADS if scale.is_toy else HEADS["8B"]
    for name, context_lens in ({"toy": [70, 9]} if scale.is_toy else mixed_lengths()).items():
        lens = [1] * len(context_lens), context_lens
        num_bytes = _attention_bytes(scale, lens, heads)
        for max_context_len in (max(context_lens), 80 if scale.is_toy else 131_072):
            us = _attending(scale, lens, heads, max_context_len=max_context_len)
            figures = scale.rates(us, num_bytes=num_bytes)
            figures["times bytes"] = us * scale.copy_rate() / num_bytes / 1e6
            name_of = f"attention, decode, mixed lengths, {name}"
            yield Line(f"{name_of}, laid out for {max_context_len}", figures)


def mixed_lengths() -> dict[str, list[int]]:
    """Return contexts of a batch, by its name."""
    random = Random(0)
    return {
        "64 of 100 to 4000 and one of 100k": [*(random.randint(100, 4000) for _ in range(63)), 100_000],
        "256 of 64 to 16k, log-uniform": [int(64 * 256 ** random.random()) for _ in range(256)],
    }


def _attention_prefill(scale: Scale) -> Iterator[Line]:
    heads = TOY_HEADS if scale.is_toy else HEADS["8B"]
    for name, lens in ({"toy": ([20, 1], [30, 30])} if scale.is_toy else PREFILLS).items():
        us = _attending(scale, lens, heads)
        # Pairs of a query and a key that it sees.
        pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(*lens, strict=True))
        figures = scale.rates(us, num_flops=4 * heads[0] * heads[2] * pairs)
        yield Line(f"attention, {name}", figures)


def _attention_soft_cap(scale: Scale) -> Iterator[Line]:
    """Heads of Gemma 2 9B, with its soft cap and without."""
    heads = TOY_HEADS if scale.is_toy else (16, 8, 256)
    batches: dict[str, Lengths] = {"decode, 32 x 4096": ([1] * 32, [4096] * 32), "prefill of 2048": ([2048], [2048])}
    for name, lens in ({"toy": ([1], [30])} if scale.is_toy else batches).items():
        without_us, us = (_attending(scale, lens, heads, soft_cap=soft_cap) for soft_cap in (0.0, 50.0))
        yield Line(f"attention, soft cap, {name}", {"us": us, "us without": without_us})


PREFILLS: dict[str, Lengths] = {
    "prefill of 8192": ([8192], [8192]),
    "prefill of 2048": ([2048], [2048]),
    "prefills, 16 of 512": ([512] * 16, [512] * 16),
    "chunk of 512 after 7680": ([512], [8192]),
    "chunk of 2048 after 30720": ([2048], [32_768]),
    "chunk of 64 after 32704": ([64], [32_768]),
    "chunk of 256 after 32512": ([256], [32_768]),
    "mixed, 63 decodes at 2048 and a chunk of 64 after 32704": ([1] * 63 + [64], [2048] * 63 + [32_768]),
    "chunk of 512 after 32256": ([512], [32_768]),
    "mixed, 63 decodes at 2048 and a chunk of 448": ([1] * 63 + [448], [2048] * 63 + [448]),
}
"""Name to query lengths and context lengths."""


def _random(scale: Scale, *shape: int) -> Tensor:
    return torch.randn(shape, device=scale.device).to(scale.dtype)


def _norms(scale: Scale) -> Iterator[Line]:
    size = 64 if scale.is_toy else 4096
    weight = _random(scale, size)

    def norm(n: int) -> Call:
        x, out = (_random(scale, n, size) for _ in "xo")
        return lambda: rms_norm_triton(x, weight, eps=1e-6, out=out)

    def torchs(n: int) -> Call:
        x = _random(scale, n, size)
        return lambda: F.rms_norm(x, (size,), weight, 1e-6)

    def added(n: int) -> Call:
        x, residual, out = (_random(scale, n, size) for _ in "xro")
        return lambda: rms_norm_triton(x, weight, residual=residual, eps=1e-6, out=out)

    for n in scale.pick([1, 32, 256, 4096, 16_384], [2]):
        row_bytes = n * size * scale.dtype.itemsize
        figures = _timed(scale, lambda n=n: norm(n), 2 * row_bytes, lambda n=n: torchs(n))
        yield Line(f"rms_norm, {n} x {size}", figures)
        yield Line(f"add_rms_norm, {n} x {size}", _timed(scale, lambda n=n: added(n), 4 * row_bytes))


def _timed(
    scale: Scale, make: Callable[[], Call], num_bytes: int, torchs: Callable[[], Call] | None = None
) -> dict[str, float | str]:
    """Return rates of a call over inputs in turn, and the time of torch's operator if there is one."""
    figures = scale.rates(scale.in_turn_us(make, num_bytes), num_bytes=num_bytes)
    return figures | ({"us of torch": scale.in_turn_us(torchs, num_bytes)} if torchs else {})


def _gates(scale: Scale) -> Iterator[Line]:
    size = 64 if scale.is_toy else 14_336

    def gate(n: int) -> Call:
        gate_up, out = _random(scale, n, 2 * size), _random(scale, n, size)
        return lambda: gated_activation_triton(gate_up, out=out)

    def torchs(n: int) -> Call:
        gate_up = _random(scale, n, 2 * size)
        return lambda: F.silu(gate_up[:, :size]) * gate_up[:, size:]

    for n in scale.pick([1, 32, 256, 4096], [2]):
        num_bytes = 3 * n * size * scale.dtype.itemsize
        figures = _timed(scale, lambda n=n: gate(n), num_bytes, lambda n=n: torchs(n))
        yield Line(f"gated_activation, {n} x {size}", figures)


def _soft_caps(scale: Scale) -> Iterator[Line]:
    """Measure logits of Gemma 2's vocabulary, in place."""
    vocab_size = 300 if scale.is_toy else 256_000

    def cap(n: int) -> Call:
        logits = _random(scale, n, vocab_size)
        return lambda: soft_cap_triton(logits, cap=30.0)

    for n in scale.pick([1, 32, 256], [2]):
        num_bytes = 2 * n * vocab_size * scale.dtype.itemsize
        yield Line(f"soft_cap, {n} x {vocab_size}", _timed(scale, lambda n=n: cap(n), num_bytes))


def _writes(scale: Scale) -> Iterator[Line]:
    num_heads, num_kv_heads, head_size = TOY_HEADS if scale.is_toy else HEADS["8B"]
    for n, has_norm in product(scale.pick([1, 32, 256, 4096, 16_384], [2]), (False, True)):
        num_bytes = n * head_size * (2 * (num_heads + 2 * num_kv_heads) * scale.dtype.itemsize + 4)
        figures = _timed(scale, lambda n=n, has_norm=has_norm: _write_of(scale, n, has_norm=has_norm), num_bytes)
        yield Line(f"write_kv{' with norm' if has_norm else ''}, {n} tokens", figures)


def _write_of(scale: Scale, num_tokens: int, *, has_norm: bool) -> Call:
    """Return a write of this many tokens into slots in random order."""
    num_heads, num_kv_heads, head_size = TOY_HEADS if scale.is_toy else HEADS["8B"]
    num_blocks = -(-num_tokens // 16)
    cache = allocate_cuda(num_blocks, 16, num_kv_heads, head_size, dtype=scale.dtype, device=scale.device)
    qkv = _random(scale, num_tokens, (num_heads + 2 * num_kv_heads) * head_size)
    out = _random(scale, num_tokens, num_heads, head_size)
    head_norm = HeadNorm(_random(scale, head_size), _random(scale, head_size), 1e-6) if has_norm else None
    cos_sin = make_cos_sin(num_tokens, head_size, scale.device)
    positions = torch.arange(num_tokens, device=scale.device)
    slots = torch.randperm(num_tokens, device=scale.device)
    return lambda: write_kv_triton(qkv, positions, slots, cos_sin, cache, head_norm=head_norm, out=out)


def _products(scale: Scale) -> Iterator[Line]:
    """Measure weights in int8, few rows in 16 bits and deterministic products, compared with the library's."""
    for name, (out_size, in_size) in ({"toy": (64, 48)} if scale.is_toy else SKINNY_SHAPES).items():
        weight = _random(scale, out_size, in_size)
        # More weights than the GPU's cache holds, as in the layers of a model.
        copies = 1 if scale.is_toy else max(1, BEYOND_CACHE_BYTES // weight.numel())
        linears = [Int8Linear(weight, None) for _ in range(copies)]
        weights = [weight.clone() for _ in range(copies)]
        halves = [HalfLinear(weight, None) for weight in weights]
        invariants = [InvariantLinear(weight, None) for weight in weights]
        for rows in scale.pick([1, 2, 8, 32, 64, 256, 512], [2]):
            x = _random(scale, rows, in_size)
            us = scale.timer.device_us(lambda x=x, linears=linears: [linear(x) for linear in linears]) / copies
            num_bytes = out_size * in_size + scale.dtype.itemsize * rows * (out_size + in_size)
            figures = scale.rates(us, num_bytes=num_bytes)
            figures["us of torch"] = (
                scale.timer.device_us(lambda x=x, weights=weights: [F.linear(x, w) for w in weights]) / copies
            )
            yield Line(f"int8 product, {name}, {rows} rows", figures)
            us = scale.timer.device_us(lambda x=x, invariants=invariants: [linear(x) for linear in invariants]) / copies
            figures = scale.rates(us, num_bytes=num_bytes + out_size * in_size)
            yield Line(f"deterministic product, {name}, {rows} rows", figures)
            if rows <= 2:
                us = scale.timer.device_us(lambda x=x, halves=halves: [half(x) for half in halves]) / copies
                figures = scale.rates(us, num_bytes=num_bytes + out_size * in_size)
                yield Line(f"product of few rows, {name}, {rows} rows", figures)


def _packed_products(scale: Scale) -> Iterator[Line]:
    """Measure packed weights compared with the library's product in 16 bits: 4 bits, and FP8 by row and by block."""
    makers: Mapping[str, Callable[[int, int], WordWeight | Float8Weight]] = {
        "4 bits in 32": lambda n, k: random_words(WordForm.of_groups(4), n, k, scale.device),
        "4 bits in 128": lambda n, k: random_words(WordForm(4, 128, "float32"), n, k, scale.device),
        "fp8 by row": lambda n, k: random_float8(0, n, k, scale.device),
        "fp8 in 128": lambda n, k: random_float8(128, n, k, scale.device),
    }
    for name, (out_size, in_size) in ({"toy": (64, 128)} if scale.is_toy else SKINNY_SHAPES).items():
        weight = _random(scale, out_size, in_size)
        copies = 1 if scale.is_toy else max(1, BEYOND_CACHE_BYTES * 2 // weight.numel())
        weights = [weight.clone() for _ in range(max(1, copies // 4))]
        for rows, (form, make) in product(scale.pick([1, 2, 16, 64, 256, 512, 1024], [2]), makers.items()):
            coded = [make(out_size, in_size) for _ in range(copies)]
            x = _random(scale, rows, in_size)
            figures = _compared(scale, x, [_linear(one) for one in coded], weights, coded[0].num_bytes)
            yield Line(f"packed product, {name}, {form}, {rows} rows", figures)


def _linear(weight: WordWeight | Float8Weight) -> Linear:
    return PackedLinear(weight, None) if isinstance(weight, WordWeight) else Float8Linear(weight, None)


def _compared(
    scale: Scale, x: Tensor, linears: Sequence[Linear], weights: Sequence[Tensor], weight_bytes: int
) -> dict[str, float | str]:
    """Measure products, and the library's over weights in 16 bits."""
    us = scale.timer.device_us(lambda: [linear(x) for linear in linears]) / len(linears)
    num_bytes = weight_bytes + scale.dtype.itemsize * len(x) * sum(weights[0].shape)
    figures = scale.rates(us, num_bytes=num_bytes)
    of_torch = scale.timer.device_us(lambda: [F.linear(x, weight) for weight in weights]) / len(weights)
    return {**figures, "us of torch": of_torch, "times as fast": of_torch / us}


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
        rows = make_options([options] * batch, scale.device)

        def sample(batch: int = batch, rows: SampleOptions = rows) -> Call:
            logits, out = _logits(scale, batch, vocab_size), torch.empty(batch, dtype=torch.int64, device=scale.device)
            return lambda: sample_triton(logits, rows, out=out)

        def torchs(batch: int = batch) -> Call:
            logits = _logits(scale, batch, vocab_size)
            return lambda: logits.argmax(dim=-1)

        num_bytes = batch * vocab_size * scale.dtype.itemsize
        figures = _timed(scale, sample, num_bytes, torchs if name == "greedy" else None)
        yield Line(f"sample, {name}, {batch} x {vocab_size}", figures)


def _logits(scale: Scale, batch: int, vocab_size: int) -> Tensor:
    return _random(scale, batch, vocab_size) * 3


def _small_ones(scale: Scale) -> Iterator[Line]:
    """Measure launch-bound kernels."""
    vocab_size, per_row = (300, 7) if scale.is_toy else (128_256, 1000)
    for batch in scale.pick([1, 256], [2]):
        logits = _random(scale, batch, vocab_size).float()
        penalties = make_penalties(batch, vocab_size, per_row, generator_on(scale.device.type))
        us = scale.timer.device_us(lambda logits=logits, p=penalties: apply_penalties_triton(logits, p))
        yield Line(f"penalties, {batch} x {vocab_size}, {per_row} seen", {"us": us})
        rows = torch.arange(batch, device=scale.device)
        masks = torch.randint(-(2**31), 2**31, (batch, -(-vocab_size // 32)), device=scale.device).int()
        us = scale.timer.device_us(
            lambda logits=logits, rows=rows, masks=masks: apply_token_masks_triton(logits, rows, masks)
        )
        yield Line(f"token_masks, {batch} x {vocab_size}", {"us": us})
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
