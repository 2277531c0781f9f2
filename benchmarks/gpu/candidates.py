"""Candidates for a kernel's configuration: neighbours of the rules' choice, compiled in parallel.

The compiler's figures decide which are measured.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

Config = TypeVar("Config")
"""A frozen dataclass of integers."""

MAX_COMPILED = 32
"""Candidates of a kernel that are compiled."""

MAX_MEASURED = 20
"""Candidates of a kernel that are measured."""

MAX_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Facts:
    """What a program of a compiled kernel takes of a processor."""

    registers: int
    """Per thread."""

    stack_bytes: int
    """Registers that did not fit, spilled to memory."""

    shared_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Processor:
    """What a processor of a GPU has; the numbers of sm_90 unless given."""

    registers: int = 65_536
    shared_bytes: int = 228 * 1024
    max_threads: int = 2048

    def num_programs(self, facts: Facts) -> int:
        """Return how many programs run at once. Each takes 1 KiB of shared memory more than it asks for."""
        by_registers = self.registers // (max(facts.registers, 1) * facts.num_threads)
        by_shared = self.shared_bytes // (facts.shared_bytes + 1024)
        return min(by_registers, by_shared, self.max_threads // facts.num_threads)


def neighbours(rule: Config) -> list[Config]:
    """Return configurations near `rule`: those that differ in one number, then some that differ in two."""
    steps = [(field.name, value) for field in fields(rule) for value in _near(field.name, getattr(rule, field.name))]
    pairs = [pair for pair in combinations(steps, 2) if pair[0][0] != pair[1][0]]
    stride = max(1, len(pairs) // (MAX_COMPILED - len(steps)) + 1)
    changes = [dict([step]) for step in steps] + [dict(pair) for pair in pairs[::stride]]
    return [replace(rule, **change) for change in changes]


def _near(name: str, value: int) -> list[int]:
    """Return the next smaller and larger values of a number: of stages by one, of a power of two by its factor."""
    if isinstance(value, bool) or value <= 0:
        return []
    if name == "num_stages" or value & (value - 1):
        return [near for near in (value - 1, value + 1) if near > 0]
    return [near for near in (value // 2, value * 2) if near > 0]


def promising(found: Iterable[tuple[Config, Facts | None]], rule: Facts | None, processor: Processor) -> list[Config]:
    """Return the candidates to measure: those that fit and have enough in flight, the first of them if there are many.

    Args:
        found: candidates with their facts, None if one does not compile.
        rule: the facts of the rules' choice. Candidates have at least half of its threads, and half of its bytes of
            shared memory, on a processor: the latter hold the copies from memory that are in flight.
        processor: what there is.
    """
    kept: list[Config] = []
    for config, facts in found:
        if facts is None or facts.stack_bytes > 0 or processor.num_programs(facts) == 0:
            continue
        if rule is None or _has_half(facts, rule, processor):
            kept.append(config)
    return kept[:MAX_MEASURED]


def _has_half(facts: Facts, rule: Facts, processor: Processor) -> bool:
    num_programs, num_of_rule = processor.num_programs(facts), processor.num_programs(rule)
    has_threads = 2 * num_programs * facts.num_threads >= num_of_rule * rule.num_threads
    return has_threads and 2 * num_programs * facts.shared_bytes >= num_of_rule * rule.shared_bytes


# Compilation


@contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Compile kernels instead of launching them; the compiled ones are collected."""
    from triton.runtime.jit import JITFunction

    usual, compiled = JITFunction.run, list[Any]()

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        compiled.append(usual(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = usual


def facts_of(launch: Callable[[], object]) -> Facts | None:
    """Return what the largest kernel of a launch takes, and the registers that any of them spills; None: it failed."""
    try:
        with compiling_only() as compiled:
            launch()
    except Exception:  # noqa: BLE001 - one that does not compile is no candidate
        return None
    each = [_facts(kernel) for kernel in compiled]
    largest = max(each, key=lambda facts: (facts.shared_bytes, facts.registers))
    return replace(largest, stack_bytes=max(facts.stack_bytes for facts in each))


def _facts(kernel: "CompiledKernel") -> Facts:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    metadata = kernel.metadata
    return Facts(int(found[1]), int(found[2]), metadata.shared, 32 * metadata.num_warps)


def compiled_in_parallel(function: Callable[..., Facts | None], tasks: Sequence[tuple[Any, ...]]) -> list[Facts | None]:
    """Call `function` with each of `tasks` in other processes, which leave what they compile in Triton's cache."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    num_processes = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(tasks)))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        # In blocks: neighbours share inputs, which a process keeps.
        size = max(1, len(tasks) // (4 * num_processes))
        return list(pool.map(function, *zip(*tasks, strict=True), chunksize=size))


def by_kind(
    tasks: Sequence[tuple[Any, ...]], facts: Sequence[Facts | None]
) -> Mapping[Any, list[tuple[Any, Facts | None]]]:
    """Return configurations and their facts by kind; a task is (workload, kind, configuration)."""
    found: dict[Any, list[tuple[Any, Facts | None]]] = {}
    for (_, kind, config), one in zip(tasks, facts, strict=True):
        found.setdefault(kind, []).append((config, one))
    return found
