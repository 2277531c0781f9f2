"""A service with adapters: each is a model at the gateway, whichever worker has it, and whatever becomes of workers."""

import json
import signal
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.producer import Producer
from sluice.protocol.rows import read_lease
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.integration.jobs import KEYS, wait_until
from tests.oracles.adapters import save_adapter
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

BASE = SMALL_MODEL.name
MODELS = (BASE, "law", "poet")
TAKEN = '"event": "job taken"'
PROMPTS = ("Once upon a time", "The river", "A cat and a dog", "Tell me")


@dataclass(frozen=True)
class Service:
    """A gateway, the workers beside it, and the folder of adapters."""

    gateway: GatewayProcess
    workers: WorkerPool
    url: str
    adapters: Path

    def start_worker(self, folder: Path | None = None, **settings: str) -> WorkerProcess:
        """Start a worker with adapters, and wait for it."""
        adapters = self.adapters if folder is None else folder
        (worker,) = self.workers.start_all(1, MODEL=str(SMALL_MODEL), ADAPTERS=str(adapters), **settings)
        return worker

    def models(self) -> dict[str, str | None]:
        """The listed models, each with its parent."""
        return {one["id"]: one.get("parent") for one in self.gateway.get("/v1/models").json()["data"]}

    def text_of(self, model: str, prompt: str, *, max_tokens: int = 600) -> str:
        """Ask as a stock client does."""
        answer = self.gateway.client().completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0.7, seed=3, extra_body={"ignore_eos": True}
        )
        assert answer.model == model
        return answer.choices[0].text

    def texts(self) -> dict[tuple[str, str], str]:
        """Ask all models everything, at once."""
        asked = [(model, prompt) for prompt in PROMPTS for model in MODELS]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(self.text_of, model, prompt) for model, prompt in asked]
            return {one: answer.result() for one, answer in zip(asked, answers, strict=True)}


@pytest.fixture
def service(valkey: RedisServer, tmp_path: Path) -> Generator[Service]:
    adapters = tmp_path / "adapters"
    for number, name in enumerate(MODELS[1:]):
        save_adapter(adapters / name, SMALL_MODEL, rank=4 + 4 * number, seed=number)
    with ExitStack() as stack:
        gateway = stack.enter_context(gateway_process(valkey.url))
        workers = stack.enter_context(worker_pool(valkey.url, tmp_path))
        yield Service(gateway, workers, valkey.url, adapters)


def is_stopped_amid_a_job(worker: WorkerProcess, client: Any) -> bool:
    """Stop a worker, and say whether it holds a job that has tokens; if not, it goes on.

    Jobs in its log may have ended: they are short, and on a busy machine this process is late.
    """
    worker.signal_worker(signal.SIGSTOP)
    held = [lease for key in client.keys(KEYS.key("held", f"{worker.incarnation}*")) for lease in client.hvals(key)]
    if any(any(read_lease(lease).offsets) for lease in held):
        return True
    worker.signal_worker(signal.SIGCONT)
    return False


class TestGivenAWorkerWithTwoAdapters:
    def test_when_models_are_listed_then_each_adapter_has_its_parent(self, service: Service) -> None:
        service.start_worker()

        wait_until(lambda: service.models() == {BASE: None, "law": BASE, "poet": BASE}, "all are listed")

        with pytest.raises(
            openai.NotFoundError, match="the model 'cook' is not served; served: law, poet, small_model"
        ):
            service.text_of("cook", "Hello")
        with Producer(service.url) as producer:
            result = producer.result(producer.submit("Hello", model="law", max_tokens=2), timeout_s=60)
        assert result.model == "law"

    @pytest.mark.long
    def test_when_a_worker_is_killed_amid_jobs_then_all_texts_are_those_of_a_calm_run(
        self, service: Service, valkey: RedisServer
    ) -> None:
        # It publishes what it has though nobody reads.
        killed = service.start_worker(UNREAD_INTERVAL_S="0")
        wait_until(lambda: len(service.models()) == len(MODELS), "all are listed")
        calm = service.texts()
        # Its few places, and its one adapter at a time, batch the jobs otherwise.
        other = service.start_worker(MAX_NUM_SEQS="4", MAX_LOADED_ADAPTERS="1")

        with ThreadPoolExecutor(1) as pool, valkey.client() as client:
            disturbed = pool.submit(service.texts)
            wait_until(lambda: is_stopped_amid_a_job(killed, client), "it holds a job that has tokens")
            killed.signal_worker(signal.SIGKILL)

            assert disturbed.result() == calm
        # By the other, or by the process that follows the killed one.
        taken = [json.loads(line) for line in (killed.output + other.output).splitlines() if TAKEN in line]
        assert [line for line in taken if line["resumed_from"] and line["published"]], taken
        assert len(set(calm.values())) == len(calm)


class TestGivenAWorkerThatLacksAnAdapter:
    @pytest.mark.long
    def test_when_a_job_names_it_then_the_worker_that_has_it_answers(self, service: Service, tmp_path: Path) -> None:
        few = tmp_path / "few"
        save_adapter(few / "poet", SMALL_MODEL, rank=8, seed=1)
        service.start_worker(few)
        service.start_worker()
        wait_until(lambda: len(service.models()) == len(MODELS), "all are listed")

        texts = [service.text_of("law", prompt, max_tokens=5) for prompt in PROMPTS]

        assert texts == [service.text_of("law", prompt, max_tokens=5) for prompt in PROMPTS]
