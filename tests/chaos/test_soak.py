"""Everything at once: producers, three workers that a supervisor restarts, and a nemesis. Then the books are read."""

import random
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from producer.contract.calls import Accepted, Duplicate, submit
from producer.contract.running import run
from producer.contract.wire import JobId, JobOptions
from tests.end_to_end.processes import Crew, WorkerProcess, crew
from tests.integration.jobs import KEYS, Ask, check_every_token_once, check_nothing_is_left, new_job, wait_for_ends
from tests.servers import RedisServer

SOAK_S = 6.0
NUM_WORKERS = 3
NUM_PRODUCERS = 3


class Fleet:
    """Workers that are started again whenever they end. Changes: it is reached for by the nemesis."""

    def __init__(self, workers: Crew) -> None:
        self._workers = workers
        self._is_over = False
        self._slots: list[WorkerProcess] = []
        self._threads = [threading.Thread(target=self._keep, args=(i,), daemon=True) for i in range(NUM_WORKERS)]

    def start(self) -> None:
        """Start all, and wait for none."""
        self._slots = [self._workers.start(MODEL="null?step_s=0.003", MAX_NUM_SEQS="8") for _ in self._threads]
        for thread in self._threads:
            thread.start()

    def _keep(self, slot: int) -> None:
        while not self._is_over:
            self._slots[slot].process.wait()
            if not self._is_over:
                self._slots[slot] = self._workers.start(MODEL="null?step_s=0.003", MAX_NUM_SEQS="8")

    def any(self, dice: random.Random) -> WorkerProcess:
        """One of them."""
        return dice.choice(self._slots)

    def stop(self) -> None:
        """Let them drain, for good."""
        self._is_over = True
        for worker in self._slots:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        for thread in self._threads:
            thread.join(30)


@contextmanager
def fleet(workers: Crew) -> Generator[Fleet]:
    """A fleet for the time of a test."""
    made = Fleet(workers)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Nemesis:
    """Does a random harm every now and then."""

    def __init__(self, fleet: Fleet, client: Any, seed: int) -> None:
        self._fleet = fleet
        self._client = client
        self._dice = random.Random(seed)
        self.harms: list[str] = []

    def rage(self, until_s: float) -> None:
        """Go on until then."""
        harms: list[Callable[[], object]] = [self._kill, self._drain, self._stop, self._cut, self._flush]
        while time.monotonic() < until_s:
            harm = self._dice.choice(harms)
            self.harms.append(harm.__name__)
            harm()
            time.sleep(self._dice.uniform(0.1, 0.5))

    def _kill(self) -> None:
        self._fleet.any(self._dice).signal(signal.SIGKILL)

    def _drain(self) -> None:
        self._fleet.any(self._dice).signal(signal.SIGTERM)

    def _stop(self) -> None:
        worker = self._fleet.any(self._dice)
        worker.signal(signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.1, 0.8))
        worker.signal(signal.SIGCONT)

    def _cut(self) -> None:
        self._client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _flush(self) -> None:
        self._client.script_flush()


def asks_of(dice: random.Random) -> list[Ask]:
    """What one producer asks for at a time."""
    return [
        Ask(
            prompt="p" * dice.randrange(1, 200),
            options=JobOptions(max_tokens=dice.randrange(1, 150), n=dice.choice([1, 1, 1, 2])),
            seed=dice.randrange(2**32),
            stream=dice.random() < 0.7,
            priority=dice.randrange(3),
            tenant=dice.choice(["ant", "bee", "cow"]),
        )
        for _ in range(dice.randrange(1, 6))
    ]


def produce(server: RedisServer, seed: int, until_s: float, submitted: dict[JobId, Ask]) -> None:
    """Submit until then. The client repeats a submit whose reply was cut off: the same ids, so nothing doubles."""
    dice = random.Random(seed)
    with server.client() as client:
        while time.monotonic() < until_s:
            asks = asks_of(dice)
            jobs = [new_job(ask) for ask in asks]
            for answer in run(client, submit(KEYS, jobs)):
                assert isinstance(answer, Accepted | Duplicate), answer
            submitted.update((job.id, ask) for job, ask in zip(jobs, asks, strict=True))
            time.sleep(dice.uniform(0.05, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_when_all_goes_wrong_for_a_while_then_every_job_is_done_with_every_token_once(
    valkey: RedisServer, tmp_path: Path, seed: int
) -> None:
    submitted: list[dict[JobId, Ask]] = [{} for _ in range(NUM_PRODUCERS)]
    with valkey.client() as client, crew(valkey.url, tmp_path) as workers:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        with fleet(workers) as ships:
            until_s = time.monotonic() + SOAK_S
            nemesis = Nemesis(ships, valkey.client(), seed)
            producers = [
                threading.Thread(target=produce, args=(valkey, seed * 100 + i, until_s, submitted[i]), daemon=True)
                for i in range(NUM_PRODUCERS)
            ]
            for thread in producers:
                thread.start()
            nemesis.rage(until_s)
            for thread in producers:
                thread.join()
            asks = {job_id: ask for part in submitted for job_id, ask in part.items()}
            wait_for_ends(client, list(asks), patience_s=60)

        assert len(asks) > 50
        assert {"_kill", "_stop", "_cut"} <= set(nemesis.harms)
        check_every_token_once(client, asks)
        check_nothing_is_left(client)
