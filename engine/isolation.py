"""Run steps so that only a culprit fails. Knows no tensors: whatever the device raises is a failed step.

A step that failed has changed nothing (see `Scheduler.schedule`), so it is tried again as it was; then without the
sequences that have just joined; then by halves, until each failing part is one sequence. Parts that succeed count:
their sequences go on in the same step.

When nothing in a step went well, the sequences are not blamed before the device has shown that it can still compute one
token of a sequence that nobody asked for: a broken device must not fail one job after another.

A step for which there is no memory has no culprit: the scheduler plans smaller ones, until a single token is too much.

All of this happens when a step is collected, one attempt after the other. What was launched on top of a step that
failed has read tokens that were never drawn: it is void (`Outcome.has_failed`), and whoever launched it plans it again.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.batch import Batch, Sampled, ScheduledSequence
from engine.errors import EngineBroken, OutOfMemory
from engine.executor import Executor, Launched
from engine.request import FailureKind, Finish, FinishReason, SamplingParams
from engine.sequence import Sequence

MAX_SHORTAGES = 20
"""So many steps in a row that lack memory, each half as large as the one before, and it is not their size."""

_PROBE_ID = -1
"""The sequence that nobody asked for."""


class NotLaunched(NamedTuple):
    """A step whose launch failed: it says so when it is collected, as if it had failed later."""

    error: Exception

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        raise self.error


class StepInFlight(NamedTuple):
    """A step that was launched and is not collected."""

    batch: Batch
    launched: Launched


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of a step. Grows while its parts run."""

    done: list[tuple[Batch, list[Sampled]]] = field(default_factory=list[tuple[Batch, list[Sampled]]])
    """The parts that succeeded, with a row for each sequence that samples; one part where nothing failed."""

    failed: list[tuple[Sequence, Finish]] = field(default_factory=list[tuple[Sequence, Finish]])
    """The culprits, each with its end."""

    has_failed: bool = False
    """The step as it was launched failed, or nothing went well in it, whatever was computed afterwards."""

    lacked_memory: bool = False
    """The step was too large for the memory that is left: nothing of it was computed, and nobody is to blame."""

    @property
    def went_well(self) -> bool:
        """Whether anything in the step did: a token was drawn, or a part of a prompt was computed."""
        return any(not sampled or any(row.error is None for row in sampled) for _, sampled in self.done)


class IsolatingExecutor:
    """Executes steps, and looks for the culprit of one that fails."""

    def __init__(self, executor: Executor, *, max_retries: int) -> None:
        self._executor = executor
        self._max_retries = max_retries
        self._num_shortages = 0
        """Steps that lacked memory since the last one that did not."""

        self.num_failed_attempts = 0
        self.last_failure: str | None = None
        """What the last attempt that failed said."""

    def launch(self, batch: Batch) -> StepInFlight:
        """Begin `batch`.

        Raises:
            EngineBroken: the executor says so.
        """
        try:
            return StepInFlight(batch, self._executor.launch(batch))
        except EngineBroken:
            raise
        except Exception as problem:  # noqa: BLE001 - the contract: anything may come from a device
            return StepInFlight(batch, NotLaunched(problem))

    def collect(self, step: StepInFlight, *, unwanted: Set[int] = frozenset()) -> Outcome:
        """Wait for `step`; compute what failed of it again, whole if that is possible.

        Args:
            step: the oldest in flight.
            unwanted: ids of sequences that ended since it was launched: nothing is said of them.

        Raises:
            EngineBroken: the executor says so, or it computes nothing any more.
        """
        outcome = Outcome()
        error = self._take(step, outcome)
        batch = step.batch
        if unwanted:
            batch = _without(batch, unwanted)
            outcome.done = [_rows_without(part, sampled, unwanted) for part, sampled in outcome.done]
        outcome.has_failed = error is not None
        if batch.is_empty:
            return outcome
        if error is not None:
            # Without the unwanted it has not been tried yet.
            num_tries = max(self._max_retries, int(bool(unwanted)))
            error = self._attempt(batch, outcome, error, num_tries=num_tries)
        if isinstance(error, OutOfMemory) and batch.num_tokens > 1 and self._num_shortages < MAX_SHORTAGES:
            self._num_shortages += 1
            outcome.lacked_memory = True
            return outcome
        self._num_shortages = 0
        if error is not None:
            self._divide(batch, error, outcome)
        if not outcome.went_well:
            outcome.has_failed = True
            self._check_device()
        return outcome

    def _take(self, step: StepInFlight, outcome: Outcome) -> Exception | None:
        """Keep the rows of `step`, or return what went wrong."""
        try:
            sampled = step.launched.collect()
            _check_rows(step.batch, sampled)
        except EngineBroken:
            raise
        except Exception as problem:  # noqa: BLE001 - as above
            self.num_failed_attempts += 1
            self.last_failure = _sentence(problem)
            return problem
        outcome.done.append((step.batch, sampled))
        return None

    def _attempt(self, batch: Batch, outcome: Outcome, error: Exception | None, *, num_tries: int) -> Exception | None:
        """Try `batch` again after `error`, and keep its rows; the last error if it always fails."""
        for _ in range(num_tries):
            error = self._take(self.launch(batch), outcome)
            if error is None:
                break
        return error

    def _divide(self, batch: Batch, error: Exception, outcome: Outcome) -> None:
        """Find the culprits of a `batch` that failed."""
        if len(batch.sequences) == 1:
            sequence = batch.sequences[0].sequence
            outcome.failed.append((sequence, _failure(error)))
            return
        for part in _parts(batch):
            problem = self._take(self.launch(part), outcome)
            if problem is not None:
                self._divide(part, problem, outcome)

    def _check_device(self) -> None:
        """See that the device can compute a sequence of one token, in the block that no sequence has."""
        probe = Sequence(
            id=_PROBE_ID,
            request_id="",
            choice=0,
            sampling=SamplingParams(temperature=0, max_tokens=1),
            token_ids=[0],
            num_prompt_tokens=1,
            block_table=[self._executor.limits.num_blocks],
        )
        outcome = Outcome()
        error = self._take(self.launch(Batch((ScheduledSequence(probe, 0, 1, True),))), outcome)
        if error is not None or not outcome.went_well:
            raise EngineBroken(f"the device computes nothing any more: {self.last_failure or 'its logits are bad'}")
        self._executor.forget([_PROBE_ID])


def _parts(batch: Batch) -> tuple[Batch, Batch]:
    """Those that ran before and those that have just joined; halves where all are of one kind."""
    sequences = batch.sequences
    middle = len(sequences) - batch.num_joined
    if middle in (0, len(sequences)):
        middle = len(sequences) // 2
    return batch.part(sequences[:middle]), batch.part(sequences[middle:])


def _without(batch: Batch, unwanted: Set[int]) -> Batch:
    """The sequences of `batch` but for the `unwanted`."""
    kept = tuple(scheduled for scheduled in batch.sequences if scheduled.sequence.id not in unwanted)
    joined = batch.sequences[len(batch.sequences) - batch.num_joined :]
    num_joined = sum(scheduled.sequence.id not in unwanted for scheduled in joined)
    return replace(batch.part(kept), num_joined=num_joined, padding=batch.padding)


def _rows_without(batch: Batch, sampled: list[Sampled], unwanted: Set[int]) -> tuple[Batch, list[Sampled]]:
    """`batch` and its rows but for the `unwanted`."""
    drawing = [scheduled for scheduled in batch.sequences if scheduled.samples]
    pairs = zip(drawing, sampled, strict=True)
    return _without(batch, unwanted), [row for scheduled, row in pairs if scheduled.sequence.id not in unwanted]


def _check_rows(batch: Batch, sampled: list[Sampled]) -> None:
    num_expected = sum(scheduled.samples for scheduled in batch.sequences)
    if len(sampled) != num_expected:
        raise RuntimeError(f"the executor returned {len(sampled)} rows, not {num_expected}")


def _failure(error: Exception) -> Finish:
    message = f"the model failed on this request: {_sentence(error)}"
    return Finish(reason=FinishReason.ERROR, error=message, failure=FailureKind.of(error))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
