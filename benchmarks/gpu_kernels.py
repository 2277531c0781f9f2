"""The kernels against float64: `benchmarks.gpu_checks`, on a card in a process for each dtype.

    python -m benchmarks.gpu_kernels bfloat16      # one of them

Nearly all of that time is compiling, which takes one core: processes beside each other divide it. What they compiled
stays in Triton's cache, where the sections that measure time find it.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks import gpu_checks
from benchmarks.gpu_process import Child, print_lines
from benchmarks.gpu_report import Line
from benchmarks.gpu_scale import Scale, card_scale

LIMIT_S = 150.0


def kernels(scale: Scale) -> Iterator[Line]:
    """The lines of every dtype; those that have none are every process's, and told once."""
    if scale.is_toy:
        yield from gpu_checks.kernels(scale)
        return
    seen = set[str]()
    with ExitStack() as stack:
        names = [str(dtype).removeprefix("torch.") for dtype in scale.dtypes]
        program = (sys.executable, "-m", "benchmarks.gpu_kernels")
        for child in [stack.enter_context(Child((*program, name))) for name in names]:
            for line in child.lines(LIMIT_S):
                if line.name not in seen:
                    yield line
                seen.add(line.name)


def main() -> None:
    """Check the dtype that is named."""
    scale = replace(card_scale(), dtypes=[getattr(torch, sys.argv[1])])
    with torch.inference_mode():
        print_lines(gpu_checks.kernels(scale))


if __name__ == "__main__":
    main()
