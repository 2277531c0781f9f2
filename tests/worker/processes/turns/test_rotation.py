"""Workers that take turns, over small programs in their place and demands that the test writes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from sluice.worker.errors import ExitCode
from tests.integration.jobs import wait_until
from tests.worker.processes.test_parent import REST, ROOT, SAYS, STAYS

FLEET = """
import json, os, sys
from pathlib import Path
from sluice.protocol.scaling.backlog import Backlog
from sluice.worker.clock import monotonic_s
from sluice.worker.config import LogConfig
from sluice.worker.log import configure_logs, get_log
from sluice.worker.processes import child_process, parent
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.turns import rotation
from sluice.worker.processes.turns.observed import Seen
from sluice.worker.processes.turns.parent import Group, TurnsParent
from sluice.worker.processes.turns.policy import TurnRules

configure_logs(LogConfig(format="json"))
parent.LOOK_EVERY_S = rotation.ASIDE_S = child_process.FIRST_DELAY_S = 0.01
folder, child = Path(sys.argv[1]), sys.argv[2]

def seen_of(name, jobs):
    backlog = Backlog(
        queue=name, backlog_jobs=jobs, backlog_tokens=jobs, running_jobs=0, running_tokens=0, workers=0,
        worker_tokens_per_s=None, rate_source="unknown", oldest_age_s=None, nearest_deadline_s=None, is_paused=False,
    )
    return Seen(at_s=monotonic_s(), backlog=backlog, oldest_s={}, is_unserved=True, offers={})

class Watch:
    @property
    def seen(self):
        jobs = json.loads((folder / "jobs").read_text())
        return {name: seen_of(name, jobs.get(name, 0)) for name in ("a", "b")}

    def state(self, states):
        with (folder / "states").open("a") as file:
            print(json.dumps(states), file=file)

    def start(self): pass
    def close(self): pass

def spec(name):
    environ = {**os.environ, "SAYS_IN": str(folder / name)}
    return ChildSpec(kind="worker", name=name, environ=environ, command=(sys.executable, "-c", child))

specs = {name: [spec(name)] for name in ("a", "b")}
rules = TurnRules(share=1, patience_s=0.01, turn_s=0, stop_s=0.3)
group = Group(name="card", rules=rules, workers=specs, watch=Watch())
workers = [spec for own in specs.values() for spec in own]
sys.exit(TurnsParent(workers, [], get_log(), lambda: lambda *_death: None, [group]).run())
"""
LINGERS = f"{STAYS}".replace('    say("leaves")\n    sys.exit(0)', '    say("lingers")')
"""Ends when it is killed."""


class Fleet:
    """Two workers that take turns, `a` first, in a process of its own. Changes with the jobs that wait."""

    def __init__(self, folder: Path, child: str) -> None:
        self._folder = folder
        self.want(a=0)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", FLEET, str(folder), child], cwd=ROOT, stderr=log)

    def want(self, **jobs: int) -> None:
        """Set how many jobs wait for each."""
        new = self._folder / "new"
        new.write_text(json.dumps(jobs))
        new.replace(self._folder / "jobs")

    def words(self, name: str) -> list[str]:
        """What the processes of a worker said."""
        return [line.split()[0] for line in self._lines(name)]

    def pids(self, name: str) -> list[int]:
        """The processes of a worker, in order."""
        return list(dict.fromkeys(int(line.split()[1]) for line in self._lines(name)))

    def states(self) -> list[dict[str, str | None]]:
        """What heartbeats were to say."""
        return [json.loads(line) for line in self._lines("states")]

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, *, a: list[str], b: list[str]) -> None:
        """Until the processes of both have said exactly these words."""
        wait_until(lambda: (self.words("a"), self.words("b")) == (a, b), f"they say {a} and {b}: {self.output}")

    def wait_for_line(self, words: str) -> None:
        """Until its log has these words."""
        wait_until(lambda: words in self.output, f"it logs {words!r}: {self.output}")

    def end(self) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    @property
    def output(self) -> str:
        """Its log."""
        return (self._folder / "log").read_text()


StartFleet = Callable[[str], Fleet]


@pytest.fixture
def start(tmp_path: Path) -> Generator[StartFleet]:
    """Starts a fleet whose workers are a program."""
    made: list[Fleet] = []

    def start_fleet(child: str) -> Fleet:
        made.append(Fleet(tmp_path, child))
        return made[-1]

    yield start_fleet
    for fleet in made:
        fleet.process.kill()
        fleet.process.wait()


@pytest.mark.slow
class TestGivenTwoWorkersThatTakeTurns:
    def test_when_the_other_has_work_then_one_leaves_before_the_next_comes(self, start: StartFleet) -> None:
        fleet = start(STAYS)
        fleet.wait_for(a=["stays"], b=[])

        fleet.want(b=1)
        fleet.wait_for(a=["stays", "leaves"], b=["stays"])
        fleet.want(a=1)
        fleet.wait_for(a=["stays", "leaves", "stays"], b=["stays", "leaves"])

        wait_until(lambda: fleet.states()[-1] == {"a": None, "b": "waiting_for_its_turn"}, "all heartbeats say so")
        assert {"a": "waiting_for_its_turn", "b": "loading"} in fleet.states()
        assert fleet.end() == ExitCode.DONE
        assert '"died' not in fleet.output

    def test_when_none_has_work_then_none_is_switched_and_all_end_on_a_signal(self, start: StartFleet) -> None:
        fleet = start(STAYS)
        fleet.wait_for_line("turn began")

        fleet.process.send_signal(signal.SIGUSR1)

        fleet.wait_for(a=["stays", "SIGUSR1"], b=[])
        assert fleet.end() == ExitCode.DONE
        assert (fleet.words("a"), fleet.words("b")) == (["stays", "SIGUSR1", "leaves"], [])

    def test_when_the_present_one_dies_then_it_is_started_again(self, start: StartFleet) -> None:
        fleet = start(STAYS)
        fleet.wait_for_line("turn began")

        os.kill(fleet.pids("a")[0], signal.SIGKILL)

        fleet.wait_for(a=["stays", "stays"], b=[])
        assert len(fleet.pids("a")) == 2
        assert fleet.end() == ExitCode.DONE

    def test_when_someone_else_asks_the_present_one_to_end_then_the_next_turn_begins(self, start: StartFleet) -> None:
        fleet = start(STAYS)
        fleet.wait_for_line("turn began")
        fleet.want(b=1)

        os.kill(fleet.pids("a")[0], signal.SIGTERM)

        fleet.wait_for(a=["stays", "leaves"], b=["stays"])
        fleet.want(a=1)
        fleet.wait_for(a=["stays", "leaves", "stays"], b=["stays", "leaves"])

    def test_when_the_fleet_is_quieted_then_no_switch_begins_until_it_continues(self, start: StartFleet) -> None:
        fleet = start(STAYS)
        fleet.wait_for_line("turn began")
        fleet.process.send_signal(signal.SIGTSTP)
        fleet.wait_for(a=["stays", "SIGTSTP"], b=[])
        fleet.want(b=1)
        fleet.process.send_signal(signal.SIGUSR1)
        fleet.wait_for(a=["stays", "SIGTSTP", "SIGUSR1"], b=[])

        fleet.process.send_signal(signal.SIGCONT)

        wait_until(lambda: fleet.words("b") == ["stays"], "the other has come")
        assert fleet.end() == ExitCode.DONE


@pytest.mark.slow
class TestGivenAWorkerThatDoesNotStop:
    def test_when_its_turn_is_over_then_it_is_killed_and_the_next_comes(self, start: StartFleet) -> None:
        fleet = start(LINGERS)
        fleet.wait_for_line("turn began")

        fleet.want(b=1)

        fleet.wait_for(a=["stays", "lingers"], b=["stays"])
        assert "worker did not stop in time: killed" in fleet.output


@pytest.mark.slow
class TestGivenAWorkerThatDoesNotStart:
    def test_when_it_has_its_turn_then_it_is_set_aside_and_the_other_comes_back(self, start: StartFleet) -> None:
        fleet = start(f"{SAYS}\nif os.environ['SAYS_IN'].endswith('b'):\n    say('dies')\n    sys.exit(1)\n{REST}")
        fleet.wait_for_line("turn began")

        fleet.want(a=1, b=1)

        wait_until(lambda: fleet.words("a").count("stays") >= 2, "the first is back")
        wait_until(lambda: fleet.words("b").count("dies") >= 2, "the other was tried again")
        assert "worker does not start: others have its turn" in fleet.output

    def test_when_its_settings_are_wrong_then_it_is_not_tried_again(self, start: StartFleet) -> None:
        fleet = start(f"{SAYS}\nif os.environ['SAYS_IN'].endswith('a'):\n    say('refuses')\n    sys.exit(2)\n{REST}")

        fleet.wait_for(a=["refuses"], b=["stays"])
        fleet.want(a=1)
        fleet.process.send_signal(signal.SIGUSR1)

        fleet.wait_for(a=["refuses"], b=["stays", "SIGUSR1"])
        assert fleet.end() == ExitCode.MISUSED

    def test_when_no_settings_are_right_then_the_fleet_ends(self, start: StartFleet) -> None:
        fleet = start(f"{SAYS}\nsay('refuses')\nsys.exit(2)")

        assert fleet.process.wait(30) == ExitCode.MISUSED
        assert (fleet.words("a"), fleet.words("b")) == (["refuses"], ["refuses"])
