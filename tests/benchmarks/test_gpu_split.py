"""A step of an engine split into its parts: marks around functions, two clocks made one, and the middle steps."""

import types
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.gpu.speed.marks import SYNC, Bar, Place, device_bars, marked
from benchmarks.gpu.speed.split import busy_ms, host_figures, window_of
from sluice import worker
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer

SMALL_MODEL = Path(worker.__file__).parent / "small_model"


def double(number: int) -> int:
    return 2 * number


def fail() -> None:
    raise KeyError("missing")


class TestGivenAFunctionThatIsMarked:
    def test_when_called_then_its_span_is_kept_and_it_does_what_it_did(self) -> None:
        owner = types.SimpleNamespace(double=double)

        with marked([Place(owner, "double", "doubling")]) as bars:
            assert owner.double(4) == 8
        assert owner.double(5) == 10

        assert owner.double is double
        (bar,) = bars
        assert bar.name == "doubling"
        assert bar.began_us <= bar.ended_us

    def test_when_it_raises_then_its_span_is_kept_all_the_same(self) -> None:
        owner = types.SimpleNamespace(fail=fail)

        with marked([Place(owner, "fail", "failing")]) as bars, pytest.raises(KeyError):
            owner.fail()

        assert [bar.name for bar in bars] == ["failing"]


class TestGivenTwoClocks:
    def test_when_merged_then_the_devices_events_tell_our_time(self) -> None:
        theirs = [
            {"ph": "X", "name": SYNC, "ts": 700.0, "dur": 1.0},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 702.0, "dur": 3.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 701.0, "dur": 3.0},
            {"ph": "M", "name": "thread_name"},
        ]

        assert device_bars(theirs, 5000.0) == [Bar("gemm", 5002.0, 5005.0)]

    def test_when_the_profiler_did_not_record_the_moment_then_it_is_reported(self) -> None:
        with pytest.raises(ValueError, match="both clocks"):
            device_bars([], 0.0)


class TestGivenAnEngine:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_it_is_marked_then_each_step_has_its_stages(self, lag: Literal[0, 1]) -> None:
        runner = load_model_runner(ModelOptions(path=SMALL_MODEL, num_blocks=8, num_threads=1, lag=lag))
        engine = LLMEngine(runner, load_tokenizer(SMALL_MODEL), EngineConfig())
        engine.add([Request(id="a", prompt_token_ids=(5, 6), sampling=Sampling(max_tokens=6, ignore_eos=True))])

        with marked() as bars:
            while not engine.is_idle:
                engine.advance()

        names = Counter(bar.name for bar in bars)
        assert names["step"] == names["plan"] == 6 + lag
        assert names["lay out"] == names["forward"] == names["wait"] == names["commit"] == names["text"] == 6


class TestGivenABusyEngine:
    """Steps of a millisecond: 100 us of plan, 500 of forward, 200 of waiting; 50 us lie between two."""

    def bars(self, num_steps: int = 9) -> list[Bar]:
        bars = [Bar("step", -1000.0, -60.0)]  # it computes nothing
        for n in range(num_steps):
            began = n * 1050.0
            parts = (("plan", 0, 100), ("forward", 100, 600), ("wait", 600, 800), ("commit", 800, 900))
            bars += [Bar(name, began + a, began + b) for name, a, b in parts]
            bars.append(Bar("step", began, began + 1000))
        return bars

    def test_when_a_window_is_chosen_then_it_has_as_many_steps_from_the_middle(self) -> None:
        assert window_of(self.bars(), 3) == (3 * 1050.0, 6 * 1050.0)

    def test_when_there_are_too_few_then_it_is_reported(self) -> None:
        with pytest.raises(ValueError, match="2 steps that compute, not 3"):
            window_of(self.bars(2), 3)

    def test_when_a_step_is_split_then_its_parts_sum_to_the_time_between_steps(self) -> None:
        figures = host_figures(self.bars(), 3)

        assert figures == pytest.approx(
            {"step ms": 1.05, "plan": 0.1, "layout": 0.0, "launch": 0.5, "wait": 0.2, "rest of host": 0.25}
        )

    def test_when_kernels_overlap_then_the_device_is_busy_once(self) -> None:
        began = 1050.0 * 3
        kernels = [(-5, 5), (100, 300), (200, 350), (210, 220), (400, 450), (2 * 1050, 2 * 1050 + 10), (3145, 3155)]

        found = busy_ms([Bar("k", began + a, began + b) for a, b in kernels], (began, began + 3 * 1050))

        assert found == pytest.approx((5 + 250 + 50 + 10 + 5) / 1000)
