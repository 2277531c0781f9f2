"""A worker with a real model that loses its device: it logs it, hands its jobs back, and asks for a restart."""

import io
import json
from pathlib import Path
from typing import Any

import structlog
import torch

from sluice import worker
from sluice.engine.execution.model_runner import ModelRunner
from sluice.kernels.decoder_step import StepInputs
from sluice.kernels.paged_attention import KVCache
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from sluice.worker.config import LogConfig
from sluice.worker.errors import ExitCode
from sluice.worker.log import configure_logs
from sluice.worker.model.loaded_model import LocalModel
from tests.integration.jobs import (
    Ask,
    field_of,
    num_on_channel,
    result_of,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer

MODEL: dict[str, Any] = {  # options go where they belong
    "model__path": str(Path(worker.__file__).parent / "small_model"),
    "model__dtype": "float32",
    "model__num_blocks": 400,
}
ASKS = [Ask(prompt=f"Count to {n}.", options=JobOptions(max_tokens=60, ignore_eos=True), seed=n) for n in (7, 9, 30)]
STEPS_TO_LIVE = 25


def dying(served: LocalModel) -> LocalModel:
    """The same model on a device that raises torch's error of a lost device after some steps."""
    runner = served.executor
    assert isinstance(runner, ModelRunner)
    compute, num_steps = runner.decoder.forward, 0

    def forward(tensors: StepInputs, caches: list[KVCache]) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps > STEPS_TO_LIVE:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCompile with hints.")
        return compute(tensors, caches)

    runner.decoder.forward = forward
    return served


class TestGivenAWorkerAmidJobs:
    def test_when_its_device_is_lost_then_its_jobs_are_handed_back_and_resume_elsewhere(
        self, valkey: RedisServer
    ) -> None:
        output = io.StringIO()
        configure_logs(LogConfig(format="json"), stream=output)
        try:
            with valkey.client() as client:
                with running_worker(valkey.url, **MODEL):
                    undisturbed = submit_all(client, ASKS)
                    wait_for_ends(client, undisturbed)
                with running_worker(valkey.url, change=dying, **MODEL) as broken:
                    job_ids = submit_all(client, ASKS)
                    wait_until(lambda: broken.exit_code is not None, "it ends by itself")
                states = {state_of(client, one) for one in job_ids}
                num_spoken = [num_on_channel(client, one) for one in job_ids]
                with running_worker(valkey.url, **MODEL):
                    wait_for_ends(client, job_ids)

                assert broken.exit_code is ExitCode.BROKEN, "start again"
                assert states == {JobState.QUEUED}, "handed back at once"
                assert 0 < max(num_spoken) < 60, "they had begun"
                for job_id, other in zip(job_ids, undisturbed, strict=True):
                    choices = zip(result_of(client, job_id).choices, result_of(client, other).choices, strict=True)
                    assert all(choice.token_ids == expected.token_ids for choice, expected in choices)
                    assert int(field_of(client, job_id, "attempt") or 0) == 2
        finally:
            structlog.reset_defaults()
        lines = [json.loads(line) for line in output.getvalue().splitlines()]
        (line,) = [line for line in lines if line["event"] == "worker broken"]
        assert line["error"].startswith("the device is lost: AcceleratorError: CUDA error: uncorrectable ECC error")
        assert "The GPU is faulty. Take it out of service" in line["error"]
