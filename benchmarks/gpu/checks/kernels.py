"""The kernels against float64: `benchmarks.gpu.checks.accuracy`, on a GPU in processes for each dtype.

    python -m benchmarks.gpu.checks.kernels bfloat16 0      # the first part of one

Nearly all of the time is compilation (about a hundred variants in bfloat16 alone), which uses one core: parallel
processes divide it. Compiled kernels stay in Triton's cache for the sections that measure time.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks.gpu.checks import accuracy as gpu_checks
from benchmarks.gpu.process import Child, ChildFailed, print_lines
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale, card_scale

LIMIT_S = 115.0
NUM_PARTS = 4
"""Processes for each dtype; each uses some GiB of host memory."""


def kernels(scale: Scale) -> Iterator[Line]:
    """Yield the lines of every dtype; lines without a dtype come from every process and are yielded once."""
    if scale.is_toy:
        yield from gpu_checks.kernels(scale)
        return
    names = [str(dtype).removeprefix("torch.") for dtype in scale.dtypes]
    program = (sys.executable, "-m", "benchmarks.gpu.checks.kernels")
    with ExitStack() as stack:
        parts = [(name, str(part)) for name in names for part in range(NUM_PARTS)]
        yield from once([stack.enter_context(Child((*program, *part))) for part in parts])


def once(children: Sequence[Child]) -> Iterator[Line]:
    """Yield the lines of all processes, each name once, and again if it is wrong.

    Raises:
        ChildFailed: one of them failed; the lines of the others come first.
    """
    seen, failures = set[str](), list[str]()
    for child in children:
        try:
            for line in child.lines(LIMIT_S):
                if line.name not in seen or not line.is_right:
                    yield line
                seen.add(line.name)
        except ChildFailed as error:
            failures.append(str(error))
    if failures:
        raise ChildFailed("; ".join(failures))


def main() -> None:
    """Check the part that is named."""
    _, name, part = sys.argv
    scale = replace(card_scale(), dtypes=[getattr(torch, name)])
    with torch.inference_mode():
        print_lines(gpu_checks.kernels(scale, part=int(part), num_parts=NUM_PARTS))


if __name__ == "__main__":
    main()
