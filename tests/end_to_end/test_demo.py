"""The demo, run as `make demo` runs it, in a separate folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT
from tests.servers import binary_of, how_to_get

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey")),
]


class TestGivenTheDemo:
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
