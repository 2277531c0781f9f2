"""The suite on this project's engine, and on engines that violate the interface: each violation is caught."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.conformance import subject as subject_module
from sluice.engine.conformance.__main__ import FINE, LEFT_OUT, PASSES, main, run_checks
from sluice.engine.conformance.behaviours import CHECKS, checks_for
from sluice.engine.conformance.resumption import NUM_TOKENS, ROWS, Resume, resume_matrix
from sluice.engine.conformance.subject import Driver, Subject, Violation
from sluice.engine.request import Finish, FinishReason, Request, Room, TokenDelta
from tests.engine.conformance.subjects import NOT_COMPUTED, null_engine, small_model


@pytest.fixture(scope="module")
def small() -> Driver:
    """The engine over the small model."""
    return Driver(small_model())


class TestGivenTheNullModel:
    @pytest.mark.parametrize("name", checks_for(NOT_COMPUTED))
    def test_when_it_is_checked_then_it_behaves(self, name: str) -> None:
        driver = Driver(null_engine())

        CHECKS[name].run(driver)

        driver.settle()

    def test_when_requests_are_resumed_then_all_that_it_computes_is_bitwise_the_same(self) -> None:
        matrix = resume_matrix(Driver(null_engine()))

        refused = {name for name, options in ROWS.items() if not NOT_COMPUTED.isdisjoint(options)}
        assert {name for name, cells in matrix.items() if set(cells) == {Resume.BITWISE}} == ROWS.keys() - refused
        assert {name for name, cells in matrix.items() if set(cells) == {Resume.REFUSED}} == refused


class TestGivenTheSmallModel:
    @pytest.mark.parametrize("name", CHECKS)
    def test_when_it_is_checked_then_it_behaves(self, small: Driver, name: str) -> None:
        CHECKS[name].run(small)

        small.settle()

    def test_when_requests_are_resumed_then_every_cell_is_bitwise_the_same(self, small: Driver) -> None:
        matrix = resume_matrix(small)

        assert {cell for cells in matrix.values() for cell in cells} == {Resume.BITWISE}
        assert all(len(cells) == NUM_TOKENS for name, cells in matrix.items() if not name.startswith("stop"))
        assert "adapter" in matrix


class Faulty:
    """An engine with one fault. Members that are not here are those of the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class LosesATokenOfResumed(Faulty):
    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            progress = tuple(replace(choice, token_ids=choice.token_ids[:-1]) for choice in request.progress)
            self._engine.add([replace(request, progress=progress)])


class ForgetsTheSeedOfResumed(Faulty):
    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            seed = request.sampling.seed + bool(request.progress)
            self._engine.add([replace(request, sampling=replace(request.sampling, seed=seed))])


class KeepsRoom(Faulty):
    """Aborted requests leave a place behind."""

    num_lost = 0

    def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)
        self.num_lost += 1

    def room(self) -> Room:
        room = self._engine.room()
        return replace(room, sequences=room.sequences - self.num_lost)


class EndsTwice(Faulty):
    def advance(self) -> list[TokenDelta]:
        deltas = self._engine.advance()
        return deltas + [delta for delta in deltas if delta.finish is not None]


class ForgetsAborts(Faulty):
    """Aborted requests end without a delta."""

    def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.drop(request_ids)


class AbortsTheDropped(Faulty):
    def drop(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)


class IgnoresLimits(Faulty):
    def validate(self, request: Request) -> None:
        """Reject nothing."""


class IgnoresPriorities(Faulty):
    def add(self, requests: Iterable[Request]) -> None:
        self._engine.add(replace(request, priority=0) for request in requests)


class StopsLate(Faulty):
    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            stops = tuple(stop + "!" for stop in request.sampling.stop)
            self._engine.add([replace(request, sampling=replace(request.sampling, stop=stops))])


class RunsOneAtATime(Faulty):
    """A request starts once nothing else runs."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._waiting: list[Request] = []

    def add(self, requests: Iterable[Request]) -> None:
        self._waiting += requests

    def advance(self) -> list[TokenDelta]:
        if self._waiting and self._engine.is_idle:
            self._engine.add([self._waiting.pop(0)])
        return self._engine.advance()


class MixesNeighbours(Faulty):
    """A request that starts beside others has another seed."""

    def add(self, requests: Iterable[Request]) -> None:
        listed = list(requests)
        for request in listed:
            prompt = request.prompt_token_ids[:-1] if len(listed) > 1 else request.prompt_token_ids
            self._engine.add([replace(request, prompt_token_ids=prompt)])


class CallsFailuresRejections(Faulty):
    def advance(self) -> list[TokenDelta]:
        return [delta._replace(finish=_as_rejection(delta.finish)) for delta in self._engine.advance()]


def _as_rejection(finish: Finish | None) -> Finish | None:
    return replace(finish, is_rejection=True) if finish and finish.reason is FinishReason.ERROR else finish


class StaysBusy(Faulty):
    """It never says that it is idle."""

    idle_s = 0.0


FAULTS: dict[Callable[[Any], Any], str] = {
    EndsTwice: "max_tokens",
    MixesNeighbours: "neighbours",
    RunsOneAtATime: "joins_before_the_end",
    LosesATokenOfResumed: "resumed",
    IgnoresLimits: "rejections",
    ForgetsAborts: "aborts",
    AbortsTheDropped: "drops",
    KeepsRoom: "room_returns",
    StopsLate: "stop_strings",
    IgnoresPriorities: "priorities",
    CallsFailuresRejections: "failing_request",
    StaysBusy: "idleness",
}


class TestGivenAnEngineWithAFault:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sluice.engine.conformance.subject.PATIENCE_S", 1.0)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_when_it_is_checked_then_a_check_says_so(self, fault: Callable[[Any], Any]) -> None:
        with pytest.raises(Violation):
            CHECKS[FAULTS[fault]].run(Driver(with_fault(null_engine(), fault)))

    def test_when_its_requests_are_resumed_with_another_seed_then_the_matrix_says_after_which_token(self) -> None:
        with pytest.raises(Violation, match=r"^greedy, after 1 tokens"):
            resume_matrix(Driver(with_fault(null_engine(), ForgetsTheSeedOfResumed)))

    def test_when_all_checks_are_run_then_the_others_pass(self) -> None:
        verdicts = run_checks(Driver(with_fault(null_engine(), StopsLate)))

        violated = {name for name in checks_for(NOT_COMPUTED) if verdicts[name] != PASSES}
        assert violated == {"stop_strings", "several_stop_strings"}

    def test_when_an_engine_never_ends_then_it_is_told_and_no_check_after_it_is_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subject_module, "PATIENCE_S", 0.2)

        verdicts = run_checks(Driver(with_fault(null_engine(), StaysBusy)))

        told = [verdict for verdict in verdicts.values() if verdict not in FINE]
        assert len(told) == 1
        assert "the checks after it were not made" in told[0]

    def test_when_a_fault_cannot_be_made_then_its_check_is_left_out(self) -> None:
        verdicts = run_checks(Driver(replace(null_engine(), break_steps_of=None)))

        assert verdicts["failing_request"] == LEFT_OUT


def with_fault(subject: Subject, fault: Callable[[Any], Any]) -> Subject:
    """The subject with a faulty engine."""
    return replace(subject, engine=fault(subject.engine))


class TestGivenTheCommand:
    def test_when_an_engine_behaves_then_it_exits_with_0_and_prints_the_matrix(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status = main(["tests.engine.conformance.subjects:null_engine"])

        printed = capsys.readouterr().out
        assert status == 0
        assert f"greedy            {'b' * NUM_TOKENS}\n" in printed
        assert "VIOLATED" not in printed

    def test_when_an_engine_does_not_then_it_exits_with_1_and_names_the_behaviour(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status = main(["tests.engine.conformance.test_conformance:late_stops"])

        assert status == 1
        assert f"VIOLATED  {CHECKS['stop_strings'].sentence}\n" in capsys.readouterr().out


def late_stops() -> Subject:
    """An engine whose stop strings do not match."""
    return with_fault(null_engine(), StopsLate)
