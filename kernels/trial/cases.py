"""Cases of each operation: small inputs of a model's sizes, which reach every variant of its kernels.

A case calls the operation as a model does, so that the variants compiled here are those that a worker needs.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sluice.kernels.chain import OPERATIONS
from sluice.kernels.copy_blocks import block_runs, copy_blocks, parts_of
from sluice.kernels.copy_blocks.reference import copy_blocks_reference
from sluice.kernels.gated_activation import gated_activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.linear import pack_linear
from sluice.kernels.linear.int8 import dequantized, quantized
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
from sluice.kernels.trial.cache_cases import attention_cases, hopper_cases, make_cache, write_cases
from sluice.kernels.trial.compare import require_close, require_equal, require_same_rows
from sluice.kernels.trial.sizes import ModelSizes

Case = Callable[[], None]
"""Runs an operation and raises `WrongResult`, or whatever the kernel raises."""

_NUM_ROWS = 33
_DETERMINISTIC_ROWS = (1, 7, 24, 70, 300)
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
    makers: Mapping[str, Callable[[], Iterator[Case]]] = {
        "copy_blocks": partial(_copy_cases, sizes, device),
        "gated_activation": partial(_gate_cases, _Given(sizes, device)),
        "hopper_prefill": partial(hopper_cases, sizes, device),
        "logprobs": partial(_logprob_cases, _Given(sizes, device)),
        "linear": partial(_product_cases, _Given(sizes, device)),
        "paged_attention": partial(attention_cases, sizes, device),
        "penalties": partial(_penalty_cases, _Given(sizes, device)),
        "prepare_batch": partial(_plan_cases, sizes, device),
        "rms_norm": partial(_norm_cases, _Given(sizes, device)),
        "sample": partial(_sample_cases, _Given(sizes, device)),
        "soft_cap": partial(_cap_cases, _Given(sizes, device)),
        "write_kv": partial(write_cases, sizes, device),
    }
    assert makers.keys() == OPERATIONS.keys()
    return list(makers[operation]())


def _norm_cases(given: _Given) -> Iterator[Case]:
    sizes = given.sizes

    def run(*, is_added: bool, is_normed: bool) -> None:
        x, residual = given.random(_NUM_ROWS, sizes.hidden_size), given.random(_NUM_ROWS, sizes.hidden_size)
        weight, added = given.random(sizes.hidden_size), given.random(sizes.hidden_size) if is_normed else None
        eps, offset = sizes.eps, sizes.norm_offset
        if not is_added:
            expected = rms_norm_reference(x.double(), weight.double(), eps=eps, weight_offset=offset)
            require_close(rms_norm(x, weight, eps=eps, weight_offset=offset), expected)
            return
        expected, total = add_rms_norm_reference(x, residual, weight, added_weight=added, eps=eps, weight_offset=offset)
        found = add_rms_norm(x, residual, weight, added_weight=added, eps=eps, weight_offset=offset)
        require_close(found, expected)
        require_close(residual, total)

    yield partial(run, is_added=False, is_normed=False)
    yield partial(run, is_added=True, is_normed=sizes.has_post_norms)


def _gate_cases(given: _Given) -> Iterator[Case]:
    def run() -> None:
        gate_up = given.random(_NUM_ROWS, 2 * given.sizes.intermediate_size)
        found = gated_activation(gate_up, activation=given.sizes.activation)
        require_close(found, gated_activation_reference(gate_up.double(), activation=given.sizes.activation))

    yield run


def _cap_cases(given: _Given) -> Iterator[Case]:
    cap = given.sizes.final_soft_cap

    def run() -> None:
        logits = given.random(3, given.sizes.vocab_size) * cap
        expected = soft_cap_reference(logits.double(), cap=cap)
        require_close(soft_cap(logits, cap=cap), expected)

    if cap:
        yield run


def _product_cases(given: _Given) -> Iterator[Case]:
    is_int8 = given.sizes.is_int8

    def run(out_size: int, in_size: int, num_rows: int, *, has_bias: bool) -> None:
        weight, x = given.random(out_size, in_size) / in_size**0.5, given.random(num_rows, in_size)
        bias = given.random(out_size) if has_bias else None
        found = pack_linear(weight, bias, is_int8=is_int8)(x)
        narrow, scales = quantized(weight) if is_int8 else (weight, None)
        pieces = list[Tensor]()
        for at in range(0, out_size, _PIECE):
            piece = narrow[at : at + _PIECE]
            wide = piece.float() if scales is None else dequantized(piece, scales[at : at + _PIECE], torch.float32)
            pieces.append(x.float() @ wide.T)
        expected = torch.cat(pieces, dim=1)
        require_close(found, expected if bias is None else expected + bias.float())

    def run_alone(out_size: int, in_size: int, *, has_bias: bool) -> None:
        linear = pack_linear(
            given.random(out_size, in_size), given.random(out_size) if has_bias else None, is_int8=is_int8
        )
        x = given.random(max(_DETERMINISTIC_ROWS), in_size)
        require_same_rows([linear(x[:num_rows]) for num_rows in _DETERMINISTIC_ROWS])

    if given.sizes.is_deterministic:
        for out_size, in_size, has_bias in sorted(given.sizes.products, reverse=True):
            yield from (partial(run, out_size, in_size, num_rows, has_bias=has_bias) for num_rows in (1, 300))
            yield partial(run_alone, out_size, in_size, has_bias=has_bias)
        return
    # Kernels for very few rows; in int8 also tiles of more, and a weight that is widened for the library.
    rows = (1, 2, 4, 7, 12, 24, 50, 200, 300) if is_int8 else (1, 2, 4)
    for out_size, in_size, has_bias in sorted(given.sizes.products, reverse=True):
        yield from (partial(run, out_size, in_size, num_rows, has_bias=has_bias) for num_rows in rows)


def _logprob_cases(given: _Given) -> Iterator[Case]:
    def run() -> None:
        count = min(5, given.sizes.vocab_size)
        # Rounded to halves, so that some are equal.
        logits = (2 * given.random(3, given.sizes.vocab_size, dtype=torch.float32)).round() / 2
        token_ids = torch.tensor([0, given.sizes.vocab_size - 1, 1], device=given.device)
        found = logprobs(logits, token_ids, count=count)
        expected = logprobs_reference(logits, token_ids, count=count)
        require_close(found[0], expected[0])
        require_close(found[1], expected[1])
        require_equal(found[2], expected[2])

    yield run


def _plan_cases(sizes: ModelSizes, device: torch.device) -> Iterator[Case]:
    def run(*, is_fed: bool) -> None:
        ids = [5, 7, -1 if is_fed else 3, PADDING, PADDING, 0]
        plan = StepPlan(
            token_ids=torch.tensor(ids, dtype=torch.int32, device=device),
            query_start_locs=torch.tensor([0, 2, 3, 5], dtype=torch.int32, device=device),
            context_lens=torch.tensor([sizes.block_size + 2, 4, 2], dtype=torch.int32, device=device),
            block_tables=torch.arange(12, dtype=torch.int32, device=device).view(3, 4),
            window_tables=torch.arange(24, dtype=torch.int32, device=device).view(2, 3, 4) if is_fed else None,
        )
        drawn = torch.tensor([11], device=device) if is_fed else None
        how = {"block_size": sizes.block_size, "spare_slot": 12 * sizes.block_size}
        found, expected = prepare_batch(plan, drawn, **how), prepare_batch_reference(plan, drawn, **how)
        require_equal(found.input_ids, expected.input_ids)
        require_equal(found.positions, expected.positions)
        require_equal(found.slot_mapping, expected.slot_mapping)
        if found.window_slots is not None and expected.window_slots is not None:
            require_equal(found.window_slots, expected.window_slots)

    yield partial(run, is_fed=False)
    yield partial(run, is_fed=True)


def _copy_cases(sizes: ModelSizes, device: torch.device) -> Iterator[Case]:
    def run() -> None:
        caches, expected = ([make_cache(sizes, 4, device) for _ in range(2)] for _ in range(2))
        pairs = [pair for two in zip(caches, expected, strict=True) for pair in zip(*map(parts_of, two), strict=True)]
        for part, other in pairs:
            part.copy_(torch.randn(part.shape, device=device))
            other.copy_(part)
        copy_blocks(block_runs(caches), [(0, 2), (1, 3)])
        copy_blocks_reference(expected, [(0, 2), (1, 3)])
        for part, other in pairs:
            # torch does not compare 8-bit floats.
            require_equal(*(x.view(torch.uint8) if x.dtype == FP8 else x for x in (part, other)))

    yield run


def _penalty_cases(given: _Given) -> Iterator[Case]:
    def run() -> None:
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
        apply_penalties_cpu(expected, Penalties(**parts))
        apply_penalties(logits, Penalties(**{name: part.to(given.device) for name, part in parts.items()}))
        require_close(logits.cpu(), expected)

    yield run


def _sample_cases(given: _Given) -> Iterator[Case]:
    def run(dtype: torch.dtype) -> None:
        options = _options(given.device)
        logits = given.random(len(options.seed), given.sizes.vocab_size, dtype=dtype)
        found = sample(logits, options)
        # An exponential that differs in the last place may move the end of a set by one token.
        require_equal(found, sample_reference(logits, options), max_different=1)

    # Logits with penalties are in float32.
    yield from (partial(run, dtype) for dtype in {given.sizes.torch_dtype, torch.float32})


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
