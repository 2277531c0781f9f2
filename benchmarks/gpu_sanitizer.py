"""compute-sanitizer over the kernels at toy sizes, on the card, where the toolkit's binary is present.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu_sanitizer      # what it looks at

Runs in a process of its own beside the section "parity", which measures no time. torch's caching of memory is off
there, so that each tensor ends where its memory does.
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

from benchmarks.gpu_process import Child
from benchmarks.gpu_report import Line
from benchmarks.gpu_scale import CpuTimer, Scale

TOOLS = {"memcheck": True, "racecheck": False}
"""Whether what it finds is wrong. Hazards in shared memory are for a person to judge: barriers that the tool does not
know are hazards to it."""

LIMIT_S = 75.0
FOUND = 86
"""The exit code that the sanitizer is told to give where it found something."""

WRONG = 87
"""The exit code of `main` where a kernel's result is wrong."""

TOOLKITS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/opt/cuda")
SMALL_RUN = (sys.executable, "-m", "benchmarks.gpu_sanitizer")


def find_sanitizer() -> str | None:
    """The binary, on PATH or in a toolkit's folder."""
    found = (shutil.which("compute-sanitizer", path=f"{toolkit}/bin") for toolkit in TOOLKITS if toolkit)
    return shutil.which("compute-sanitizer") or next(filter(None, found), None)


@contextmanager
def sanitizing(scale: Scale) -> Generator[Callable[[], Iterator[Line]]]:
    """Start what can be, and give what tells of it; what has not ended by then is ended."""
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
    """Wait for its end, for as long as all of it may take. Wrong: a result is, or something was found that is."""
    name, code = f"compute-sanitizer, {tool}", run.wait(LIMIT_S)
    if code is None:
        return Line(name, {"note": f"not over after {LIMIT_S:g} s: nothing is known"})
    output = run.output()
    last_words = (output or ["nothing"])[-1].strip("= ")
    if code == WRONG:
        said = [text for text in output if not text.startswith("=")]
        return Line(name, {"note": (said or ["a result is wrong"])[-1], "found": last_words}, is_right=False)
    if code not in (0, FOUND):
        # FOUND is given only where the program ended well: what was found may be why it did not.
        has_found = TOOLS[tool] and re.search("ERROR SUMMARY: [1-9]", last_words) is not None
        return Line(name, {"note": f"did not end well ({code}): {last_words}"}, not has_found)
    return Line(name, {"s": run.age_s, "found": last_words}, code == 0 or not TOOLS[tool])


def main() -> int:
    """Every kernel once or twice in float16, its results looked at too; exit code `WRONG` if one is wrong."""
    from benchmarks import gpu_checks

    device = torch.device("cuda")
    scale = Scale(device=device, timer=CpuTimer(), is_toy=True, dtypes=[torch.float16], dtype=torch.float16)
    with torch.inference_mode():
        wrong = [line.name for line in gpu_checks.kernels(scale) if not line.is_right]
    if wrong:
        print(f"wrong under the sanitizer: {', '.join(wrong)}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
