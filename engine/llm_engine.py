"""Turn requests into tokens, one step at a time. Read `LLMEngine.step` first."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.errors import RequestRejected
from sluice.engine.execution.isolation import IsolatingExecutor, StepInFlight, StepOutcome
from sluice.engine.executor import Executor, Preparing, TextDecoder
from sluice.engine.request import ChoiceProgress, Finish, FinishReason, Request, Room, TokenDelta
from sluice.engine.scheduling.disciplines import make_scheduler
from sluice.engine.sequence import Sequence
from sluice.engine.text.output import ChoiceOutput, Outputs
from sluice.engine.validation import check_request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Current state of the engine, for metrics and status."""

    num_running: int
    num_waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    """Slots of blocks held by running sequences (cached but unreferenced blocks count as free)."""

    num_preemptions: int
    """Since the engine was created, as are the next five."""

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_failed_attempts: int
    """Attempts at a step, or at a part of one, that raised."""

    last_failure: str | None
    """Message of the last failed attempt."""


class LLMEngine:
    """The engine: `add`, `abort`, `step`. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        executor: Executor,
        decoder: TextDecoder,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an idle engine.

        Raises:
            ValueError: settings of `config` contradict each other.
        """
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self._config = config
        self._limits = executor.limits
        self._isolating = IsolatingExecutor(executor, max_retries=config.max_step_retries)
        self._scheduler = make_scheduler(config, self._limits, clock)
        self._outputs = Outputs(decoder, self._limits)
        self._lag = executor.lag if self._scheduler.may_overlap else 0
        self._preparing = executor if isinstance(executor, Preparing) else None
        self._in_flight: StepInFlight | None = None
        """The step launched last, between two calls of `step`. Always None at lag 0."""

        self._sequence_ids = count()
        self._ended: list[TokenDelta] = []
        self._num_steps = 0
        self._num_output_tokens = 0

    def validate(self, request: Request) -> None:
        """Check that `request` can ever run here. Reads no mutable state: any thread may call it.

        Raises:
            RequestRejected: it cannot; the message gives the numbers.
        """
        check_request(request, self._limits)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue `requests` for their first step.

        An invalid request does not raise and does not affect the others: its rejection is among the next step's deltas.
        A request whose id is already known replaces the older one, which yields nothing more.
        """
        for request in requests:
            self.drop([request.id])
            try:
                self.validate(request)
            except RequestRejected as rejection:
                self._end(request, Finish(reason=FinishReason.ERROR, error=str(rejection), is_rejection=True))
            else:
                self._start(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each unfinished choice yields an ABORTED delta in the next step. Unknown ids are ignored."""
        # Deduplicate: an id may be given more than once.
        aborted = [
            output for request_id in dict.fromkeys(request_ids) for output in self._outputs.of_request(request_id)
        ]
        self._ended += [output.end(Finish(reason=FinishReason.ABORTED)) for output in aborted]
        self._retire(aborted)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests at once, without further output (their lease was lost). Unknown ids are ignored."""
        dropped = set(request_ids)
        self._retire([output for request_id in dropped for output in self._outputs.of_request(request_id)])
        self._ended = [delta for delta in self._ended if delta.request_id not in dropped]

    def step(self) -> list[TokenDelta]:
        """Launch the next step and return the output of the step that is due.

        At lag 0 these are the same step. At lag 1 the due step is the previous one, which ran while this one was
        planned;
        a call returns nothing if no step is due, and launches nothing if there is nothing to plan.

        Raises:
            EngineBroken: the device is lost; nothing more can run in this process.
        """
        launched = self._launch(self._scheduler.schedule())
        due, self._in_flight = (self._in_flight, launched) if self._lag else (launched, None)
        if due is None:
            if self._preparing is not None and self.is_idle:
                self._preparing.prepare()
            return self._take_ended()
        outcome = self._isolating.collect(due, unwanted=self._scheduler.ended_ids)
        deltas = self._take_ended()
        for part, sampled in outcome.done:
            self._scheduler.commit(part, sampled)
            deltas += self._outputs.read(part, sampled)
        deltas += [self._outputs.of_sequence(sequence_id).end(finish) for sequence_id, finish in outcome.failed]
        # Before landing: a preempted sequence still holds its blocks then, and a failed row must remove them from the
        # prefix index.
        self._retire(self._outputs.finished())
        self._land(due, outcome)
        self._count(deltas)
        return deltas

    def room(self) -> Room:
        """Return what can start within the next steps; all zero while any sequence waits for room."""
        return self._scheduler.room()

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to compute and nothing to return."""
        return not (self._scheduler.running or self._scheduler.waiting or self._ended or self._in_flight)

    @property
    def idle_s(self) -> float:
        """Seconds until a step has something to do: 0 if it has now, infinity if no request is known.

        Between the two while a discipline gathers a batch: see `sluice.engine.scheduling.comparison`.
        """
        if self._scheduler.running or self._ended or self._in_flight:
            return 0.0
        if self._scheduler.waiting:
            return self._scheduler.gathering_s
        return 0.0 if self._preparing is not None and self._preparing.has_preparations else float("inf")

    @property
    def stats(self) -> EngineStats:
        """Current state of the engine."""
        scheduler = self._scheduler
        num_used = self._limits.num_blocks - scheduler.blocks.num_free_blocks
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_tokens_total=self._limits.num_blocks * self._limits.block_size,
            kv_tokens_used=num_used * self._limits.block_size,
            num_preemptions=scheduler.counters.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.counters.num_prompt_tokens,
            num_cached_tokens=scheduler.counters.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_failed_attempts=self._isolating.num_failed_attempts,
            last_failure=self._isolating.last_failure,
        )

    def describe(self) -> list[str]:
        """Return one line per sequence with its state (for SIGUSR1)."""
        return [str(sequence) for sequence in self._scheduler.known]

    def check_invariants(self) -> None:
        """Check the invariants of blocks and sequences; for tests and debugging.

        Raises:
            AssertionError: an invariant is violated.
        """
        self._scheduler.check_invariants()
        known = {sequence.id for sequence in self._scheduler.known}
        assert known == self._outputs.sequence_ids, "sequences and open choices do not match"
        assert self._in_flight or not self._scheduler.leaving, "blocks are kept for a step that has completed"

    def _launch(self, batch: Batch) -> StepInFlight | None:
        if batch.is_empty:
            return None
        launched = self._isolating.launch(batch)
        if self._lag:
            self._scheduler.launch(batch)
        return launched

    def _land(self, step: StepInFlight, outcome: StepOutcome) -> None:
        """Mark `step` as no longer in flight, and the step launched on top of it too if it failed."""
        if self._lag:
            self._scheduler.land(step.batch)
        if outcome.has_failed and self._in_flight is not None:
            self._scheduler.land(self._in_flight.batch)
            self._in_flight = None
        if outcome.lacked_memory:
            self._scheduler.shrink(step.batch)

    def _start(self, request: Request) -> None:
        for choice, progress in enumerate(_progress(request)):
            if progress.is_finished:
                continue
            output = self._outputs.make(request, self._sequence(request, choice, progress))
            if output.finish is not None:
                self._ended.append(output.end(output.finish))
                continue
            self._outputs.open(output)
            self._scheduler.add(output.sequence)

    def _end(self, request: Request, finish: Finish) -> None:
        """End choices that never started."""
        for choice, progress in enumerate(_progress(request)):
            if not progress.is_finished:
                output = self._outputs.make(request, self._sequence(request, choice, progress))
                self._ended.append(output.end(finish))

    def _sequence(self, request: Request, choice: int, progress: ChoiceProgress) -> Sequence:
        return Sequence(
            id=next(self._sequence_ids),
            request_id=request.id,
            choice=choice,
            sampling=request.sampling,
            priority=request.priority,
            arrival_s=request.arrival_s,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            token_ids=[*request.prompt_token_ids, *progress.token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            num_resumed_tokens=len(progress.token_ids),
        )

    def _retire(self, outputs: list[ChoiceOutput]) -> None:
        """Release the sequences of choices that ended or are no longer wanted."""
        if not outputs:
            return
        self._outputs.close(outputs)
        self._scheduler.finish(
            [output.sequence for output in outputs],
            # A failed row may have left wrong keys and values in its blocks: remove them from the prefix index.
            suspects=[output.sequence for output in outputs if output.has_failed],
        )

    def _take_ended(self) -> list[TokenDelta]:
        ended, self._ended = self._ended, []
        return ended

    def _count(self, deltas: list[TokenDelta]) -> None:
        self._num_steps += 1
        self._num_output_tokens += sum(len(delta.token_ids) for delta in deltas)


def _progress(request: Request) -> tuple[ChoiceProgress, ...]:
    """Return the published progress of each choice; empty progress where the request has none."""
    missing = max(1, request.num_choices) - len(request.progress)
    return request.progress + (ChoiceProgress(),) * missing
