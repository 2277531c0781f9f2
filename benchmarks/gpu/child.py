"""Child process of `benchmarks gpu`: measures groups of one section, and prints their lines for `process.Child`."""

import argparse
import sys
from importlib import import_module

import torch

from benchmarks.gpu.process import Groups, child_main
from benchmarks.gpu.report import Report
from benchmarks.gpu.run import SECTIONS
from benchmarks.gpu.scale import card_scale, toy_scale


def main() -> int:
    """Measure; return the exit code."""
    with torch.inference_mode():
        return child_main(_groups)


def _groups(arguments: argparse.Namespace) -> Groups:
    rates = _rates(Report.read(arguments.results))
    scale = toy_scale() if arguments.device == "cpu" else card_scale(rates)
    return import_module(f"benchmarks.gpu.{SECTIONS[arguments.section].module}").groups(scale)


def _rates(report: Report) -> dict[str, float]:
    """Return the rates that section "roof" measured, by the names of its lines."""
    known = {line.name: line.figures for line in report.lines.get("roof", ())}
    figures = {"copy": ("copy", "GB/s", 1e9), "product": ("product, square", "TFLOP/s", 1e12)}
    return {rate: float(known[name][figure]) * unit for rate, (name, figure, unit) in figures.items() if name in known}


if __name__ == "__main__":
    sys.exit(main())
