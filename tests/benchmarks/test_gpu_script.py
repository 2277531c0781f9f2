"""The benchmark for a card runs to its end without one, and can find a kernel wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, in a process of its own: it decides there how Triton runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


class TestGivenNoCard:
    @pytest.mark.slow
    @pytest.mark.parametrize("sections", ["environment,roof,kernels,timing", "parity,step"])
    def test_when_it_runs_at_toy_sizes_then_every_section_ends_and_all_is_right(
        self, sections: str, tmp_path: Path
    ) -> None:
        done = run("--device", "cpu", "--sections", sections, "--json", str(tmp_path / "gpu.json"))

        found = json.loads((tmp_path / "gpu.json").read_text())
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(found["lines"]) == sections.split(",")
        assert all(line["is_right"] for lines in found["lines"].values() for line in lines)
        assert found["broken"] == {}
        assert all(found["lines"].values())

    def test_when_a_section_does_not_exist_then_it_says_which_there_are(self, tmp_path: Path) -> None:
        done = run("--sections", "attention", "--json", str(tmp_path / "gpu.json"))

        assert done.returncode == 2
        assert "no such section: attention; there are environment, roof" in done.stderr
