"""GPU benchmark: are the kernels correct, how near are they to the memory's limit, how long is a step?

    python -m benchmarks gpu [--sections environment,roof,kernels,parity,timing,step,split,service,peers] [--json FILE]
    python -m benchmarks gpu --device cpu        # toy sizes, kernels interpreted: does it all run?

Needs one CUDA device, torch, triton, transformers and this repository; no network; under ten minutes: each section has
a share of them, and one that needs more is cut. Optional components (a Redis or Valkey server, flashinfer,
compute-sanitizer) give a line if they are absent. Ends with a table, and the targets with the measured figures; writes
the same as JSON. Exit code 1 if a section failed or a result is wrong; slow is not wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.report import Line, Report
from benchmarks.gpu.targets import verdicts, with_targets

BUDGETS_S = {
    "environment": 5,
    "roof": 20,
    "kernels": 110,
    "parity": 85,
    "timing": 90,
    "step": 50,
    "split": 45,
    "service": 70,
    "peers": 90,
}
"""The sections in order, and seconds reserved for each while earlier ones run. Together under --minutes."""

SECTIONS = tuple(BUDGETS_S)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: toy sizes, interpreted.")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="Which to run, in order.")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="Where to write it all.")
    parser.add_argument("--minutes", type=float, default=9.5, help="Begin nothing after this long.")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return arguments


def _sections(device: str) -> Mapping[str, Callable[[], Iterable[Line]]]:
    """Return the sections by name. Imports Triton."""
    import torch

    from benchmarks.gpu import scale as gpu_scale
    from benchmarks.gpu.checks import kernels as gpu_kernels
    from benchmarks.gpu.checks import sameness as gpu_sameness
    from benchmarks.gpu.peers import run as gpu_peers
    from benchmarks.gpu.service import run as gpu_service
    from benchmarks.gpu.speed import kernels as gpu_speed
    from benchmarks.gpu.speed import split as gpu_split

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here; --device cpu runs the same at toy sizes, interpreted")
    scale = gpu_scale.toy_scale() if device == "cpu" else gpu_scale.card_scale()
    measures = {
        "environment": gpu_speed.environment,
        "roof": gpu_speed.roof,
        "kernels": gpu_kernels.kernels,
        "parity": gpu_sameness.parity,
        "timing": gpu_speed.kernel_times,
        "step": gpu_speed.step_times,
        "split": gpu_split.split,
        "service": gpu_service.service,
        "peers": gpu_peers.peers,
    }
    return {name: partial(torch.inference_mode()(measure), scale) for name, measure in measures.items()}


def _as_they_are(_section: str, lines: Iterable[Line]) -> Iterable[Line]:
    return lines


def deadlines_s(names: Sequence[str], total_s: float) -> list[float]:
    """Return each section's deadline in seconds from the start, which reserves the time of later sections."""
    return [total_s - sum(BUDGETS_S[later] for later in names[at + 1 :]) for at in range(len(names))]


def main(argv: list[str] | None = None) -> int:
    """Run the selected sections; return the exit code."""
    arguments = _arguments(argv)
    if arguments.device == "cpu":
        # Before Triton is imported, which reads it once.
        os.environ["TRITON_INTERPRET"] = "1"
    names, began_s = arguments.sections.split(","), time.monotonic()
    sections = _sections(arguments.device)
    # A toy's figures are meaningless.
    noted = with_targets if arguments.device == "cuda" else _as_they_are
    report = Report()
    for name, until_s in zip(names, deadlines_s(names, 60 * arguments.minutes), strict=True):
        report.run(name, lambda name=name: noted(name, sections[name]()), began_s + until_s)
    report.add("targets", verdicts(report))
    arguments.json.write_text(report.as_json())
    print("\n" + "\n".join(report.table()))
    print(f"\n{'all right' if report.is_right else 'NOT ALL RIGHT'}; everything is in {arguments.json}")
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
