"""vLLM over two processes that share each product: one that dies or hangs is the end of its worker, and jobs move."""

import signal
from collections.abc import Generator
from dataclasses import replace

import psutil
import pytest

from sluice.protocol.jobs import Job
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.real_model.conftest import QUESTIONS, engine_named
from tests.end_to_end.real_model.service import Service, chat, running_service
from tests.forks import ROOT
from tests.gateway.batches.processes import place_in
from tests.servers import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(2400)]

NUM_JOBS = 12


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """The service with vLLM, its worker with two ranks. SmolLM2 has nine heads, which two cannot share."""
    engine = engine_named("vllm")
    settings = {**engine.settings, "ENGINE_OPTION": "tensor_parallel_size=2", "STEP_DEADLINE_S": "15"}
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch, redis_server("valkey", is_durable=True) as server:
        patch.setenv("PYTHONPATH", str(ROOT))
        place = place_in(folder, server.url)
        # One worker: more ranks than cores wait for each other far longer than they compute.
        engine = replace(engine, settings=settings)
        with running_service(server, place, folder, SMALL_MODEL, engine, num_workers=1) as made:
            yield made


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks of a worker's vLLM."""
    [engine] = [one for one in psutil.Process(pid).children() if "sluice.worker.engine_process" in one.cmdline()]
    ranks = [one for one in engine.children() if "VLLM::Worker" in " ".join(one.cmdline())]
    assert len(ranks) == 2, [one.cmdline() for one in engine.children()]
    return ranks


def long_jobs() -> list[Job]:
    """Greedy chats that are not over at once."""
    return [chat(question, max_tokens=300, ignore_eos=True) for question in QUESTIONS[:NUM_JOBS]]


class TestGivenJobsUnderWayOnTwoRanks:
    @pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
    def test_when_one_rank_dies_or_hangs_then_each_answer_is_that_of_a_calm_run(
        self, two_ranks: Service, harm: signal.Signals
    ) -> None:
        calm = two_ranks.texts(two_ranks.submit(long_jobs()))
        job_ids = two_ranks.submit(long_jobs())
        two_ranks.wait_until_they_speak(job_ids[:4], 3)
        [pid] = two_ranks.pids()
        ranks = ranks_of(pid)

        ranks[1].send_signal(harm)
        two_ranks.wait_until(lambda: pid not in two_ranks.pids(), "the worker has ended")
        # Its successor, too, starts two ranks: what that takes says nothing of the jobs.
        two_ranks.wait_for_workers()
        texts = two_ranks.texts(job_ids)

        assert texts == calm
        two_ranks.check_streams(job_ids, texts)
        two_ranks.wait_until(lambda: not any(one.is_running() for one in ranks), "both ranks have ended")
        two_ranks.check_it_is_whole()
