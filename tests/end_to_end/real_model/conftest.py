"""The service with each engine that is installed in turn, on SmolLM2."""

from collections.abc import Generator
from pathlib import Path

import pytest

from sluice.worker.config import OWN_ENGINE
from sluice.worker.engines.registry import installed
from tests.end_to_end.real_model.service import Engine, Service, chat, running_service
from tests.forks import ROOT
from tests.gateway.batches.processes import place_in
from tests.servers import redis_server
from tools.real_model.folder import real_model_folder
from tools.vllm_environment import vllm_python

QUESTIONS = [f"Write a sentence about the number {number}." for number in range(50)]


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2's folder, in float32."""
    return real_model_folder()


def engine_named(name: str) -> Engine:
    """An engine with the settings that choose it."""
    if name == OWN_ENGINE:
        return Engine(name, {"NUM_THREADS": "1"})
    # Without graphs it starts in seconds instead of a minute, and its workers are killed again and again.
    settings = {"ENGINE": name, "ENGINE_PYTHON": str(vllm_python()), "GRAPHS": "false", "BLOCK_SIZE": "32"}
    return Engine(name, settings)


@pytest.fixture(scope="session", params=installed())
def service(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Service]:
    """Two workers with one of the engines, and all that a client needs."""
    engine = engine_named(request.param)
    folder = tmp_path_factory.mktemp(engine.name)
    with pytest.MonkeyPatch.context() as patch, redis_server("valkey", is_durable=True) as server:
        # For an engine's process in another environment: this tree is not installed there.
        patch.setenv("PYTHONPATH", str(ROOT))
        with running_service(server, place_in(folder, server.url), folder, model, engine) as made:
            yield made


@pytest.fixture(scope="session")
def calm(service: Service) -> list[str]:
    """The answers to all questions while nothing fails."""
    return service.texts(service.submit([chat(question) for question in QUESTIONS]))


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> Generator[None]:
    """After each test of the service, whatever it did, the service is whole."""
    yield
    if "service" in request.fixturenames:
        request.getfixturevalue("service").check_it_is_whole()
