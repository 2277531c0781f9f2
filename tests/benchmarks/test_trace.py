"""The trace: marks around functions, two clocks made one, a picture of some steps; and a whole one at toy size."""

import json
import types
from collections import Counter
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

from benchmarks.trace import engine as trace_engine
from benchmarks.trace import run as trace
from benchmarks.trace.marks import PROCESS, Marks, Place, Span, events_of
from benchmarks.trace.picture import bars_of, picture, window_of
from sluice import worker
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, SamplingParams
from sluice.engine.text.tokenizer import load_tokenizer

SMALL_MODEL = Path(worker.__file__).parent / "small_model"


def double(number: int) -> int:
    return 2 * number


def fail() -> None:
    raise KeyError("missing")


class TestGivenAFunctionThatIsMarked:
    def test_when_called_then_its_span_is_kept_and_it_does_what_it_did(self) -> None:
        owner = types.SimpleNamespace(double=double)
        marks = Marks()

        with marks.on([Place(owner, "double", "doubling")]):
            assert owner.double(4) == 8
        assert owner.double(5) == 10

        assert owner.double is double
        (span,) = marks.spans
        assert (span.name, span.thread) == ("doubling", "MainThread")
        assert span.began_ns <= span.ended_ns

    def test_when_it_raises_then_its_span_is_kept_all_the_same(self) -> None:
        owner = types.SimpleNamespace(fail=fail)
        marks = Marks()

        with marks.on([Place(owner, "fail", "failing")]), pytest.raises(KeyError):
            owner.fail()

        assert [span.name for span in marks.spans] == ["failing"]


class TestGivenTwoClocks:
    def test_when_merged_then_ours_tell_the_profilers_time(self) -> None:
        marks = Marks()
        marks.spans.append(Span("step", "MainThread", 5_002_000, 5_005_000))
        theirs = [{"ph": "X", "name": trace_engine.SYNC, "ts": 700.0, "dur": 1.0}]

        events = trace_engine.merged(theirs, marks, zero_ns=5_000_000)

        (ours,) = [event for event in events if event.get("cat") == "sluice"]
        assert (ours["ts"], ours["dur"], ours["pid"]) == (702.0, 3.0, PROCESS)

    def test_when_the_profiler_did_not_record_the_moment_then_it_is_reported(self) -> None:
        with pytest.raises(ValueError, match="both clocks"):
            trace_engine.merged([], Marks(), zero_ns=0)


class TestGivenAnEngine:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_it_is_marked_then_each_step_has_its_stages(self, lag: Literal[0, 1]) -> None:
        runner = load_model_runner(ModelOptions(path=SMALL_MODEL, num_blocks=8, num_threads=1, lag=lag))
        engine = LLMEngine(runner, load_tokenizer(SMALL_MODEL), EngineConfig())
        engine.add([Request(id="a", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=6, ignore_eos=True))])
        marks = Marks()

        with marks.on(trace_engine.ENGINE_PLACES):
            while not engine.is_idle:
                engine.advance()

        names = Counter(span.name for span in marks.spans)
        assert names["step"] == names["plan"] == 6 + lag
        assert names["lay out"] == names["forward"] == names["wait"] == names["commit"] == names["text"] == 6


def spans(num_steps: int) -> list[Span]:
    """Steps of a millisecond, each with a forward in its middle; one in between computes nothing."""
    found: list[Span] = [Span("step", "MainThread", 0, 900_000)]
    for n in range(1, num_steps + 1):
        began = n * 1_000_000
        found.append(Span("forward", "MainThread", began + 200_000, began + 700_000))
        found.append(Span("step", "MainThread", began, began + 900_000))
    found.append(Span("round trip", "tell", 1_100_000, 2_100_000))
    return found


class TestGivenATraceOfSteps:
    def test_when_a_window_is_chosen_then_it_has_as_many_steps_from_the_middle(self) -> None:
        bars = bars_of(events_of(spans(5), zero_ns=0), is_cpu=True)

        assert window_of(bars, num_steps=3) == (2000.0, 4900.0)

    def test_when_there_are_too_few_then_it_is_reported(self) -> None:
        with pytest.raises(ValueError, match="has 2 steps that compute, not 3"):
            window_of(bars_of(events_of(spans(2), zero_ns=0), is_cpu=True), num_steps=3)

    @pytest.mark.parametrize("is_cpu", [True, False])
    def test_when_the_device_is_drawn_then_it_is_the_cards_kernels_or_the_cpus_forward(self, is_cpu: bool) -> None:
        events = events_of(spans(3), zero_ns=0)
        events.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1300.0, "dur": 5.0, "pid": 0, "tid": 7})

        on_device = [bar for bar in bars_of(events, is_cpu=is_cpu) if bar.row == "device"]

        assert len(on_device) == (4 if is_cpu else 1)

    def test_when_drawn_then_it_is_an_svg_whose_bars_lie_in_the_window(self) -> None:
        bars = bars_of(events_of(spans(5), zero_ns=0), is_cpu=True)

        root = ElementTree.fromstring(picture(bars, (2000.0, 4900.0), title="three <steps>"))

        drawn = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("stroke")]
        assert len(drawn) == 3 + 3 + 3 + 1, "steps, their forwards twice, and the end of a round trip"
        for one in drawn:
            assert float(one.get("x", "-1")) >= 0
            assert float(one.get("x", "0")) + float(one.get("width", "0")) <= 1180


@pytest.mark.slow
class TestGivenAWholeWorker:
    def test_when_traced_then_steps_stages_and_round_trips_are_there_and_a_picture(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, svg = tmp_path / "trace.json", tmp_path / "steps.svg"

        trace.main(["--jobs", "4", "--tokens", "6", "--out", str(out), "--picture", str(svg)])

        events = json.loads(out.read_text())["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "sluice"}
        assert {place.name for place in trace.PLACES} <= names
        assert any(event.get("cat") == "cpu_op" for event in events), "torch's own are next to ours"
        assert svg.read_text().startswith("<svg")
        assert "3 steps" in capsys.readouterr().out
