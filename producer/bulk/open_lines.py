"""Lines of a bulk file whose jobs have not all ended. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.producer.operations.results import Outcome
from sluice.protocol.openai_format.requests import Endpoint, ManyPrompts
from sluice.protocol.wire import JobId


@dataclass(slots=True, eq=False)
class JobsOfLine:
    """The jobs of a line that has several, and their outcomes so far. Mutable."""

    request: ManyPrompts
    job_ids: tuple[JobId, ...]
    _outcomes: dict[JobId, Outcome] = field(default_factory=dict[JobId, Outcome])

    def add(self, outcome: Outcome) -> bool:
        """Add the outcome of one of them; return whether all have ended now."""
        self._outcomes[outcome.job_id] = outcome
        return len(self._outcomes) == len(self.job_ids)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all, in the order of the line's prompts."""
        return [self._outcomes[job_id] for job_id in self.job_ids]


class SubmittedLine(NamedTuple):
    """A line that has not ended. A named tuple, because there is one per line."""

    number: int
    custom_id: str
    endpoint: Endpoint
    model: str | None
    many: JobsOfLine | None = None
    """Its jobs, if it has several; the line has the name of the first."""

    def ids(self, job_id: JobId) -> Iterable[JobId]:
        """Return the jobs of the line that has this one."""
        return (job_id,) if self.many is None else self.many.job_ids

    def is_first(self, job_id: JobId) -> bool:
        """Return whether this job stands for the line where lines are counted."""
        return self.many is None or self.many.job_ids[0] == job_id
