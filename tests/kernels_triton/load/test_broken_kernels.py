"""Kernels broken in a copy of the source, tried by real processes, in which Triton interprets them on the CPU."""

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.start import DRILLS, break_kernel
from sluice.kernels.trial.runner import KernelTrial, Task
from tests.kernels_triton.load.test_trial_cases import SIZES

RUNS_COMPILED = True  # not in the interpreter's process: each trial has its own

CHILD = """
import torch
from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.kernels.trial.__main__ import main
with triton_in_place_of_cpu(): main()
"""
SAID = {
    "wrong result": "differs from its reference by",
    "does not compile": "NameError",
    "illegal access": "its process ended with code -11",
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["illegal access", "wrong result", "does not compile"])
def test_when_a_kernel_is_broken_then_its_operation_fails_and_another_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    operation, *how = DRILLS[name]
    break_kernel(tmp_path, *how)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    tasks = [Task(operation, 0), Task("prepare_batch", 0)]

    verdict = KernelTrial(SIZES, "cpu", tasks, command=(sys.executable, "-c", CHILD)).run(1)

    assert list(verdict.problems) == [operation]
    assert SAID[name] in verdict.problems[operation]
    assert (verdict.untried, verdict.num_cases) == ({}, 1)
