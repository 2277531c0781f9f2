"""The conformance suite on vLLM, in its environment: float32, as it is there that bits do not depend on the batch."""

import os
import subprocess

import pytest

from sluice.engine.conformance.resumption import ROWS, SEEDED
from sluice.worker.engines.vllm.load import UNREAD
from tests.forks import ROOT
from tools.vllm_environment import vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]


class TestGivenVllm:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"OPTIONS": "tensor_parallel_size=2"},
            # vLLM's runner for CPUs has no pipeline in eager mode, and adapters turn its compiler off.
            {"OPTIONS": "pipeline_parallel_size=2", "GRAPHS": "1", "ADAPTER": "0"},
        ],
        ids=["one process", "two tensor-parallel ranks", "two pipeline ranks"],
    )
    def test_when_it_is_checked_then_it_behaves_and_resumes_bitwise(self, settings: dict[str, str]) -> None:
        command = [vllm_python(), "-m", "sluice.engine.conformance", "tests.worker.engines.vllm.real:vllm_engine"]

        found = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
            capture_output=True,
            text=True,
            check=False,
        )

        assert found.returncode == 0, found.stdout + found.stderr[-2000:]
        assert "VIOLATED" not in found.stdout
        lines = found.stdout.partition("resumed after")[2].splitlines()[1:]
        cells = {line.rpartition(" ")[0].strip(): set(line.rpartition(" ")[2]) for line in lines if line.strip()}
        rows = ROWS if "ADAPTER" in settings else {**ROWS, "adapter": SEEDED}
        assert cells == {name: {"-"} if UNREAD.keys() & options else {"b"} for name, options in rows.items()}
