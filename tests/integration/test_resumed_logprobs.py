"""Log-probabilities of a job that changed its worker: those before the seam come off the channel, the rest are new."""

from typing import Any

import pytest

from producer.contract.wire import JobId, JobOptions, TokenLogprobs
from tests.end_to_end.processes import ROOT
from tests.integration.jobs import (
    Ask,
    num_on_channel,
    read_channel,
    result_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer

MODEL: dict[str, Any] = {"model__path": str(ROOT / "worker" / "small_model"), "model__dtype": "float32"}
ASK = Ask(options=JobOptions(max_tokens=80, n=2, logprobs=3, ignore_eos=True, repetition_penalty=1.1), seed=11)
BOUND = 2e-5
"""See tests/oracles/test_seeded_sampling.py."""


def on_channel(client: Any, job_id: JobId, choice: int) -> list[TokenLogprobs]:
    """Of each token, in order."""
    return [one for entry in read_channel(client, job_id, choice) for one in entry.logprobs or ()]


@pytest.mark.long
class TestGivenAJobOfTwoChoicesWithLogprobs:
    def test_when_its_worker_leaves_then_channel_and_result_have_those_of_an_undisturbed_one(
        self, valkey: RedisServer
    ) -> None:
        with valkey.client() as client:
            with running_worker(valkey.url, **MODEL, drain__mode="hand-over"):
                [undisturbed] = submit_all(client, [ASK])
                wait_for_ends(client, [undisturbed])
                [job_id] = submit_all(client, [ASK])
                wait_until(lambda: num_on_channel(client, job_id, 1) >= 10, "it speaks")
            num_before = len(on_channel(client, job_id, 0))
            with running_worker(valkey.url, **MODEL):
                wait_for_ends(client, [job_id])

            assert 10 <= num_before < 80
            for choice, (kept, told) in enumerate(
                zip(result_of(client, job_id).choices, result_of(client, undisturbed).choices, strict=True)
            ):
                assert kept.token_ids == told.token_ids
                assert kept.logprobs is not None
                assert told.logprobs is not None
                assert list(kept.logprobs) == on_channel(client, job_id, choice)
                assert [one.chosen for one in kept.logprobs] == pytest.approx(
                    [one.chosen for one in told.logprobs], abs=BOUND
                )
                assert [dict(one.top) for one in kept.logprobs] == [
                    pytest.approx(dict(one.top), abs=BOUND) for one in told.logprobs
                ]
