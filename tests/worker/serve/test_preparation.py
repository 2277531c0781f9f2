"""Which jobs are prepared at once, on the thread that pulled them, and which are left to a thread."""

from sluice.engine.request import Room
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobSpec, encode_prompt
from sluice.worker.clock import ServerClock
from sluice.worker.config import load_config
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.clients import connect
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.results import Origin
from sluice.worker.log import get_log
from sluice.worker.model.translate import Translator
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters
from sluice.worker.serve.preparation import SHORT_BYTES, Preparation
from sluice.worker.watchdog import Watchdog
from tests.integration.jobs import wait_until

KEYS = QueueKeys("q")
NOWHERE = "redis://127.0.0.1:1"
ROOM = Room(kv_tokens=100_000, prefill_tokens=100_000, sequences=100)


def _context() -> WorkerContext:
    mailbox, health = Mailbox(max_buffered_bytes=2**20), RedisHealth(get_log(), NOWHERE)
    return WorkerContext(
        incarnation="me",
        partitions=(KEYS,),
        config=load_config({}, flags={"redis.url": NOWHERE}),
        origin=Origin(model="m", fingerprint="f", worker="w"),
        cache_tokens=10_000,
        leases=Leases(),
        mailbox=mailbox,
        clock=ServerClock(),
        health=health,
        unavailable=UnavailablePartitions(lambda: None, health, mailbox.wake),
        meters=Meters(),
        watchdog=Watchdog(30.0),
        log=get_log(),
    )


class Prepared:
    """A preparation whose thread does not run yet, and what reaches the loop. Changes with the test."""

    def __init__(self) -> None:
        self.context = _context()
        translator = Translator(encode=_encode, template=None, validate=lambda _: None, model="m")
        self.preparation = Preparation(connect(NOWHERE, timeout_s=1), self.context, translator)
        self.ids: list[str] = []

    def put(self, *prompts: str) -> list[HeldJob]:
        """Put new jobs with these prompts, pulled together."""
        jobs = [_job(self.context.leases, number, prompt) for number, prompt in enumerate(prompts)]
        self.context.leases.take(KEYS, 1, jobs)
        self.preparation.put(jobs)
        return jobs

    def delivered(self) -> list[str]:
        """Return the ids of all requests that the loop could take so far."""
        self.ids += [request.id for request in self.context.mailbox.new_requests(ROOM, wait_s=0)]
        return self.ids


def _encode(text: str, *, add_special_tokens: bool) -> list[int]:
    return [len(text) + add_special_tokens]


def _job(leases: Leases, number: int, prompt: str) -> HeldJob:
    leased = LeasedJob(
        id=JobId(f"0.t.{number}"), epoch=1, attempt=1, priority=0, spec=b"", payload=encode_prompt(prompt), seed=1,
        choices=1, submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1, published=(0,), ended=(False,),
        fingerprint=None, fits=True,
    )  # fmt: skip
    return leases.new_job(leased, KEYS, JobSpec())


class TestGivenAPullOfNewJobs:
    def test_when_their_prompts_are_short_then_the_loop_has_them_without_another_thread(self) -> None:
        prepared = Prepared()

        jobs = prepared.put("a", "b")

        assert prepared.delivered() == [job.request_id for job in jobs]

    def test_when_their_prompts_are_long_together_then_they_do_not_delay_the_next_pull(self) -> None:
        prepared = Prepared()

        jobs = prepared.put("a" * (SHORT_BYTES // 2), "b" * (SHORT_BYTES // 2))

        assert prepared.delivered() == []
        prepared.preparation.start()
        wait_until(lambda: prepared.delivered() == [job.request_id for job in jobs], "the thread prepares them")
        prepared.preparation.stop()
