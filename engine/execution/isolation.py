"""Run steps so that a failure affects only the sequence that causes it.

Knows no tensors: any device error fails a step.

A failed step has changed nothing (see `Scheduler.schedule`). It is retried unchanged, then without the sequences that
have just joined, then in halves, until each failing part is one sequence. Parts that succeed are kept: their sequences
advance in the same step.

If every part of a step fails, the device must first compute one token of a probe sequence before the sequences are
blamed: a broken device must not fail one job after another.

A step that lacks memory has no culprit, nor has a part of a step that is divided for another reason: the scheduler
plans smaller steps, until a single token is too much.

This happens when a step is collected, one attempt at a time. A step launched on top of a failed one has read tokens
that were never sampled: it is void (`StepOutcome.has_failed`), and the caller plans it again.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluice.engine.batch import NO_DRAFTS, Admission, Batch, Masks, Sampled, ScheduledRow
from sluice.engine.errors import EngineBroken, OutOfMemory
from sluice.engine.executor import DrawnLater, Executor, Launched
from sluice.engine.request import FailureKind, Finish, FinishReason, Sampling

MAX_SHORTAGES = 20
"""Consecutive steps that lack memory, each half as large as the one before, after which their size is not the cause."""

_PROBE_SLOT = -1
"""The last slot, which no sequence uses."""

_NOTHING_READ = RuntimeError("the executor returned nothing of the prompt that it was to read")


class NotLaunched(NamedTuple):
    """A step whose launch failed: it raises when it is collected, as if it had failed later."""

    error: Exception

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        raise self.error


class StepInFlight(NamedTuple):
    """A step that was launched and is not collected."""

    batch: Batch
    launched: Launched
    began_s: float


@dataclass(slots=True, eq=False)
class StepOutcome:
    """Result of a step. Extended while its parts run."""

    done: list[tuple[Batch, list[Sampled]]] = field(default_factory=list[tuple[Batch, list[Sampled]]])
    """Parts that succeeded, with a row for each sequence that samples; one part if nothing failed."""

    failed: list[tuple[int, Finish]] = field(default_factory=list[tuple[int, Finish]])
    """Ids of the sequences that cause the failure, each with its end."""

    has_failed: bool = False
    """Whether the step as launched failed, or nothing in it succeeded, regardless of later retries."""

    has_lost_drafts: bool = False
    """Whether the step failed, and succeeded without its drafts."""

    too_large: Batch | None = None
    """The smallest part that the memory was too small for: nothing of it was computed, and no sequence is at fault."""

    taken_s: float = 0.0
    """From the launch, or the end of the step before if that was later, until the step was collected. Not for one that
    has failed.
    """

    @property
    def went_well(self) -> bool:
        """Whether anything in the step succeeded: a token was sampled, or a part of a prompt was computed."""
        # Plain loops: this is asked in every step, and nearly always answered by its first row.
        for _, sampled in self.done:
            if not sampled:
                return True
            for row in sampled:
                if row.error is None:
                    return True
        return False


class IsolatingExecutor:
    """An executor that isolates the sequence that makes a step fail."""

    def __init__(self, executor: Executor, *, max_retries: int, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._max_retries = max_retries
        self._clock = clock
        self._last_end_s = float("-inf")
        self._num_shortages = 0
        """Consecutive steps that lacked memory."""

        self.num_failed_attempts = 0
        self.last_failure: str | None = None
        """Message of the last failed attempt."""

    def launch(self, batch: Batch) -> StepInFlight:
        """Launch `batch`.

        Raises:
            EngineBroken: raised by the executor.
        """
        began_s = self._clock()
        try:
            return StepInFlight(batch, self._executor.launch(batch), began_s)
        except EngineBroken:
            raise
        except Exception as problem:  # noqa: BLE001 - the contract: anything may come from a device
            return StepInFlight(batch, NotLaunched(problem), began_s)

    def draw(self, step: StepInFlight, masks: Masks) -> StepInFlight:
        """Draw a launched step with `Batch.draws_later`; return it as if it had been launched with its masks.

        Raises:
            EngineBroken: raised by the executor.
        """
        launched = step.launched
        try:
            if isinstance(launched, DrawnLater):
                launched.draw(masks)
        except EngineBroken:
            raise
        except Exception as problem:  # noqa: BLE001 - as above
            launched = NotLaunched(problem)
        return StepInFlight(replace(step.batch, masks=masks, draws_later=False), launched, step.began_s)

    def collect(self, step: StepInFlight, *, unwanted: Set[int] = frozenset()) -> StepOutcome:
        """Wait for `step`, and compute its failed parts again, whole if possible.

        Args:
            step: the oldest in flight.
            unwanted: ids of sequences that ended since the launch; their rows are discarded.

        Raises:
            EngineBroken: raised by the executor, or the device can no longer compute.
        """
        outcome = StepOutcome()
        error = self._take(step, outcome)
        ended_s = self._clock()
        outcome.taken_s, self._last_end_s = ended_s - max(step.began_s, self._last_end_s), ended_s
        batch = step.batch
        if unwanted:
            batch = _without(batch, unwanted)
            outcome.done = [_rows_without(part, sampled, unwanted) for part, sampled in outcome.done]
            outcome.failed = [failed for failed in outcome.failed if failed[0] not in unwanted]
        outcome.has_failed = error is not None
        if batch.is_empty:
            return outcome
        if error is not None:
            # The batch without the unwanted sequences, and without drafts, has not been tried yet.
            num_tries = max(self._max_retries, int(bool(unwanted or batch.drafts)))
            batch = replace(batch, drafts=NO_DRAFTS)
            error = self._attempt(batch, outcome, error, num_tries=num_tries)
            outcome.has_lost_drafts = bool(step.batch.drafts) and error is None
        if error is not None:
            may_be_smaller = batch.num_tokens > 1 and self._num_shortages < MAX_SHORTAGES
            self._divide(batch, error, outcome, may_be_smaller=may_be_smaller)
        self._num_shortages = self._num_shortages + 1 if outcome.too_large is not None else 0
        if not outcome.went_well and outcome.too_large is None:
            outcome.has_failed = True
            self._check_device()
        return outcome

    def _take(self, step: StepInFlight, outcome: StepOutcome) -> Exception | None:
        """Keep the rows of `step`, or return its error."""
        try:
            sampled = step.launched.collect()
            _check_rows(step.batch, sampled)
        except EngineBroken:
            raise
        except Exception as problem:  # noqa: BLE001 - as above
            self.num_failed_attempts += 1
            self.last_failure = _sentence(problem)
            return problem
        unread = _unread(step.batch, sampled) if step.batch.reads else None
        if unread:
            outcome.failed += [(sequence_id, _failure(_NOTHING_READ)) for sequence_id in unread]
            outcome.done.append(_rows_without(step.batch, sampled, unread))
        else:
            outcome.done.append((step.batch, sampled))
        return None

    def _attempt(
        self, batch: Batch, outcome: StepOutcome, error: Exception | None, *, num_tries: int
    ) -> Exception | None:
        """Retry `batch` after `error`, and keep its rows; return the last error if every try fails."""
        for _ in range(num_tries):
            error = self._take(self.launch(batch), outcome)
            if error is None:
                break
        return error

    def _divide(self, batch: Batch, error: Exception, outcome: StepOutcome, *, may_be_smaller: bool) -> None:
        """Find the failing sequences of a failed `batch`; `may_be_smaller` if shortages of memory blame none."""
        if may_be_smaller and isinstance(error, OutOfMemory):
            if outcome.too_large is None or batch.num_tokens < outcome.too_large.num_tokens:
                outcome.too_large = batch
            return
        if len(batch.rows) == 1:
            outcome.failed.append((batch.rows[0].sequence_id, _failure(error)))
            return
        for part in _parts(batch):
            problem = self._take(self.launch(part), outcome)
            if problem is not None:
                self._divide(part, problem, outcome, may_be_smaller=may_be_smaller)

    def _check_device(self) -> None:
        """Check that the device can compute a sequence of one token, in the block that no sequence uses."""
        limits = self._executor.limits
        probe = Admission(
            slot=_PROBE_SLOT,
            sequence_id=-1,
            request_id="",
            choice=0,
            sampling=Sampling(temperature=0, max_tokens=1),
            cache_salt="",
            token_ids=(0,),
            num_prompt_tokens=1,
            block_ids=(limits.num_blocks,),
            window_ids=((limits.num_blocks,),) * limits.window_groups,
        )
        row = ScheduledRow(_PROBE_SLOT, probe.sequence_id, start=0, num_tokens=1, samples=True)
        outcome = StepOutcome()
        error = self._take(self.launch(Batch((row,), admissions=(probe,))), outcome)
        if error is not None or not outcome.went_well:
            raise EngineBroken(f"the device can no longer compute: {self.last_failure or 'its logits are not finite'}")


def _parts(batch: Batch) -> tuple[Batch, Batch]:
    """Split into sequences that ran before and those that have just joined; in halves if all are of one kind."""
    rows = batch.rows
    middle = len(rows) - batch.num_joined
    if middle in (0, len(rows)):
        middle = len(rows) // 2
    return batch.part(rows[:middle]), batch.part(rows[middle:])


def _without(batch: Batch, unwanted: Set[int]) -> Batch:
    """Return `batch` without the `unwanted` sequences."""
    kept = tuple(row for row in batch.rows if row.sequence_id not in unwanted)
    joined = batch.rows[len(batch.rows) - batch.num_joined :]
    num_joined = sum(row.sequence_id not in unwanted for row in joined)
    return replace(batch.part(kept), num_joined=num_joined, padding=batch.padding)


def _rows_without(batch: Batch, sampled: list[Sampled], unwanted: Set[int]) -> tuple[Batch, list[Sampled]]:
    """Return `batch` and its rows without the `unwanted` sequences."""
    drawing = [row for row in batch.rows if row.samples]
    pairs = zip(drawing, sampled, strict=True)
    return _without(batch, unwanted), [result for row, result in pairs if row.sequence_id not in unwanted]


def _check_rows(batch: Batch, sampled: list[Sampled]) -> None:
    num_expected = sum(row.samples for row in batch.rows)
    if len(sampled) != num_expected:
        raise RuntimeError(f"the executor returned {len(sampled)} rows, not {num_expected}")


def _unread(batch: Batch, sampled: list[Sampled]) -> set[int]:
    """Return the sequences whose prompts were due (`Batch.reads`) and bring neither a result nor an error.

    Nothing would end them: a sequence that generates no token waits for its prompt alone.
    """
    drawing = (row for row in batch.rows if row.samples)
    return {
        row.sequence_id
        for row, result in zip(drawing, sampled, strict=True)
        if row.sequence_id in batch.reads and result.prompt is None and result.error is None
    }


def _failure(error: Exception) -> Finish:
    message = f"the model failed on this request: {_sentence(error)}"
    return Finish(reason=FinishReason.ERROR, error=message, failure=FailureKind.of(error))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
