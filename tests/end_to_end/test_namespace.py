"""A project with packages named like ours: commands, child processes and scripts run there import Sluice's own code."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from sluice.protocol.redis import embedded
from tests.end_to_end.processes import ROOT
from tests.grids import fast_only
from tests.servers import binary_of, how_to_get

SCRIPTS = Path(sys.executable).parent
MARKERS = "imported"
MODULE = """
import os
import pathlib
folder = pathlib.Path(os.environ["NAMESPACE_TEST_FOLDER"], "imported")
folder.mkdir(exist_ok=True)
(folder / __name__).touch()
raise SystemExit(f"the project's own {__name__} was imported")
"""
MODULES = (
    "worker/__init__.py",
    "worker/__main__.py",
    "producer.py",
    "engine/__init__.py",
    "kernels/__init__.py",
    "migrations/__init__.py",
    "gateway.py",
    "history.py",
    "protocol.py",
)
SCRIPT = """
from sluice import Producer

with Producer() as producer:
    producer.result(producer.submit("hello", max_tokens=4), timeout_s=60)
"""
TIMEOUT_S = 60.0

FLEET = (("--processes", "2"),)
ALONE = ((),)
"""Arguments of `worker start`."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey")),
    pytest.mark.skipif(
        not (SCRIPTS / "worker").exists(),
        reason="needs the distribution's scripts: pip install -e '.[worker,embedded,dev]'",
    ),
]


@dataclass(frozen=True)
class Project:
    """A folder whose modules have the names of our folders, with its own state folder."""

    folder: Path
    environ: Mapping[str, str]

    def run(self, *command: str) -> str:
        """Run a command in the folder and return its standard output."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def imported(self) -> list[str]:
        """The project's own modules that were imported."""
        return sorted(path.name for path in self.folder.glob(f"{MARKERS}/*"))

    @property
    def states(self) -> list[str]:
        """The states of all jobs in the history; none before it exists."""
        path = self.folder / "state" / "history.db"
        if not path.exists():
            return []
        database = sqlite3.connect(path, timeout=10)
        try:
            return [row[0] for row in database.execute("SELECT state FROM jobs")]
        except sqlite3.OperationalError:
            return []
        finally:
            database.close()

    @property
    def log(self) -> str:
        """What the worker has logged."""
        return (self.folder / "worker.log").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Generator[Project]:
    for name in MODULES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MODULE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {
        "NAMESPACE_TEST_FOLDER": str(tmp_path),
        # The project is searched before everything that is installed, also by child processes.
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "SLUICE_STATE_DIR": str(tmp_path / "state"),
        "SLUICE_METRICS": "false",
        "SLUICE_LOG_FORMAT": "json",
        "OMP_NUM_THREADS": "1",
    }
    yield Project(tmp_path, environ)
    embedded.stop(tmp_path / "state")


@pytest.fixture(params=fast_only([FLEET], [ALONE]), ids=["fleet", "one-process"])
def running(project: Project, request: pytest.FixtureRequest) -> Generator[Project]:
    """The project with a worker, or a fleet of two, started in its folder."""
    command = [str(SCRIPTS / "worker"), "start", "--cpu", "--model", "null", *request.param]
    with (project.folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=project.folder, env=project.environ, stdout=log, stderr=log)
    num_processes = len(request.param) or 1
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while project.log.count("worker started") < num_processes:
            assert worker.poll() is None, project.log
            assert time.monotonic() < deadline_s, project.log
            time.sleep(0.05)
        yield project
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(TIMEOUT_S) == 0, project.log


class TestGivenAProjectWithModulesNamedLikeOurs:
    def test_when_its_own_modules_are_imported_then_they_are_noted(self, project: Project) -> None:
        for name in ("engine", "gateway", "history", "kernels", "migrations", "producer", "protocol", "worker"):
            subprocess.run(
                [sys.executable, "-c", f"import {name}"], cwd=project.folder, env=project.environ, check=False
            )

        assert project.imported == [
            "engine",
            "gateway",
            "history",
            "kernels",
            "migrations",
            "producer",
            "protocol",
            "worker",
        ]

    @pytest.mark.long
    def test_when_a_worker_runs_there_then_jobs_are_done_by_our_code(self, running: Project) -> None:
        (running.folder / "prompts.jsonl").write_text(json.dumps({"prompt": "hello", "max_tokens": 4}) + "\n")
        (running.folder / "script.py").write_text(SCRIPT)

        running.run(str(SCRIPTS / "producer"), "submit", "prompts.jsonl", "--wait")
        running.run(sys.executable, "script.py")

        deadline_s = time.monotonic() + TIMEOUT_S
        while running.states != ["done", "done"]:
            assert time.monotonic() < deadline_s, (running.states, running.log)
            time.sleep(0.05)
        assert running.imported == []

    def test_when_a_worker_runs_as_a_module_then_it_is_ours(self, project: Project) -> None:
        shown = project.run(sys.executable, "-P", "-m", "sluice.worker", "status")

        assert shown.startswith("no living workers on queue 'default' at ")
        assert project.imported == []


class TestGivenTheInstalledCommands:
    @pytest.mark.parametrize("command", ["producer", "worker"])
    def test_when_asked_for_their_version_then_it_is_that_of_the_distribution(self, command: str) -> None:
        asked = subprocess.run([SCRIPTS / command, "--version"], capture_output=True, text=True, check=False)

        assert asked.stdout.split()[-1:] == [version("sluice-llm")], asked.stderr
