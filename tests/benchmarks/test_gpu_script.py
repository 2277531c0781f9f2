"""The benchmark for a GPU runs to its end without one, can find a kernel wrong, and prints the targets."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from triton.runtime.cache import FileCacheManager  # pyright: ignore[reportMissingTypeStubs] - it has none

from benchmarks.engine.bare import num_wanted
from benchmarks.gpu import cache
from benchmarks.gpu.checks import accuracy as gpu_checks
from benchmarks.gpu.checks import sanitizer as gpu_sanitizer
from benchmarks.gpu.checks.sameness import WAYS, EngineRun, first_difference
from benchmarks.gpu.models import SHAPES, calls_line, triton_in_place_of_cpu
from benchmarks.gpu.peers import flex, nano_jobs
from benchmarks.gpu.process import Child, ChildFailed, Groups
from benchmarks.gpu.report import Line, Report
from benchmarks.gpu.run import CALLS, MINUTES, SECTIONS, Measurement, Section, deadlines_s
from benchmarks.gpu.scale import CpuTimer, Scale
from benchmarks.gpu.service import load_figures
from benchmarks.gpu.speed import kernels as gpu_speed
from benchmarks.gpu.speed import steps
from benchmarks.gpu.speed.kernels import plain_attention
from benchmarks.gpu.speed.roof import SKINNY_SHAPES
from benchmarks.gpu.targets import TARGETS, verdicts
from sluice.engine.models.config import parse_config
from sluice.history.queries import JobRow
from sluice.kernels.paged_attention.reference import paged_attention_reference
from tests.card_packages import card_environment
from tests.grids import fast_only
from tests.integration.jobs import wait_until

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The script, in a separate process: it decides there how Triton runs."""
    command = [sys.executable, "-m", "benchmarks.gpu.run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def command_of(process: Path) -> str:
    """The command line of a process, a folder of /proc; empty if it has ended."""
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def on_cpu(*, is_toy: bool) -> Scale:
    """A scale without a GPU."""
    return Scale(
        device=torch.device("cpu"), timer=CpuTimer(), is_toy=is_toy, dtypes=[torch.float32], dtype=torch.float32
    )


class TestGivenNoCard:
    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.long
    @pytest.mark.parametrize("call", [1, 2, 3])
    def test_when_it_runs_at_toy_sizes_then_every_section_ends_and_all_is_right(
        self, call: int, tmp_path: Path
    ) -> None:
        # The service needs its packages; the others run with those that a GPU's machine has.
        environment = card_environment(tmp_path) if "service" not in CALLS[call] else None
        done = run(
            "--device", "cpu", "--call", f"{call}", "--minutes", "9", "--out", str(tmp_path), environment=environment
        )

        found = Report.read(tmp_path / "gpu.jsonl")
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(found.lines) == list(CALLS[call])
        assert found.is_right
        assert all(found.lines.values())
        assert done.stdout.count("verdict not measured") == len(TARGETS)
        for target in TARGETS:
            if target.section in ("split", "service", "peers") and target.section in found.lines:
                covered = [target.is_for(target.section, line) for line in found.lines[target.section]]
                assert any(covered), f"no line for {target.what}"
        # A server is among what tests need: nothing of the service is left out here.
        for line in found.lines.get("service", ()):
            assert "note" not in line.figures, line
        assert (tmp_path / "gpu-cache.tar.xz").stat().st_size < 2**24

    def test_when_a_section_does_not_exist_then_it_says_which_there_are(self) -> None:
        done = run("--sections", "attention")

        assert done.returncode == 2
        assert "no such section: attention; there are roof, kernels" in done.stderr

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
    def test_when_a_card_is_asked_for_then_it_says_that_there_is_none(self, tmp_path: Path) -> None:
        done = run("--call", "1", "--out", str(tmp_path))

        assert done.returncode == 1
        assert done.stderr.startswith("no CUDA device is here")


class TestGivenLittleTime:
    @pytest.mark.parametrize("call", CALLS)
    def test_when_a_call_runs_then_budgets_fit_and_each_leaves_the_later_theirs(self, call: int) -> None:
        names, total_s = CALLS[call], 60 * MINUTES[call]

        deadlines = deadlines_s(names, total_s)

        assert deadlines[0] >= SECTIONS[names[0]].budget_s
        assert deadlines[-1] == total_s
        for name, before, after in zip(names[1:], deadlines, deadlines[1:], strict=False):
            assert after - before == pytest.approx(SECTIONS[name].budget_s)

    def test_when_one_section_is_asked_for_then_it_has_all_of_it(self) -> None:
        assert deadlines_s(["step"], 570) == [570]

    def test_when_there_is_less_than_sections_need_then_each_has_its_share(self) -> None:
        needed = [SECTIONS[name].budget_s for name in ("timing", "step")]

        assert deadlines_s(["timing", "step"], sum(needed) / 2) == pytest.approx([needed[0] / 2, sum(needed) / 2])

    def test_when_the_time_is_over_then_nothing_is_begun(self, tmp_path: Path) -> None:
        report = Report(tmp_path / "gpu.jsonl")

        Measurement(report, ["false"], {}).run("roof", SECTIONS["roof"], until_s=0.0)

        assert report.broken == {"roof": ["out of time: not begun"]}


def drill(tmp_path: Path, *groups: str, section: Section, limit_s: float = 60) -> Report:
    """The report of a section that consists of these groups; each is a fault or the name of its line."""
    report = Report(tmp_path / "gpu.jsonl")
    program = (sys.executable, "-m", "tests.benchmarks.drill", "--device", "cpu", "--results", "none")
    environment = {"DRILL": ",".join(groups), "PYTHONPATH": str(ROOT)}
    Measurement(report, program, environment).run("drill", section, time.monotonic() + limit_s)
    found = Report.read(tmp_path / "gpu.jsonl")
    assert (found.lines, found.broken) == (report.lines, report.broken)
    return found


class TestGivenASectionThatFails:
    FAULTS: ClassVar[dict[str, str]] = {
        "raises": "exit code 1: RuntimeError: CUDA error: an illegal memory access was encountered",
        "hangs": "no line for 2 s",
        "aborts": "ended by SIGABRT: printed by a library",
        "is killed": "ended by SIGKILL: printed by a library",
        "exits": "exit code 3: printed by a library",
    }

    @pytest.mark.parametrize("num_processes", fast_only([3], [1]))
    def test_when_groups_fail_in_every_way_then_all_other_lines_are_in_the_file(
        self, tmp_path: Path, num_processes: int
    ) -> None:
        groups = [name for fault in self.FAULTS for name in (f"before {fault}", fault)]

        found = drill(tmp_path, *groups, "last", section=Section("", 60, 2, num_processes))

        assert not found.is_right
        assert {line.name for line in found.lines["drill"]} == {
            *(f"before {fault}" for fault in self.FAULTS), *(f"first of {fault}" for fault in self.FAULTS), "last",
        }  # fmt: skip
        assert sorted(found.broken["drill"]) == sorted(f"{name}: {problem}" for name, problem in self.FAULTS.items())

    def test_when_the_time_is_over_then_the_rest_is_not_measured(self, tmp_path: Path) -> None:
        found = drill(tmp_path, "one", "hangs", "another", section=Section("", 60), limit_s=2)

        assert [line.name for line in found.lines["drill"]] == ["one", "first of hangs"]
        assert found.broken["drill"] == ["hangs: out of time"]

    def test_when_a_child_cannot_begin_then_it_is_tried_once(self, tmp_path: Path) -> None:
        report = Report(tmp_path / "gpu.jsonl")

        Measurement(report, ["sh", "-c", "echo no >&2; exit 3"], {}).run("roof", SECTIONS["roof"], float("inf"))

        assert report.broken == {"roof": ["at the start: exit code 3: no"]}

    @pytest.mark.long
    def test_when_it_is_ended_then_its_children_are_and_what_was_measured_is_kept(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.run", "--device", "cpu", "--sections", "kernels", "--out"]
        with subprocess.Popen([*command, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.terminate()
            code = process.wait()

        assert code == 1
        assert first.startswith("kernels: paged_attention")
        assert len(Report.read(tmp_path / "gpu.jsonl").lines["kernels"]) >= 1
        assert (tmp_path / "gpu-cache.tar.xz").exists()
        assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in command_of(pid)]

    def test_when_a_result_is_wrong_then_the_report_is_not_right(self, tmp_path: Path) -> None:
        found = drill(tmp_path, "one", "wrong", section=Section("", 60))

        assert (found.is_right, found.broken) == (False, {})
        assert list(found.table())[1:] == ["  one    us 1", "  wrong  us 1  WRONG"]

    def test_when_a_program_is_killed_then_its_children_are_too(self, tmp_path: Path) -> None:
        child_of_it = tmp_path / "pid"
        script = f"sleep 60 & echo $! > {child_of_it}; wait"

        with pytest.raises(ChildFailed, match=r"no line for 0\.5 s"), Child(["sh", "-c", script]) as child:
            list(child.records(0.5, float("inf")))

        executable = Path(f"/proc/{child_of_it.read_text().strip()}/exe")
        # It has its signal, and may still be on its way out.
        wait_until(lambda: not executable.exists(), "the child of the program has ended", patience_s=10)


class TestGivenCompiledKernels:
    def test_when_they_are_packed_then_a_launch_finds_them_in_another_folder(self, tmp_path: Path) -> None:
        before, after = tmp_path / "before" / "KEY", tmp_path / "after"
        before.mkdir(parents=True)
        files = {name: before / name for name in ("norm.cubin", "norm.json", "norm.ttir", "norm.llir")}
        for file in files.values():
            file.write_text(file.name)
        listed = {name: str(file) for name, file in files.items()}
        (before / "__grp__norm.json").write_text(json.dumps({"child_paths": listed}))

        cache.pack(before.parent, tmp_path / "cache.tar.xz")
        with cache.folder(tmp_path / "cache.tar.xz") as compiled:
            shutil.copytree(compiled, after)
            manager = FileCacheManager.__new__(FileCacheManager)
            manager.cache_dir = str(compiled / "KEY")
            found = manager.get_group("norm.json")

        assert found == {name: str(compiled / "KEY" / name) for name in ("norm.cubin", "norm.json")}
        assert {path.name for path in (after / "KEY").iterdir()} == {"__grp__norm.json", "norm.cubin", "norm.json"}


class TestGivenTargets:
    def reported(self, *lines: Line) -> dict[str, Line]:
        return {line.name: line for line in verdicts(Report(lines={"timing": list(lines)}))}

    def test_when_a_size_does_not_count_then_it_is_not_measured(self) -> None:
        found = self.reported(Line("rms_norm, 256 x 4096", {"us": 1.0, "of copy": 0.2}))

        assert found["norm, from 4k tokens"].figures["verdict"] == "not measured"

    def test_when_the_worst_is_not_good_enough_then_it_is_not_reached_and_is_named(self) -> None:
        found = self.reported(
            Line("rms_norm, 4096 x 4096", {"of copy": 0.95}), Line("add_rms_norm, 16384 x 4096", {"of copy": 0.84})
        )["norm, from 4k tokens"]

        assert found.figures["verdict"] == "NOT reached"
        assert (found.figures["worst"], found.figures["at"]) == (0.84, "add_rms_norm, 16384 x 4096")
        assert found.figures["lines"] == 2

    def test_when_all_are_good_enough_then_it_is_reached_and_the_others_are_not_measured(self) -> None:
        found = self.reported(Line("sample, greedy, 256 x 128256", {"us": 59.0}))

        assert found["sampling, greedy"].figures["verdict"] == "reached"
        assert {line.figures["verdict"] for name, line in found.items() if name != "sampling, greedy"} == {
            "not measured"
        }

    def test_when_a_line_has_no_figure_but_a_note_then_it_is_not_measured(self) -> None:
        found = self.reported(Line("sample, greedy, 256 x 128256", {"note": "cannot"}))

        assert found["sampling, greedy"].figures["verdict"] == "not measured"


def nothing(*_arguments: object, **_options: object) -> None:
    """Stands for what is only handed on."""


class NoTimer(CpuTimer):
    """Runs nothing."""

    def device_us(self, call: Callable[[], object]) -> float:
        return 1000.0

    eager_us = device_us
    host_us = device_us


class TestGivenTheSizesOfACard:
    """Tensors without memory, and calls that are not made: what is left is which sizes would be measured."""

    def lines(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Line]]:
        device = torch.device("meta")
        scale = Scale(device=device, timer=NoTimer(), is_toy=False, dtypes=[torch.bfloat16], dtype=torch.bfloat16)

        def decoder(shape: str, _device: torch.device, **_options: int) -> SimpleNamespace:
            return SimpleNamespace(config=parse_config(SHAPES[shape] | {"max_position_embeddings": 8192}))

        monkeypatch.setattr(steps, "random_decoder", decoder)
        for module, names in (
            (gpu_speed, ("generator_on", "make_penalties", "Int8Linear", "InvariantLinear")),
            (steps, ("make_caches",)),
        ):
            for name in names:
                monkeypatch.setattr(module, name, nothing)
        sections = {"timing": gpu_speed, "step": steps}
        return {
            name: [line for group in module.groups(scale).values() for line in group()]
            for name, module in sections.items()
        }

    def test_when_they_are_listed_then_each_kernel_of_a_step_is_among_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timed = {line.name.partition(",")[0] for line in self.lines(monkeypatch)["timing"]}

        assert timed == {
            "attention", "rms_norm", "add_rms_norm", "gated_activation", "soft_cap", "write_kv", "write_kv with norm",
            "int8 product", "packed product", "product of few rows", "deterministic product", "sample", "penalties",
            "token_masks",
            "prepare_batch", "copy_blocks",
        }  # fmt: skip

    def test_when_they_are_listed_then_each_size_that_a_target_names_is_among_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = self.lines(monkeypatch)

        found = {
            target.what: {line.name for line in lines[target.section] if target.is_for(target.section, line)}
            for target in TARGETS
            if target.section in lines
        }

        shapes = ("8B", "1B", "0.6B")
        assert found == {
            "decode attention, from 8k and batch 32": {
                *(f"attention, decode, {shape}, {batch} x 8192" for shape in shapes for batch in (32, 128)),
                *(f"attention, decode, 8B, {batch} x 32768" for batch in (32, 128)),
            },
            "decode attention at 2k, from batch 32": {
                f"attention, decode, {shape}, {batch} x 2048" for shape in shapes for batch in (32, 128)
            },
            "decode attention, mixed lengths": {
                f"attention, decode, mixed lengths, {name}, laid out for {longest}"
                for name, lens in gpu_speed.mixed_lengths().items()
                for longest in (max(lens), 131_072)
            },
            "prefill attention at 8k": {"attention, prefill of 8192"},
            "norm, from 4k tokens": {f"{op}, {n} x 4096" for op in ("rms_norm", "add_rms_norm") for n in (4096, 16384)},
            "activation, from 4k tokens": {"gated_activation, 4096 x 14336"},
            "KV write, from 4k tokens": {
                f"{op}, {n} tokens" for op in ("write_kv", "write_kv with norm") for n in (4096, 16384)
            },
            "sampling, greedy": {"sample, greedy, 256 x 128256"},
            "sampling, top-p": {
                "sample, top-p 0.9, 256 x 128256",
                "sample, top-k 50, top-p 0.9, min-p, 256 x 128256",
            },
            "8B decode step, batch 1": {f"8B, 1 x {n}" for n in (512, 2048, 8192)},
            "8B decode step, batch 32 and 256": {
                *(f"8B, 32 x {n}" for n in (512, 2048, 8192)),
                *(f"8B, 256 x {n}" for n in (512, 2048)),
            },
            "a row over packed weights, 8B": {
                f"packed product, {name}, {form}, 1 rows"
                for name in SKINNY_SHAPES
                if name.startswith("8B")
                for form in ("4 bits in 32", "4 bits in 128", "fp8 by row", "fp8 in 128")
            },
            "256 rows in fp8, 8B": {
                f"packed product, {name}, {form}, 256 rows"
                for name in SKINNY_SHAPES
                if name.startswith("8B")
                for form in ("fp8 by row", "fp8 in 128")
            },
        }


class TestGivenInterpretedKernelsInPlaceOfTheCpus:
    def test_when_each_was_called_then_all_is_right_and_where_one_was_not_it_is_wrong(self) -> None:
        calls = Counter[str]()
        with triton_in_place_of_cpu(calls):
            pass

        assert {"sample", "prepare_batch", "copy_blocks", "paged_attention"} <= calls.keys()
        assert set(calls.values()) == {0}
        assert calls_line(Counter(calls.keys())).is_right
        for name in calls:
            assert not calls_line(Counter({**dict.fromkeys(calls, 1), name: 0})).is_right


class TestGivenAnEngineThatSaysOtherTokens:
    def test_when_compared_then_the_first_prompt_and_place_are_named(self) -> None:
        expected = {("0", 0): [1, 2], ("1", 0): [3, 4, 5], ("2", 0): [6]}

        assert first_difference(expected, expected) is None
        assert first_difference({**expected, ("1", 0): [3, 9, 5], ("2", 0): [7]}, expected) == (
            "prompt 1, choice 0, token 1: 9 instead of 4"
        )
        assert first_difference({**expected, ("1", 0): [3, 4]}, expected) == (
            "prompt 1, choice 0, token 2: nothing instead of 5"
        )

    @pytest.mark.parametrize(
        ("befell", "is_disturbed"),
        [
            ({}, True),
            ({"num_preemptions": 0}, False),
            ({"num_cached_tokens": 0}, False),
            ({"num_copying_steps": 0}, False),
            ({"num_replays": 0}, False),
        ],
    )
    def test_when_something_of_its_way_has_not_happened_then_it_was_not_disturbed(
        self, befell: dict[str, int], is_disturbed: bool
    ) -> None:
        all_of_it = {"num_preemptions": 1, "num_cached_tokens": 1, "num_copying_steps": 1, "num_replays": 1}

        assert EngineRun({}, **all_of_it | befell).was_disturbed(WAYS[-1]) is is_disturbed
        assert EngineRun({}, **all_of_it | befell).was_disturbed(WAYS[0])

    def test_when_ways_are_listed_then_each_combination_is_there_once(self) -> None:
        assert len(set(WAYS)) == len(WAYS) == 16
        assert str(WAYS[0]) == "lag 0"
        assert str(WAYS[-1]) == "graphs, lag 1, preemption, prefix cache"


class TestGivenASanitizer:
    def stand_in(self, folder: Path, script: str) -> str:
        path = folder / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    @pytest.mark.parametrize(
        ("tool", "script", "is_right", "message"),
        [
            ("memcheck", 'echo "========= ERROR SUMMARY: 0 errors"', True, "ERROR SUMMARY: 0 errors"),
            ("memcheck", 'echo "========= ERROR SUMMARY: 3 errors"; exit 86', False, "ERROR SUMMARY: 3 errors"),
            ("racecheck", 'echo "$2: 3 hazards"; exit 86', True, "racecheck: 3 hazards"),
            (
                "memcheck",
                'echo "wrong: rms_norm"; echo "========= ERROR SUMMARY: 0 errors"; exit 87',
                False,
                "wrong: rms_norm",
            ),
            ("racecheck", 'echo "wrong: rms_norm"; exit 87', False, "wrong: rms_norm"),
            ("memcheck", 'echo "no device"; exit 3', True, "did not end well (3): no device"),
            (
                "memcheck",
                'echo "========= ERROR SUMMARY: 3 errors"; exit 1',
                False,
                "did not end well (1): ERROR SUMMARY: 3 errors",
            ),
            ("memcheck", "exec sleep 60", True, "not over after 0.2 s: nothing is known"),
        ],
    )
    def test_when_it_ends_or_does_not_then_the_line_says_what_is_known(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, script: str, is_right: bool, message: str
    ) -> None:
        monkeypatch.setattr(gpu_sanitizer, "LIMIT_S", 0.2 if "sleep" in script else 30)

        line = gpu_sanitizer.line_under(self.stand_in(tmp_path, script), tool, ["true"])

        assert line.is_right is is_right
        assert message in line.figures.values()

    @pytest.mark.parametrize(("is_right", "code"), [(True, 0), (False, gpu_sanitizer.WRONG)])
    def test_when_a_result_under_it_is_wrong_then_an_exit_code_of_its_own_says_so(
        self, monkeypatch: pytest.MonkeyPatch, is_right: bool, code: int
    ) -> None:
        def groups(_scale: Scale) -> Groups:
            return {"norm": lambda: [Line("rms_norm", {})], "rope": lambda: [Line("rope", {}, is_right)]}

        monkeypatch.setattr(gpu_checks, "groups", groups)

        assert gpu_sanitizer.main() == code

    def test_when_it_is_absent_then_a_line_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_sanitizer, "find_sanitizer", lambda: None)

        ((line,),) = (group() for group in gpu_sanitizer.sanitized(on_cpu(is_toy=False)).values())

        assert line.figures == {"note": "not present: compute-sanitizer"}


class TestGivenFlexAttention:
    """It is asked for the attention that ours computes."""

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(("query_lens", "context_lens"), [([7], [7]), ([1, 1], [20, 20]), ([3, 3], [40, 40])])
    def test_when_lengths_are_equal_then_it_computes_the_same(
        self, query_lens: list[int], context_lens: list[int]
    ) -> None:
        inputs = plain_attention(on_cpu(is_toy=True), query_lens, context_lens, (4, 2, 16))
        tables = (inputs.block_tables, inputs.query_start_locs, inputs.context_lens)

        ours = paged_attention_reference(inputs.query, inputs.kv_cache, *tables, scale=inputs.scale, sliding_window=0)

        torch.testing.assert_close(flex(inputs)(), ours)


class TestGivenNanoVllmsRequests:
    def test_when_made_then_they_are_as_many_tokens_as_its_page_says(self) -> None:
        jobs = nano_jobs(on_cpu(is_toy=False))

        assert (len(jobs), num_wanted(jobs)) == (256, 133_966)
        assert all(100 <= len(job.prompt) <= 1024 and 100 <= job.num_output_tokens <= 1024 for job in jobs)


class TestGivenAJobHistory:
    def row(self, **known: Any) -> JobRow:  # Any: as the columns are
        columns: dict[str, Any] = dict.fromkeys(field.name for field in fields(JobRow))
        return JobRow(**columns | known)

    def test_when_jobs_are_done_then_rates_are_theirs_and_times_are_percentiles(self) -> None:
        rows = [
            self.row(
                submitted_ms=1000 * n, finished_ms=1000 * n + 500, output_tokens=10, ttft_s=0.01 * (n + 1), tpot_s=0.002
            )
            for n in range(5)
        ]

        figures = load_figures(rows)

        assert figures["offered/s"] == 1.0
        assert figures["done/s"] == pytest.approx(5 / 4.5)
        assert figures["tokens/s"] == pytest.approx(50 / 4.5)
        assert figures["TTFT p50 ms"] == pytest.approx(30)
        assert figures["TTFT p99 ms"] == pytest.approx(49.6)
        assert figures["TPOT p99 ms"] == pytest.approx(2)
        assert figures["from"] == "the job history"
