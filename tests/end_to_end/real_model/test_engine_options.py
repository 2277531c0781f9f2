"""What vLLM says of options of its own, which a worker passes on: those for several hosts, too."""

import os
import subprocess

import pytest

from tests.forks import ROOT
from tools.vllm_environment import vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(300)]

ANSWERS = {
    # The environment has no Ray: that vLLM asks for it shows that the option has arrived.
    "distributed_executor_backend=ray": "SLUICE_MODEL: vLLM cannot run it: Failed to import Ray",
    "tensor_parallel_size=two": (
        "SLUICE_ENGINE_OPTION: vLLM 0.32.0 refuses tensor_parallel_size=two: argument --tensor-parallel-size/-tp: "
        "invalid int value: 'two'"
    ),
    "tensor_parallel_sise=2": (
        "SLUICE_ENGINE_OPTION: vLLM 0.32.0 refuses tensor_parallel_sise=2: unrecognized arguments: "
        "--tensor-parallel-sise 2"
    ),
    "speculative_conf={}": (
        "SLUICE_ENGINE_OPTION: vLLM 0.32.0 refuses speculative_conf={}: unrecognized arguments: --speculative-conf {}"
    ),
    "speculative_config={}": "SLUICE_ENGINE_OPTION: speculative_config would do nothing",
    "max_model_len=64": "SLUICE_ENGINE_OPTION: max_model_len has a setting of the worker's own",
    "block_size=32": "SLUICE_ENGINE_OPTION: block_size has a setting of the worker's own",
    "enable_lora": "SLUICE_ENGINE_OPTION: enable_lora would do nothing: adapters are named by --adapters",
}


class TestGivenOptionsOfVllm:
    def test_when_they_are_wrong_then_the_error_has_the_sentence_of_vllm(self) -> None:
        command = [vllm_python(), "-m", "tests.worker.engines.vllm.options", *ANSWERS]

        found = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
        )

        lines = [line for line in found.stdout.splitlines() if line.startswith("SLUICE_")]
        assert len(lines) == len(ANSWERS)
        for line, answer in zip(lines, ANSWERS.values(), strict=True):
            assert line.startswith(answer), line
