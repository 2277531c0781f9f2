"""The jobs this incarnation holds, with their epochs; shared by loop, exchange, puller, intake and beat under one lock.

A job is held from the pull that leased it until its end, its give-back or its loss is acknowledged. Knows no Redis.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from producer.contract.calls import LeasedJob
from producer.contract.keys import QueueKeys
from producer.contract.states import JobState
from producer.contract.wire import End, JobId, JobSpec
from worker.channel import ChannelOutput
from worker.results import JobMeasures

_numbers = count(1)

FORGET_PROMPT_BYTES = 16 * 1024
"""Shorter prompts are kept with their jobs: letting go costs more than they do."""


@dataclass(slots=True, eq=False)
class HeldJob:
    """One job that is ours for now. Changes as it is prepared, generated, published and ended."""

    leased: LeasedJob
    keys: QueueKeys
    spec: JobSpec | None
    """None: it cannot be read."""

    choices: list[ChannelOutput] = field(default_factory=list[ChannelOutput])
    measures: JobMeasures = field(default_factory=lambda: JobMeasures(prompt_tokens=0))
    stop: JobState | None = None
    """It is flagged: it ends with this state."""

    is_admitted: bool = False
    """The engine was, or is being, given its request."""

    has_begun: bool = False
    """The engine has said something about it."""

    is_announced: bool = False
    """The queue knows its first times, prompt tokens and fingerprint."""

    is_returning: bool = False
    """It is being given back: nothing more is said about it."""

    request_id: str = field(init=False)
    """What the engine calls it: another lease on the same job is another request, even one of the same epoch, which a
    Redis that lost its last second gives again."""

    def __post_init__(self) -> None:
        self.request_id = f"{self.leased.id}#{self.leased.epoch}.{next(_numbers)}"
        if not self.choices:
            self.choices = [
                ChannelOutput(published=offset, has_end=ended)
                for offset, ended in zip(self.leased.published, self.leased.ended, strict=True)
            ]

    @property
    def id(self) -> JobId:
        """What the producer calls it."""
        return self.leased.id

    @property
    def num_published(self) -> int:
        """Tokens on its channels, all choices."""
        return sum(choice.published for choice in self.choices)

    @property
    def has_ended(self) -> bool:
        """Whether every choice has said its end."""
        return all(choice.end is not None or choice.has_end for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        """Whether the queue has acknowledged every end."""
        return all(choice.has_end for choice in self.choices)

    @property
    def has_news(self) -> bool:
        """Whether its channels lack something."""
        return any(choice.has_news for choice in self.choices)

    def forget_prompt(self) -> None:
        """Let go of a long prompt: the engine has its tokens."""
        if len(self.leased.payload) > FORGET_PROMPT_BYTES:
            self.leased = replace(self.leased, payload=b"")

    def end_all(self, end: End, *, now_ms: int) -> None:
        """End every choice that has not ended."""
        for choice in self.choices:
            if not choice.has_end:
                choice.close(end, now_ms=now_ms)


@dataclass(frozen=True, slots=True)
class HeldList:
    """What a beat says of one partition: taken at one instant."""

    requests: Mapping[JobId, str]
    """Each held job with its request: the lease that the beat speaks for."""

    processed_pull: int


@dataclass(slots=True, eq=False)
class Leases:
    """The book of held jobs. Any thread may call it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    _by_request: dict[str, HeldJob] = field(default_factory=dict[str, HeldJob])
    _by_job: dict[JobId, HeldJob] = field(default_factory=dict[JobId, HeldJob])
    _processed_pull: dict[QueueKeys, int] = field(default_factory=dict[QueueKeys, int])

    def take(self, keys: QueueKeys, number: int, jobs: Iterable[HeldJob]) -> list[HeldJob]:
        """Hold what pull `number` brought; return the older leases on the same jobs, which it replaces."""
        with self.lock:
            replaced: list[HeldJob] = []
            for job in jobs:
                older = self._by_job.get(job.id)
                if older is not None:
                    replaced.append(older)
                    self.remove(older)
                self._by_job[job.id] = job
                self._by_request[job.request_id] = job
            self._processed_pull[keys] = number
            return replaced

    def remove(self, job: HeldJob) -> bool:
        """Hold it no longer; False if it was not held."""
        with self.lock:
            if self._by_request.pop(job.request_id, None) is None:
                return False
            if self._by_job.get(job.id) is job:
                del self._by_job[job.id]
            return True

    def of_request(self, request_id: str) -> HeldJob | None:
        """The job behind an engine's request, if it is still held."""
        return self._by_request.get(request_id)

    def of_job(self, job_id: JobId) -> HeldJob | None:
        """The held job of an id."""
        return self._by_job.get(job_id)

    def all(self) -> list[HeldJob]:
        """Every held job, oldest first."""
        with self.lock:
            return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def held(self, keys: QueueKeys) -> HeldList:
        """What the next beat of a partition says."""
        with self.lock:
            requests = {job.id: job.request_id for job in self._by_job.values() if job.keys == keys}
            return HeldList(requests, self._processed_pull.get(keys, 0))
