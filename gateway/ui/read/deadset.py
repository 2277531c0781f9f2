"""The dead set in groups of the same error. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.protocol.calls import JobView

LISTED = 100
"""Jobs of a group that are listed; the group's buttons act on all of it."""

NO_CODE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadGroup:
    """The jobs of a queue that failed with the same error."""

    queue: str
    code: str
    jobs: tuple[JobView, ...]
    """Newest failure first."""

    @property
    def listed(self) -> Sequence[JobView]:
        """The newest of them."""
        return self.jobs[:LISTED]

    @property
    def until_ms(self) -> int:
        """When the newest of them failed: later ones are not among those that were seen."""
        return self.jobs[0].ended_ms or 0

    @property
    def example(self) -> str:
        """The message of the newest one."""
        return self.jobs[0].error or ""


def groups_of(queue: str, dead: Iterable[JobView]) -> list[DeadGroup]:
    """Group dead jobs by their error, the largest group first."""
    views_by_code: dict[str, list[JobView]] = {}
    for view in sorted(dead, key=lambda view: view.ended_ms or 0, reverse=True):
        views_by_code.setdefault(code_of(view), []).append(view)
    groups = [DeadGroup(queue=queue, code=code, jobs=tuple(views)) for code, views in views_by_code.items()]
    return sorted(groups, key=lambda group: (-len(group.jobs), group.code))


def code_of(view: JobView) -> str:
    """Return the error of a job, in a word."""
    return view.error_code or NO_CODE
