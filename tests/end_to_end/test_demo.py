"""The demos, run as `make demo` and `make demo-web` run them, in separate folders; the latter's output as printed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT
from tests.servers import binary_of, how_to_get

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey")),
]


class TestGivenTheDemo:
    @pytest.mark.long
    def test_when_it_is_run_then_killed_jobs_resume_and_the_history_has_both_kinds(self, tmp_path: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

        done = subprocess.run(
            [sys.executable, "-m", "tools.demo"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip

        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"continues at token \d+", done.stdout)
        assert "exited with code 0" in done.stdout
        # state, jobs, attempts: the long jobs that were killed, and all others. A short one of the three may end just
        # before the kill on a slow machine.
        rows = re.findall(r"│ done +│ (\d+) +│ (\d+) +│", done.stdout)
        assert [attempts for _, attempts in rows] == ["2", "1"], done.stdout
        assert sum(int(jobs) for jobs, _ in rows) == 23


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Generator[subprocess.Popen[str]]:
    """The demo while it runs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "OPENAI_"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.demo_web"]
    folder = tmp_path_factory.mktemp("demo")
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def printed(demo: subprocess.Popen[str]) -> str:
    """What it prints until all is served."""
    assert demo.stdout is not None
    lines: list[str] = []
    for line in demo.stdout:
        lines.append(line)
        if "print(chunk" in line:
            break
    return "".join(lines)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
class TestGivenTheDemoOfTheGateway:
    def test_when_its_curl_line_is_run_then_it_answers(self, printed: str) -> None:
        [line] = re.findall(r"^ +(curl .*)$", printed, re.MULTILINE)

        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)

        assert done.returncode == 0, done.stderr
        assert "42" in done.stdout

    def test_when_its_snippet_is_run_then_it_prints_the_answer(self, printed: str, tmp_path: Path) -> None:
        snippet = textwrap.dedent(printed[printed.index("    from openai") :])

        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )

        assert done.returncode == 0, done.stderr
        assert "3, 4, 5, 6, 7, 8, 9" in done.stdout

    def test_when_it_is_interrupted_then_it_stops_all_it_started(
        self, demo: subprocess.Popen[str], printed: str
    ) -> None:
        assert "until Ctrl-C" in printed

        demo.send_signal(signal.SIGINT)

        assert demo.wait(60) == 0
