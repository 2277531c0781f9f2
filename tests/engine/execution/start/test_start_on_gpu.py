"""A start on a GPU, in processes of its own: nothing compiles after it, and a broken kernel takes nothing down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.start import DRILLS
from sluice import worker

ROOT = Path(__file__).parents[4]
FOLDER = Path(worker.__file__).parent / "small_model"


@pytest.mark.parametrize("name", DRILLS)
def test_the_kernel_that_a_drill_breaks_has_what_it_replaces(name: str) -> None:
    operation, file, old, new = DRILLS[name]

    text = (ROOT / "kernels" / file).read_text()

    assert file.startswith(f"{operation}/")
    assert text.count(old) == 1
    assert new not in text


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_when_it_is_ready_then_nothing_compiles_and_broken_kernels_have_stepped_down() -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--start", "--model", str(FOLDER)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    starts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [start.get("variants_after") for start in starts] == [{}] * (2 + len(DRILLS)), done.stdout + done.stderr
    assert [list(start["replaced"]) for start in starts[2:]] == [[operation] for operation, *_ in DRILLS.values()]
    assert [start["replaced"] for start in starts[:2]] == [{}, {}]
    assert len({start["fingerprint"] for start in starts}) == 1 + len(DRILLS)
