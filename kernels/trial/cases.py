"""Cases of each operation: small inputs of a model's sizes, which reach every variant of its kernels.

A case calls the operation as a model does, so that the variants compiled here are those that a worker needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sluice.kernels.adapters import AdapterBank, LowRank, RowPlaces, add_adapters
from sluice.kernels.chain import OPERATIONS
from sluice.kernels.copy_blocks import block_runs, copy_blocks, parts_of
from sluice.kernels.copy_blocks.reference import copy_blocks_reference
from sluice.kernels.decoder_shape import MixtureShape
from sluice.kernels.experts import Dense, Mixture, Router, Stacked, StackedExperts, route
from sluice.kernels.experts.cpu import combine_torch, grouped_rows
from sluice.kernels.experts.reference import route_reference
from sluice.kernels.gated_activation import gated_activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.linear import pack_gated_linear, pack_linear
from sluice.kernels.linear.cuda import MAX_PACKED_ROWS, Float8Linear, PackedLinear
from sluice.kernels.linear.float8 import Float8Weight, random_float8, rounded_rows_float8
from sluice.kernels.linear.grouped import GROUP
from sluice.kernels.linear.int8 import dequantized, quantized
from sluice.kernels.linear.plain import Linear, PlainLinear
from sluice.kernels.linear.words import FLOAT8_CODES, WordForm, WordWeight, random_words
from sluice.kernels.logprobs import logprobs
from sluice.kernels.logprobs.reference import logprobs_reference
from sluice.kernels.paged_attention import FP8
from sluice.kernels.penalties import Penalties, apply_penalties
from sluice.kernels.penalties.cpu import apply_penalties_cpu
from sluice.kernels.prepare_batch import PADDING, StepPlan, prepare_batch
from sluice.kernels.prepare_batch.reference import prepare_batch_reference
from sluice.kernels.rms_norm import add_rms_norm, rms_norm
from sluice.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from sluice.kernels.sample import SampleOptions, sample
from sluice.kernels.sample.reference import sample_reference
from sluice.kernels.soft_cap import soft_cap
from sluice.kernels.soft_cap.reference import soft_cap_reference
from sluice.kernels.token_masks import apply_token_masks
from sluice.kernels.token_masks.reference import apply_token_masks_reference
from sluice.kernels.trial.cache_cases import attention_cases, hopper_cases, make_cache, write_cases
from sluice.kernels.trial.compare import require_close, require_equal, require_same_rows
from sluice.kernels.trial.sizes import ModelSizes

Case = Callable[[], None]
"""Runs an operation and raises `WrongResult`, or whatever the kernel raises."""

_NUM_ROWS = 33
_DETERMINISTIC_ROWS = (1, 7, 24, 70, 300)
"""Each number of rows has other blocks."""

_PRODUCT_ROWS = (1, 24, 70, 200, 300, 1100)
"""Each number of rows has other tiles, or other programs that add the parts of K."""

_PIECE = 8192
"""Rows of a weight that are widened at once for a reference."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A model's sizes, and random tensors on a device."""

    sizes: ModelSizes
    device: torch.device

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.sizes.torch_dtype)


def cases_of(operation: str, sizes: ModelSizes, device: torch.device) -> list[Case]:
    """Return the cases of one of `OPERATIONS`; none if the model does not use it."""
    given = _Given(sizes, device)
    makers: Mapping[str, Callable[[], Iterable[Case]]] = {
        "adapters": lambda: _adapter_cases(given) if sizes.adapter_rank else [],
        "copy_blocks": lambda: [partial(_try_copy, given)],
        "experts": lambda: _mixture_cases(given, sizes.mixture),
        "gated_activation": lambda: [partial(_try_gate, given)],
        "hopper_prefill": lambda: hopper_cases(sizes, device),
        "logprobs": lambda: [partial(_try_logprobs, given)],
        "linear": lambda: _product_cases(given),
        "paged_attention": lambda: attention_cases(sizes, device),
        "penalties": lambda: [partial(_try_penalties, given)],
        "prepare_batch": lambda: [partial(_try_plan, given, is_fed=is_fed) for is_fed in (False, True)],
        "rms_norm": lambda: _norm_cases(given),
        # Logits with penalties are in float32.
        "sample": lambda: [partial(_try_sample, given, dtype) for dtype in {sizes.torch_dtype, torch.float32}],
        "soft_cap": lambda: [partial(_try_cap, given)] if sizes.final_soft_cap else [],
        "token_masks": lambda: [partial(_try_masks, given)],
        "write_kv": lambda: write_cases(sizes, device),
    }
    assert makers.keys() == OPERATIONS.keys()
    return list(makers[operation]())


def _adapter_cases(given: _Given) -> Iterator[Case]:
    for out_size, in_size, _ in sorted(given.sizes.products, reverse=True):
        yield partial(_try_adapters, given, out_size, in_size)


def _try_adapters(given: _Given, out_size: int, in_size: int) -> None:
    out, x = given.random(_NUM_ROWS, out_size), given.random(_NUM_ROWS, in_size)
    rank, places = given.sizes.adapter_rank, (torch.arange(_NUM_ROWS, dtype=torch.int32) % 4 - 1).to(given.device)
    bank = AdapterBank((out_size,), in_size, rank=rank, num_places=3, like=x)
    for place in range(2):
        bank.put(place, [LowRank(given.random(rank, in_size) / in_size**0.5, given.random(out_size, rank))])
    rows, expected = RowPlaces(places, (0, 1, 2)), out.double()
    for place in range(2):
        added = x.double() @ bank.down[place].double().T @ bank.up[place].double().T
        expected += torch.where((places == place)[:, None], added, 0.0)
    add_adapters(out, x, bank, rows)
    require_close(out, expected)


def _norm_cases(given: _Given) -> Iterator[Case]:
    yield partial(_try_norm, given)
    yield partial(_try_added_norm, given, has_norm=True)
    if given.sizes.is_parallel or not given.sizes.has_pre_norms:
        yield partial(_try_added_norm, given, has_norm=False)


def _try_norm(given: _Given) -> None:
    x, weight = given.random(_NUM_ROWS, given.sizes.hidden_size), given.random(given.sizes.hidden_size)
    options = given.sizes.norm_options
    require_close(rms_norm(x, weight, **options), rms_norm_reference(x.double(), weight.double(), **options))


def _try_added_norm(given: _Given, *, has_norm: bool) -> None:
    sizes = given.sizes
    x, residual = given.random(_NUM_ROWS, sizes.hidden_size), given.random(_NUM_ROWS, sizes.hidden_size)
    weight = given.random(sizes.hidden_size) if has_norm else None
    added = given.random(sizes.hidden_size) if sizes.has_post_norms else None
    options = sizes.norm_options
    expected, total = add_rms_norm_reference(x, residual, weight, added_weight=added, **options)
    actual = add_rms_norm(x, residual, weight, added_weight=added, **options)
    require_close(actual, expected)
    require_close(residual, total)


def _try_gate(given: _Given) -> None:
    gate_up = given.random(_NUM_ROWS, 2 * given.sizes.intermediate_size)
    actual = gated_activation(gate_up, activation=given.sizes.activation)
    require_close(actual, gated_activation_reference(gate_up.double(), activation=given.sizes.activation))


def _mixture_cases(given: _Given, shape: MixtureShape | None) -> Iterator[Case]:
    """Yield mixtures of rows that fill small blocks, and large ones."""
    if shape is None:
        return
    for num_rows in (1, 20 * shape.num_experts // shape.num_chosen):
        yield partial(_try_mixture, given, shape, num_rows)
    if given.sizes.is_deterministic:
        yield partial(_try_mixture_alone, given, shape)


def _mixture(given: _Given, shape: MixtureShape) -> Mixture:
    """Return a mixture of random experts, which are not more than are needed to be different."""
    sizes, has_shared, size = given.sizes, shape.shared_size > 0, shape.intermediate_size
    num_experts = min(shape.num_experts, 2 * shape.num_chosen)

    def stacked(out_size: int, in_size: int) -> Stacked:
        bias = given.random(num_experts, out_size) if shape.has_bias else None
        weight = given.random(num_experts, out_size, in_size) / in_size**0.5
        return Stacked.of(weight, bias, is_int8=sizes.is_int8)

    shared = given.random(sizes.hidden_size, sizes.hidden_size) / sizes.hidden_size**0.5
    router = Router(
        weight=given.random(num_experts + has_shared, sizes.hidden_size) / sizes.hidden_size**0.5,
        bias=given.random(num_experts, dtype=torch.float32) if shape.has_bias else None,
        num_chosen=shape.num_chosen,
        is_normalised=shape.is_normalised,
        has_shared=has_shared,
    )
    experts = StackedExperts(
        gate_up=stacked(2 * size, sizes.hidden_size),
        down=stacked(sizes.hidden_size, size),
        activation=sizes.activation,
    )
    # What the shared expert computes is of other operations.
    return Mixture(router=router, experts=experts, shared=Dense(lambda x: x, PlainLinear(shared, None)))


def _try_mixture(given: _Given, shape: MixtureShape, num_rows: int) -> None:
    mixture, x = _mixture(given, shape), given.random(num_rows, given.sizes.hidden_size)
    assert isinstance(mixture.experts, StackedExperts)
    routing = route(x, mixture.router)
    expected = route_reference(x, mixture.router)
    # Two scores may be so near that they are ordered otherwise.
    require_equal(routing.experts, expected.experts, max_different=num_rows // 50)
    require_close(routing.shares, expected.shares)
    rows, places = grouped_rows(x, routing.experts, mixture.experts.each)
    shared = None if routing.shared is None else mixture.shared(x) if mixture.shared else None
    require_close(mixture.experts(x, routing, shared), combine_torch(rows, places, routing, shared))


def _try_mixture_alone(given: _Given, shape: MixtureShape) -> None:
    """Check that a row's mixture does not depend on the number of rows."""
    mixture, x = _mixture(given, shape), given.random(max(_DETERMINISTIC_ROWS), given.sizes.hidden_size)

    def computed(rows: Tensor) -> Tensor:
        return mixture.experts(rows, route(rows, mixture.router), None)

    require_same_rows([computed(x[:num_rows]) for num_rows in _DETERMINISTIC_ROWS])


def _try_cap(given: _Given) -> None:
    cap = given.sizes.final_soft_cap
    logits = given.random(3, given.sizes.vocab_size) * cap
    expected = soft_cap_reference(logits.double(), cap=cap)
    require_close(soft_cap(logits, cap=cap), expected)


def _product_cases(given: _Given) -> Iterator[Case]:
    """Yield products of every weight, with numbers of rows that use every kernel."""
    if given.sizes.word_forms:
        yield from _packed_cases(given)
    if given.sizes.is_deterministic:
        rows: tuple[int, ...] = (1, 300)
    else:
        # Kernels for very few rows; in int8 also tiles of more, and a weight that is widened for the library.
        rows = (1, 2, 4, 7, 12, 24, 50, 200, 300) if given.sizes.is_int8 else (1, 2, 4)
    for out_size, in_size, has_bias in sorted(given.sizes.products, reverse=True):
        yield from (partial(_try_product, given, out_size, in_size, n, has_bias=has_bias) for n in rows)
        if given.sizes.is_deterministic:
            yield partial(_try_product_alone, given, out_size, in_size, has_bias=has_bias)
    if given.sizes.is_deterministic and given.sizes.intermediate_size:
        yield partial(_try_gated_product_alone, given)


def _packed_cases(given: _Given) -> Iterator[Case]:
    """Yield products of every weight in every packed form: of few rows, in each tile, and widened for the library."""
    rows = (1, 300) if given.sizes.is_deterministic else (1, 2, 12, 24, 50, 200, MAX_PACKED_ROWS + 1)
    for out_size, in_size, has_bias in sorted(given.sizes.products, reverse=True):
        for form in given.sizes.word_forms:
            if in_size % (form.span or GROUP) == 0 or form.scales == FLOAT8_CODES:
                yield from (partial(_try_packed, given, form, out_size, in_size, n, has_bias=has_bias) for n in rows)
                if given.sizes.is_deterministic:
                    yield partial(_try_packed_alone, given, form, out_size, in_size)


def _coded(
    given: _Given, form: WordForm, out_size: int, in_size: int, bias: Tensor | None
) -> tuple[Linear, Float8Weight | WordWeight]:
    """Return the product of a random weight, and the weight."""
    if form.scales == FLOAT8_CODES:
        in_float8 = random_float8(form.span, out_size, in_size, given.device)
        return Float8Linear(in_float8, bias), in_float8
    words = random_words(form, out_size, in_size, given.device)
    return PackedLinear(words, bias), words


def _try_packed(given: _Given, form: WordForm, out_size: int, in_size: int, num_rows: int, *, has_bias: bool) -> None:
    x, bias = given.random(num_rows, in_size), given.random(out_size) if has_bias else None
    linear, weight = _coded(given, form, out_size, in_size, bias)
    actual = linear(x)
    rows = x.float()
    if isinstance(linear, Float8Linear) and linear.rounds(x):
        codes, scales = rounded_rows_float8(x)
        rows = codes.float() * scales[:, None]
    pieces = [
        rows @ weight.map(lambda part, at=at: part[at : at + _PIECE]).dequantized(torch.float32).T
        for at in range(0, out_size, _PIECE)
    ]
    expected = torch.cat(pieces, dim=1)
    require_close(actual, expected if bias is None else expected + bias.float())


def _try_packed_alone(given: _Given, form: WordForm, out_size: int, in_size: int) -> None:
    """Check that a row's product does not depend on the number of rows."""
    linear, _ = _coded(given, form, out_size, in_size, given.random(out_size))
    x = given.random(max(_DETERMINISTIC_ROWS), in_size)
    require_same_rows([linear(x[:num_rows]) for num_rows in _DETERMINISTIC_ROWS])


def _try_product(given: _Given, out_size: int, in_size: int, num_rows: int, *, has_bias: bool) -> None:
    weight, x = given.random(out_size, in_size) / in_size**0.5, given.random(num_rows, in_size)
    bias = given.random(out_size) if has_bias else None
    actual = pack_linear(weight, bias, is_int8=given.sizes.is_int8)(x)
    narrow, scales = quantized(weight) if given.sizes.is_int8 else (weight, None)
    pieces = list[Tensor]()
    for at in range(0, out_size, _PIECE):
        piece = narrow[at : at + _PIECE]
        wide = piece.float() if scales is None else dequantized(piece, scales[at : at + _PIECE], torch.float32)
        pieces.append(x.float() @ wide.T)
    expected = torch.cat(pieces, dim=1)
    require_close(actual, expected if bias is None else expected + bias.float())


def _try_product_alone(given: _Given, out_size: int, in_size: int, *, has_bias: bool) -> None:
    """Check that a row's product does not depend on the number of rows."""
    weight, bias = given.random(out_size, in_size), given.random(out_size) if has_bias else None
    linear = pack_linear(weight, bias, is_int8=given.sizes.is_int8)
    x = given.random(max(_PRODUCT_ROWS), in_size)
    require_same_rows([linear(x[:num_rows]) for num_rows in _PRODUCT_ROWS])


def _try_gated_product_alone(given: _Given) -> None:
    """Check that a row's gated product depends neither on the number of rows nor on whether the gate is applied later.

    It is where adapters change what is gated.
    """
    sizes = given.sizes
    weight = given.random(2 * sizes.intermediate_size, sizes.hidden_size) / sizes.hidden_size**0.5
    bias = given.random(2 * sizes.intermediate_size) if sizes.has_mlp_bias else None
    linear = pack_linear(weight, bias, is_int8=sizes.is_int8)
    gated = pack_gated_linear(weight, bias, activation=sizes.activation, is_int8=sizes.is_int8)
    x = given.random(max(_PRODUCT_ROWS), sizes.hidden_size)
    in_two_steps = gated_activation(linear(x), activation=sizes.activation)
    require_same_rows([*(gated(x[:num_rows]) for num_rows in _PRODUCT_ROWS), in_two_steps])


def _try_logprobs(given: _Given) -> None:
    count = min(5, given.sizes.vocab_size)
    # Rounded to halves, so that some are equal.
    logits = (2 * given.random(3, given.sizes.vocab_size, dtype=torch.float32)).round() / 2
    token_ids = torch.tensor([0, given.sizes.vocab_size - 1, 1], device=given.device)
    actual = logprobs(logits, token_ids, count=count)
    expected = logprobs_reference(logits, token_ids, count=count)
    require_close(actual[0], expected[0])
    require_close(actual[1], expected[1])
    require_equal(actual[2], expected[2])


def _try_plan(given: _Given, *, is_fed: bool) -> None:
    block_size, device = given.sizes.block_size, given.device
    ids = [5, 7, -1 if is_fed else 3, PADDING, PADDING, 0]
    plan = StepPlan(
        token_ids=torch.tensor(ids, dtype=torch.int32, device=device),
        query_start_locs=torch.tensor([0, 2, 3, 5], dtype=torch.int32, device=device),
        context_lens=torch.tensor([block_size + 2, 4, 2], dtype=torch.int32, device=device),
        block_tables=torch.arange(12, dtype=torch.int32, device=device).view(3, 4),
        window_tables=torch.arange(24, dtype=torch.int32, device=device).view(2, 3, 4) if is_fed else None,
    )
    drawn = torch.tensor([11], device=device) if is_fed else None
    how = {"block_size": block_size, "spare_slot": 12 * block_size}
    actual, expected = prepare_batch(plan, drawn, **how), prepare_batch_reference(plan, drawn, **how)
    require_equal(actual.input_ids, expected.input_ids)
    require_equal(actual.positions, expected.positions)
    require_equal(actual.slot_mapping, expected.slot_mapping)
    if actual.window_slots is not None and expected.window_slots is not None:
        require_equal(actual.window_slots, expected.window_slots)


def _try_copy(given: _Given) -> None:
    caches, expected = ([make_cache(given.sizes, 4, given.device) for _ in range(2)] for _ in range(2))
    pairs = [pair for two in zip(caches, expected, strict=True) for pair in zip(*map(parts_of, two), strict=True)]
    for part, other in pairs:
        part.copy_(torch.randn(part.shape, device=given.device))
        other.copy_(part)
    copy_blocks(block_runs(caches), [(0, 2), (1, 3)])
    copy_blocks_reference(expected, [(0, 2), (1, 3)])
    for part, other in pairs:
        # torch does not compare 8-bit floats.
        require_equal(*(x.view(torch.uint8) if x.dtype == FP8 else x for x in (part, other)))


def _try_penalties(given: _Given) -> None:
    num_rows, vocab_size = 3, given.sizes.vocab_size
    repetition, frequency, presence = torch.rand(3, num_rows)
    parts = {
        "seen": torch.randint(0, 4, (num_rows, vocab_size), dtype=torch.int32),
        "places": torch.tensor([2, -1, 0], dtype=torch.int32),
        "extras": torch.tensor([[0, 1], [1, 1], [-1, 0]], dtype=torch.int32),
        "repetition": repetition + 0.5,
        "frequency": frequency,
        "presence": presence,
    }
    logits = given.random(num_rows, vocab_size, dtype=torch.float32)
    expected = logits.cpu().clone()
    apply_penalties_cpu(expected, Penalties(**parts, listed=None))
    apply_penalties(logits, Penalties(**{name: part.to(given.device) for name, part in parts.items()}, listed=None))
    require_close(logits.cpu(), expected)


def _try_masks(given: _Given) -> None:
    vocab_size = given.sizes.vocab_size
    logits, rows = given.random(3, vocab_size), torch.tensor([2, 0])
    masks = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32))).int()
    expected = logits.cpu().clone()
    apply_token_masks_reference(expected, rows, masks)
    apply_token_masks(logits, rows.to(given.device), masks.to(given.device))
    require_equal(logits.cpu(), expected)


def _try_sample(given: _Given, dtype: torch.dtype) -> None:
    options = _options(given.device)
    logits = given.random(len(options.seed), given.sizes.vocab_size, dtype=dtype)
    # An exponential that differs in the last place may move the end of a set by one token.
    require_equal(sample(logits, options), sample_reference(logits, options), max_different=1)


def _options(device: torch.device) -> SampleOptions:
    """Return rows with no filter, each one, and all of them, at different temperatures."""
    filters = [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.8, 0.01)]
    top_k, top_p, min_p = zip(*filters * 3, strict=True)
    num_rows = len(top_k)
    return SampleOptions(
        temperature=torch.tensor([0.0] * 5 + [1.0] * 5 + [0.7] * 5, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, device=device),
        min_p=torch.tensor(min_p, device=device),
        seed=torch.arange(num_rows, device=device) * 987654321987,
        position=torch.arange(num_rows, dtype=torch.int32, device=device),
        counter_2=torch.zeros(num_rows, dtype=torch.int64, device=device),
    )
