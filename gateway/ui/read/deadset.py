"""The dead set in groups of the same error. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.protocol.calls import JobView

LISTED = 100
"""Number of jobs that are listed of a group; the group's buttons act on all of it."""

NO_CODE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadGroup:
    """The jobs of a queue that failed with the same error."""

    queue: str
    code: str
    jobs: tuple[JobView, ...]
    """The jobs, newest failure first."""

    @property
    def listed(self) -> Sequence[JobView]:
        """The newest jobs, which are listed."""
        return self.jobs[:LISTED]

    @property
    def until_ms(self) -> int:
        """When the newest job failed. Jobs that fail later are not part of the group that was seen."""
        return self.jobs[0].ended_ms or 0

    @property
    def example(self) -> str:
        """The error message of the newest job."""
        return self.jobs[0].error or ""


def groups_of(queue: str, dead: Iterable[JobView]) -> list[DeadGroup]:
    """Group dead jobs by their error, the largest group first."""
    views_by_code: dict[str, list[JobView]] = {}
    for view in sorted(dead, key=lambda view: view.ended_ms or 0, reverse=True):
        views_by_code.setdefault(code_of(view), []).append(view)
    groups = [DeadGroup(queue=queue, code=code, jobs=tuple(views)) for code, views in views_by_code.items()]
    return sorted(groups, key=lambda group: (-len(group.jobs), group.code))


def code_of(view: JobView) -> str:
    """Return the error code of a job."""
    return view.error_code or NO_CODE
