"""compute-sanitizer over the kernels at toy sizes, on a GPU, if the toolkit's binary is present.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.checks.sanitizer      # the checked program

Part of section "parity", which measures no time. torch's memory caching is off there, so that each tensor ends where
its memory does.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.process import Groups
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


def sanitized(scale: Scale) -> Groups:
    """Return a group for each tool, or one that says why there are none."""
    binary = find_sanitizer()
    if binary is None or scale.is_toy:
        why = "not present: compute-sanitizer" if binary is None else "not run: it needs a GPU"
        return {"compute-sanitizer": lambda: [Line("compute-sanitizer", {"note": why})]}
    return {tool: partial(_lines, binary, tool) for tool in TOOLS}


def _lines(binary: str, tool: str) -> list[Line]:
    return [line_under(binary, tool, SMALL_RUN)]


def line_under(binary: str, tool: str, program: Sequence[str]) -> Line:
    """Run `program` under a tool. Wrong: a wrong result, or an error found."""
    command = (binary, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *program)
    name, began_s = f"compute-sanitizer, {tool}", time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return Line(name, {"note": f"not over after {LIMIT_S:g} s: nothing is known"})
    code, output = done.returncode, done.stdout.splitlines()
    last_words = (output or ["nothing"])[-1].strip("= ")
    if code == WRONG:
        said = [text for text in output if not text.startswith("=")]
        return Line(name, {"note": (said or ["a result is wrong"])[-1], "found": last_words}, is_right=False)
    if code not in (0, FOUND):
        # FOUND is returned only if the program ended well: the findings may be why it did not.
        has_found = TOOLS[tool] and re.search("ERROR SUMMARY: [1-9]", last_words) is not None
        return Line(name, {"note": f"did not end well ({code}): {last_words}"}, not has_found)
    return Line(name, {"s": time.monotonic() - began_s, "found": last_words}, code == 0 or not TOOLS[tool])


def main() -> int:
    """Run every kernel once or twice in float16, and check its results; exit code `WRONG` if one is wrong."""
    from benchmarks.gpu.checks import accuracy as gpu_checks

    device = torch.device("cuda")
    scale = Scale(device=device, timer=CpuTimer(), is_toy=True, dtypes=[torch.float16], dtype=torch.float16)
    with torch.inference_mode():
        lines = [line for group in gpu_checks.groups(scale).values() for line in group()]
    wrong = [line.name for line in lines if not line.is_right]
    if wrong:
        print(f"wrong under the sanitizer: {', '.join(wrong)}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
