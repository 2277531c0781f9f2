"""The parent process, over small programs in a worker's place: restarts, reports, signals and its end."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from sluice.worker.config import load_config
from sluice.worker.errors import ExitCode
from sluice.worker.processes import specs
from sluice.worker.processes.specs import callbacks_specs, environment_of, is_fleet, recorder_specs, worker_specs
from tests.integration.jobs import wait_until

ROOT = Path(__file__).parents[3]
PARENT = """
import ctypes, os, sys
from sluice.worker.processes import child_process
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.parent import Parent
from sluice.worker.config import LogConfig
from sluice.worker.log import configure_logs, get_log

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
configure_logs(LogConfig(format="json"))
child_process.FIRST_DELAY_S = 0.01
folder, program, child, restart, count = *sys.argv[1:5], int(sys.argv[5])

def spec(number, **more):
    environ = {**os.environ, "SAYS_IN": f"{folder}/{number}"}
    return ChildSpec(name=f"p{number}", environ=environ, command=(program, "-c", child), **more)

def report(incarnation, was_ready):
    with open(f"{folder}/reported", "a") as file:
        file.write(incarnation + "\\n")

workers = [spec(number, kind="worker", restart=restart) for number in range(count)]
recorders = [spec("recorder", kind="recorder", restart="always")] if restart == "no" else []
sys.exit(Parent(workers, recorders, get_log(), lambda: report).run())
"""
SAYS = """
import os, signal, sys

def say(word):
    with open(os.environ["SAYS_IN"], "a") as file:
        file.write(f"{word} {os.getpid()} {sys.argv[-1]}\\n")
"""
UNTIL_EOF = """
import select

# A signal that comes just before a blocking read would not interrupt it.
while not select.select([sys.stdin], [], [], 0.05)[0]:
    pass
"""
REST = """
import select

# A signal that comes just before a read does not interrupt it.
wakes, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)
for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1):
    signal.signal(number, lambda number, _frame: say(signal.Signals(number).name))

def leave(_number, _frame):
    say("leaves")
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP, signal.SIGUSR1))
say("stays")
os.write(0, b"+")  # it is ready: the recorder follows
while sys.stdin not in select.select([sys.stdin, wakes], [], [])[0]:
    os.read(wakes, 100)
say("orphaned")
"""
STAYS = f"{SAYS}{REST}"
LOADS = f"""{SAYS}
import fcntl

say("loads")
lock = open(os.environ["SAYS_IN"] + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
{REST}"""


class Parent:
    """A parent in a separate process, for its signals are the process's."""

    def __init__(self, folder: Path, child: str, count: int, program: str, restart: str) -> None:
        self._folder = folder
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PARENT, str(folder), program, child, restart, str(count)], cwd=ROOT, stderr=log
            )

    def words(self, number: int | str) -> list[str]:
        """What the children of a spec said, one after the other."""
        return [line.split()[0] for line in self._lines(number)]

    def pids(self, number: int | str) -> list[int]:
        """The children of a spec, in order."""
        return list(dict.fromkeys(int(line.split()[1]) for line in self._lines(number)))

    def incarnations(self, number: int) -> list[str]:
        """The incarnations of the children of a spec, in order."""
        return list(dict.fromkeys(line.split()[2] for line in self._lines(number)))

    @property
    def reported(self) -> list[str]:
        """The incarnations whose end was reported."""
        return self._lines("reported")

    def _lines(self, number: int | str) -> list[str]:
        path = self._folder / str(number)
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, word: str, number: int | str = 0, *, times: int = 1) -> None:
        """Until a spec's children have said a word so often."""
        wait_until(
            lambda: self.words(number).count(word) >= times, f"{number} says {word} {times} times: {self.output}"
        )

    @property
    def output(self) -> str:
        """The parent's log."""
        return (self._folder / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send the parent a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The parent's exit code."""
        return self.process.wait(30)

    def end(self) -> None:
        """Kill it; its children go by themselves."""
        self.process.kill()
        self.process.wait()


class Parents:
    """Starts parents that do not outlive the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[Parent] = []

    def of(self, child: str, *, count: int = 1, program: str = sys.executable, restart: str = "on-failure") -> Parent:
        """A parent of `count` children in which `program` runs `child`; with a sidecar, if they are not restarted."""
        self.made.append(Parent(self._folder, child, count, program, restart))
        return self.made[-1]


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Who wants this lock waits meanwhile."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def parents(tmp_path: Path) -> Generator[Parents]:
    made = Parents(tmp_path)
    yield made
    for parent in made.made:
        parent.end()


class TestGivenChildrenThatStay:
    def test_when_one_is_killed_then_a_new_one_comes_and_the_other_is_left_alone(self, parents: Parents) -> None:
        parent = parents.of(STAYS, count=2)
        parent.wait_for("stays", 0)
        parent.wait_for("stays", 1)

        os.kill(parent.pids(0)[0], signal.SIGKILL)
        parent.wait_for("stays", 0, times=2)

        assert len(parent.pids(0)) == 2
        assert parent.words(1) == ["stays"]
        assert '"exit_code": -9' in parent.output
        assert len(set(parent.incarnations(0))) == 2, "each process is another incarnation"
        assert parent.reported == parent.incarnations(0)[:1], "the old one is reported, not the new one"

    def test_when_asked_to_stop_then_each_is_signalled_and_the_parent_ends_after_them(self, parents: Parents) -> None:
        parent = parents.of(STAYS, count=2)
        parent.wait_for("stays", 0)
        parent.wait_for("stays", 1)

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.DONE
        assert [parent.words(number) for number in (0, 1)] == [["stays", "leaves"]] * 2

    @pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1], ids=lambda number: number.name)
    def test_when_sent_another_signal_then_it_is_passed_on_once(self, parents: Parents, number: signal.Signals) -> None:
        parent = parents.of(STAYS)
        parent.wait_for("stays")

        parent.signal(number)
        parent.wait_for(number.name)
        parent.signal(signal.SIGTERM)
        parent.wait()

        assert parent.words(0) == ["stays", number.name, "leaves"]

    def test_when_one_dies_while_all_are_quiet_then_it_restarts_at_the_next_continue(self, parents: Parents) -> None:
        parent = parents.of(STAYS, count=2)
        parent.wait_for("stays", 0)
        parent.wait_for("stays", 1)
        parent.signal(signal.SIGTSTP)
        parent.wait_for("SIGTSTP", 1)

        os.kill(parent.pids(0)[0], signal.SIGKILL)
        wait_until(lambda: "; restarting" in parent.output, "its death is logged")
        os.kill(parent.pids(1)[0], signal.SIGKILL)
        wait_until(lambda: parent.output.count("; restarting") == 2, "so is the other's, and none has come")
        assert [len(parent.pids(number)) for number in (0, 1)] == [1, 1]
        parent.signal(signal.SIGCONT)

        parent.wait_for("stays", 0, times=2)
        parent.wait_for("stays", 1, times=2)

    def test_when_the_parent_is_killed_then_they_hear_of_it(self, parents: Parents) -> None:
        parent = parents.of(STAYS, count=2)
        parent.wait_for("stays", 0)
        parent.wait_for("stays", 1)

        parent.signal(signal.SIGKILL)

        parent.wait_for("orphaned", 0)
        parent.wait_for("orphaned", 1)

    def test_when_one_leaves_as_asked_by_a_person_then_none_replaces_it(self, parents: Parents) -> None:
        parent = parents.of(STAYS)
        parent.wait_for("stays")

        os.kill(parent.pids(0)[0], signal.SIGTERM)

        assert parent.wait() == ExitCode.DONE
        assert len(parent.pids(0)) == 1


class TestGivenOneWorkerAndItsSidecar:
    """Nobody restarts the worker but the parent's own supervisor."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
    def test_when_it_is_killed_then_the_parent_exits_as_a_shell_would(
        self, parents: Parents, number: signal.Signals
    ) -> None:
        parent = parents.of(STAYS, restart="no")
        parent.wait_for("stays")
        parent.wait_for("stays", "recorder")

        os.kill(parent.pids(0)[0], number)

        assert parent.wait() == 128 + number
        assert parent.reported == parent.incarnations(0), "its own incarnation, once"
        assert len(parent.reported[0]) == 32
        assert parent.words("recorder")[-1] in ("leaves", "orphaned"), "it is stopped after the worker"

    @pytest.mark.parametrize("code", [1, 2, 3, 7])
    def test_when_it_exits_then_the_parent_has_its_code(self, parents: Parents, code: int) -> None:
        parent = parents.of(f"{SAYS}\nsay('ends')\nos._exit({code})", restart="no")

        assert parent.wait() == code
        assert parent.reported == parent.incarnations(0)
        assert '"warning"' not in parent.output, "the worker has said why"
        assert parent.words("recorder") == [], "it is started for a worker that is ready"

    def test_when_its_sidecar_is_killed_then_it_is_restarted_and_nothing_is_reported(self, parents: Parents) -> None:
        parent = parents.of(STAYS, restart="no")
        parent.wait_for("stays")
        parent.wait_for("stays", "recorder")

        os.kill(parent.pids("recorder")[0], signal.SIGKILL)
        parent.wait_for("stays", "recorder", times=2)

        assert parent.words(0) == ["stays"]
        assert parent.reported == []

    def test_when_asked_to_stop_then_both_leave(self, parents: Parents) -> None:
        parent = parents.of(STAYS, restart="no")
        parent.wait_for("stays")
        parent.wait_for("stays", "recorder")

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.DONE
        assert parent.words(0) == ["stays", "leaves"]
        assert parent.words("recorder")[-1] in ("leaves", "orphaned")


class TestGivenAChildThatLeavesAProcessBehind:
    """The parent inherits it, as process 1 of a container does."""

    LEAVES_ONE = f"""{SAYS}
import subprocess
first = not os.path.exists(os.environ["SAYS_IN"])
if first:
    left = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    say(f"left:{{left.pid}}")
    os._exit(1)
say("stays")
sys.stdin.read()
"""

    def test_when_that_process_ends_then_the_parent_reaps_it(self, parents: Parents) -> None:
        parent = parents.of(self.LEAVES_ONE)
        parent.wait_for("stays")
        left = parent.words(0)[0].removeprefix("left:")

        wait_until(lambda: not Path("/proc", left).exists(), "it is gone, and no zombie")

        parent.signal(signal.SIGTERM)
        assert parent.wait() == ExitCode.DONE


class TestGivenChildrenThatDieAtOnce:
    def test_when_they_do_it_again_then_the_next_comes_later_each_time(self, parents: Parents) -> None:
        parent = parents.of(f"{SAYS}\nsay('dies')\nsys.exit(1)")

        parent.wait_for("dies", times=4)
        parent.signal(signal.SIGTERM)

        parent.wait()
        assert [f'"retry_in_s": {delay_s}' in parent.output for delay_s in (0.01, 0.02, 0.04)] == [True] * 3

    def test_when_stopped_while_a_restart_is_due_then_none_starts_and_the_parent_ends(self, parents: Parents) -> None:
        parent = parents.of(f"{SAYS}\nsay('dies')\nsys.exit(1)")
        parent.wait_for("dies", times=6)
        wait_until(lambda: parent.output.count("; restarting") == 6, "the seventh is due in 0.32 s")

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.DONE
        assert len(parent.pids(0)) == 6


class TestGivenAChildThatStillLoads:
    """It has no handlers yet; the other one is up, and is signalled after it."""

    @pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGUSR1], ids=lambda number: number.name)
    def test_when_a_signal_comes_then_it_is_handled_as_soon_as_possible(
        self, parents: Parents, tmp_path: Path, number: signal.Signals
    ) -> None:
        with locked(tmp_path / "0.lock"):
            parent = parents.of(LOADS, count=2)
            parent.wait_for("loads", 0)
            parent.wait_for("stays", 1)
            parent.signal(number)
            parent.wait_for(number.name, 1)
        parent.wait_for("stays", 0)

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.DONE
        assert parent.words(0) == ["loads", number.name, "stays", "leaves"]

    def test_when_it_is_quieted_and_continued_then_it_does_not_begin_quiet(
        self, parents: Parents, tmp_path: Path
    ) -> None:
        with locked(tmp_path / "0.lock"):
            parent = parents.of(LOADS, count=2)
            parent.wait_for("loads", 0)
            parent.wait_for("stays", 1)
            parent.signal(signal.SIGTSTP)
            parent.wait_for("SIGTSTP", 1)
            parent.signal(signal.SIGCONT)
            parent.wait_for("SIGCONT", 1)
        parent.wait_for("stays", 0)

        assert parent.words(0) == ["loads", "stays"]

    def test_when_ctrl_c_ends_it_as_click_does_then_the_parent_ends_as_asked(self, parents: Parents) -> None:
        parent = parents.of(f"{SAYS}\nsignal.signal(signal.SIGINT, lambda *_: os._exit(1))\nsay('loads'){UNTIL_EOF}")
        parent.wait_for("loads")

        parent.signal(signal.SIGINT)

        assert parent.wait() == ExitCode.DONE


class TestGivenAProgramThatCannotBeStartedForNow:
    def test_when_it_can_be_then_it_comes_as_after_a_death(self, parents: Parents, tmp_path: Path) -> None:
        program = tmp_path / "program"
        parent = parents.of(STAYS, program=str(program))
        wait_until(lambda: parent.output.count("cannot be started; retrying") >= 3, "it has been tried thrice")

        script = tmp_path / "script"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        script.rename(program)

        parent.wait_for("stays")
        assert [f'"retry_in_s": {delay_s}' in parent.output for delay_s in (0.01, 0.02, 0.04)] == [True] * 3
        parent.signal(signal.SIGTERM)
        assert parent.wait() == ExitCode.DONE


class TestGivenAChildThatDoesNotLeaveAsItShould:
    def test_when_asked_to_stop_then_the_parent_says_that_it_was_broken(self, parents: Parents) -> None:
        parent = parents.of(f"{SAYS}\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\nsay('up'){UNTIL_EOF}")
        parent.wait_for("up")

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.BROKEN

    def test_when_it_breaks_in_the_drain_and_stop_is_repeated_then_the_exit_code_says_so(
        self, parents: Parents
    ) -> None:
        parent = parents.of(
            f"{SAYS}\n"
            "def leave(*_):\n"
            "    if os.environ['SAYS_IN'].endswith('0'):\n"
            "        os._exit(7)\n"
            "    signal.signal(signal.SIGINT, lambda *_: os._exit(0))\n"
            "    say('drains')\n"
            "signal.signal(signal.SIGTERM, leave)\n"
            f"say('up'){UNTIL_EOF}",
            count=2,
        )
        parent.wait_for("up", 0)
        parent.wait_for("up", 1)
        parent.signal(signal.SIGTERM)
        parent.wait_for("drains", 1)
        wait_until(lambda: '"exit_code": 7' in parent.output, "the first one's end is logged")

        parent.signal(signal.SIGTERM)

        assert parent.wait() == ExitCode.BROKEN


class TestGivenAChildWhoseSettingsAreWrong:
    def test_when_it_says_so_then_it_is_not_started_again_and_the_parent_says_the_same(self, parents: Parents) -> None:
        parent = parents.of(f"{SAYS}\nsay('refuses')\nsys.exit(2)")

        assert parent.wait() == ExitCode.MISUSED
        assert parent.words(0) == ["refuses"]
        assert "it will not be restarted" in parent.output


class TestGivenAConfiguration:
    FLAGS: ClassVar[dict[str, object]] = {
        "redis.url": "redis://:secret@queue/3",
        "queue.name": "q",
        "history.recorder": False,
        "batching.enable_prefix_caching": True,
        "beat.life_s": 7.5,
        "model.path": "null?step_s=0.1",
    }

    def test_when_written_as_an_environment_then_it_is_read_again_as_it_was(self) -> None:
        config = load_config({"SLUICE_LOG_LEVEL": "warning"}, flags=self.FLAGS)

        assert load_config(environment_of(config)) == config

    @pytest.mark.parametrize("options", ["", "tensor_parallel_size=2", "tensor_parallel_size=2 swap_space=1"])
    def test_when_a_setting_has_several_values_then_they_are_read_again_one_by_one(self, options: str) -> None:
        config = load_config({"SLUICE_ENGINE": "vllm", **({"SLUICE_ENGINE_OPTION": options} if options else {})})

        assert load_config(environment_of(config)) == config
        assert config.model.engine_option == tuple(options.split())

    def test_when_it_asks_for_one_worker_then_nobody_restarts_it_but_its_recorder(self) -> None:
        config = load_config({}, flags={**self.FLAGS, "history.recorder": True, "history.keep_prompts": "hash"})

        (worker,), (recorder,) = worker_specs(config, {}), recorder_specs(config, {})

        assert not any(worker.restarts_after(code) for code in (0, 1, 2, 3, -9))
        assert load_config(worker.environ) == config
        assert [recorder.restarts_after(code) for code in (0, 1, 2, -9)] == [True, True, False, True]
        assert load_config(recorder.environ).history.keep_prompts == "hash"
        assert recorder_specs(load_config({}, flags=self.FLAGS), {}) == []

    def test_when_the_server_is_embedded_then_it_brings_callbacks_along(self) -> None:
        environ = {"SLUICE_CALLBACKS_SECRET": "of all", "SLUICE_RETENTION_DAYS": "9", "SLUICE_LOG_LEVEL": "warning"}
        config = load_config(environ)

        [spec] = callbacks_specs(config, environ)

        assert load_config(spec.environ) == config
        assert spec.command[-2:] == ("callbacks", "--until-eof")
        assert [spec.restarts_after(code) for code in (0, 1, 2, -9)] == [True, True, False, True]

    @pytest.mark.parametrize(
        ("flags", "num"),
        [
            ({"redis.url": "redis://h"}, 0),
            ({"redis.url": "redis://h", "history.callbacks": True}, 1),
            ({"history.callbacks": False}, 0),
        ],
    )
    def test_when_a_flag_or_another_server_is_given_then_that_decides(self, flags: dict[str, object], num: int) -> None:
        assert len(callbacks_specs(load_config({}, flags=flags), {})) == num

    def test_when_it_names_gpus_then_each_has_a_post_of_its_own(self) -> None:
        config = load_config({}, flags={**self.FLAGS, "model.device": "cuda:0,2", "model.memory_fraction": 0.8})

        workers = worker_specs(
            config, {"PATH": "/bin", "SLUICE_CONFIG": "/etc/sluice.toml", "SLUICE_STATE_DIR": "/state"}
        )

        assert is_fleet(config)
        assert [spec.name for spec in workers] == ["gpu0", "gpu2"]
        assert [spec.cores for spec in workers] == [frozenset(), frozenset()]
        for index, spec in enumerate(workers):
            own = load_config(spec.environ)
            assert own.model.device == f"cuda:{index * 2}"
            assert own.metrics.port == 9400 + index
            assert (own.model.memory_fraction, own.redis, own.queue) == (0.8, config.redis, config.queue)
            assert not is_fleet(own)
            assert spec.environ["PATH"] == "/bin"
            assert "SLUICE_CONFIG" not in spec.environ, "what it says is already there, and would be read anew"
            assert spec.environ["SLUICE_STATE_DIR"] == "/state"

    def test_when_it_asks_for_processes_on_the_cpu_then_they_share_its_cores_and_memory(self) -> None:
        config = load_config({}, flags={**self.FLAGS, "model.processes": 4, "metrics.port": 0, "log.name": "east"})

        workers = worker_specs(config, {})

        assert [spec.name for spec in workers] == ["east-cpu0", "east-cpu1", "east-cpu2", "east-cpu3"]
        for spec in workers:
            own = load_config(spec.environ)
            assert (own.model.memory_fraction, own.metrics.port, own.model.processes) == (0.125, 0, 1)
            assert spec.cores <= os.sched_getaffinity(0)
            assert spec.cores

    @pytest.mark.parametrize(
        ("num_usable", "environ", "stated"),
        [(16, {}, None), (8, {}, "2"), (8, {"OMP_NUM_THREADS": "3"}, "3"), (1, {}, "1")],
    )
    def test_when_a_cgroup_has_a_quota_then_its_processes_share_that_too(
        self, monkeypatch: pytest.MonkeyPatch, num_usable: int, environ: dict[str, str], stated: str | None
    ) -> None:
        monkeypatch.setattr(specs, "own_cores", lambda: list(range(16)))
        monkeypatch.setattr(specs, "num_usable_cores", lambda: num_usable)
        config = load_config({}, flags={**self.FLAGS, "model.processes": 4})

        found = [spec.environ.get("OMP_NUM_THREADS") for spec in worker_specs(config, environ)]

        assert found == [stated] * 4

    def test_when_no_memory_share_is_given_then_its_processes_split_that_of_one(self) -> None:
        config = load_config({}, flags={**self.FLAGS, "model.processes": 4})

        shares = [load_config(spec.environ).model.memory_share for spec in worker_specs(config, {})]

        assert shares == [load_config({}).model.memory_share / 4] * 4
