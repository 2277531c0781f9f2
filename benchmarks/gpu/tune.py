"""Measure kernel configurations on this GPU, and write the best to the table that launches use.

    python -m benchmarks gpu --tune [--shapes 8B,1B,0.6B] [--write]
    python -m benchmarks gpu --tune --device cpu      # toy sizes, interpreted: does it all run?

Launches are made as a model makes them. Of each kind that asks for a configuration, the neighbours of the rules' choice
are compiled, in as many processes as there are cores, and at most 20 are measured. The result of each is compared with
that of the rules' choice; one that differs is reported and rejected. Without --write nothing is changed. A new table
may change sampled tokens, since sums are then split elsewhere: write it before a GPU begins to serve, not while jobs
are to be resumed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu.candidates import (
    Config,
    Facts,
    Processor,
    by_kind,
    compiled_in_parallel,
    facts_of,
    neighbours,
    promising,
)

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.gpu.scale import Scale
    from sluice.kernels.tuned import Kind

HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64), "0.6B": (16, 8, 128), "toy": (4, 2, 16)}
"""Query heads, key-value heads, head size."""

WEIGHTS = {
    "8B": ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)),
    "1B": ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192)),
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "toy": ((48, 40),),
}
"""Outputs by inputs of a layer's products."""

BATCHES = {"decodes": ([1] * 32, [4096] * 32), "drafts": ([6] * 32, [4096] * 32), "prefill": ([2048], [4096])}
TOY_BATCHES = {"decodes": ([1, 1], [40, 9]), "prefill": ([20], [30])}
"""Query lengths and context lengths."""

INT8_ROWS = (8, 16, 32, 64)

CLEARLY = 0.98
"""A candidate replaces the rules' choice only if it takes less than this share of its time."""


class Found(NamedTuple):
    """A configuration, and the times of the rules' choice and of this one."""

    config: Any  # the operation's own
    rule_us: float
    us: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Launches of one operation, described so that any process can make them."""

    shape: str
    name: str
    is_narrow: bool
    """Keys and values in fp8, or weights in int8."""

    weight: tuple[int, int] = (0, 0)
    num_tokens: int = 0

    @property
    def label(self) -> str:
        """The printed name."""
        if self.num_tokens == 0:
            return f"{self.shape}, {self.name}{', fp8 cache' if self.is_narrow else ''}"
        kind = "int8" if self.is_narrow else "16 bits"
        return f"{self.shape}, {self.name}, {kind}, {self.weight[0]} x {self.weight[1]}, {self.num_tokens} rows"

    def launch(self, scale: "Scale") -> "Callable[[], Tensor]":
        """Make the inputs; return the call."""
        if self.num_tokens == 0:
            return _attending(scale, self)
        return _multiplying(scale, self)


def workloads(shapes: Sequence[str]) -> Iterator[Workload]:
    """Yield attention, products of few rows, and products in int8 of the models in `shapes`."""
    for shape in shapes:
        for name in TOY_BATCHES if shape == "toy" else BATCHES:
            for is_narrow in (False, True):
                yield Workload(shape, name, is_narrow)
        for weight in WEIGHTS[shape]:
            for is_narrow in (False, True):
                yield Workload(shape, "product of few rows", is_narrow, weight, 1)
            for rows in INT8_ROWS[:1] if shape == "toy" else INT8_ROWS:
                yield Workload(shape, "product", True, weight, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write if asked; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu --tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: toy sizes, interpreted.")
    parser.add_argument("--shapes", default="8B,1B,0.6B", help="Models whose shapes are measured.")
    parser.add_argument("--write", action="store_true", help="Put what is found into kernels/tuned.json.")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        # Before Triton is imported, which reads it once.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from sluice.kernels.tuned import card_name, write_table

    scale = _scale(arguments.device)
    shapes = ["toy"] if scale.is_toy else arguments.shapes.split(",")
    table: dict[str, dict[str, Sequence[int]]] = {}
    with torch.inference_mode():
        for workload, (operation, key), found in tune(scale, list(workloads(shapes))):
            print(f"{workload.label}: {found.config}, {found.rule_us:.1f} us by the rules, {found.us:.1f} us now")
            table.setdefault(operation, {})[key] = astuple(found.config)
    if arguments.write:
        write_table(card_name(scale.device), table)
    return 0


def _scale(device: str) -> "Scale":
    from benchmarks.gpu.scale import card_scale, toy_scale

    return toy_scale() if device == "cpu" else card_scale()


def tune(scale: "Scale", given: Sequence[Workload]) -> "Iterator[tuple[Workload, Kind, Found]]":
    """Yield the best configuration of each kind of launch."""
    launches = [(workload, kind, rule) for workload in given for kind, rule in kinds_of(scale, workload).items()]
    candidates = _candidates(scale, launches)
    for workload, kind, rule in launches:
        compute = _with(kind, workload.launch(scale))
        yield workload, kind, fastest(scale, workload.label, compute, rule, candidates[kind])


def kinds_of(scale: "Scale", workload: Workload) -> "Mapping[Kind, Any]":
    """Launch once; return the kinds of launches that ask for a configuration, with the rules' choices."""
    from sluice.kernels.tuned import recording_requests

    launch = workload.launch(scale)
    with recording_requests() as requests:
        launch()
    return requests


def _with(kind: "Kind", launch: "Callable[[], Tensor]") -> "Callable[[Any], Tensor]":
    from sluice.kernels.tuned import trying

    def compute(config: object) -> "Tensor":
        with trying(kind, config):
            return launch()

    return compute


def _candidates(scale: "Scale", asked: "Sequence[tuple[Workload, Kind, Any]]") -> "Mapping[Kind, list[Any]]":
    """Return the configurations to measure, by kind."""
    if scale.is_toy:
        return {kind: neighbours(rule)[:2] for _, kind, rule in asked}
    tasks = [(workload, kind, config) for workload, kind, rule in asked for config in [rule, *neighbours(rule)]]
    print(f"compiling {len(tasks)} candidates", flush=True)
    found = by_kind(tasks, compiled_in_parallel(facts_by_compiling, tasks))
    processor = _processor(scale)
    return {kind: promising(each[1:], each[0][1], processor) for kind, each in found.items()}


def _processor(scale: "Scale") -> Processor:
    import torch

    properties = torch.cuda.get_device_properties(scale.device)
    threads = properties.max_threads_per_multi_processor
    return Processor(properties.regs_per_multiprocessor, properties.shared_memory_per_multiprocessor, threads)


def facts_by_compiling(workload: Workload, kind: "Kind", config: object) -> Facts | None:
    """Compile one candidate, in a process of its own."""
    compute = _with(kind, _launch_here(workload))
    return facts_of(lambda: compute(config))


@lru_cache(maxsize=1)
def _launch_here(workload: Workload) -> "Callable[[], Tensor]":
    return workload.launch(_scale("cuda"))


# Workloads


def _attending(scale: "Scale", workload: Workload) -> "Callable[[], Tensor]":
    from benchmarks.gpu.checks.accuracy import attend
    from benchmarks.gpu.speed.kernels import plain_attention

    query_lens, context_lens = (TOY_BATCHES if scale.is_toy else BATCHES)[workload.name]
    heads = HEADS[workload.shape]
    inputs = plain_attention(scale, query_lens, context_lens, heads, is_fp8=workload.is_narrow)
    return lambda: attend(inputs)


def _multiplying(scale: "Scale", workload: Workload) -> "Callable[[], Tensor]":
    import torch

    from benchmarks.gpu.scale import BEYOND_CACHE_BYTES
    from sluice.kernels.linear.few_rows import few_rows_triton
    from sluice.kernels.linear.int8 import quantized
    from sluice.kernels.linear.kernel import int8_product_triton

    out_size, in_size = workload.weight
    weight, scales = torch.randn(out_size, in_size, device=scale.device), None
    weight, scales = quantized(weight) if workload.is_narrow else (weight.to(scale.dtype), None)
    # More weights than the GPU's cache holds, as in the layers of a model.
    num_copies = 1 if scale.is_toy else max(1, BEYOND_CACHE_BYTES // weight.nbytes)
    weights = [weight.clone() for _ in range(num_copies)]
    x = torch.randn(workload.num_tokens, in_size, device=scale.device).to(scale.dtype)
    multiply = few_rows_triton if workload.name == "product of few rows" else int8_product_triton

    def launch() -> "Tensor":
        out = x.new_empty(x.shape[0], out_size)
        for one in weights:
            multiply(x, one, scales, None, out=out)
        return out

    return launch


def fastest(
    scale: "Scale", label: str, compute: "Callable[[Config], Tensor]", rule: Config, candidates: Sequence[Config]
) -> "Found":
    """Return the fastest candidate with the result of `rule`, if it is clearly faster; else `rule`."""
    expected = compute(rule).double()
    best, best_us = rule, CLEARLY * scale.timer.device_us(lambda: compute(rule))
    rule_us = best_us / CLEARLY
    for candidate in candidates:
        try:
            error = (compute(candidate).double() - expected).norm() / expected.norm()
        except Exception as problem:  # noqa: BLE001 - one that does not fit the GPU is no candidate
            print(f"  {label}: {candidate} cannot be launched: {type(problem).__name__}")
            continue
        if not float(error) < 0.01:
            print(f"  {label}: {candidate} is WRONG by {float(error):.3g}, left out")
            continue
        us = scale.timer.device_us(lambda candidate=candidate: compute(candidate))
        if us < best_us:
            best, best_us = candidate, us
    return Found(best, rule_us, rule_us if best == rule else best_us)


if __name__ == "__main__":
    sys.exit(main())
