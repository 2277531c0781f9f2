"""Run a step so that only a culprit fails. Knows no tensors: whatever the device raises is a failed step.

A step that failed has changed nothing (see `Scheduler.schedule`), so it is tried again as it was; then without the
sequences that have just joined; then by halves, until each failing part is one sequence. Parts that succeed count:
their sequences go on in the same step.

When nothing in a step went well, the sequences are not blamed before the device has shown that it can still compute one
token of a sequence that nobody asked for: a broken device must not fail one job after another.
"""

from dataclasses import dataclass, field

from engine.batch import Batch, Sampled, ScheduledSequence
from engine.errors import EngineBroken
from engine.executor import Executor
from engine.request import FailureKind, Finish, FinishReason, SamplingParams
from engine.sequence import Sequence

_PROBE_ID = -1
"""The sequence that nobody asked for."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of a step. Grows while its parts run."""

    done: list[tuple[Batch, list[Sampled]]] = field(default_factory=list[tuple[Batch, list[Sampled]]])
    """The parts that succeeded, with a row for each sequence that samples; one part where nothing failed."""

    failed: list[tuple[Sequence, Finish]] = field(default_factory=list[tuple[Sequence, Finish]])
    """The culprits, each with its end."""

    @property
    def went_well(self) -> bool:
        """Whether anything in the step did: a token was drawn, or a part of a prompt was computed."""
        return any(not sampled or any(row.error is None for row in sampled) for _, sampled in self.done)

    @property
    def suspect(self) -> Sequence:
        """One of the sequences that will end because of it. The caller knows that nothing went well."""
        if self.failed:
            return self.failed[0][0]
        return next(scheduled.sequence for scheduled in self.done[0][0].sequences if scheduled.samples)


class IsolatingExecutor:
    """Executes steps, and looks for the culprit of one that fails."""

    def __init__(self, executor: Executor, *, max_retries: int) -> None:
        self._executor = executor
        self._max_retries = max_retries
        self.num_failed_attempts = 0
        self.last_failure: str | None = None
        """What the last attempt that failed said."""

    def execute(self, batch: Batch) -> Outcome:
        """Compute `batch`, whole if that is possible.

        Raises:
            EngineBroken: the executor says so, or it computes nothing any more.
        """
        outcome = Outcome()
        error = self._attempt(batch, outcome, num_tries=1 + self._max_retries)
        if error is not None:
            self._divide(batch, error, outcome)
        if not outcome.went_well:
            self._check_device(outcome.suspect)
        return outcome

    def _attempt(self, batch: Batch, outcome: Outcome, *, num_tries: int) -> Exception | None:
        """Try `batch` and keep its rows; the last error if it always fails."""
        error: Exception | None = None
        for _ in range(num_tries):
            try:
                sampled = self._executor.launch(batch).collect()
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
            outcome.failed.append((sequence, _failure(error)))
            return
        for part in _parts(batch):
            problem = self._attempt(part, outcome, num_tries=1)
            if problem is not None:
                self._divide(part, problem, outcome)

    def _check_device(self, suspect: Sequence) -> None:
        """See that the device can compute a sequence of one token, in a block that `suspect` is about to give back."""
        # The block of a sequence's last token is its own: it is never shared or known before that token is computed.
        probe = Sequence(
            id=_PROBE_ID,
            request_id="",
            choice=0,
            sampling=SamplingParams(temperature=0, max_tokens=1),
            token_ids=[0],
            num_prompt_tokens=1,
            block_table=suspect.block_table[-1:],
        )
        outcome = Outcome()
        error = self._attempt(Batch((ScheduledSequence(probe, 0, 1, True),)), outcome, num_tries=1)
        if error is not None or not outcome.went_well:
            raise EngineBroken(f"the device computes nothing any more: {self.last_failure or 'its logits are bad'}")
        self._executor.forget([_PROBE_ID])


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


def _failure(error: Exception) -> Finish:
    message = f"the model failed on this request: {_sentence(error)}"
    return Finish(reason=FinishReason.ERROR, error=message, failure=FailureKind.of(error))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
