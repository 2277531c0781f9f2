"""All checks of a drained queue, in one pass over its jobs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tests.chaos.checker import queue as queues
from tests.chaos.checker.deliveries import Deliveries, check_deliveries, check_unasked
from tests.chaos.checker.evidence import Asked, Journal, Reference
from tests.chaos.checker.formats import ENDS, Job, Malformed
from tests.chaos.checker.history import History, check_row
from tests.chaos.checker.jobs import check_job
from tests.chaos.checker.reading import AT_A_TIME, read_jobs


@dataclass(slots=True, eq=False)
class Findings:
    """The findings by job (or key), and how much was checked."""

    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    figures: Counter[str] = field(default_factory=Counter[str])

    def of_kind(self, *kinds: str) -> list[tuple[str, str]]:
        """Those of some kinds."""
        return [one for one in self.found if one[1].partition(":")[0] in kinds]


def check(
    client: Any,  # a redis-py client
    journal: Journal,
    reference: Reference,
    *,
    queue: str = "default",
    partitions: int = 1,
    database_url: str | None = None,
    deliveries: Deliveries | None = None,
) -> Findings:
    """Check everything. The queue must be drained, its recorder idle, its workers stopped."""
    findings = Findings()
    history = History(database_url) if database_url else None
    for partition in range(partitions):
        prefix = f"{{{queue}:{partition}}}:2"
        here = [asked for asked in journal.values() if asked.id.startswith(f"{partition}.")]
        _Partition(client, prefix, here, reference, history, findings).check(deliveries)
    if deliveries is not None:
        findings.found += check_unasked(deliveries, {one.id for one in journal.values() if one.wants_callback})
        findings.figures["callbacks received"] = sum(map(len, deliveries.values()))
    if history is not None:
        findings.found += [(one, "row: this job was not submitted") for one in history.all_ids() - journal.keys()]
        history.close()
    return findings


@dataclass(frozen=True, slots=True)
class _Partition:
    client: Any
    prefix: str
    asked: list[Asked]
    reference: Reference
    history: History | None
    findings: Findings

    def check(self, deliveries: Deliveries | None) -> None:
        settings = {k.decode(): v.decode() for k, v in self.client.hgetall(f"{self.prefix}:config").items()}
        known: list[tuple[Asked, str]] = []
        for asked, job in self._jobs():
            reference = self.reference[asked.ask]
            self._add(asked.id, check_job(job, asked, reference, settings))
            self._count(asked, job)
            if job.fields:
                known.append((asked, job.state))
        found = self.findings.found
        found += queues.check_counters(self.client, self.prefix, Counter(state for _, state in known))
        found += queues.check_batches(self.client, self.prefix, known)
        found += queues.check_residue(self.client, self.prefix)
        if deliveries is not None:
            found += queues.check_drained(self.client, f"{self.prefix}:callbacks")
            self._check_callbacks(known, deliveries)

    def _check_callbacks(self, known: list[tuple[Asked, str]], deliveries: Deliveries) -> None:
        for asked, state in known:
            if asked.wants_callback and state in ENDS:
                self.findings.figures["callbacks wanted"] += 1
                self._add(asked.id, check_deliveries(state, deliveries.get(asked.id, ())))

    def _jobs(self) -> Iterator[tuple[Asked, Job]]:
        """Each with its row compared on the way, so that one chunk at a time is in memory."""
        all_asked = iter(self.asked)
        while chunk := list(islice(all_asked, AT_A_TIME)):
            ids = [asked.id for asked in chunk]
            rows = self.history.rows_of(ids) if self.history else {}
            for asked, job in zip(chunk, self._read(ids), strict=True):
                if job is None:
                    continue
                if self.history and job.state in ENDS:
                    self._add(job.id, check_row(job, rows.get(job.id)))
                yield asked, job

    def _read(self, ids: list[str]) -> Iterator[Job | None]:
        try:
            yield from list(read_jobs(self.client, self.prefix, ids))
        except Malformed:
            yield from map(self._read_one, ids)

    def _read_one(self, job_id: str) -> Job | None:
        try:
            return next(read_jobs(self.client, self.prefix, [job_id]))
        except Malformed as error:
            self._add(job_id, iter([f"malformed: {error}"]))
            return None

    def _add(self, job_id: str, found: Iterator[str]) -> None:
        self.findings.found += [(job_id, what) for what in found]

    def _count(self, asked: Asked, job: Job) -> None:
        figures = self.findings.figures
        figures["jobs"] += 1
        figures["acknowledged"] += asked.is_acknowledged
        figures["tokens"] += sum(offset for offset, _ in job.published) if job.fields else 0
        figures["attempts"] += job.number("attempt")
        figures["taken over or given back"] += max(0, job.number("epoch") - 1)
        if job.fields:
            figures[job.state] += 1
