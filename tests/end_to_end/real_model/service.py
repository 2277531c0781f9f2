"""The whole service over a model that was trained for real, with any engine: two workers, a gateway, callbacks."""

import os
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from sluice.producer import Producer
from sluice.protocol.jobs import Job, job
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.audit.command import AuditOptions, run_audit
from sluice.worker.config import load_config
from sluice.worker.model.folders import name_of
from tests.chaos.soak.fleet import Fleet, fleet
from tests.end_to_end.processes import FAST
from tests.gateway.batches.processes import Place
from tests.gateway.gateway_process import GatewayProcess
from tests.integration.jobs import KEYS, check_nothing_is_left, num_on_channel, read_channel, wait_until
from tests.servers import RedisServer

NUM_WORKERS = 2
PATIENCE_S = 300.0
START_PATIENCE_S = 900.0
"""For a worker that starts: with two ranks of vLLM, it took 245 s on two cores that a dozen processes shared."""

PLACES = 8
"""Of a worker."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that workers run."""

    name: str
    settings: Mapping[str, str]
    """Of `worker start`, by their environment names without prefix. One that is empty is not given."""


def chat(text: str, **options: Any) -> Job:  # Any: options of several types
    """A greedy chat of 40 tokens at most, unless the options say otherwise."""
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0, **options}
    return job([{"role": "user", "content": text}], **asked)


@dataclass(frozen=True, slots=True)
class Service:
    """A running service. Its workers are restarted whenever they end."""

    server: RedisServer
    place: Place
    fleet: Fleet
    gateway: GatewayProcess
    producer: Producer
    client: Any  # a redis-py client
    openai: openai.OpenAI
    model: str
    num_workers: int

    def ask(self, text: str, **options: Any) -> str:  # Any: options of several types
        """Chat through the gateway, 30 tokens at most."""
        return self._asked(text, options).choices[0].message.content

    def ask_in_pieces(self, text: str, **options: Any) -> str:  # Any: as above
        """The same as a stream."""
        chunks = self._asked(text, {**options, "stream": True})
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def _asked(self, text: str, options: Mapping[str, object]) -> Any:  # Any: an answer, or a stream of chunks
        completions: Any = self.openai.chat.completions
        messages = [{"role": "user", "content": text}]
        return completions.create(model=self.model, messages=messages, max_tokens=30, **options)

    def submit(self, jobs: Sequence[Job]) -> list[JobId]:
        """Submit jobs, and insist on acceptance."""
        answers = list(self.producer.submit_many(jobs))
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert refused == []
        return [JobId(str(answer)) for answer in answers]

    def texts(self, job_ids: Sequence[JobId]) -> list[str]:
        """Wait for the results of jobs."""
        return [self.producer.result(one, timeout_s=PATIENCE_S).text for one in job_ids]

    def check_streams(self, job_ids: Sequence[JobId], texts: Sequence[str]) -> None:
        """Check that what readers saw is each result, every token once."""
        for job_id, text in zip(job_ids, texts, strict=True):
            assert "".join(entry.text for entry in read_channel(self.client, job_id)) == text

    def wait_until_they_speak(self, job_ids: Sequence[JobId], num_tokens: int = 1) -> None:
        """Wait until each job has published so many tokens."""
        self.wait_until(lambda: all(num_on_channel(self.client, one) >= num_tokens for one in job_ids), "all speak")

    def wait_until(self, is_so: Any, what: str) -> None:  # Any: a function
        """Poll until something holds."""
        wait_until(is_so, what, patience_s=PATIENCE_S)

    def wait_for_workers(self) -> None:
        """Wait until all workers are there."""
        wait_until(lambda: len(self.pids()) == self.num_workers, "all workers are there", patience_s=START_PATIENCE_S)

    def pids(self) -> set[int]:
        """The workers that live and have announced themselves."""
        alive = map(bytes.decode, self.client.zrange(KEYS.key("alive"), 0, -1))
        announced = {int(self.client.hget(KEYS.key("worker", one), "pid") or 0) for one in alive}
        return announced & self.fleet.by_worker_pid().keys()

    def pid_with(self, job_id: JobId) -> int | None:
        """The worker that has a job."""
        owner = self.producer.status(job_id).owner
        found = self.client.hget(KEYS.key("worker", owner), "pid") if owner else None
        return int(found) if found and int(found) in self.fleet.by_worker_pid() else None

    def kill_each_owner_of(self, job_id: JobId) -> int:
        """Kill each worker that takes a job, until the job has ended; return how many."""
        killed: set[int] = set()
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.producer.status(job_id).state.is_terminal:
            assert time.monotonic() < deadline_s, self.producer.status(job_id)
            pid = self.pid_with(job_id)
            if pid is not None and pid not in killed and self.producer.status(job_id).state is JobState.RUNNING:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # between two polls
        return len(killed)

    def findings(self) -> list[Any]:  # Any: findings of the audit
        """What the audit finds."""
        flags = {"redis.url": self.server.url, "history.database_url": self.place.database_url}
        return run_audit(load_config({}, flags=flags), {}, AuditOptions(pause_s=1.0)).findings

    def check_it_is_whole(self) -> None:
        """Check that no job is under way, that the audit finds nothing, and let the next test have both workers."""
        self.wait_for_workers()
        check_nothing_is_left(self.client)
        found = self.findings()
        assert not found, found


@contextmanager
def running_service(
    server: RedisServer, place: Place, folder: Path, model: Path, engine: Engine, *, num_workers: int = NUM_WORKERS
) -> Generator[Service]:
    """Run the service until the end of the context."""

    def command(_num_starts: int) -> tuple[str, ...]:
        return ("sluice.worker", "start", "--redis-url", server.url)

    known = {name.removeprefix("SLUICE_"): value for name, value in FAST.items()}
    own = {
        "MODEL": str(model), "DTYPE": "float32", "DEVICE": "cpu", "MAX_NUM_SEQS": str(PLACES),
        "MAX_MODEL_LEN": "1024", "RECORDER": "true", "DATABASE_URL": place.database_url, "ENGINE_PROCESS": "on",
        "BEAT_EVERY_S": "1", "BEAT_LIFE_S": "10",
    }  # fmt: skip
    settings = {name: value for name, value in {**known, **own, **engine.settings}.items() if value}
    with ExitStack() as stack:
        client: Any = stack.enter_context(server.client())  # redis-py types it in part
        client.config_set("appendfsync", "always")
        workers = stack.enter_context(fleet("worker", [command] * num_workers, folder, **settings))
        stack.enter_context(place.callbacks())
        gateway = stack.enter_context(place.gateway())
        producer = stack.enter_context(Producer(server.url, database_url=place.database_url))
        name = name_of(str(model), model)
        made = Service(server, place, workers, gateway, producer, client, gateway.client(), name, num_workers)
        made.wait_for_workers()
        yield made
