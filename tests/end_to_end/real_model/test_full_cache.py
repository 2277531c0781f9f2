"""More text at once than the KV cache holds: jobs wait or are preempted, none fails, and no answer changes."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.producer.errors import JobFailed
from sluice.protocol.jobs import Job
from sluice.protocol.wire import JobId
from sluice.worker.engines.registry import installed
from tests.end_to_end.real_model.conftest import QUESTIONS, engine_named
from tests.end_to_end.real_model.service import PATIENCE_S, PLACES, Service, chat, running_service
from tests.forks import ROOT
from tests.gateway.batches.processes import place_in
from tests.servers import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]

BLOCK_SIZE = 32
NUM_BLOCKS = 33
"""Of 32 tokens: four of these jobs. The model reads 8192 tokens, and the cache holds 1056."""


@pytest.fixture(scope="module", params=installed())
def small_cache(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Service]:
    """The service with one worker, whose cache holds half of what its places may need."""
    engine = engine_named(request.param)
    settings = {**engine.settings, "BLOCK_SIZE": str(BLOCK_SIZE), "NUM_BLOCKS": str(NUM_BLOCKS), "MAX_MODEL_LEN": ""}
    folder = tmp_path_factory.mktemp("small-cache")
    with pytest.MonkeyPatch.context() as patch, redis_server("valkey", is_durable=True) as server:
        patch.setenv("PYTHONPATH", str(ROOT))
        place = place_in(folder, server.url)
        with running_service(server, place, folder, model, replace(engine, settings=settings), num_workers=1) as made:
            yield made


def long_chats(first: int, end: int) -> list[Job]:
    """Some greedy chats of 200 tokens each."""
    return [chat(question, max_tokens=200, ignore_eos=True) for question in QUESTIONS[first:end]]


def preemptions(service: Service, job_ids: list[JobId]) -> int:
    """How often jobs were preempted, by their records."""

    def recorded() -> list[int | None]:
        return [row.preemptions for row in service.producer.jobs(state="done") if row.id in job_ids]

    service.wait_until(lambda: len(recorded()) == len(job_ids), "their ends are recorded")
    return sum(number or 0 for number in recorded())


class TestGivenACacheThatHoldsHalfOfTheRunningJobs:
    def test_when_all_places_are_taken_then_each_answer_is_that_of_an_ample_cache(self, small_cache: Service) -> None:
        ample: list[str] = []
        for first in range(0, PLACES, 4):
            job_ids = small_cache.submit(long_chats(first, first + 4))
            ample += small_cache.texts(job_ids)
            assert preemptions(small_cache, job_ids) == 0

        job_ids = small_cache.submit(long_chats(0, PLACES))
        texts = small_cache.texts(job_ids)

        assert texts == ample
        assert preemptions(small_cache, job_ids) > 0
        small_cache.check_streams(job_ids, texts)
        small_cache.check_it_is_whole()

    def test_when_a_job_is_longer_than_the_cache_then_it_fails_alone_with_the_reason(
        self, small_cache: Service
    ) -> None:
        [longer, mate] = small_cache.submit([chat("word " * 1100), chat(QUESTIONS[0])])

        assert small_cache.texts([mate])[0]
        with pytest.raises(JobFailed, match=r"prompt .* 1\d\d\d tokens; .*Shorten the prompt") as failed:
            small_cache.producer.result(longer, timeout_s=PATIENCE_S)

        assert failed.value.code in ("prompt_too_long", "request_too_large")
        small_cache.check_it_is_whole()
