"""The honest user: jobs at a steady rate, each compared with its expected output."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.producer import AsyncProducer
from sluice.producer.errors import QueueFull
from sluice.producer.operations.submission import Receipt
from sluice.protocol.jobs import Job
from sluice.protocol.wire import JobId
from tests.chaos.catalogue import Ask
from tests.integration.jobs import new_job_id
from tests.security.acl import QUEUE

TENANT = "victim"
Output = list[tuple[tuple[int, ...], str]]
"""Token ids and text of each choice."""


@dataclass(slots=True, eq=False)
class Ledger:
    """What became of the honest jobs. Changes as they end."""

    times_s: list[float] = field(default_factory=list[float])
    """From the first try to submit it until its output is complete."""

    ids: list[str] = field(default_factory=list[str])
    num_refused: int = 0
    """Submits that the queue refused as full; each was tried again."""

    faults: list[str] = field(default_factory=list[str])


class Honest:
    """Submits jobs of a catalogue and checks them. Changes: its ledger."""

    def __init__(self, url: str, asks: Sequence[Ask], *, patience_s: float) -> None:
        self.ledger = Ledger()
        self._url = url
        self._asks = asks
        self._patience_s = patience_s
        self._expected: list[Output] = []

    def learn(self) -> None:
        """Run the catalogue once, before the attack, for the expected outputs."""
        asyncio.run(self._learn())

    def submit_for(self, seconds: float, *, jobs_per_s: float) -> None:
        """Submit at a steady rate for some time, and wait for all outputs."""
        asyncio.run(self._submit_for(seconds, jobs_per_s))

    async def _learn(self) -> None:
        async with AsyncProducer(self._url, queue=QUEUE) as producer:
            for ask in self._asks:
                job_id = await self._submitted(producer, ask.job(tenant=TENANT))
                result = await producer.result(job_id, timeout_s=60)
                self._expected.append([(tuple(one.token_ids), one.text) for one in result.choices])

    async def _submit_for(self, seconds: float, jobs_per_s: float) -> None:
        async with AsyncProducer(self._url, queue=QUEUE) as producer:
            began_s, tasks = time.monotonic(), list[asyncio.Task[None]]()
            while time.monotonic() - began_s < seconds:
                tasks.append(asyncio.create_task(self._one(producer, len(tasks))))
                await asyncio.sleep(max(0.0, began_s + len(tasks) / jobs_per_s - time.monotonic()))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for job_id, error in zip(self.ledger.ids, ends, strict=True):
            if error is not None:
                self.ledger.faults.append(f"{job_id}: {type(error).__name__}: {error}")

    async def _one(self, producer: AsyncProducer, number: int) -> None:
        at, job_id, began_s = number % len(self._asks), str(new_job_id(TENANT)), time.monotonic()
        self.ledger.ids.append(job_id)
        async with asyncio.timeout(self._patience_s):
            await self._submit(producer, self._asks[at], job_id, number)
            output = await (self._read if number % 2 else self._wait)(producer, job_id, len(self._expected[at]))
        self.ledger.times_s.append(time.monotonic() - began_s)
        if output != self._expected[at]:
            self.ledger.faults.append(f"{job_id}: expected {self._expected[at]}, got {output}")

    async def _submit(self, producer: AsyncProducer, ask: Ask, job_id: str, number: int) -> None:
        """Submit under a chosen id. One in four has a time to live, whose timer the others can see."""
        ttl_s = 3600.0 if number % 4 == 0 else None
        await self._submitted(producer, ask.job(job_id=JobId(job_id), tenant=TENANT, priority=number % 3, ttl_s=ttl_s))

    async def _submitted(self, producer: AsyncProducer, job: Job) -> str:
        """Submit until the job is accepted."""
        while True:
            [answer] = [one async for one in producer.submit_many([job])]
            if isinstance(answer, Receipt):
                return str(answer)
            if not isinstance(answer, QueueFull):
                raise answer
            self.ledger.num_refused += 1
            await asyncio.sleep(0.2)

    async def _wait(self, producer: AsyncProducer, job_id: str, num_choices: int) -> Output:
        result = await producer.result(job_id)
        assert len(result.choices) == num_choices
        return [(tuple(one.token_ids), one.text) for one in result.choices]

    async def _read(self, producer: AsyncProducer, job_id: str, num_choices: int) -> Output:
        return [await self._read_one(producer, job_id, choice) for choice in range(num_choices)]

    async def _read_one(self, producer: AsyncProducer, job_id: str, choice: int) -> tuple[tuple[int, ...], str]:
        """Follow a channel: each token is on it once."""
        ids, text = list[int](), ""
        async for event in producer.stream(job_id, choice=choice):
            ids += event.token_ids
            text += event.text
        return tuple(ids), text
