"""The outcomes of jobs that the queue no longer has, read from the job history."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from sluice.producer.errors import ENDS_BADLY, HistoryUnavailable
from sluice.producer.operations.results import Outcome
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

if TYPE_CHECKING:
    from sluice.history.queries import History, JobRow


class RecordedOutcomes:
    """The outcomes in the history, which is opened at the first look-up. Leaving the context closes it.

    Args:
        url: SQLAlchemy URL of the history; None: there is none.
        queue: Name of the jobs' queue.
    """

    def __init__(self, url: str | None, queue: str) -> None:
        self._url, self._queue = url, queue
        self._history: History | None = None
        self._opened = ExitStack()
        self.problem: str | None = None
        """Why the history could not be read. After an error, it is not read again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._opened.close()
        self._history = None

    def find(self, job_id: JobId) -> Outcome | None:
        """Return the outcome of a job; None if the history lacks its end, or the output of a done job."""
        if self._url is None or self.problem is not None:
            return None
        try:
            return recorded_outcome(self._open(self._url), self._queue, job_id)
        except HistoryUnavailable as error:
            self.problem = str(error)
            return None

    def _open(self, url: str) -> "History":
        from sluice.history.queries import History

        if self._history is None:
            self._history = self._opened.enter_context(History(url))
        return self._history


def recorded_outcome(history: "History", queue: str | Sequence[str], job_id: JobId) -> Outcome | None:
    """Return the outcome of a job in the history, as `RecordedOutcomes.find` does.

    Raises:
        HistoryUnavailable: the history cannot be read.
    """
    row = history.job(queue, job_id)
    output = history.result(queue, job_id) if row is not None and row.state == JobState.DONE else None
    return None if row is None else _outcome(job_id, row, output)


def _outcome(job_id: JobId, row: "JobRow", output: Mapping[str, Any] | None) -> Outcome | None:  # Any: JSON
    state = JobState(row.state)
    if state in ENDS_BADLY:
        reason = row.error or row.reason or "no reason was given"
        error = ENDS_BADLY[state](job_id, reason, code=row.error_code)
        return Outcome(job_id=job_id, view=None, result=None, error=error)
    if output is None:
        return None
    from sluice.history.results import result_of

    result = result_of(output["choices"], output["usage"], model=row.model)
    return Outcome(job_id=job_id, view=None, result=result, error=None)
