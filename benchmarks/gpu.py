"""What a card does with the engine: are the kernels right, how near to the memory's limit, how long is a step.

    python -m benchmarks.gpu [--sections environment,roof,kernels,parity,timing,step] [--json gpu.json]
    python -m benchmarks.gpu --device cpu        # toy sizes, kernels interpreted: does it all run?

Needs one CUDA device, torch, triton, transformers and this repository; no network; under ten minutes. Ends with a
table, and writes the same as JSON. Exit code 1 if a section broke or a result is wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.gpu_report import Line, Report

SECTIONS = ("environment", "roof", "kernels", "parity", "timing", "step")


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

    from benchmarks import gpu_checks, gpu_parity, gpu_scale, gpu_speed

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here; --device cpu runs the same at toy sizes, interpreted")
    scale = gpu_scale.toy_scale() if device == "cpu" else gpu_scale.card_scale()
    measures = {
        "environment": gpu_speed.environment,
        "roof": gpu_speed.roof,
        "kernels": gpu_checks.kernels,
        "parity": gpu_parity.parity,
        "timing": gpu_speed.kernel_times,
        "step": gpu_speed.step_times,
    }
    return {name: partial(torch.inference_mode()(measure), scale) for name, measure in measures.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the sections asked for; returns the exit code."""
    arguments = _arguments(argv)
    if arguments.device == "cpu":
        # Before Triton is imported, which is when it decides.
        os.environ["TRITON_INTERPRET"] = "1"
    until_s = time.monotonic() + 60 * arguments.minutes
    sections = _sections(arguments.device)
    report = Report()
    for name in arguments.sections.split(","):
        report.run(name, sections[name], until_s)
    arguments.json.write_text(report.as_json())
    print("\n" + "\n".join(report.table()))
    print(f"\n{'all right' if report.is_right else 'NOT ALL RIGHT'}; everything is in {arguments.json}")
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
