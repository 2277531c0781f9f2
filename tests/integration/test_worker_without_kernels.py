"""A worker on the CPU without a C compiler and without packaged kernels: it runs, and says what is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.kernels.native import packaged_library
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import ROOT, WorkerProcess
from tests.servers import RedisServer

LOSS = "Generation on the CPU is about seven times slower without them. Install a C compiler (gcc)"


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment without a compiler and with an empty cache."""
    if packaged_library() is not None:
        pytest.skip("the kernels are packaged")
    return {"PATH": str(tmp_path), "HOME": str(tmp_path)}


@pytest.mark.slow
class TestGivenNoKernels:
    def test_when_a_worker_starts_then_it_warns(
        self, valkey: RedisServer, tmp_path: Path, nowhere: dict[str, str]
    ) -> None:
        worker = WorkerProcess(valkey.url, tmp_path / "log", **nowhere, SLUICE_MODEL=str(SMALL_MODEL))
        try:
            worker.wait_until_started()
        finally:
            worker.kill()

        (line,) = [json.loads(line) for line in worker.output.splitlines() if "no native kernels" in line]
        assert line["level"] == "warning"
        assert LOSS in line["event"]

    @pytest.mark.long
    def test_when_the_doctor_looks_then_it_warns(
        self, valkey: RedisServer, tmp_path: Path, nowhere: dict[str, str]
    ) -> None:
        command = [sys.executable, "-P", "-m", "sluice.worker", "doctor", "--cpu", "--redis-url", valkey.url]

        done = subprocess.run(
            command,
            env=nowhere | {"SLUICE_DATABASE_URL": f"sqlite:///{tmp_path}/history.db", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

        assert f"warn   kernels: none, PyTorch's operators are used\n       {LOSS}" in done.stdout, done.stderr
        assert done.returncode == 1
