"""Turn requests into tokens, one step at a time. Read `LLMEngine.step` first."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

from sluice.engine.batch import NO_MASKS, Batch, Read
from sluice.engine.config import EngineConfig
from sluice.engine.errors import RequestRejected
from sluice.engine.execution.isolation import IsolatingExecutor, StepInFlight, StepOutcome
from sluice.engine.executor import Executor, Preparing, TextDecoder
from sluice.engine.interface import EngineStats
from sluice.engine.request import ChoiceProgress, Finish, FinishReason, Request, Room, TokenDelta
from sluice.engine.scheduling.disciplines import make_scheduler
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.choice import make_source
from sluice.engine.speculation.grammar_drafts import GrammarDrafts
from sluice.engine.speculation.source import DraftSource, Fallback, Fitting
from sluice.engine.text.grammars import Compiler, Refused
from sluice.engine.text.matcher import CompiledGrammar
from sluice.engine.text.output import ChoiceOutput, Outputs
from sluice.engine.validation import check_request
from sluice.engine.watching import Watcher, Watching

STALLED_S = 2.0
"""A preempted request that has had no place for this long is stalled. Before, it is likely to run again soon, and the
prefix cache has most of it."""

_COMPILING_S = 0.002
"""Seconds until an engine that has nothing else to do looks again whether a grammar is compiled."""

_NO_PROGRESS = ChoiceProgress()

_SEQUENCE_IDS = count()
"""Of all engines of a process: a model keeps rows by them, and may have two engines, one after the other or at once."""


class LLMEngine:
    """The engine: `add`, `abort`, `advance`. Not thread-safe: one thread owns it."""

    num_uncounted = 0
    """Requests that were added and that `room` does not know of yet. An engine in another process has some."""

    def __init__(
        self,
        executor: Executor,
        decoder: TextDecoder,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        draft_source: DraftSource | None = None,
        draft_model: Executor | None = None,
    ) -> None:
        """Create an idle engine.

        Args:
            executor: computes the steps.
            decoder: turns tokens into text.
            config: limits and options of the scheduler.
            clock: seconds, monotonic.
            draft_source: guesses tokens to be verified, instead of the source that `config.speculation` names.
            draft_model: guesses with `config.speculation` where earlier text does not, in steps of
                `StepLimits.of_draft_model`. It has the vocabulary of `executor`. Steps do not overlap then.

        Raises:
            ValueError: settings of `config` contradict each other.
        """
        problems = config.problems()
        if draft_model is not None and config.speculation == "off":
            problems.append("a draft model needs speculation, which is off")
        if problems:
            raise ValueError("; ".join(problems))
        self._config = config
        self._limits = executor.limits
        self._clock = clock
        self._isolating = IsolatingExecutor(executor, max_retries=config.max_step_retries, clock=clock)
        if draft_source is None:
            draft_source = make_source(config, draft_model, self._limits.vocab_size, clock)
        self._outputs = Outputs(decoder, self._limits)
        if draft_source is not None:
            fitting = Fitting(draft_source, self._outputs.fitting)
            draft_source = Fallback(fitting, GrammarDrafts(self._outputs.guesses))
        # A draft model reads a sequence's last token, which only the device has while a step is in flight.
        lag = executor.lag if draft_model is None else 0
        self._scheduler = make_scheduler(config, self._limits, clock, draft_source, lag=lag)
        self._compiler = Compiler(decoder, self._limits.vocab_size)
        self._watching: Watching | None = None
        """Describes the iterations while someone watches."""

        self._preparing = executor if isinstance(executor, Preparing) else None
        self._in_flight: StepInFlight | None = None
        """The step launched last, between two calls of `step_overlapped`. Always None with `step`."""

        self._ended: list[TokenDelta] = []
        self._num_steps = 0
        self._num_rows = 0
        self._num_output_tokens = 0

    def validate(self, request: Request) -> None:
        """Check that `request` can ever run here. Reads no mutable state: any thread may call it.

        Raises:
            RequestRejected: it cannot; the message gives the numbers.
        """
        check_request(request, self._limits, step_tokens=self._config.max_num_batched_tokens)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue `requests` for their first step.

        An invalid request does not raise and does not affect the others: its rejection is among the next step's deltas.
        A request whose id is already known replaces the older one, which yields nothing more.
        """
        # Of two with one id, the later replaces the earlier.
        by_id = {request.id: request for request in requests}
        self.drop(by_id)
        for request in by_id.values():
            try:
                self.validate(request)
            except RequestRejected as rejection:
                self._start(request, _rejected(str(rejection)))
                continue
            if request.grammar is not None:
                # It starts in the first step after its grammar was compiled.
                self._compiler.add(request, request.grammar)
            else:
                self._start(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each unfinished choice yields an ABORTED delta in the next step. Unknown ids are ignored."""
        # Deduplicate: an id may be given more than once.
        request_ids = list(dict.fromkeys(request_ids))
        for request in self._compiler.take_back(request_ids):
            self._start(request, Finish(reason=FinishReason.ABORTED))
        aborted = [output for request_id in request_ids for output in self._outputs.of_request(request_id)]
        self._ended += [output.end(Finish(reason=FinishReason.ABORTED)) for output in aborted]
        self._retire(aborted)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests at once, without further output (their lease was lost). Unknown ids are ignored."""
        dropped = set(request_ids)
        if not dropped:
            return
        self._compiler.take_back(dropped)
        self._retire([output for request_id in dropped for output in self._outputs.of_request(request_id)])
        self._ended = [delta for delta in self._ended if delta.request_id not in dropped]

    def advance(self) -> list[TokenDelta]:
        """Step as the executor can: `step_overlapped` on a device that lags, `step` on any other. Call only this one.

        Raises:
            EngineBroken: the device is lost; nothing more can run in this process.
        """
        deltas = self.step_overlapped() if self._scheduler.overlaps else self.step()
        if (watching := self._watching) is not None:
            watching.note_step(deltas)
        return deltas

    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence by one step, and return the tokens that it produced.

        Raises:
            EngineBroken: the device is lost; nothing more can run in this process.
        """
        batch = self._plan()
        if batch.is_empty:
            return self._deltas_of_no_step()
        outcome = self._isolating.collect(self._isolating.launch(batch))
        deltas = self._commit(batch, outcome)
        if outcome.too_large is not None:
            self._scheduler.shrink(outcome.too_large)
        return deltas

    def step_overlapped(self) -> list[TokenDelta]:
        """Launch the next step while the previous one runs, and return the previous one's tokens.

        The same verbs as in `step`, with the same tokens. A call returns the output of no step if none was in flight,
        and launches nothing if there is nothing to plan.

        Raises:
            EngineBroken: the device is lost; nothing more can run in this process.
        """
        due, self._in_flight = self._in_flight, self._launch_on_top(self._plan())
        if due is None:
            return self._deltas_of_no_step()
        outcome = self._isolating.collect(due, unwanted=self._scheduler.ended_ids)
        # Before landing: a preempted sequence still holds its blocks then, and a failed row must remove them from the
        # prefix index.
        deltas = self._commit(due.batch, outcome)
        self._scheduler.land(due.batch)
        if outcome.has_failed and self._in_flight is not None:
            # It has read tokens that were never sampled.
            self._scheduler.land(self._in_flight.batch)
            self._in_flight = None
        if self._in_flight is not None and self._in_flight.batch.draws_later:
            # All tokens before its own are known now.
            self._in_flight = self._isolating.draw(self._in_flight, self._outputs.masks(self._in_flight.batch))
        if outcome.too_large is not None:
            self._scheduler.shrink(outcome.too_large)
        return deltas

    def stalled(self) -> list[str]:
        """Return the preempted requests that have waited for `STALLED_S` and have no running sequence."""
        return self._scheduler.stalled_requests(STALLED_S)

    def look_ahead(self, seconds: float) -> None:
        """Set for how long ahead `room` counts the places of sequences that end for certain, by their limits."""
        self._scheduler.look_ahead(seconds)

    def room(self) -> Room:
        """Return what can start within the next steps; while a sequence waits for more, only `Room.over_class`."""
        room = self._scheduler.room()
        return room.without(self._compiler.waiting) if self._compiler.waiting else room

    @property
    def max_request_tokens(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self._limits.longest_request(self._config.max_num_batched_tokens)

    @property
    def most_offered_tokens(self) -> int:
        """Cache tokens of the largest request that an idle engine has room for."""
        return self._limits.most_offered_tokens(self._config.max_num_batched_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to compute and nothing to return."""
        has_sequences = self._scheduler.running or self._scheduler.waiting or self._in_flight
        return not (has_sequences or self._ended or self._compiler.waiting)

    @property
    def idle_s(self) -> float:
        """Seconds until a step has something to do: 0 if it has now, infinity if no request is known.

        Between the two while a grammar is compiled, or a discipline gathers a batch: see
        `sluice.engine.scheduling.comparison`.
        """
        if self._scheduler.running or self._ended or self._in_flight:
            return 0.0
        if self._compiler.waiting:
            return _COMPILING_S
        if self._scheduler.waiting:
            return self._scheduler.gathering_s
        return 0.0 if self._preparing is not None and self._preparing.has_preparations else float("inf")

    @property
    def stats(self) -> EngineStats:
        """Current state of the engine."""
        scheduler = self._scheduler
        limits, num_used = self._limits, self._limits.num_blocks - scheduler.blocks.num_free_blocks
        return EngineStats(
            num_places=self._config.max_num_seqs,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + sum(request.num_choices for request in self._compiler.waiting),
            kv_tokens_total=limits.num_cache_tokens,
            kv_tokens_used=-(-num_used // limits.blocks_per_entry) * limits.block_size,
            num_preemptions=scheduler.counters.num_preemptions,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_prompt_tokens=scheduler.counters.num_prompt_tokens,
            num_cached_tokens=scheduler.counters.num_cached_tokens,
            num_loaded_tokens=scheduler.counters.num_loaded_tokens,
            num_output_tokens=self._num_output_tokens,
            num_drafted_tokens=scheduler.counters.num_drafted_tokens,
            num_accepted_tokens=scheduler.counters.num_accepted_tokens,
            num_failed_attempts=self._isolating.num_failed_attempts,
            last_failure=self._isolating.last_failure,
        )

    def watch(self, watcher: Watcher | None) -> None:
        """Describe each iteration to `watcher` from now on; None ends it. Any thread may call it.

        The watcher is called by the engine's thread between two steps.
        """
        self._watching = None if watcher is None else Watching(self._scheduler, watcher, self._clock)

    @property
    def is_watched(self) -> bool:
        """Whether iterations are described."""
        return self._watching is not None

    def describe(self) -> list[str]:
        """Return one line per sequence with its state (for SIGUSR1)."""
        compiling = [f"{request.id}: its grammar is being compiled" for request in self._compiler.waiting]
        return [str(sequence) for sequence in self._scheduler.known] + compiling

    def check_invariants(self) -> None:
        """Check the invariants of blocks and sequences; for tests and debugging.

        Raises:
            AssertionError: an invariant is violated.
        """
        self._scheduler.check_invariants()
        known = {sequence.id for sequence in self._scheduler.known}
        assert known == self._outputs.sequence_ids, "sequences and open choices do not match"
        assert self._in_flight or not self._scheduler.leaving, "blocks are kept for a step that has completed"

    def _plan(self) -> Batch:
        for request, grammar in self._compiler.take_ready() if self._compiler.waiting else ():
            self._start(request, grammar=grammar)
        batch = self._scheduler.schedule()
        if self._outputs.are_constrained:
            is_later = self._outputs.lack_masks(batch)
            batch = replace(batch, draws_later=is_later, masks=NO_MASKS if is_later else self._outputs.masks(batch))
        if self._outputs.are_reading:
            batch = replace(batch, reads=self._outputs.reads(batch))
        if self._outputs.has_unread and not batch.is_empty:
            batch = replace(batch, unread=self._outputs.take_unread())
        if (watching := self._watching) is not None:
            watching.note_plan(batch)
        return batch

    def _launch_on_top(self, batch: Batch) -> StepInFlight | None:
        """Launch `batch` on top of the step in flight."""
        if batch.is_empty:
            return None
        launched = self._isolating.launch(batch)
        self._scheduler.launch(batch)
        return launched

    def _commit(self, batch: Batch, outcome: StepOutcome) -> list[TokenDelta]:
        """Advance the sequences of a collected step, end those that are done, and return their tokens."""
        deltas = self._take_ended()
        if not outcome.has_failed:
            self._scheduler.note_time(batch, outcome.taken_s)
        elif outcome.has_lost_drafts:
            self._scheduler.rest_from_drafts()
        for part, sampled in outcome.done:
            self._scheduler.commit(part, sampled)
            self._num_rows += len(part.rows)
            deltas += self._outputs.read(part, sampled)
        for sequence, token_ids in self._outputs.take_forced() if self._outputs.are_constrained else ():
            self._scheduler.extend(sequence, token_ids)
        deltas += [self._outputs.fail(sequence_id, finish) for sequence_id, finish in outcome.failed]
        self._retire(self._outputs.take_finished())
        self._count(deltas)
        return deltas

    def _deltas_of_no_step(self) -> list[TokenDelta]:
        """Return the ends of requests that no step computed; use the time if there is nothing else to do."""
        if self._preparing is not None and self.is_idle:
            self._preparing.prepare()
        return self._take_ended()

    def _start(
        self, request: Request, rejected: Finish | None = None, *, grammar: CompiledGrammar | Refused | None = None
    ) -> None:
        """Queue the unfinished choices of a request; if it is rejected, or its output so far ends them, end them."""
        if isinstance(grammar, Refused):
            rejected, grammar = _rejected(grammar.reason, is_rejection=grammar.is_final), None
        # The prompt is read by one choice, for all of them.
        read, ended = read_of(request), list[tuple[ChoiceOutput, Finish]]()
        for choice, progress in enumerate(_progress(request)):
            if progress.is_finished:
                continue
            matcher = None if grammar is None else grammar.matcher_of_choice()
            sequence = self._sequence(request, choice, progress, needs_all=read is not None and read.needs_all)
            output = self._outputs.make(request, sequence, matcher)
            if finish := rejected or output.finish:
                ended.append((output, finish))
                continue
            self._outputs.open(output, read)
            read = None
            self._scheduler.add(output.sequence)
        if read is not None and ended and ended[-1][1].reason is not FinishReason.ERROR:
            self._read_alone(request, ended.pop()[0], read)
        self._ended += [output.end(finish) for output, finish in ended]

    def _read_alone(self, request: Request, output: ChoiceOutput, read: Read) -> None:
        """Read the prompt for a choice whose tokens an earlier attempt has generated; it ends once that is done."""
        silent = replace(request, sampling=replace(request.sampling, max_tokens=0))
        output.sequence = self._sequence(silent, output.choice, ChoiceProgress(), needs_all=read.needs_all)
        self._outputs.open(output, read)
        self._scheduler.add(output.sequence)

    def _sequence(self, request: Request, choice: int, progress: ChoiceProgress, *, needs_all: bool) -> Sequence:
        return Sequence(
            id=next(_SEQUENCE_IDS),
            request_id=request.id,
            choice=choice,
            sampling=request.sampling,
            priority=request.priority,
            cache_salt=_salt_of(request),
            adapter=request.adapter,
            targets=request.targets,
            needs_all=needs_all,
            token_ids=[*request.prompt_token_ids, *progress.token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            num_resumed_tokens=len(progress.token_ids),
            most_ahead_tokens=self._limits.most_cached_tokens(
                len(request.prompt_token_ids), request.sampling.max_tokens
            ),
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


def read_of(request: Request) -> Read | None:
    """Return what a request reads of its prompt besides the next token."""
    if request.embed is None and request.sampling.prompt_logprobs is None:
        return None
    return Read(request.embed, request.sampling.prompt_logprobs)


def _salt_of(request: Request) -> str:
    """Return the salt of the blocks of a request: those of an adapter have keys and values of its own."""
    # No name of an adapter has a NUL.
    return f"{request.adapter}\0{request.cache_salt}" if request.adapter else request.cache_salt


def _rejected(reason: str, *, is_rejection: bool = True) -> Finish:
    return Finish(reason=FinishReason.ERROR, error=reason, is_rejection=is_rejection)


def _progress(request: Request) -> tuple[ChoiceProgress, ...]:
    """Return the published progress of each choice; empty progress where the request has none."""
    missing = max(1, request.num_choices) - len(request.progress)
    return request.progress + (_NO_PROGRESS,) * missing
