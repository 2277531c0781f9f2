"""A failover under a crowd: 64 worker processes, 10,000 tenants and a million waiting jobs. Half an hour; 12 GiB."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from sluice.producer.client import Producer
from sluice.producer.errors import LessDurable
from sluice.producer.operations.submission import Receipt, SubmitAnswer
from sluice.protocol.calls import QueueSettings
from sluice.protocol.jobs import Job
from tests.chaos.catalogue import Ask, Intent, JournalWriter, write_reference
from tests.chaos.checker.audit import check
from tests.chaos.checker.evidence import read_journals, read_reference
from tests.chaos.faults.replicated import Watched, watched
from tests.chaos.soak.run import is_empty
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.integration.jobs import KEYS, new_job_id, wait_until
from tests.servers import redis_server

NUM_WORKERS, NUM_TENANTS, NUM_JOBS = 64, 10_000, 1_000_000
AT_ONCE = 4096
LOOK_S = 0.2
PLENTY = 1 << 40
"""A bound that is not reached."""

ASKS = [Ask(f"number {i}", {"max_tokens": 1 + i % 3, "seed": i, "stream": False}) for i in range(10)]
WORKER = {"MODEL": "null?step_s=0.001", "BEAT_EVERY_S": "1", "BEAT_LIFE_S": "4", "LOG_LEVEL": "warning"}
START_S, DRAIN_S = 600.0, 3000.0
DOWN_AFTER_MS = 10_000
"""More than a busy machine stalls: the only failover is that of the test."""

TAKEOVER_S = 60.0
"""Far more than it takes to detect the death of the primary, to promote the replica, and to go on there."""


def jobs() -> Iterator[tuple[Intent, Job]]:
    """A hundred jobs of each tenant, by turns."""
    for number in range(NUM_JOBS):
        ask, tenant = number % len(ASKS), f"tenant-{number % NUM_TENANTS}"
        job_id = new_job_id(tenant)
        yield Intent(asked=job_id, ask=ask), ASKS[ask].job(job_id=job_id, tenant=tenant)


def submit_all(producer: Producer, journal: JournalWriter) -> Counter[str]:
    """Submit all jobs, each until the replica has it."""
    answers, drawn = Counter[str](), jobs()
    while chosen := list(islice(drawn, AT_ONCE)):
        journal.intend(intent for intent, _ in chosen)
        left: list[Job] = [job for _, job in chosen]
        while left:
            given: list[SubmitAnswer] = list(producer.submit_many(left))
            journal.acknowledge(str(answer) for answer in given if isinstance(answer, Receipt))
            left = [job for job, answer in zip(left, given, strict=True) if isinstance(answer, LessDurable)]
            answers.update(type(answer).__name__ for answer in given)
    return answers


def slowly(is_so: Callable[[], bool]) -> Callable[[], bool]:
    """Look five times a second: the processors belong to the workers."""

    def look() -> bool:
        time.sleep(LOOK_S)
        return is_so()

    return look


def num_done(service: Watched) -> int:
    """Jobs that are done by the server that was the replica."""
    with service.pair.replica.client() as client:
        return int(client.hget(KEYS.key("counters"), "done") or 0)


def fail_over(service: Watched, workers: WorkerPool) -> tuple[float, int]:
    """Kill the primary amid the work; return the seconds until the next end, and how many jobs waited then."""
    for _ in range(NUM_WORKERS):
        workers.start(**WORKER)
    with service.pair.primary.client() as primary:
        wait_until(lambda: primary.zcard(KEYS.key("alive")) == NUM_WORKERS, "all workers beat", patience_s=START_S)
    wait_until(slowly(lambda: num_done(service) > NUM_JOBS // 100), "the crowd works", patience_s=DRAIN_S)
    service.pair.primary.kill()
    began_s = time.monotonic()
    service.wait_until_promoted()
    before = num_done(service)
    wait_until(lambda: num_done(service) > before, "a job ends at the new primary", patience_s=DRAIN_S)
    return time.monotonic() - began_s, NUM_JOBS - before


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_when_the_primary_dies_amid_a_million_waiting_jobs_then_each_is_done_once(tmp_path: Path) -> None:
    with redis_server() as server, worker_pool(server.url, tmp_path) as workers, Producer(server.url) as producer:
        workers.start(**WORKER)
        write_reference(producer, ASKS, tmp_path / "reference.json")
    with watched(down_after_ms=DOWN_AFTER_MS) as service, worker_pool(service.url, tmp_path) as crowd:
        bounds = QueueSettings(
            max_waiting_jobs=PLENTY, max_waiting_tokens=PLENTY, max_waiting_bytes=PLENTY, max_outbox_entries=PLENTY,
            max_outbox_bytes=PLENTY, channel_ttl_ms=4 * 3_600_000,
        )  # fmt: skip
        with (
            Producer(service.url, durability="replica:1") as producer,
            JournalWriter(tmp_path / "journal.jsonl") as journal,
        ):
            producer.configure(bounds)
            answers = submit_all(producer, journal)
        pause_s, num_waiting = fail_over(service, crowd)
        with service.pair.replica.client() as client:
            wait_until(slowly(lambda: is_empty(client)), "every job has ended", patience_s=DRAIN_S)
            crowd.drain()
            # There is no recorder: what it would read is not residue.
            client.delete(KEYS.outbox)
            evidence = read_journals([tmp_path / "journal.jsonl"]), read_reference(tmp_path / "reference.json")
            found = check(client, *evidence)

    print(f"{answers}; {num_waiting} waited; next end after {pause_s:.1f} s; {found.figures}")  # noqa: T201  # a figure
    assert answers["Receipt"] == NUM_JOBS == found.figures["acknowledged"]
    assert num_waiting > NUM_JOBS // 2
    assert pause_s < TAKEOVER_S
    assert found.found == []
