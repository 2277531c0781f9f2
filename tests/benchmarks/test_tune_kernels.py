"""The table of configurations: written by a command, read by launches, and only what gives the same result."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.scale import toy_scale
from benchmarks.kernels.tune import fastest
from sluice.kernels import tuned as table
from sluice.kernels.paged_attention.config import AttentionConfig

ROOT = Path(__file__).parent.parent.parent
RULE, OTHER = AttentionConfig(16, 64, 4, 5), AttentionConfig(32, 32, 4, 3)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the table is kept in this test."""
    monkeypatch.setattr(table, "PATH", tmp_path / "tuned.json")
    table._table.cache_clear()  # pyright: ignore[reportPrivateUsage]
    return tmp_path / "tuned.json"


class TestGivenATable:
    def test_when_there_is_none_then_nothing_is_known(self, path: Path) -> None:
        assert table.tuned(torch.device("cpu"), "paged_attention", "rows=16") is None

    def test_when_one_is_written_then_its_card_finds_it_and_others_keep_theirs(self, path: Path) -> None:
        table.write_table("another card", {"paged_attention": {"rows=16": [1, 2, 3, 4]}})
        table.write_table("cpu", {"paged_attention": {"rows=16": [16, 64, 4, 5]}})

        assert table.tuned(torch.device("cpu"), "paged_attention", "rows=16") == [16, 64, 4, 5]
        assert table.tuned(torch.device("cpu"), "paged_attention", "rows=32") is None
        assert table.tuned(torch.device("cpu"), "int8_product", "rows=16") is None
        assert json.loads(path.read_text())["another card"] == {"paged_attention": {"rows=16": [1, 2, 3, 4]}}


class TestGivenCandidates:
    def test_when_one_gives_another_result_then_it_is_left_out_and_named(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def compute(config: AttentionConfig) -> torch.Tensor:
            return torch.ones(4) if config == RULE else torch.full((4,), 1.5)

        assert fastest(toy_scale(), "a kernel", compute, RULE, [OTHER]) == RULE
        assert "WRONG by 0.5, left out" in capsys.readouterr().out

    def test_when_one_cannot_be_launched_then_the_others_are_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        def compute(config: AttentionConfig) -> torch.Tensor:
            if config != RULE:
                raise RuntimeError("out of resource: shared memory")
            return torch.ones(4)

        assert fastest(toy_scale(), "a kernel", compute, RULE, [OTHER]) == RULE
        assert "cannot be launched: RuntimeError" in capsys.readouterr().out


class TestGivenNoCard:
    @pytest.mark.long
    def test_when_it_runs_at_toy_sizes_then_it_measures_every_kernel(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "benchmarks.kernels.tune", "--device", "cpu"]

        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stdout + done.stderr
        assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("toy")] == [
            "toy, decodes",
            "toy, decodes, fp8 cache",
            "toy, prefill",
            "toy, prefill, fp8 cache",
            "toy, int8 48 x 40",
        ]
        assert "WRONG" not in done.stdout
        assert not table.PATH.exists()
