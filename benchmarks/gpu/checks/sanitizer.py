"""compute-sanitizer over the kernels at toy sizes, on a GPU, if the toolkit's binary is present.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.checks.sanitizer      # the checked program

Runs in a separate process alongside the section "parity", which measures no time. torch's memory caching is off there,
so that each tensor ends where its memory does.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.gpu.process import Child
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import CpuTimer, Scale

TOOLS = {"memcheck": True, "racecheck": False}
"""Whether findings are errors. Shared-memory hazards need manual review: barriers unknown to the tool look like
hazards.
"""

LIMIT_S = 75.0
FOUND = 86
"""Exit code of the sanitizer when it has findings."""

WRONG = 87
"""Exit code of `main` when a kernel's result is wrong."""

TOOLKITS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/opt/cuda")
SMALL_RUN = (sys.executable, "-m", "benchmarks.gpu.checks.sanitizer")


def find_sanitizer() -> str | None:
    """Return the binary, on PATH or in a toolkit's folder."""
    found = (shutil.which("compute-sanitizer", path=f"{toolkit}/bin") for toolkit in TOOLKITS if toolkit)
    return shutil.which("compute-sanitizer") or next(filter(None, found), None)


@contextmanager
def sanitizing(scale: Scale) -> Generator[Callable[[], Iterator[Line]]]:
    """Start the available tools, and yield a function for their results; unfinished ones are ended."""
    binary = find_sanitizer()
    if binary is None or scale.is_toy:
        why = "not present: compute-sanitizer" if binary is None else "not run: it needs a card"
        yield lambda: iter([Line("compute-sanitizer", {"note": why})])
        return
    with ExitStack() as stack:
        runs = {tool: stack.enter_context(sanitized(binary, tool, SMALL_RUN)) for tool in TOOLS}
        yield lambda: (line_of(tool, run) for tool, run in runs.items())


def sanitized(binary: str, tool: str, program: Sequence[str]) -> Child:
    """Start `program` under a tool."""
    command = (binary, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *program)
    return Child(command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def line_of(tool: str, run: Child) -> Line:
    """Wait for all tools, up to a shared limit. Wrong: a wrong result, or an error found."""
    name, code = f"compute-sanitizer, {tool}", run.wait(LIMIT_S)
    if code is None:
        return Line(name, {"note": f"not over after {LIMIT_S:g} s: nothing is known"})
    output = run.output()
    last_words = (output or ["nothing"])[-1].strip("= ")
    if code == WRONG:
        said = [text for text in output if not text.startswith("=")]
        return Line(name, {"note": (said or ["a result is wrong"])[-1], "found": last_words}, is_right=False)
    if code not in (0, FOUND):
        # FOUND is returned only if the program ended well: the findings may be why it did not.
        has_found = TOOLS[tool] and re.search("ERROR SUMMARY: [1-9]", last_words) is not None
        return Line(name, {"note": f"did not end well ({code}): {last_words}"}, not has_found)
    return Line(name, {"s": run.age_s, "found": last_words}, code == 0 or not TOOLS[tool])


def main() -> int:
    """Run every kernel once or twice in float16, and check its results; exit code `WRONG` if one is wrong."""
    from benchmarks.gpu.checks import accuracy as gpu_checks

    device = torch.device("cuda")
    scale = Scale(device=device, timer=CpuTimer(), is_toy=True, dtypes=[torch.float16], dtype=torch.float16)
    with torch.inference_mode():
        wrong = [line.name for line in gpu_checks.kernels(scale) if not line.is_right]
    if wrong:
        print(f"wrong under the sanitizer: {', '.join(wrong)}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
