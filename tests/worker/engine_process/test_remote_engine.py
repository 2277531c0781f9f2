"""A real process with the null model: its tokens are an engine's in this process, and neither outlives the other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sluice.engine.errors import EngineBroken
from sluice.engine.request import FinishReason, Request, Sampling, TokenDelta
from sluice.engine.watching import Iteration
from sluice.worker.config import load_config
from sluice.worker.engine_process.messages import StepReport, receive
from sluice.worker.engine_process.process import EngineProcess
from sluice.worker.engine_process.remote_engine import RemoteEngine, ReportedSteps
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.load import load
from tests.integration.jobs import wait_until

PATIENCE_S = 30.0


@contextmanager
def remote_engine(model: str = "null", *, deadline_s: float = 30.0, **flags: object) -> Generator[RemoteEngine]:
    config = load_config({}, flags={"model.path": model, "redis.url": "redis://unused", **flags})
    with EngineProcess(config, "test") as process:
        steps = ReportedSteps(deadline_s)
        engine = RemoteEngine(process, steps, step_tokens=config.step_limits.max_num_batched_tokens)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()


def request(name: str, *, max_tokens: int = 20, prompt: str = "hello", num_choices: int = 1) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=len(name), ignore_eos=True)
    return Request(id=name, prompt_token_ids=tuple(prompt.encode()), sampling=sampling, num_choices=num_choices)


def advance_until(engine: RemoteEngine, holds: Callable[[list[TokenDelta]], bool]) -> list[TokenDelta]:
    """Advance until what has come satisfies `holds`, and return it."""
    deltas: list[TokenDelta] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds(deltas):
        assert time.monotonic() < deadline_s, deltas
        deltas += engine.advance()
        time.sleep(0.001)
    return deltas


def num_ended(deltas: list[TokenDelta]) -> int:
    return sum(one.finish is not None for one in deltas)


def tokens_of(deltas: list[TokenDelta]) -> dict[tuple[str, int], tuple[int, ...]]:
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    for one in deltas:
        name = (one.request_id, one.choice)
        assert one.start == len(tokens.get(name, ()))
        tokens[name] = tokens.get(name, ()) + one.token_ids
    return tokens


def process_of_engine() -> psutil.Process:
    """Return the only process of an engine that this one has."""
    (found,) = [one for one in psutil.Process().children() if "sluice.worker.engine_process" in one.cmdline()]
    return found


def ignores(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process ignores a signal."""
    (mask,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask.split()[1], 16) & 1 << number - 1)


def is_asleep(process: psutil.Process) -> bool:
    """Tell whether a process has computed nothing for a moment."""
    before = process.cpu_times()
    time.sleep(0.1)
    return process.cpu_times() == before


class TestGivenRequests:
    def test_when_another_process_runs_them_then_the_tokens_are_those_of_this_one(self) -> None:
        asked = [request(f"r{i}", num_choices=1 + i % 2, max_tokens=5 + i) for i in range(20)]
        local = load(load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"}))
        local.engine.add(asked)
        expected: list[TokenDelta] = []
        while not local.engine.is_idle:
            expected += local.engine.advance()

        with remote_engine() as engine:
            engine.add(asked)
            deltas = advance_until(engine, lambda some: num_ended(some) == 30)

            assert tokens_of(deltas) == tokens_of(expected)
            assert engine.stats.num_output_tokens == local.engine.stats.num_output_tokens
            assert engine.room() == local.engine.room()

    def test_when_they_are_on_their_way_then_the_room_says_how_many_it_does_not_count(self) -> None:
        with remote_engine("null?step_s=0.05") as engine:
            before = engine.room()
            engine.add([request("a"), request("b")])
            assert (engine.num_uncounted, engine.room()) == (0, before), "nothing is sent yet"

            engine.advance()
            assert (engine.num_uncounted, engine.room()) == (2, before)

            advance_until(engine, lambda some: len(some) >= 2)
            assert engine.num_uncounted == 0
            assert engine.room().sequences == before.sequences - 2

    def test_when_it_looks_ahead_then_the_next_orders_say_so(self) -> None:
        with remote_engine("null?step_s=0.02") as engine:
            num_places = engine.room().sequences
            engine.look_ahead(10.0)
            engine.add([request("a", max_tokens=12)])

            advance_until(engine, lambda some: len(some) >= 2)

            assert engine.room().sequences == num_places, "its end is certain within ten seconds"

    def test_when_one_is_aborted_and_one_dropped_then_one_ends_and_the_other_is_silent(self) -> None:
        with remote_engine("null?step_s=0.01") as engine:
            engine.add([request("aborted", max_tokens=2000), request("dropped", max_tokens=2000), request("kept")])
            advance_until(engine, lambda some: len(some) >= 6)

            engine.abort(["aborted"])
            engine.drop(["dropped"])
            deltas = advance_until(engine, lambda some: num_ended(some) == 2)

            ends = {one.request_id: one.finish.reason for one in deltas if one.finish is not None}
            assert ends == {"aborted": FinishReason.ABORTED, "kept": FinishReason.LENGTH}
            assert sum(one.request_id == "dropped" for one in deltas) < 100, "only what was on its way"
            wait_until(lambda: not engine.advance() and engine.stats.num_running == 0, "nothing runs")

    def test_when_iterations_are_watched_then_they_come_with_the_reports_until_the_end(self) -> None:
        seen: list[Iteration] = []
        with remote_engine("null?step_s=0.005") as engine:
            engine.watch(seen.append)
            engine.add([request("a")])
            advance_until(engine, lambda some: num_ended(some) == 1)
            engine.watch(None)
            engine.add([request("b")])
            advance_until(engine, lambda some: num_ended(some) == 1)

        assert "a/0" in str(seen[0])
        assert len(seen) <= 22
        assert all("b/0" not in str(one) for one in seen[1:])


class TestGivenALoopThatDoesNotTakeReports:
    """The buffer towards Redis is full."""

    def test_when_it_goes_on_then_no_token_is_missing_and_the_engine_has_waited(self) -> None:
        with remote_engine(deadline_s=0.2) as engine:
            engine.add([request("a", max_tokens=2000)])
            first = engine.advance()
            wait_until(lambda: is_asleep(process_of_engine()), "the engine waits")
            time.sleep(0.4)

            assert not engine.watchdog.is_overdue, "no step is late while nobody takes its report"
            deltas = first + advance_until(engine, lambda some: num_ended(some) == 1)
            assert len(tokens_of(deltas)["a", 0]) == 2000

    def test_when_many_have_come_then_it_takes_all_at_once(self) -> None:
        with remote_engine("null?step_s=0.001") as engine:
            engine.add([request("a", max_tokens=2000)])
            engine.advance()
            wait_until(lambda: len(engine.advance()) > 2 or time.sleep(0.02), "several come at once")

    def test_when_it_stops_then_the_process_ends(self) -> None:
        with remote_engine() as engine:
            engine.add([request("a", max_tokens=2000)])
            engine.advance()
            process = process_of_engine()
            wait_until(lambda: is_asleep(process), "the engine waits")
        assert not process.is_running()


class TestGivenAProcessThatBreaks:
    def test_when_it_is_killed_then_advancing_says_so_once_its_reports_are_taken(self) -> None:
        with remote_engine("null?step_s=0.01") as engine:
            engine.add([request("a", max_tokens=2000)])
            advance_until(engine, lambda some: len(some) >= 3)

            process_of_engine().kill()

            with pytest.raises(EngineBroken, match="ended: signal 9"):
                advance_until(engine, lambda some: num_ended(some) == 1)

    def test_when_its_step_hangs_then_the_watchdog_says_so(self) -> None:
        with remote_engine("null?obey_prompts=1", deadline_s=0.5) as engine:
            assert not engine.watchdog.is_overdue
            engine.add([request("a", prompt="[[hang@3]]")])
            engine.advance()
            wait_until(lambda: engine.watchdog.is_overdue, "the deadline passes")

    def test_when_it_is_idle_then_nothing_is_overdue(self) -> None:
        with remote_engine(deadline_s=0.2) as engine:
            engine.add([request("a")])
            advance_until(engine, lambda some: num_ended(some) == 1)
            time.sleep(0.4)
            assert not engine.watchdog.is_overdue
            assert 0 < engine.watchdog.busy_s < 0.4

    def test_when_it_loses_its_device_then_the_error_is_the_engines(self) -> None:
        with remote_engine("null?obey_prompts=1") as engine:
            engine.add([request("a", prompt="[[lose@3]]")])
            with pytest.raises(EngineBroken, match="injected loss of the device"):
                advance_until(engine, lambda some: num_ended(some) == 1)

    def test_when_a_report_cannot_be_read_then_advancing_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object) -> None:
            raise ValueError("no pickle")

        with remote_engine() as engine:
            monkeypatch.setattr("sluice.worker.engine_process.remote_engine.receive", fails)
            engine.add([request("a")])
            with pytest.raises(EngineBroken, match="no pickle"):
                advance_until(engine, lambda some: num_ended(some) == 1)

    def test_when_its_orders_cannot_be_read_then_it_says_so_and_ends(self) -> None:
        config = load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"})
        with EngineProcess(config, "test") as process:
            process.load()

            process.connection.send_bytes(b"no pickle")

            received = receive(process.connection, StepReport, EngineBroken)
            assert "UnpicklingError" in str(received)
            assert process.end() == "exit code 0"

    def test_when_a_gathered_batch_hangs_then_it_is_overdue(self) -> None:
        gathering = {"batching.discipline": "dynamic", "batching.batch_window_s": 0.05}
        with remote_engine("null?obey_prompts=1", deadline_s=0.5, **gathering) as engine:
            engine.add([request("a", prompt="[[hang@0]]")])
            engine.advance()
            wait_until(lambda: bool(engine.advance()) or engine.watchdog.is_overdue, "the deadline passes")


class TestGivenAModelThatCannotBeLoaded:
    def test_when_a_setting_is_wrong_then_the_error_names_it(self) -> None:
        config = load_config({}, flags={"model.path": "null?no_such_option=1", "redis.url": "redis://unused"})
        with EngineProcess(config, "test") as process, pytest.raises(ConfigError, match="no option no_such_option"):
            process.load()

    def test_when_the_worker_gives_up_before_then_the_process_ends_at_once(self) -> None:
        config = load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"})
        with EngineProcess(config, "test") as process:
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 1
        assert not psutil.pid_exists(process.pid)

    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTSTP])
    def test_when_a_signal_comes_before_then_it_loads_all_the_same(self, number: signal.Signals) -> None:
        config = load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"})
        with EngineProcess(config, "test") as process:
            wait_until(lambda: "sluice.worker.engine_process" in psutil.Process(process.pid).cmdline(), "it runs")
            wait_until(lambda: ignores(process.pid, number), "it has begun")
            os.kill(process.pid, number)
            facts, first = process.load()
        assert facts.limits.num_blocks > 0
        assert first.is_idle

    def test_when_the_process_is_killed_meanwhile_then_the_worker_is_broken(self) -> None:
        config = load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"})
        with EngineProcess(config, "test") as process:
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(WorkerBroken, match="signal 9"):
                process.load()


OWNER = """
import sys, time
from tests.worker.engine_process.test_remote_engine import remote_engine, request
with remote_engine(sys.argv[1]) as engine:
    engine.add([request("a", max_tokens=2000)])
    engine.advance()
    print(engine._process.pid, flush=True)
    time.sleep(600)
"""


class TestGivenAWorkerThatIsKilled:
    def test_when_it_had_only_begun_then_the_process_of_its_engine_ends(self) -> None:
        begin = """
import os, signal
from sluice.worker.config import load_config
from sluice.worker.engine_process.process import EngineProcess
process = EngineProcess(load_config({}, flags={"model.path": "null", "redis.url": "redis://unused"}), "test")
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        owner = subprocess.run([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True, check=False)

        wait_until(lambda: not psutil.pid_exists(int(owner.stdout)), "the process ends")

    @pytest.mark.parametrize("model", ["null", "null?step_s=600"], ids=["between steps", "within a step"])
    def test_when_it_is_gone_then_so_is_the_process_of_its_engine(self, model: str) -> None:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, model], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        engine = psutil.Process(int(owner.stdout.readline()))

        owner.kill()
        owner.communicate()

        engine.wait(5)
