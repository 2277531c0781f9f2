"""The cost of a deterministic engine, per step: section "deterministic" of `benchmarks gpu`.

The same random weights in two decoders of one process, one with the usual kernels and one with those whose results do
not depend on the batch; decodes, and a chunk of a prompt.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.gpu.models import random_decoder, step_tensors, triton_in_place_of_cpu
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.speed.steps import BLOCK_SIZE, stepping
from sluice.kernels.chain import set_deterministic

DECODES = ((1, 2048), (32, 2048), (128, 2048), (32, 8192))
"""Sequences and their contexts."""

CHUNK = 4096


def groups(scale: Scale) -> Groups:
    """Return a small and a large dense model."""
    return {shape: partial(_lines, scale, shape) for shape in (["toy"] if scale.is_toy else ["8B", "0.6B"])}


def _lines(scale: Scale, shape: str) -> Iterator[Line]:
    steps = [(f"{batch} x {context}", [1] * batch, [context] * batch) for batch, context in DECODES]
    steps.append((f"chunk of {CHUNK}", [CHUNK], [CHUNK]))
    if scale.is_toy:
        steps = [("2 x 40", [1, 1], [40, 40])]
    usual, deterministic = (_times_ms(scale, shape, steps, is_deterministic=is_it) for is_it in (False, True))
    for (name, _, _), before_ms, after_ms in zip(steps, usual, deterministic, strict=True):
        figures: dict[str, float | str] = {
            "ms": before_ms,
            "ms deterministic": after_ms,
            "cost": after_ms / before_ms - 1,
        }
        yield Line(f"{shape}, {name}", figures)


def _times_ms(
    scale: Scale, shape: str, steps: list[tuple[str, list[int], list[int]]], *, is_deterministic: bool
) -> list[float]:
    """Return the milliseconds of each step in a CUDA graph."""
    with _kernels(scale, is_deterministic=is_deterministic):
        decoder = random_decoder(shape, scale.device, max_model_len=128 if scale.is_toy else 8192, max_tokens=CHUNK)
        return [
            scale.timer.device_us(stepping(scale, decoder, step_tensors(lens, contexts, BLOCK_SIZE, scale.device)))
            / 1e3
            for _, lens, contexts in steps
        ]


@contextmanager
def _kernels(scale: Scale, *, is_deterministic: bool) -> Generator[None]:
    if scale.is_toy:
        with triton_in_place_of_cpu(deterministic=is_deterministic):
            yield
        return
    set_deterministic(is_deterministic)
    try:
        yield
    finally:
        set_deterministic(False)
