"""The parent of a fleet, over small programs in a worker's place and a number that the test writes."""

import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.worker.errors import ExitCode
from sluice.worker.processes.fleet import ScaleIn
from tests.integration.jobs import wait_until
from tests.worker.processes.test_parent import REST, ROOT, SAYS, STAYS

FLEET = """
import os, sys
from pathlib import Path
from sluice.protocol.scaling.backlog import Backlog
from sluice.protocol.scaling.demand import ScalePolicy
from sluice.worker.config import LogConfig
from sluice.worker.log import configure_logs, get_log
from sluice.worker.processes import fleet, parent
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.fleet import FleetPolicy

configure_logs(LogConfig(format="json"))
parent.LOOK_EVERY_S = fleet.READ_EVERY_S = 0.01
folder, child = Path(sys.argv[1]), sys.argv[2]

def read():
    text = (folder / "wanted").read_text()
    return None if not text else Backlog(
        queue="q", backlog_jobs=int(text), backlog_tokens=0, running_jobs=0, running_tokens=0, workers=0,
        worker_tokens_per_s=None, rate_source="unknown", oldest_age_s=None, nearest_deadline_s=None, is_paused=False,
    )

def spec(number):
    environ = {**os.environ, "SAYS_IN": str(folder / str(number))}
    return ChildSpec(kind="worker", name=f"p{number}", environ=environ, command=(sys.executable, "-c", child))

policy = FleetPolicy(scale=ScalePolicy(max_workers=3), scale_in_after_s=0.0, jobs_per_worker=1)
made = fleet.Fleet(
    [spec(number) for number in range(3)], [], get_log(), lambda: lambda *_death: None, policy=policy, read=read
)
sys.exit(made.run())
"""


class Fleet:
    """A fleet of at most three in a process of its own. Changes with the number that is wanted."""

    def __init__(self, folder: Path, child: str) -> None:
        self._folder = folder
        self.want("")
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", FLEET, str(folder), child], cwd=ROOT, stderr=log)

    def want(self, number: int | str) -> None:
        """Set how many jobs there are; empty: the queue cannot be read."""
        new = self._folder / "new"
        new.write_text(str(number))
        new.replace(self._folder / "wanted")

    def words(self) -> list[list[str]]:
        """What the processes of each spec said."""
        paths = [self._folder / str(number) for number in range(3)]
        return [[line.split()[0] for line in path.read_text().splitlines()] if path.exists() else [] for path in paths]

    def wait_for(self, *words: list[str]) -> None:
        """Until the processes of each spec have said exactly these words."""
        wait_until(lambda: self.words() == list(words), f"they say {words}; {self.words()}")

    @property
    def output(self) -> str:
        """The fleet's log."""
        return (self._folder / "log").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Generator[Fleet]:
    made = Fleet(tmp_path, STAYS)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.slow
class TestGivenAFleetOfAtMostThree:
    def test_when_the_number_changes_then_the_newest_are_started_and_drained(self, fleet: Fleet) -> None:
        fleet.want(2)
        fleet.wait_for(["stays"], ["stays"], [])
        fleet.want(1)
        fleet.wait_for(["stays"], ["stays", "leaves"], [])
        fleet.want(7)
        fleet.wait_for(["stays"], ["stays", "leaves", "stays"], ["stays"])
        fleet.want(0)
        fleet.wait_for(["stays", "leaves"], ["stays", "leaves"] * 2, ["stays", "leaves"])

        fleet.process.send_signal(signal.SIGTERM)

        assert fleet.process.wait(30) == ExitCode.DONE
        assert '"died' not in fleet.output

    def test_when_the_queue_cannot_be_read_then_the_workers_stay(self, fleet: Fleet) -> None:
        fleet.want(1)
        fleet.wait_for(["stays"], [], [])
        fleet.want("")
        fleet.process.send_signal(signal.SIGUSR1)
        fleet.wait_for(["stays", "SIGUSR1"], [], [])

        fleet.process.send_signal(signal.SIGTERM)

        assert fleet.process.wait(30) == ExitCode.DONE
        assert fleet.words() == [["stays", "SIGUSR1", "leaves"], [], []]

    def test_when_it_has_no_worker_and_is_asked_to_stop_then_it_ends(self, fleet: Fleet) -> None:
        fleet.want(0)

        fleet.process.send_signal(signal.SIGTERM)

        assert fleet.process.wait(30) in (ExitCode.DONE, -signal.SIGTERM), "it may not have begun to listen"
        assert fleet.words() == [[], [], []]


@pytest.mark.slow
class TestGivenAFleetWithWrongSettings:
    def test_when_a_worker_ends_as_misused_then_the_fleet_ends_so_too(self, tmp_path: Path) -> None:
        made = Fleet(tmp_path, f"import sys; sys.exit({ExitCode.MISUSED.value})")
        made.want(1)

        assert made.process.wait(30) == ExitCode.MISUSED


@pytest.mark.slow
class TestGivenAFleetWhoseFirstWorkerIsReady:
    """The others refuse to start, each for a reason of its own: a device or a port, say."""

    CHILD = f"{SAYS}\nif not os.environ['SAYS_IN'].endswith('0'):\n    say('refuses')\n    sys.exit(2)\n{REST}"

    def test_when_others_exit_as_misused_then_it_stays_and_they_are_not_started_again(self, tmp_path: Path) -> None:
        made = Fleet(tmp_path, self.CHILD)
        made.want(1)
        made.wait_for(["stays"], [], [])

        made.want(3)
        wait_until(lambda: made.output.count("it will not be restarted") == 2, "both have refused")
        made.process.send_signal(signal.SIGUSR1)
        made.wait_for(["stays", "SIGUSR1"], ["refuses"], ["refuses"])
        made.process.send_signal(signal.SIGTERM)

        assert made.process.wait(30) == ExitCode.MISUSED
        assert made.words() == [["stays", "SIGUSR1", "leaves"], ["refuses"], ["refuses"]]


class TestGivenNumbersThatAreWanted:
    @given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 9)), min_size=1))
    def test_when_time_passes_then_the_largest_of_the_last_seconds_counts(self, steps: list[tuple[float, int]]) -> None:
        scale_in, now_s, seen = ScaleIn(15.0), 0.0, list[tuple[float, int]]()

        for passed_s, wanted in steps:
            now_s += passed_s
            seen.append((now_s, wanted))

            assert scale_in.next(wanted, now_s) == max(one for at_s, one in seen if now_s - at_s < 15.0)

    def test_when_there_is_no_delay_then_each_counts_at_once(self) -> None:
        scale_in = ScaleIn(0.0)

        assert [scale_in.next(wanted, now_s) for now_s, wanted in enumerate((3, 1, 2))] == [3, 1, 2]
