"""Faults amid the work of a real model: greedy answers are those of a calm run, none lost, none twice."""

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.end_to_end.real_model.conftest import QUESTIONS
from tests.end_to_end.real_model.service import Service, chat

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]


def done(service: Service) -> int:
    """How many jobs are done, ever."""
    return service.producer.queue()[0].totals["done"]


def kill_worker(service: Service) -> None:
    """Kill a worker."""
    os.kill(min(service.pids()), signal.SIGKILL)


def kill_engine(service: Service) -> None:
    """Kill the process of a worker's engine."""
    worker = psutil.Process(min(service.pids()))
    [engine] = [one for one in worker.children() if "sluice.worker.engine_process" in one.cmdline()]
    engine.kill()


def restart_redis(service: Service) -> None:
    """Kill the server of the queue, and start it again with what it has written."""
    service.server.kill()
    time.sleep(0.5)  # a server that is back within a round trip's retries is an outage that nobody notices
    service.server.start()


class TestGivenFiftyJobsUnderWay:
    @pytest.mark.parametrize("harm", [kill_worker, kill_engine, restart_redis])
    def test_when_a_process_is_killed_then_each_answer_is_that_of_a_calm_run(
        self, service: Service, calm: list[str], harm: Callable[[Service], None]
    ) -> None:
        before = done(service)
        job_ids = service.submit([chat(question) for question in QUESTIONS])
        service.wait_until_they_speak(job_ids[:8], 5)

        harm(service)
        texts = service.texts(job_ids)

        assert texts == calm
        assert done(service) - before == len(job_ids)
        service.check_streams(job_ids, texts)
        assert (2 in attempts(service, job_ids)) is (harm is not restart_redis)


class TestGivenAJobThatEndsItsWorkerEachTime:
    def test_when_it_has_done_so_repeatedly_then_it_alone_is_failed(self, service: Service, calm: list[str]) -> None:
        poison, *mates = service.submit([chat("Tell me a story.", max_tokens=500), *map(chat, QUESTIONS[:10])])

        num_killed = service.kill_each_owner_of(poison)

        found = service.producer.status(poison)
        assert (found.state, found.error_code) == (JobState.FAILED, "killed_its_worker")
        assert num_killed >= 3
        texts = service.texts(mates)
        assert texts == calm[:10]
        service.check_streams(mates, texts)


def attempts(service: Service, job_ids: list[JobId]) -> set[int]:
    """The numbers of attempts of jobs."""
    return {view.attempt for view in service.producer.views(job_ids) if view is not None}
