"""A worker with a real model whose device is lost amid jobs: it says so, hands them back, and asks to be replaced."""

import io
import json
from pathlib import Path
from typing import Any

import structlog
import torch

import worker
from engine.batch_tensors import BatchTensors
from engine.model_runner import ModelRunner
from kernels.paged_attention import KVCache
from producer.contract.states import JobState
from producer.contract.wire import JobOptions
from tests.integration.jobs import KEYS, Ask, num_on_channel, result_of, state_of, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer
from worker.config import LogConfig
from worker.errors import ExitCode
from worker.log import configure_logs
from worker.serving import Served

MODEL: dict[str, Any] = {  # options go where they belong
    "model__path": str(Path(worker.__file__).parent / "small_model"),
    "model__dtype": "float32",
    "model__num_blocks": 400,
}
ASKS = [Ask(prompt=f"Count to {n}.", options=JobOptions(max_tokens=60, ignore_eos=True), seed=n) for n in (7, 9, 30)]
STEPS_TO_LIVE = 25


def dying(served: Served) -> Served:
    """The same model on a device that is lost after some steps, as torch tells it."""
    runner = served.executor
    assert isinstance(runner, ModelRunner)
    compute, num_steps = runner.decoder.forward, 0

    def forward(tensors: BatchTensors, caches: list[KVCache]) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps > STEPS_TO_LIVE:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCompile with hints.")
        return compute(tensors, caches)

    runner.decoder.forward = forward
    return served


class TestGivenAWorkerAmidJobs:
    def test_when_its_device_is_lost_then_its_jobs_are_handed_back_and_go_on_elsewhere_as_if_nothing_had_been(
        self, valkey: RedisServer
    ) -> None:
        said = io.StringIO()
        configure_logs(LogConfig(format="json"), stream=said)
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
                    assert int(client.hget(KEYS.job(job_id), "attempt")) == 2
        finally:
            structlog.reset_defaults()
        lines = [json.loads(line) for line in said.getvalue().splitlines()]
        (line,) = [line for line in lines if line["event"] == "worker broken"]
        assert line["error"].startswith("the device is lost: AcceleratorError: CUDA error: uncorrectable ECC error")
        assert "Take this GPU out of service" in line["error"]
