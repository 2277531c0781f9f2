"""The table of configurations: written by a command, read by launches, and only what gives the same result."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

import json
import os
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.candidates import MAX_COMPILED, Facts, Processor, facts_of, neighbours, promising
from benchmarks.gpu.scale import toy_scale
from benchmarks.gpu.tune import fastest
from sluice.kernels import tuned as table
from sluice.kernels.linear.few_rows import FewRowsConfig, few_rows_triton
from sluice.kernels.linear.kernel import ProductConfig
from sluice.kernels.paged_attention.config import AttentionConfig
from tests.kernels_triton.compiler import CUOBJDUMP, HOPPER

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
        assert table.chosen(torch.device("cpu"), "paged_attention", "rows=16", RULE) == RULE

    def test_when_one_is_written_then_its_card_finds_it_and_others_keep_theirs(self, path: Path) -> None:
        table.write_table("another GPU", {"paged_attention": {"rows=16": [1, 2, 3, 4]}})
        device = torch.device("cpu")
        table.write_table(table.card_name(device), {"paged_attention": {"rows=16": list(astuple(OTHER))}})

        assert table.chosen(device, "paged_attention", "rows=16", RULE) == OTHER
        assert table.chosen(device, "paged_attention", "rows=32", RULE) == RULE
        assert table.chosen(device, "int8_product", "rows=16", RULE) == RULE
        assert json.loads(path.read_text())["another GPU"] == {"paged_attention": {"rows=16": [1, 2, 3, 4]}}

    def test_when_the_compiler_is_another_version_then_its_entry_is_not_read(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = torch.device("cpu")
        table.write_table(table.card_name(device), {"paged_attention": {"rows=16": list(astuple(OTHER))}})
        monkeypatch.setattr("sluice.kernels.tuned.version", {"triton": "1.2.3"}.__getitem__)
        table.card_name.cache_clear()

        try:
            assert table.card_name(device) == "cpu, triton 1.2.3"
            assert table.chosen(device, "paged_attention", "rows=16", RULE) == RULE
        finally:
            table.card_name.cache_clear()

    def test_when_a_configuration_is_tried_then_only_its_kind_of_launch_uses_it(self, path: Path) -> None:
        device = torch.device("cpu")

        with table.recording_requests() as requests, table.trying(("paged_attention", "rows=16"), OTHER):
            found = [table.chosen(device, "paged_attention", key, RULE) for key in ("rows=16", "rows=32")]

        assert found == [OTHER, RULE]
        assert requests == {("paged_attention", "rows=16"): RULE, ("paged_attention", "rows=32"): RULE}
        assert table.chosen(device, "paged_attention", "rows=16", RULE) == RULE


class TestGivenARulesChoice:
    def test_when_neighbours_are_made_then_each_differs_in_one_or_two_numbers(self) -> None:
        found = neighbours(ProductConfig(64, 8, 256, num_parts=1, num_warps=4, num_stages=5))

        rule = (64, 8, 256, 1, 4, 5)
        changed = [sum(a != b for a, b in zip(astuple(one), rule, strict=True)) for one in found]
        assert changed == sorted(changed)
        assert set(changed) == {1, 2}
        assert len(set(found)) == len(found) <= MAX_COMPILED
        assert {one.num_stages for one in found} == {4, 5, 6}

    def test_when_candidates_spill_or_keep_little_in_flight_then_they_are_left_out(self) -> None:
        rule = Facts(registers=64, stack_bytes=0, shared_bytes=64 * 1024, num_threads=128)
        found = {
            "like the rule": rule,
            "spills": replace(rule, stack_bytes=8),
            "does not compile": None,
            "too large": replace(rule, shared_bytes=300 * 1024),
            "few copies in flight": replace(rule, shared_bytes=1024, registers=255),
            "few threads": replace(rule, num_threads=32),
            "larger": replace(rule, shared_bytes=200 * 1024, num_threads=256),
        }

        assert promising(found.items(), rule, Processor()) == ["like the rule", "larger"]

    @pytest.mark.slow
    @pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no NVIDIA compiler")
    def test_when_it_is_only_compiled_then_nothing_runs_and_the_facts_are_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, weight = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(8, 64, dtype=torch.bfloat16)
        out = torch.zeros(1, 8, dtype=torch.bfloat16)
        monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())

        facts = facts_of(lambda: few_rows_triton(x, weight, None, None, out=out))
        failed = facts_of(lambda: few_rows_triton(x, weight, None, None, out=out, config=FewRowsConfig(3, 64, 4)))

        assert facts is not None
        assert (facts.stack_bytes, facts.num_threads) == (0, 128)
        assert 0 < facts.registers <= 64
        assert failed is None
        assert not out.any()


class Hopper:
    """A driver of a GPU that is not there, as far as a compilation asks it."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class TestGivenCandidates:
    def test_when_one_gives_another_result_then_it_is_left_out_and_named(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def compute(config: AttentionConfig) -> torch.Tensor:
            return torch.ones(4) if config == RULE else torch.full((4,), 1.5)

        assert fastest(toy_scale(), "a kernel", compute, RULE, [OTHER]).config == RULE
        assert "WRONG by 0.5, left out" in capsys.readouterr().out

    def test_when_one_cannot_be_launched_then_the_others_are_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        def compute(config: AttentionConfig) -> torch.Tensor:
            if config != RULE:
                raise RuntimeError("out of resource: shared memory")
            return torch.ones(4)

        assert fastest(toy_scale(), "a kernel", compute, RULE, [OTHER]).config == RULE
        assert "cannot be launched: RuntimeError" in capsys.readouterr().out


class TestGivenNoCard:
    @pytest.mark.long
    def test_when_it_runs_at_toy_sizes_then_it_measures_every_kernel(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "benchmarks.gpu.tune", "--device", "cpu"]

        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stdout + done.stderr
        assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("toy")] == [
            "toy, decodes",
            "toy, decodes, fp8 cache",
            "toy, prefill",
            "toy, prefill, fp8 cache",
            "toy, product of few rows, 16 bits, 48 x 40, 1 rows",
            "toy, product of few rows, int8, 48 x 40, 1 rows",
            "toy, product, int8, 48 x 40, 8 rows",
        ]
        assert "WRONG" not in done.stdout
        assert not table.PATH.exists()
