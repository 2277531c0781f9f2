"""Configurations of kernels, the rules' choice and its neighbours: section "candidates" of `benchmarks gpu`.

`python -m benchmarks gpu --tune --write` measures the same for all models, and writes what it finds.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tune import Workload, tune, workloads


def groups(scale: Scale) -> Groups:
    """Return the workloads of an 8B model by their names; candidates of a group are compiled beside each other."""
    # Of the toy's, which are interpreted, a few.
    given = list(workloads(["toy"]))[::4] if scale.is_toy else list(workloads(["8B"]))
    names = dict.fromkeys(workload.name for workload in given)
    return {name: partial(_lines, scale, [one for one in given if one.name == name]) for name in names}


def _lines(scale: Scale, given: Sequence[Workload]) -> Iterator[Line]:
    for workload, (operation, key), found in tune(scale, given):
        figures: dict[str, float | str] = {
            "us": found.us,
            "us by the rules": found.rule_us,
            "key": key,
            "best": str(found.config),
        }
        yield Line(f"{operation}, {workload.label}", figures)
