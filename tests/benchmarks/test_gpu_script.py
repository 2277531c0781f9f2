"""The benchmark for a card runs to its end without one, can find a kernel wrong, and prints the targets."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.checks import accuracy as gpu_checks
from benchmarks.gpu.checks import sanitizer as gpu_sanitizer
from benchmarks.gpu.checks.kernels import once
from benchmarks.gpu.checks.sameness import WAYS, EngineRun, first_difference
from benchmarks.gpu.models import SHAPES, calls_line, triton_in_place_of_cpu
from benchmarks.gpu.peers.attention import flex, keys_and_values, varlen
from benchmarks.gpu.peers.engines import nano_jobs, num_wanted
from benchmarks.gpu.process import Child, ChildFailed, print_lines
from benchmarks.gpu.report import Line, Report
from benchmarks.gpu.run import BUDGETS_S, SECTIONS, deadlines_s
from benchmarks.gpu.scale import CpuTimer, Scale
from benchmarks.gpu.service.load import load_figures
from benchmarks.gpu.speed import kernels as gpu_speed
from benchmarks.gpu.speed.kernels import plain_attention
from benchmarks.gpu.speed.split import busy_ms, host_figures
from benchmarks.gpu.targets import TARGETS, verdicts, with_targets
from benchmarks.trace.marks import Span, events_of
from benchmarks.trace.picture import Bar, bars_of
from sluice.engine.models.config import parse_config
from sluice.kernels.paged_attention.reference import paged_attention_reference
from sluice.producer.history.queries import JobRow
from tests.grids import fast_only

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, in a separate process: it decides there how Triton runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def on_cpu(*, is_toy: bool) -> Scale:
    """A scale without a card."""
    return Scale(
        device=torch.device("cpu"), timer=CpuTimer(), is_toy=is_toy, dtypes=[torch.float32], dtype=torch.float32
    )


class TestGivenNoCard:
    @pytest.mark.slow
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize(
        "sections", fast_only(["environment,roof", "step,split"], ["kernels,timing", "parity", "service,peers"])
    )
    def test_when_it_runs_at_toy_sizes_then_every_section_ends_and_all_is_right(
        self, sections: str, tmp_path: Path
    ) -> None:
        done = run("--device", "cpu", "--sections", sections, "--json", str(tmp_path / "gpu.json"))

        found = json.loads((tmp_path / "gpu.json").read_text())
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(found["lines"]) == [*sections.split(","), "targets"]
        assert all(line["is_right"] for lines in found["lines"].values() for line in lines)
        assert found["broken"] == {}
        assert all(found["lines"].values())
        assert {line["figures"]["verdict"] for line in found["lines"]["targets"]} == {"not measured"}
        for target in TARGETS:
            if target.section in sections.split(",") and target.section in ("split", "service", "peers"):
                lines = [Line(**line) for line in found["lines"][target.section]]
                assert any(target.is_for(target.section, line) for line in lines), f"no line for {target.what}"
        # A server is among what tests need: nothing of the service is left out here.
        for line in found["lines"].get("service", ()):
            assert "note" not in line["figures"], line

    def test_when_a_section_does_not_exist_then_it_says_which_there_are(self, tmp_path: Path) -> None:
        done = run("--sections", "attention", "--json", str(tmp_path / "gpu.json"))

        assert done.returncode == 2
        assert "no such section: attention; there are environment, roof" in done.stderr


class TestGivenLittleTime:
    def test_when_all_sections_run_then_budgets_fit_and_each_leaves_the_later_theirs(self) -> None:
        deadlines = deadlines_s(SECTIONS, 570)

        assert sum(BUDGETS_S.values()) <= 570
        assert deadlines[-1] == 570
        for name, before, after in zip(SECTIONS[1:], deadlines, deadlines[1:], strict=False):
            assert after - before == BUDGETS_S[name]

    def test_when_one_section_is_asked_for_then_it_has_all_of_it(self) -> None:
        assert deadlines_s(["step"], 570) == [570]

    def test_when_the_time_is_over_then_nothing_is_begun(self) -> None:
        report, begun = Report(), list[str]()

        report.run("roof", lambda: begun.append("roof") or [], until_s=0.0)

        assert begun == []
        assert report.broken == {"roof": "out of time: not begun"}


class TestGivenTargets:
    def reported(self, *lines: Line) -> dict[str, Line]:
        report = Report()
        report.run("timing", lambda: with_targets("timing", lines), until_s=float("inf"))
        return {line.name: line for line in verdicts(report)}

    def test_when_a_size_that_counts_is_measured_then_the_target_stands_beside_it(self) -> None:
        counts, does_not = (Line(f"rms_norm, {n} x 4096", {"us": 1.0, "of copy": 0.9}) for n in (4096, 256))

        first, second = with_targets("timing", [counts, does_not])

        assert first.figures == counts.figures | {"target": "of copy >= 0.85"}
        assert second == does_not

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

        monkeypatch.setattr(gpu_speed, "random_decoder", decoder)
        for name in ("make_caches", "generator_on", "make_penalties", "Int8Linear"):
            monkeypatch.setattr(gpu_speed, name, nothing)
        return {"timing": list(gpu_speed.kernel_times(scale)), "step": list(gpu_speed.step_times(scale))}

    def test_when_they_are_listed_then_each_kernel_of_a_step_is_among_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timed = {line.name.partition(",")[0] for line in self.lines(monkeypatch)["timing"]}

        assert timed == {
            "attention", "rms_norm", "add_rms_norm", "gated_activation", "soft_cap", "write_kv", "write_kv with norm",
            "int8 product", "sample", "penalties", "prepare_batch", "copy_blocks",
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
        }


class TestGivenPartsOfTheChecks:
    def test_when_parts_are_joined_then_each_check_is_there_once_with_or_without_dtype(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def line(name: str, _agreements: object) -> Line:
            return Line(name, {})

        def frequencies(_scale: Scale) -> Line:
            return Line("frequencies", {})

        monkeypatch.setattr(gpu_checks, "_line", line)
        monkeypatch.setattr(gpu_checks, "_frequencies", frequencies)
        scale = on_cpu(is_toy=True)

        whole = [one.name for one in gpu_checks.kernels(scale)]
        parts = [one.name for part in range(3) for one in gpu_checks.kernels(scale, part=part, num_parts=3)]

        assert sorted(parts) == sorted(whole)
        assert {"rms_norm, float32", "sample, tokens, float32", "penalties", "frequencies"} <= set(whole)


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
        ("tool", "script", "is_right", "said"),
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
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, script: str, is_right: bool, said: str
    ) -> None:
        monkeypatch.setattr(gpu_sanitizer, "LIMIT_S", 0.2 if "sleep" in script else 30)

        with gpu_sanitizer.sanitized(self.stand_in(tmp_path, script), tool, ["true"]) as child:
            line = gpu_sanitizer.line_of(tool, child)

        assert line.is_right is is_right
        assert said in line.figures.values()
        assert child.has_ended

    @pytest.mark.parametrize(("is_right", "code"), [(True, 0), (False, gpu_sanitizer.WRONG)])
    def test_when_a_result_under_it_is_wrong_then_an_exit_code_of_its_own_says_so(
        self, monkeypatch: pytest.MonkeyPatch, is_right: bool, code: int
    ) -> None:
        def kernels(_scale: Scale) -> list[Line]:
            return [Line("rms_norm", {}), Line("rope", {}, is_right)]

        monkeypatch.setattr(gpu_checks, "kernels", kernels)

        assert gpu_sanitizer.main() == code

    def test_when_it_is_absent_then_a_line_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_sanitizer, "find_sanitizer", lambda: None)

        with gpu_sanitizer.sanitizing(on_cpu(is_toy=False)) as lines:
            (line,) = lines()

        assert line.figures == {"note": "not present: compute-sanitizer"}


class TestGivenAPartInAProcessOfItsOwn:
    LINE = '{"name": "toy", "figures": {"us": 3.5}, "is_right": false}'

    def test_when_it_prints_lines_then_they_are_ours_and_other_output_is_not(self) -> None:
        with Child([sys.executable, "-c", f"print('noise'); print('{self.LINE}')"]) as child:
            assert list(child.lines(30)) == [Line("toy", {"us": 3.5}, is_right=False)]

    @pytest.mark.parametrize(
        ("then", "limit_s", "problem"),
        [
            ("echo no >&2; exit 3", 30, "exit code 3: no"),
            ("exit 3", 30, "exit code 3: nothing was said"),
            ("exec sleep 60", 0.5, "not over after 0.5 s"),
        ],
    )
    def test_when_it_fails_or_takes_too_long_then_what_it_printed_comes_first(
        self, then: str, limit_s: float, problem: str
    ) -> None:
        with Child(["sh", "-c", f"echo '{self.LINE}'; {then}"]) as child:
            lines = child.lines(limit_s)
            assert next(lines) == Line("toy", {"us": 3.5}, is_right=False)
            with pytest.raises(ChildFailed, match=f"^{problem}$"):
                next(lines)

        assert child.has_ended

    def test_when_one_of_several_fails_then_the_others_lines_are_there_each_name_once(self) -> None:
        right = self.LINE.replace("false", "true")
        other = right.replace("toy", "other")
        scripts = (f"echo '{right}'; exit 3", f"echo '{right}'; echo '{other}'")

        with Child(["sh", "-c", scripts[0]]) as first, Child(["sh", "-c", scripts[1]]) as second:
            lines = once([first, second])
            assert [next(lines).name, next(lines).name] == ["toy", "other"]
            with pytest.raises(ChildFailed, match="exit code 3"):
                next(lines)

    def test_when_a_name_comes_again_then_its_line_is_kept_where_it_is_wrong(self) -> None:
        right = self.LINE.replace("false", "true")

        with Child(["echo", right]) as first, Child(["echo", right]) as again, Child(["echo", self.LINE]) as wrong:
            assert [line.is_right for line in once([first, again, wrong])] == [True, False]

    def test_when_lines_are_printed_then_they_can_be_read_again(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_lines([Line("toy", {"us": 3.5}, is_right=False)])

        assert capsys.readouterr().out == self.LINE + "\n"


def dense(query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, group: int) -> Tensor:
    """Causal attention of each sequence, aligned at its end; `group` query heads to a key head."""
    parts: list[Tensor] = []
    bounds = zip(query_ends.tolist(), query_ends[1:].tolist(), key_ends.tolist(), key_ends[1:].tolist(), strict=False)
    for q0, q1, k0, k1 in bounds:
        q, k, v = (x.double().transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(dim=-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def varlen_of_old(  # torch 2.10's arguments
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    assert is_causal
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    return dense(query, key, value, cu_seq_q, cu_seq_k, 1)


def varlen_of_now(  # torch 2.13's arguments, those that matter
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert (window_size, enable_gqa) == ((-1, 0), True)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    return dense(query, key, value, cu_seq_q, cu_seq_k, 2)


class TestGivenTorchsAttentions:
    """They are asked for the attention that ours computes."""

    def both(
        self, make: Callable[..., Callable[[], Tensor]], query_lens: list[int], context_lens: list[int]
    ) -> tuple[Tensor, Tensor]:
        inputs = plain_attention(on_cpu(is_toy=True), query_lens, context_lens, (4, 2, 16))
        tables = (inputs.block_tables, inputs.query_start_locs, inputs.context_lens)
        cache = inputs.kv_cache
        return make(inputs, *keys_and_values(inputs))(), paged_attention_reference(
            inputs.query, cache, *tables, scale=inputs.scale, sliding_window=0
        )

    @pytest.mark.parametrize("version", [varlen_of_old, varlen_of_now])
    @pytest.mark.parametrize(("query_lens", "context_lens"), [([7], [7]), ([1, 1], [20, 33]), ([3, 9], [40, 9])])
    def test_when_lengths_differ_then_varlen_attn_equals_ours_in_each_torch_version(
        self, monkeypatch: pytest.MonkeyPatch, version: object, query_lens: list[int], context_lens: list[int]
    ) -> None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", version)

        theirs, ours = self.both(varlen, query_lens, context_lens)

        torch.testing.assert_close(theirs, ours)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(("query_lens", "context_lens"), [([7], [7]), ([1, 1], [20, 20]), ([3, 3], [40, 40])])
    def test_when_lengths_are_equal_then_flex_attention_computes_the_same(
        self, query_lens: list[int], context_lens: list[int]
    ) -> None:
        theirs, ours = self.both(flex, query_lens, context_lens)

        torch.testing.assert_close(theirs, ours)


class TestGivenNanoVllmsRequests:
    def test_when_made_then_they_are_as_many_tokens_as_its_page_says(self) -> None:
        jobs = nano_jobs(on_cpu(is_toy=False))

        assert (len(jobs), num_wanted(jobs)) == (256, 133_966)
        assert all(100 <= len(job.prompt) <= 1024 and 100 <= job.num_output_tokens <= 1024 for job in jobs)


class TestGivenABusyEngine:
    """Steps of a millisecond: 100 us of plan, 500 of forward, 200 of waiting; 50 us lie between two."""

    def bars(self) -> list[Bar]:
        spans = list[Span]()
        for n in range(9):
            began = n * 1_050_000
            parts = (("plan", 0, 100), ("forward", 100, 600), ("wait", 600, 800), ("commit", 800, 900))
            spans += [Span(name, "main", began + 1000 * a, began + 1000 * b) for name, a, b in parts]
            spans.append(Span("step", "main", began, began + 1_000_000))
        return bars_of(events_of(spans, zero_ns=0), is_cpu=True)

    def test_when_a_step_is_split_then_its_parts_sum_to_the_time_between_steps(self) -> None:
        figures = host_figures(self.bars(), 3)

        assert figures == pytest.approx(
            {"step ms": 1.05, "plan": 0.1, "layout": 0.0, "launch": 0.5, "wait": 0.2, "rest of host": 0.25}
        )

    def test_when_kernels_overlap_then_the_device_is_busy_once(self) -> None:
        host = [bar for bar in self.bars() if bar.row != "device"]
        began = 1050.0 * 3
        kernels = [(-5, 5), (100, 300), (200, 350), (210, 220), (400, 450), (2 * 1050, 2 * 1050 + 10), (3145, 3155)]

        found = busy_ms([*host, *(Bar("device", "device", began + a, began + b) for a, b in kernels)], 3)

        assert found == pytest.approx((5 + 250 + 50 + 10 + 5) / 1000 / 3)


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
        assert figures["TTFT p99 ms"] == pytest.approx(50)
        assert figures["TPOT p99 ms"] == pytest.approx(2)
        assert figures["from"] == "the job history"
