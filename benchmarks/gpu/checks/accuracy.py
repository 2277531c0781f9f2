"""The kernels against float64, in sizes and dtypes that need a GPU: section "kernels" of `benchmarks gpu`.

Nearly all of the time is compilation (about a hundred variants in bfloat16 alone), which uses one core: several
processes divide it. Compiled kernels stay in Triton's cache for the sections that measure time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.linear.few_rows import few_rows_triton
from sluice.kernels.linear.float8 import random_float8, rounded_rows_float8
from sluice.kernels.linear.float8_row import float8_row_triton
from sluice.kernels.linear.float8_tiles import float8_tiles_triton
from sluice.kernels.linear.int8 import dequantized, quantized
from sluice.kernels.linear.kernel import int8_product_triton
from sluice.kernels.linear.word_row import word_row_triton
from sluice.kernels.linear.word_tiles import word_tiles_triton
from sluice.kernels.linear.words import WordForm, random_words
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda, paged_attention_triton
from sluice.kernels.penalties.kernel import apply_penalties_triton
from sluice.kernels.philox.kernel import random_words_triton
from sluice.kernels.philox.reference import gumbel_reference, random_words_reference
from sluice.kernels.prepare_batch import StepPlan
from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
from sluice.kernels.prepare_batch.reference import prepare_batch_reference
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from sluice.kernels.sample.kernel import find_kept_sets, sample_triton
from sluice.kernels.sample.reference import sample_reference
from sluice.kernels.soft_cap.kernel import soft_cap_triton
from sluice.kernels.token_masks.kernel import apply_token_masks_triton
from sluice.kernels.token_masks.reference import apply_token_masks_reference
from sluice.kernels.write_kv.kernel import write_kv_triton
from tests.oracles import kernel_cases as cases
from tests.oracles.block_copies import NUM_GUARDS, copies_rightly, copy_by_kernel
from tests.oracles.kernel_cases import EXACT, Agreement, AttentionCase, AttentionInputs, WriteInputs

EPS = 1e-6
WRONG = Agreement(float("inf"), 1.0)
Heads = tuple[int, int, int]
"""Query heads, key-value heads, head size."""

Lengths = tuple[list[int], list[int]]
"""Query lengths and context lengths."""

Check = Callable[[Scale, torch.dtype], Iterator[Agreement]]


def groups(scale: Scale) -> Groups:
    """Return each kernel in each dtype: the largest error as a fraction of its bound, and the RMS error."""
    others: dict[str, Callable[[Scale], Iterator[Agreement]]] = {
        "philox, bits and noise": _noise,
        "penalties": _penalties,
        "token_masks": _masks,
        "prepare_batch": _preparation,
        "copy_blocks": _copies,
    }
    checks = {
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(check, scale, dtype)
        for dtype in scale.dtypes
        for name, check in _checks(scale, dtype).items()
    } | {name: partial(check, scale) for name, check in others.items()}
    lines: Groups = {name: partial(_lines, name, check) for name, check in checks.items()}
    return {**lines, "sample, frequencies": lambda: [_frequencies(scale)]}


def _checks(scale: Scale, dtype: torch.dtype) -> dict[str, Check]:
    """Return the checks of a dtype; attention for each shape of heads, which is a compilation or two."""
    bent = BENT_HEADS[-1:] if scale.is_toy else BENT_HEADS[:3] if dtype == scale.dtype else BENT_HEADS[:1]
    return {
        **_of_heads("decode", _decode, _heads(scale, dtype, None)),
        **_of_heads("mixed", _mixed, _heads(scale, dtype, None)),
        **_of_heads("soft cap and sinks", _bent, bent),
        "paged_attention, same bits": _bits,
        "rms_norm": _norm,
        "soft_cap": _soft_cap,
        "gated_activation": _gate,
        "int8 product": _product,
        "product of few rows": _few_rows,
        "packed product": _packed_product,
        "fp8 product": _float8_product,
        "write_kv": _write_kv,
        "sample, kept sets": _kept_sets,
        "sample, tokens": _tokens,
        "write_kv, fp8": _write_fp8,
        **_of_heads("decode, fp8 cache", partial(_decode, cache_dtype=FP8), _heads(scale, dtype, FP8)),
        **_of_heads("mixed, fp8 cache", partial(_mixed, cache_dtype=FP8), _heads(scale, dtype, FP8)),
    }


def _of_heads(what: str, check: Callable[..., Iterator[Agreement]], shapes: Sequence[Heads]) -> dict[str, Check]:
    return {
        f"paged_attention, {what}, {heads[0]}/{heads[1]} heads of {heads[2]}": partial(check, heads=heads)
        for heads in shapes
    }


def _lines(name: str, check: Callable[[], Iterable[Agreement]]) -> list[Line]:
    return [_line(name, check())]


def _line(name: str, agreements: Iterable[Agreement]) -> Line:
    worst, num_cases = EXACT, 0
    for found in agreements:
        worst = worst.and_also(found)
        num_cases += 1
    return Line(name, {"cases": num_cases, "of bound": worst.worst, "rms": worst.rms}, worst.holds)


def _if_true(holds: bool) -> Agreement:
    return EXACT if holds else WRONG


def _norm(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    generator = cases.generator_on(scale.device.type)
    sizes = scale.pick([64, 576, 896, 2048, 5120, 8192], [60])
    for hidden_size, num_tokens in product(sizes, scale.pick([1, 17, 257], [2])):
        x, residual = (cases.random_tensor(num_tokens, hidden_size, dtype=dtype, generator=generator) for _ in "ab")
        weight, out = cases.random_tensor(hidden_size, dtype=dtype, generator=generator), torch.empty_like(x)
        rms_norm_triton(x, weight, eps=EPS, out=out)
        yield cases.norm_agreement(out, x, weight, EPS)
        total = residual + x
        rms_norm_triton(x, weight, residual=residual, eps=EPS, out=out)
        yield cases.norm_agreement(out, total, weight, EPS)
        yield _if_true(cases.same_bits(residual, total))
        before, added_weight = residual.clone(), cases.random_tensor(hidden_size, dtype=dtype, generator=generator)
        rms_norm_triton(x, weight, residual=residual, eps=EPS, weight_offset=1.0, added_weight=added_weight, out=out)
        yield cases.added_norm_agreement(residual, x, before, added_weight, EPS, 1.0)
        yield cases.norm_agreement(out, residual, weight, EPS, 1.0)


def _soft_cap(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    generator = cases.generator_on(scale.device.type)
    for size, cap in product(scale.pick([60, 256_000], [60]), (0.3, 30.0)):
        x = cases.random_tensor(9, size, dtype=dtype, generator=generator, spread=12)
        out = x.clone()
        soft_cap_triton(out, cap=cap)
        yield cases.soft_cap_agreement(out, x, cap)


def _gate(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    generator = cases.generator_on(scale.device.type)
    activations: list[Activation] = ["silu", "gelu_tanh"]
    for size, activation in product(scale.pick([60, 1408, 14336], [60]), activations):
        gate_up = cases.random_tensor(9, 2 * size, dtype=dtype, generator=generator, spread=4)
        out = torch.empty(9, size, dtype=dtype, device=scale.device)
        gated_activation_triton(gate_up, activation=activation, out=out)
        yield cases.gate_agreement(out, gate_up, activation)


def _product(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    generator = cases.generator_on(scale.device.type)
    shapes = ((20, 40),) if scale.is_toy else ((6144, 4096), (4096, 14_336), (1000, 500), (128_257, 896))
    for (out_size, in_size), num_tokens in product(shapes, scale.pick([1, 33, 200], [3])):
        x = cases.random_tensor(num_tokens, in_size, dtype=dtype, generator=generator)
        narrow, scales = quantized(cases.random_tensor(out_size, in_size, dtype=dtype, generator=generator))
        bias = cases.random_tensor(out_size, dtype=dtype, generator=generator)
        out = torch.full((num_tokens, out_size), float("nan"), dtype=dtype, device=scale.device)
        int8_product_triton(x, narrow, scales, bias, out=out)
        yield cases.product_agreement(out, x, narrow, scales, bias)


def _few_rows(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    """Check products of one to four rows in int8 and in `dtype`, and that a row keeps its bits."""
    generator = cases.generator_on(scale.device.type)
    shapes = ((20, 40),) if scale.is_toy else ((1024, 3072), (4096, 14_336), (1001, 500))
    for (out_size, in_size), num_tokens in product(shapes, scale.pick([1, 2, 3, 4], [3])):
        x = cases.random_tensor(num_tokens, in_size, dtype=dtype, generator=generator)
        narrow, scales = quantized(cases.random_tensor(out_size, in_size, dtype=dtype, generator=generator))
        ones = torch.ones_like(scales)
        for weight, factors in ((narrow, scales), (dequantized(narrow, ones, dtype), None)):
            out = torch.full((num_tokens, out_size), float("nan"), dtype=dtype, device=scale.device)
            few_rows_triton(x, weight, factors, None, out=out)
            yield cases.product_agreement(out, x, narrow, ones if factors is None else factors, None)
            alone = torch.empty_like(out[-1:])
            few_rows_triton(x[-1:], weight, factors, None, out=alone)
            yield _if_true(cases.same_bits(alone, out[-1:]))


def _packed_product(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    """Check products over each packed form, in tiles and of one row, whose bits do not depend on their number."""
    generator = cases.generator_on(scale.device.type)
    forms = (WordForm.of_groups(4), WordForm.of_spans(4, 128, 10_000), WordForm.of_groups(8), WordForm(8, 0, "float32"))
    shapes = ((20, 128),) if scale.is_toy else ((6144, 4096), (4096, 14_336), (1000, 896))
    for form, (out_size, in_size) in product(forms, shapes):
        weight = random_words(form, out_size, in_size, scale.device)
        rows = cases.random_tensor(scale.pick([300], [18])[0], in_size, dtype=dtype, generator=generator)
        bias = cases.random_tensor(out_size, dtype=dtype, generator=generator)
        all_rows = torch.full((len(rows), out_size), float("nan"), dtype=dtype, device=scale.device)
        word_tiles_triton(rows, weight, bias, out=all_rows)
        yield cases.packed_agreement(all_rows, rows, weight, bias, is_rounded=True)
        for num_tokens in scale.pick([1, 2, 24, 60], [2]):
            x, out = rows[:num_tokens], torch.full_like(all_rows[:num_tokens], float("nan"))
            word_tiles_triton(x, weight, bias, out=out)
            yield _if_true(cases.same_bits(out, all_rows[:num_tokens]))
            if num_tokens == 1:
                word_row_triton(x, weight, bias, out=out)
                yield cases.packed_agreement(out, x, weight, bias, is_rounded=False)


def _float8_product(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    """Check products in FP8: rounded rows, and that their bits do not depend on the number of rows."""
    generator = cases.generator_on(scale.device.type)
    shapes = ((20, 128),) if scale.is_toy else ((6144, 4096), (4096, 14_336), (1000, 896))
    for span, (out_size, in_size) in product((0, 128), shapes):
        weight = random_float8(span, out_size, in_size, scale.device)
        x = cases.random_tensor(scale.pick([300], [18])[0], in_size, dtype=dtype, generator=generator)
        bias = cases.random_tensor(out_size, dtype=dtype, generator=generator)
        out = torch.full((len(x), out_size), float("nan"), dtype=dtype, device=scale.device)
        float8_tiles_triton(x, weight, bias, out=out)
        codes, scales = rounded_rows_float8(x)
        rows, exact = codes.double() * scales.double()[:, None], weight.dequantized(torch.float64)
        # The matrix unit keeps 14 bits of a sum of 128 products.
        slack = 2.0**-13 * (rows.abs() @ exact.abs().T)
        yield cases.agreement(out, rows @ exact.T + bias.double(), slack)
        for num_tokens in scale.pick([1, 24, 60], [2]):
            few = torch.empty_like(out[:num_tokens])
            float8_tiles_triton(x[:num_tokens], weight, bias, out=few)
            yield _if_true(cases.same_bits(few, out[:num_tokens]))
        float8_row_triton(x[:1], weight, bias, out=out[:1])
        yield cases.agreement(out[:1], x[:1].double() @ exact.T + bias.double(), 2**-8 * slack[:1])


def _write_kv(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    for cache, inputs in _writes(scale, dtype):
        yield cases.write_agreement(inputs, cache, _write(inputs, cache))


def _write_fp8(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    for cache, inputs in _writes(scale, dtype):
        narrow = cases.fp8_copy(cache)
        yield cases.fp8_write_agreement(inputs, narrow, _write(inputs, narrow))


def _writes(scale: Scale, dtype: torch.dtype) -> Iterator[tuple[KVCache, WriteInputs]]:
    """Caches full of NaN, and the data to write to them."""
    shapes = ((32, 8, 128, 128), (14, 2, 64, 64), (4, 1, 80, 32))[-1 if scale.is_toy else 0 :]
    for (num_heads, num_kv_heads, head_size, rotary_size), norm_offset in product(shapes, (None, 0.0, 1.0)):
        cache = allocate_cuda(32, 16, num_kv_heads, head_size, dtype=dtype, device=scale.device)
        inputs = cases.make_write(
            cache,
            num_tokens=2 if scale.is_toy else 300,
            num_heads=num_heads,
            rotary_size=rotary_size,
            norm_offset=norm_offset,
            generator=cases.generator_on(scale.device.type),
        )
        yield cache, inputs


def _write(inputs: WriteInputs, cache: KVCache) -> Tensor:
    """Return the kernel's queries, written to memory that was NaN."""
    shape = (inputs.qkv.shape[0], inputs.num_heads, cache.head_size)
    out = torch.full(shape, float("nan"), dtype=inputs.qkv.dtype, device=inputs.qkv.device)
    write_kv_triton(
        inputs.qkv,
        inputs.positions,
        inputs.slot_mapping,
        inputs.cos_sin,
        cache,
        head_norm=inputs.head_norm,
        out=out,
    )
    return out


# Attention


def attention_inputs(
    scale: Scale, dtype: torch.dtype, case: AttentionCase, cache_dtype: torch.dtype | None = None
) -> AttentionInputs:
    """Return a case's tensors, in a cache a few blocks larger than needed; in `dtype` unless given otherwise."""
    cache = allocate_cuda(
        cases.blocks_needed(case) + 3,
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        dtype=cache_dtype or dtype,
        device=scale.device,
    )
    return cases.make_attention(case, cache, dtype, cases.generator_on(scale.device.type))


def attend(inputs: AttentionInputs, out: Tensor | None = None) -> Tensor:
    """Return the kernel's output, written to memory that was NaN unless given."""
    call = inputs.call(out)
    paged_attention_triton(call)
    return call.out


HEADS = ((32, 8, 128), (16, 8, 128), (32, 8, 64), (14, 2, 64), (8, 1, 80), (6, 2, 96), (8, 4, 256), (24, 1, 128))
BENT_HEADS = ((8, 4, 256), (32, 16, 128), (64, 8, 64), (2, 1, 16))
"""Those with a soft cap or sinks; the last is a toy's."""

SHORT_CHUNKS: Lengths = ([100, 1, 17, 600, 40, 6], [9000, 3000, 4097, 5000, 2049, 20_000])
"""Most are short over long contexts, some of them in one segment."""


def _heads(scale: Scale, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> Sequence[Heads]:
    """Return all shapes in the main dtype, some in the others."""
    if scale.is_toy:
        return HEADS[-1:]
    if cache_dtype is not None:
        return HEADS[::3] if dtype == scale.dtype else HEADS[:1]
    return HEADS if dtype == scale.dtype else HEADS[::3]


def _decode(
    scale: Scale, dtype: torch.dtype, *, heads: Heads, cache_dtype: torch.dtype | None = None
) -> Iterator[Agreement]:
    contexts = [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 20_000][: 4 if scale.is_toy else None]
    for window in scale.pick([0, 1, 512, 4000], [0, 16]):
        case = _case(([1] * len(contexts), contexts), heads, num_padding=2, sliding_window=window)
        inputs = attention_inputs(scale, dtype, case, cache_dtype)
        yield cases.attention_agreement(inputs, attend(inputs))


def _mixed(
    scale: Scale, dtype: torch.dtype, *, heads: Heads, cache_dtype: torch.dtype | None = None
) -> Iterator[Agreement]:
    batches = (([1, 700, 64, 1, 0, 300, 2], [3000, 700, 900, 17, 40, 2100, 2]), SHORT_CHUNKS)
    if scale.is_toy:
        batches = (([1, 40, 5], [70, 40, 33]),)
    for lens, window in product(batches, scale.pick([0, 65, 2500], [0, 65])):
        case = _case(lens, heads, num_padding=5, sliding_window=window)
        inputs = attention_inputs(scale, dtype, case, cache_dtype)
        yield cases.attention_agreement(inputs, attend(inputs))


def _bent(scale: Scale, dtype: torch.dtype, *, heads: Heads) -> Iterator[Agreement]:
    """Check a soft cap that affects scores of about one, sinks, and both: decodes, some split, and a mixed batch."""
    batches = (([1] * 5, [1, 511, 512, 513, 3000]), ([1, 300, 0, 64], [3000, 300, 40, 900]), SHORT_CHUNKS)
    if scale.is_toy:
        batches = (([1, 1], [40, 9]), ([20, 1], [30, 9]))
    for lens, (soft_cap, has_sinks) in product(batches, ((2.0, False), (0.0, True), (2.0, True))):
        sinks = cases.sinks_of(heads[0]) if has_sinks else None
        inputs = attention_inputs(scale, dtype, _case(lens, heads, num_padding=2, soft_cap=soft_cap, sinks=sinks))
        yield cases.attention_agreement(inputs, attend(inputs))


def _case(lens: Lengths, heads: Heads, **options: Any) -> AttentionCase:  # noqa: ANN401 - its other fields
    query_lens, context_lens = lens
    num_heads, num_kv_heads, head_size = heads
    return AttentionCase(
        query_lens=query_lens,
        context_lens=context_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        **options,
    )


def _bits(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    """Check bitwise equality: repeated; permuted; and a decode computed alone."""
    contexts = [9, 70, 1, 33] if scale.is_toy else [9, 1500, 1, 700, 5000, 512, 513]
    case = AttentionCase(
        query_lens=[1] * len(contexts), context_lens=contexts, num_heads=8, num_kv_heads=2, head_size=64
    )
    inputs = attention_inputs(scale, dtype, case)
    first = attend(inputs)
    for _ in range(1 if scale.is_toy else 20):
        yield _if_true(cases.same_bits(attend(inputs), first))
    order = torch.randperm(len(contexts), generator=torch.Generator().manual_seed(0)).to(scale.device)
    yield _if_true(cases.same_bits(attend(_only(inputs, order)), first[order]))
    for row in range(len(contexts)):
        alone = replace(_only(inputs, torch.tensor([row], device=scale.device)), max_context_len=contexts[row])
        yield _if_true(cases.same_bits(attend(alone), first[row : row + 1]))


def _only(inputs: AttentionInputs, rows: Tensor) -> AttentionInputs:
    """Return decodes of some rows."""
    return replace(
        inputs,
        query=inputs.query[rows],
        block_tables=inputs.block_tables[rows],
        query_start_locs=inputs.query_start_locs[: len(rows) + 1],
        context_lens=inputs.context_lens[rows],
    )


# Sampling

FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 50, "temperature": 0.6},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.001, "temperature": 0.8},
]


def _rows_of_logits(scale: Scale, dtype: torch.dtype, vocab_size: int) -> Tensor:
    """Return a row for each of `FILTERS`, in a wider buffer that is NaN beyond them."""
    wide = cases.random_tensor(
        len(FILTERS), vocab_size + 3, dtype=dtype, generator=cases.generator_on(scale.device.type), spread=3
    )
    wide[:, vocab_size:] = float("nan")
    return wide[:, :vocab_size]


def _kept_sets(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    for vocab_size in scale.pick([1000, 32_000, 128_257, 151_936], [300]):
        logits = _rows_of_logits(scale, dtype, vocab_size)
        options = cases.make_options([row for row in FILTERS if row.get("temperature") != 0], scale.device)
        rows = logits[: len(options.temperature)]
        cut_keys, cut_ids = find_kept_sets(rows, options)
        bits = (rows.float() / options.temperature[:, None] + 0.0).view(torch.int32)
        keys = torch.where(bits < 0, ~bits, bits ^ -(2**31)).long() & 0xFFFFFFFF
        ids = torch.arange(vocab_size, device=scale.device)
        kept = (keys > cut_keys[:, None]) | ((keys == cut_keys[:, None]) & (ids <= cut_ids[:, None]))
        for row in range(len(rows)):
            yield _if_true(cases.kept_set_differs(rows, options, row, kept[row]) is None)


def _tokens(scale: Scale, dtype: torch.dtype) -> Iterator[Agreement]:
    for vocab_size in scale.pick([1000, 128_257], [300]):
        logits = _rows_of_logits(scale, dtype, vocab_size)
        logits[2, 7] = float("nan")
        options = cases.make_options(FILTERS, scale.device, position=5)
        out = torch.full((len(FILTERS),), -7, dtype=torch.int64, device=scale.device)
        sample_triton(logits, options, out=out)
        yield _if_true(out.tolist() == sample_reference(logits, options).tolist())


def _penalties(scale: Scale) -> Iterator[Agreement]:
    generator = cases.generator_on(scale.device.type)
    for vocab_size, per_row in ((40, 40), (300, 7)) if scale.is_toy else ((1000, 1000), (151_936, 4000)):
        logits = cases.random_tensor(3, vocab_size, dtype=torch.float32, generator=generator, spread=3)
        penalties = cases.make_penalties(3, vocab_size, per_row, generator)
        out = logits.clone()
        apply_penalties_triton(out, penalties)
        yield cases.penalties_agreement(out, logits, penalties)


def _masks(scale: Scale) -> Iterator[Agreement]:
    for vocab_size in (40, 300) if scale.is_toy else (1000, 151_936):
        logits = torch.randn(3, vocab_size, device=scale.device)
        rows = torch.tensor([2, 0], device=scale.device)
        masks = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), device=scale.device).int()
        out, expected = logits.clone(), logits.clone()
        apply_token_masks_triton(out, rows, masks)
        apply_token_masks_reference(expected, rows, masks)
        yield _if_true(cases.same_bits(out, expected))


def _preparation(scale: Scale) -> Iterator[Agreement]:
    for query_lens, context_lens in (([1] * 9, [5, 16, 17, 300, 1, 2, 3, 64, 65]), ([1, 300, 2, 0], [9, 900, 2, 4])):
        plan = StepPlan(
            token_ids=torch.arange(sum(query_lens) + 2, device=scale.device, dtype=torch.int32) - 5,
            query_start_locs=torch.tensor([0, *query_lens], device=scale.device).cumsum(0).int(),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=scale.device),
            block_tables=torch.arange(len(query_lens) * 60, device=scale.device, dtype=torch.int32).view(-1, 60),
        )
        drawn = torch.arange(700, 705, device=scale.device)
        found = prepare_batch_triton(plan, drawn, block_size=16, spare_slot=7)
        expected = prepare_batch_reference(plan, drawn, block_size=16, spare_slot=7)
        for name in ("input_ids", "positions", "slot_mapping"):
            yield _if_true(torch.equal(getattr(found, name), getattr(expected, name)))


def _copies(scale: Scale) -> Iterator[Agreement]:
    num_layers, num_kv_heads, head_size = (2, 1, 24) if scale.is_toy else (30, 8, 128)
    for dtype in (*scale.dtypes, FP8):
        sizes = (200 if not scale.is_toy else 8, 16, num_kv_heads, head_size)
        caches = [allocate_cuda(*sizes, dtype=dtype, device=scale.device) for _ in range(num_layers)]
        half = (sizes[0] - 2 * NUM_GUARDS) // 2
        yield _if_true(copies_rightly(copy_by_kernel, caches, [(at // 3, half + at) for at in range(half)]))


def _noise(scale: Scale) -> Iterator[Agreement]:
    num_tokens = 5000 if scale.is_toy else 151_936
    token_ids = torch.arange(num_tokens, device=scale.device)
    for seed in (0, 2**63 - 1, -1):
        words, noise = random_words_triton(
            num_tokens,
            torch.tensor([seed], device=scale.device),
            torch.tensor([123], dtype=torch.int32, device=scale.device),
            torch.tensor([4], dtype=torch.int32, device=scale.device),
        )
        expected = random_words_reference(token_ids, seed=seed & (2**64 - 1), position=123, counter_2=4)
        yield _if_true(torch.equal(words, expected))
        error = (noise.double() - gumbel_reference(expected).double()).abs().max()
        yield Agreement(float(error) / 2e-6, 0.0)


def _frequencies(scale: Scale) -> Line:
    """Check many samples from few tokens, one of them rare, by chi-square."""
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.0495, 0.0005], device=scale.device)
    num_draws = 40 if scale.is_toy else 200_000
    logits = probabilities.log().expand(num_draws, -1)
    options = replace(
        cases.make_options([{}], scale.device),
        **{
            name: torch.full((num_draws,), value, dtype=dtype, device=scale.device)
            for name, value, dtype in (
                ("temperature", 1.0, torch.float32),
                ("top_k", 0, torch.int32),
                ("top_p", 1.0, torch.float32),
                ("min_p", 0.0, torch.float32),
                ("position", 0, torch.int32),
                ("counter_2", 0, torch.int32),
            )
        },
        seed=torch.arange(num_draws, device=scale.device),
    )
    out = torch.empty(num_draws, dtype=torch.int64, device=scale.device)
    sample_triton(logits, options, out=out)
    expected = probabilities.double() * num_draws
    statistic = float(((out.bincount(minlength=5) - expected).square() / expected).sum())
    # 4 degrees of freedom: one in ten thousand is above. The toy has too few samples for the rare token.
    return Line("sample, frequencies", {"draws": num_draws, "chi-square": statistic}, scale.is_toy or statistic < 23.5)
