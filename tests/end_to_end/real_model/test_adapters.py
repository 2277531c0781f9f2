"""Adapters of a real model, with each engine: mixed in a batch, loaded by turns, and their worker killed amid them."""

import os
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.protocol.jobs import Job
from sluice.worker.config import OWN_ENGINE
from sluice.worker.engines.registry import installed
from tests.end_to_end.real_model.conftest import QUESTIONS, engine_named
from tests.end_to_end.real_model.service import Engine, Service, chat, running_service
from tests.forks import ROOT
from tests.gateway.batches.processes import place_in
from tests.oracles.adapters import save_adapter
from tests.servers import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1200)]

NAMES = ("cook", "law", "poet")
NUM_QUESTIONS = 6


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three adapters of different ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(NAMES):
        save_adapter(folder / name, model, rank=4 + 5 * number, seed=number, std=0.05)
    return folder


def with_adapters(engine: Engine, adapters: Path) -> Engine:
    """An engine with adapters, two of which are loaded at once."""
    return replace(engine, settings={**engine.settings, "ADAPTERS": str(adapters), "MAX_LOADED_ADAPTERS": "2"})


@pytest.fixture(scope="module")
def alone(model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of our own engine, one job after the other."""
    folder = tmp_path_factory.mktemp("alone")
    with redis_server("valkey") as server:
        place, engine = place_in(folder, server.url), with_adapters(engine_named(OWN_ENGINE), adapters)
        with running_service(server, place, folder, model, engine, num_workers=1) as made:
            return [made.texts(made.submit([one]))[0] for one in mixed_jobs(made.model)]


@pytest.fixture(scope="module", params=installed())
def adapted(
    request: pytest.FixtureRequest, model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Service]:
    """The service with adapters, over each engine."""
    folder = tmp_path_factory.mktemp("adapted")
    engine = with_adapters(engine_named(request.param), adapters)
    with pytest.MonkeyPatch.context() as patch, redis_server("valkey", is_durable=True) as server:
        patch.setenv("PYTHONPATH", str(ROOT))
        with running_service(server, place_in(folder, server.url), folder, model, engine) as made:
            yield made


def mixed_jobs(model: str) -> list[Job]:
    """The same greedy chats with the model alone and with each of its adapters, by turns."""
    return [
        chat(question, model=name, max_tokens=60, ignore_eos=True)
        for question in QUESTIONS[:NUM_QUESTIONS]
        for name in (model, *NAMES)
    ]


class TestGivenJobsOfTheModelAndOfItsAdapters:
    def test_when_they_run_at_once_then_each_text_is_that_of_our_engine_alone(
        self, adapted: Service, alone: list[str]
    ) -> None:
        job_ids = adapted.submit(mixed_jobs(adapted.model))
        texts = adapted.texts(job_ids)

        assert texts == alone
        assert len(set(texts)) == len(texts)
        adapted.check_it_is_whole()

    def test_when_a_worker_is_killed_amid_them_then_texts_are_the_same(
        self, adapted: Service, alone: list[str]
    ) -> None:
        job_ids = adapted.submit(mixed_jobs(adapted.model))
        adapted.wait_until_they_speak(job_ids[:4], 5)

        os.kill(min(adapted.pids()), signal.SIGKILL)
        texts = adapted.texts(job_ids)

        assert texts == alone
        assert 2 in {view.attempt for view in adapted.producer.views(job_ids) if view is not None}
        adapted.check_streams(job_ids, texts)
        adapted.check_it_is_whole()
