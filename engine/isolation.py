"""Run a step so that only a culprit fails. Knows no tensors: whatever the device raises is a failed step.

A step that failed has changed nothing (see `Scheduler.schedule`), so it is tried again as it was; then without the
sequences that have just joined; then by halves, until each failing part is one sequence. Parts that succeed count:
their sequences go on in the same step.
"""

from dataclasses import dataclass, field

from engine.batch import Batch, Sampled
from engine.errors import EngineBroken
from engine.executor import Executor
from engine.sequence import Sequence

_MOST_FAILURES_IN_A_ROW = 3
"""So many sequences failed one after the other, alone, and none went well in between: it is not the sequences."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of a step. Grows while its parts run."""

    done: list[tuple[Batch, list[Sampled]]] = field(default_factory=list[tuple[Batch, list[Sampled]]])
    """The parts that succeeded, with a row for each sequence that samples; one part where nothing failed."""

    failed: list[tuple[Sequence, str]] = field(default_factory=list[tuple[Sequence, str]])
    """The culprits, each with a sentence."""


class IsolatingExecutor:
    """Executes steps, and looks for the culprit of one that fails."""

    def __init__(self, executor: Executor, *, max_retries: int) -> None:
        self._executor = executor
        self._max_retries = max_retries
        self._num_failures_in_a_row = 0
        self.num_failed_attempts = 0
        self.last_failure: str | None = None
        """What the last attempt that failed said."""

    def execute(self, batch: Batch) -> Outcome:
        """Compute `batch`, whole if that is possible.

        Raises:
            EngineBroken: the executor says so, or everything fails.
        """
        outcome = Outcome()
        error = self._attempt(batch, outcome, num_tries=1 + self._max_retries)
        if error is not None:
            self._divide(batch, error, outcome)
            self._judge(batch, outcome, error)
        else:
            self._num_failures_in_a_row = 0
        return outcome

    def _attempt(self, batch: Batch, outcome: Outcome, *, num_tries: int) -> Exception | None:
        """Try `batch` and keep its rows; the last error if it always fails."""
        error: Exception | None = None
        for _ in range(num_tries):
            try:
                sampled = self._executor.execute(batch)
                _check_rows(batch, sampled)
            except EngineBroken:
                raise
            except Exception as problem:  # noqa: BLE001 - the contract: anything may come from a device
                error = problem
                self.num_failed_attempts += 1
                self.last_failure = _sentence(problem)
            else:
                outcome.done.append((batch, sampled))
                return None
        return error

    def _divide(self, batch: Batch, error: Exception, outcome: Outcome) -> None:
        """Find the culprits of a `batch` that failed."""
        if len(batch.sequences) == 1:
            sequence = batch.sequences[0].sequence
            outcome.failed.append((sequence, f"the model failed on this request: {_sentence(error)}"))
            return
        for part in _parts(batch):
            problem = self._attempt(part, outcome, num_tries=1)
            if problem is not None:
                self._divide(part, problem, outcome)

    def _judge(self, batch: Batch, outcome: Outcome, error: Exception) -> None:
        """Tell culprits from a device that is lost."""
        if outcome.done:
            self._num_failures_in_a_row = 0
            return
        self._num_failures_in_a_row += 1
        if len(batch.sequences) > 1 or self._num_failures_in_a_row >= _MOST_FAILURES_IN_A_ROW:
            raise EngineBroken(
                f"every sequence fails, alone as together ({len(batch.sequences)} in this step, "
                f"{self._num_failures_in_a_row} such steps in a row): {_sentence(error)}"
            ) from error


def _parts(batch: Batch) -> tuple[Batch, Batch]:
    """Those that ran before and those that have just joined; halves where all are of one kind."""
    sequences = batch.sequences
    middle = len(sequences) - batch.num_joined
    if middle in (0, len(sequences)):
        middle = len(sequences) // 2
    return Batch(sequences[:middle]), Batch(sequences[middle:])


def _check_rows(batch: Batch, sampled: list[Sampled]) -> None:
    num_expected = sum(scheduled.samples for scheduled in batch.sequences)
    if len(sampled) != num_expected:
        raise RuntimeError(f"the executor returned {len(sampled)} rows, not {num_expected}")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
