"""Jobs that return to the queue before their end: at a graceful shutdown, or for an idle worker.

A preempted job that waits here while another worker is idle continues there, if that one has a place for it. It leaves
with its tokens: what its channels lack is published first, and the other worker continues after that. As its noise is
a function of seed and position, the output has no seam.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Self

from redis.exceptions import RedisError

from sluice.protocol.calls import Returned, give_back, inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import SLICE_JOBS
from sluice.protocol.redis.execution import run
from sluice.protocol.redis.surveys import pages_of_workers
from sluice.protocol.workers import ADAPTERS
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.model.translate import room_of
from sluice.worker.serve.context import WorkerContext

LOOK_EVERY_S = 1.0
"""How often a worker with such jobs looks for an idle one."""

Leaving = Literal["clean", "broken"]
"""How an incarnation ends."""

IDLE_FIELDS = ("state", "held", "running", "fingerprint", ADAPTERS, "places", "largest_job_tokens", "kv_tokens_total")
"""Fields of a heartbeat that say whether a worker is idle, and what fits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWorker:
    """A worker that holds nothing, as its heartbeat describes it."""

    incarnation: str
    places: int
    kv_tokens: float

    @classmethod
    def read(cls, incarnation: str, about: Mapping[str, str]) -> Self:
        """Read a heartbeat. A worker that does not report its places is given one job at a time."""
        places = about.get("places", "")
        kv_tokens = about.get("largest_job_tokens", about.get("kv_tokens_total", ""))
        return cls(
            incarnation=incarnation,
            places=int(places) if places.isdecimal() else 1,
            kv_tokens=int(kv_tokens) if kv_tokens.isdecimal() else inf,
        )

    def choose(self, jobs: Iterable[HeldJob], *, reserve_tokens: int) -> list[HeldJob]:
        """Return the first jobs that fit it together: further ones would wait there as they do here."""
        places, kv_tokens, chosen = self.places, self.kv_tokens, list[HeldJob]()
        for job in jobs:
            need = room_of(job, reserve_tokens=reserve_tokens)
            if need.sequences <= places and need.kv_tokens <= kv_tokens:
                chosen.append(job)
                places, kv_tokens = places - need.sequences, kv_tokens - need.kv_tokens
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """Jobs to return, and why, for the log."""

    jobs: Sequence[HeldJob]
    why: Mapping[str, str]


class ReturnQueue:
    """The jobs to return. Any thread calls `add_unstarted`; the pull thread calls `turn`.

    The pull thread returns them between its pulls, so that a pull under way cannot bring a job that is missed.
    """

    def __init__(self, client: Client, context: WorkerContext) -> None:
        """Return nothing yet. `client` belongs to the pull thread."""
        self._client = client
        self._context = context
        self._returns_unstarted = False
        self._due: list[_Due] = []
        self._look_s = 0.0
        """When to look for an idle worker again."""

    def add_unstarted(self) -> None:
        """Return every job of which the engine has yielded nothing."""
        self._returns_unstarted = True
        self._context.mailbox.wake()

    def turn(self) -> None:
        """Return what is due. Jobs of a partition that does not answer stay due."""
        if self._returns_unstarted:
            self._returns_unstarted = False
            self._add([job for job in self._context.leases.all() if job.give_back()], {"reason": "drain"})
            self._context.mailbox.interrupt()
        stalled, now_s = self._context.mailbox.stalled, monotonic_s()
        if stalled and now_s >= self._look_s:
            self._look_s = now_s + LOOK_EVERY_S
            self._add_stalled(stalled)
        if self._due:
            self._return()

    def _add(self, jobs: Sequence[HeldJob], why: Mapping[str, str]) -> None:
        self._context.mailbox.lose([job.request_id for job in jobs])
        self._due.append(_Due(jobs=jobs, why=why))

    def _add_stalled(self, request_ids: Sequence[str]) -> None:
        """Return preempted jobs for one idle worker, as many as fit it; first publish them, if necessary."""
        held = map(self._context.leases.of_request, request_ids)
        jobs = [job for job in held if job is not None and job.is_active and not job.has_ended]
        reserve_tokens = self._context.config.queue.reserve_tokens
        for keys in dict.fromkeys(job.keys for job in jobs):
            idle = self._idle_worker(keys)
            own = (job for job in jobs if job.keys == keys)
            if idle is not None and (chosen := idle.choose(own, reserve_tokens=reserve_tokens)):
                self._add_for(idle, chosen)
                return

    def _add_for(self, idle: IdleWorker, jobs: Sequence[HeldJob]) -> None:
        if unpublished := [job.request_id for job in jobs if job.has_updates]:
            for request_id in unpublished:
                self._context.mailbox.put_unpublished(request_id)
            self._look_s = 0.0
            return
        # Until its next heartbeat that worker seems idle.
        self._look_s += self._context.config.beat.every_s
        returned = [job for job in jobs if job.give_back(with_output=True)]
        self._add(returned, {"reason": "idle worker", "worker": idle.incarnation})

    def _idle_worker(self, keys: QueueKeys) -> IdleWorker | None:
        if keys in self._context.unavailable:
            return None
        try:
            if run(self._client, inspect(keys)).is_paused:
                return None
            return next(self._idle_workers(keys), None)
        except (RedisError, OSError) as error:
            self._context.unavailable.failed(keys, error)
            return None

    def _idle_workers(self, keys: QueueKeys) -> Iterator[IdleWorker]:
        for page in pages_of_workers(self._client, keys, fields=IDLE_FIELDS):
            for name, about in page.items():
                if name != self._context.incarnation and self._may_continue(about):
                    yield IdleWorker.read(name, about)

    def _may_continue(self, about: Mapping[str, str]) -> bool:
        """Return whether this worker, as its heartbeat describes it, is idle and has the same model."""
        is_idle = (about.get("state"), about.get("held"), about.get("running")) == ("pulling", "0", "0")
        has_adapters = set(self._context.origin.adapters) <= set(about.get(ADAPTERS, "").split())
        return is_idle and has_adapters and about.get("fingerprint") == self._context.origin.fingerprint

    def _return(self) -> None:
        was_due = self._due
        for due in was_due:
            for keys in self._context.partitions:
                self._return_of(keys, due)
        rests = [_Due(jobs=[job for job in due.jobs if job.is_held], why=due.why) for due in was_due]
        self._due = [rest for rest in rests if rest.jobs]
        if any(len(rest.jobs) < len(due.jobs) for rest, due in zip(rests, was_due, strict=True)):
            self._context.mailbox.interrupt()

    def _return_of(self, keys: QueueKeys, due: _Due) -> None:
        unavailable = self._context.unavailable
        jobs = [job for job in due.jobs if job.keys == keys and job.is_held]
        if not jobs or keys in unavailable:
            return
        try:
            return_jobs(self._client, keys, self._context, jobs)
        except (RedisError, OSError) as error:
            unavailable.failed(keys, error)
        else:
            self._context.log.info("jobs handed back", count=len(jobs), **due.why)


def return_jobs(
    client: Client, keys: QueueKeys, context: WorkerContext, jobs: Sequence[HeldJob], *, leaves: Leaving | None = None
) -> None:
    """Return held jobs of one partition to the queue, in slices; the last slice deregisters a worker that leaves.

    One that leaves broken has perhaps been broken by one of these jobs, and the queue counts a death.

    Raises:
        RedisError: The queue did not answer. Jobs that were not returned are reclaimed by other workers.
    """
    slices = [jobs[at : at + SLICE_JOBS] for at in range(0, len(jobs), SLICE_JOBS)] or ([[]] if leaves else [])
    for number, part in enumerate(slices, start=1):
        returned = [Returned(job_id=job.id, epoch=job.leased.epoch) for job in part]
        is_last = leaves is not None and number == len(slices)
        run(client, give_back(keys, context.incarnation, returned, deregister=is_last, broken=leaves == "broken"))
        for job in part:
            context.leases.remove(job)
