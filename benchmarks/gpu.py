"""What a card does with the engine: are the kernels right, how near to the memory's limit, how long is a step.

    python -m benchmarks.gpu [--sections environment,roof,kernels,parity,timing,step,split,service,peers] [--json FILE]
    python -m benchmarks.gpu --device cpu        # toy sizes, kernels interpreted: does it all run?

Needs one CUDA device, torch, triton, transformers and this repository; no network; under ten minutes: each section has
a share of them, and one that needs more is cut. What else is of use (a Redis or Valkey server, flashinfer,
compute-sanitizer) gives a line where it is absent. Ends with a table, and what is wanted of a card beside what was
measured; writes the same as JSON. Exit code 1 if a section broke or a result is wrong; too slow is not wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu_report import Line, Report
from benchmarks.gpu_targets import verdicts, with_targets

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
"""The sections in order, and seconds that are kept for each while those before it run. Together under --minutes."""

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
    """The sections by name. Imports Triton."""
    import torch

    from benchmarks import gpu_kernels, gpu_peers, gpu_sameness, gpu_scale, gpu_service, gpu_speed, gpu_split

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
    """When each section must end, in seconds from the beginning: what is kept for those behind it is theirs."""
    return [total_s - sum(BUDGETS_S[later] for later in names[at + 1 :]) for at in range(len(names))]


def main(argv: list[str] | None = None) -> int:
    """Run the sections asked for; returns the exit code."""
    arguments = _arguments(argv)
    if arguments.device == "cpu":
        # Before Triton is imported, which is when it decides.
        os.environ["TRITON_INTERPRET"] = "1"
    names, began_s = arguments.sections.split(","), time.monotonic()
    sections = _sections(arguments.device)
    # A toy's figures are no answer.
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
