"""The jobs that this incarnation holds, by request and by job id, under one lock for all threads. No I/O.

A job is held from the pull that leased it until its end or its return is acknowledged, or its lease is lost.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobSpec
from sluice.worker.jobs.held_job import HeldJob


@dataclass(frozen=True, slots=True)
class HeldList:
    """The held jobs of one partition at one instant, for a heartbeat."""

    requests: Mapping[JobId, str]
    """Each held job with its request id: the lease that the heartbeat renews."""

    processed_pull: int
    """The number of the last pull whose jobs are in the list; 0 before the first."""


@dataclass(slots=True, eq=False)
class Leases:
    """The held jobs. Any thread may call it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Guards the held jobs and their transitions. Hold it to make a check and a transition one step."""

    _by_request: dict[str, HeldJob] = field(default_factory=dict[str, HeldJob])
    _by_job: dict[tuple[QueueKeys, JobId], HeldJob] = field(default_factory=dict[tuple[QueueKeys, JobId], HeldJob])
    """By partition and id: two queues may have jobs of the same id."""

    _processed_pull: dict[QueueKeys, int] = field(default_factory=dict[QueueKeys, int])

    def new_job(self, leased: LeasedJob, keys: QueueKeys, spec: JobSpec | None) -> HeldJob:
        """Make a job that shares this lock; `take` holds it."""
        return HeldJob(leased=leased, keys=keys, spec=spec, lock=self.lock)

    def take(self, keys: QueueKeys, number: int, jobs: Iterable[HeldJob]) -> list[HeldJob]:
        """Hold the jobs of pull `number`; return the older leases on the same jobs, which are released."""
        with self.lock:
            replaced: list[HeldJob] = []
            for job in jobs:
                older = self._by_job.get((keys, job.id))
                if older is not None:
                    replaced.append(older)
                    self.remove(older)
                self._by_job[keys, job.id] = job
                self._by_request[job.request_id] = job
            self._processed_pull[keys] = number
            return replaced

    def remove(self, job: HeldJob) -> bool:
        """Release a job; return False if it was not held."""
        with self.lock:
            if self._by_request.pop(job.request_id, None) is None:
                return False
            if self._by_job.get((job.keys, job.id)) is job:
                del self._by_job[job.keys, job.id]
            job.release()
            return True

    def of_request(self, request_id: str) -> HeldJob | None:
        """Return the held job of an engine's request; None if it is released."""
        return self._by_request.get(request_id)

    def of_job(self, keys: QueueKeys, job_id: JobId) -> HeldJob | None:
        """Return the held job of an id in a partition; None if it is released."""
        return self._by_job.get((keys, job_id))

    def all(self) -> list[HeldJob]:
        """Return every held job, oldest first."""
        with self.lock:
            return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def held(self, keys: QueueKeys) -> HeldList:
        """Return the held jobs of a partition, for its next heartbeat."""
        with self.lock:
            requests = {job.id: job.request_id for job in self._by_job.values() if job.keys == keys}
            return HeldList(requests, self._processed_pull.get(keys, 0))
