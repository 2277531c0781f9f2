"""Jobs that return to the queue before their end, at a graceful shutdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from sluice.producer.contract.calls import Returned, give_back
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.limits import SLICE_JOBS
from sluice.producer.contract.transport.execution import run
from sluice.worker.connection.clients import Client
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.serve.context import WorkerContext


class ReturnQueue:
    """The jobs to return. Any thread adds to it; the pull thread calls `turn`.

    The pull thread returns them between its pulls, so that a pull under way cannot bring a job that is missed.
    """

    def __init__(self, client: Client, context: WorkerContext) -> None:
        """Return nothing yet. `client` belongs to the pull thread."""
        self._client = client
        self._context = context
        self._returns_unstarted = False
        self._due: list[HeldJob] = []

    def add_unstarted(self) -> None:
        """Return every job of which the engine has yielded nothing."""
        self._returns_unstarted = True
        self._context.mailbox.wake()

    def turn(self) -> None:
        """Return what is due. Jobs of a partition that does not answer stay due."""
        if self._returns_unstarted:
            self._returns_unstarted = False
            self._add([job for job in self._context.leases.all() if job.give_back()])
            self._context.mailbox.interrupt()
        if self._due:
            self._return()

    def _add(self, jobs: Sequence[HeldJob]) -> None:
        self._context.mailbox.lose([job.request_id for job in jobs])
        self._due += jobs

    def _return(self) -> None:
        leases, unavailable = self._context.leases, self._context.unavailable
        for keys in self._context.partitions:
            jobs = [job for job in self._due if job.keys == keys and job.is_held]
            if not jobs or keys in unavailable:
                continue
            try:
                return_jobs(self._client, keys, self._context.incarnation, leases, jobs)
            except (RedisError, OSError) as error:
                unavailable.failed(keys, error)
            else:
                self._context.log.info("jobs handed back", count=len(jobs))
        was_due, self._due = self._due, [job for job in self._due if job.is_held]
        if len(self._due) < len(was_due):
            self._context.mailbox.interrupt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregistration:
    """The end of an incarnation, sent with the last jobs that it returns."""

    is_broken: bool
    """Whether the worker broke: the returned jobs may be the cause, and the queue counts a death."""


def return_jobs(
    client: Client,
    keys: QueueKeys,
    incarnation: str,
    leases: Leases,
    jobs: Sequence[HeldJob],
    deregistration: Deregistration | None = None,
) -> None:
    """Return held jobs of one partition to the queue, in slices; the last slice carries the deregistration, if any.

    Raises:
        RedisError: The queue did not answer. Jobs that were not returned are reclaimed by other workers.
    """
    slices = [jobs[at : at + SLICE_JOBS] for at in range(0, len(jobs), SLICE_JOBS)] or ([[]] if deregistration else [])
    for number, part in enumerate(slices, start=1):
        returned = [Returned(job_id=job.id, epoch=job.leased.epoch) for job in part]
        is_last = deregistration is not None and number == len(slices)
        is_broken = deregistration is not None and deregistration.is_broken
        run(client, give_back(keys, incarnation, returned, deregister=is_last, broken=is_broken))
        for job in part:
            leases.remove(job)
