"""The conformance suite on vLLM, in its environment: float32, as it is there that bits do not depend on the batch."""

import os
import subprocess

import pytest

from tests.forks import ROOT
from tools.vllm_environment import vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]


class TestGivenVllm:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"OPTIONS": "tensor_parallel_size=2"},
            # vLLM's runner for CPUs has no pipeline in eager mode.
            {"OPTIONS": "pipeline_parallel_size=2", "GRAPHS": "1"},
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
        matrix = found.stdout.partition("resumed after")[2].splitlines()[1:]
        assert len(matrix) >= 8
        assert all(set(line.rsplit(maxsplit=1)[-1]) == {"b"} for line in matrix if line.strip())
