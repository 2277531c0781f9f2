"""Output of a step for each choice: its new tokens, the newly visible text, and its end. Knows no tensors.

Hot module: one `ChoiceOutput.accept` per sequence and step.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from sluice.engine.batch import Batch, Masks, Read, Reads, Sampled
from sluice.engine.executor import ModelLimits, TextDecoder
from sluice.engine.request import FailureKind, Finish, FinishReason, Request, SequenceStats, TokenDelta
from sluice.engine.sequence import Sequence
from sluice.engine.text.detokenizer import Detokenizer, stream_opener
from sluice.engine.text.habits import Guess, Habits
from sluice.engine.text.logprobs import PlacedDetokenizer, bytes_reader
from sluice.engine.text.matcher import Matcher, num_bytes_with_bits, only_token, set_token
from sluice.engine.text.stopping import StopMatcher, prepared

MAX_FORCED_TOKENS = 64
"""Most tokens that a grammar adds to a choice at once, without a draw."""

_AT_ITS_LENGTH = Finish(reason=FinishReason.LENGTH)

_CONTEXT_TOKENS = 8
"""Tokens of a prompt that decide how the text that follows it begins."""


class ChoiceOutput:
    """Output of one choice so far. Mutable.

    Visible text depends only on the tokens, so an earlier attempt's tokens are replayed by accepting them again.
    """

    __slots__ = (
        "_detokenizer",
        "_known_ids",
        "_matcher",
        "_max_tokens",
        "_min_tokens",
        "_places",
        "_stats",
        "_stop_ids",
        "choice",
        "finish",
        "num_tokens",
        "request_id",
        "sequence",
    )

    def __init__(self, request: Request, sequence: Sequence, detokenizer: Detokenizer, limits: ModelLimits) -> None:
        sampling = request.sampling
        self.request_id = request.id
        self.choice = sequence.choice
        self.sequence = sequence
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._detokenizer = detokenizer
        self._places = detokenizer if isinstance(detokenizer, PlacedDetokenizer) else None
        self._matcher = StopMatcher(prepared(sampling.stop)) if sampling.stop else None
        self._known_ids = range(limits.vocab_size)
        self._stop_ids = _stop_ids(request, limits)
        self._min_tokens = sampling.min_tokens
        num_prompt_tokens = sequence.num_prompt_tokens
        self._max_tokens = limits.most_tokens(num_prompt_tokens, sampling.max_tokens) - num_prompt_tokens
        self._stats: SequenceStats | None = None

    def replay(self, token_ids: list[int]) -> None:
        """Accept tokens that were published before. Their text is not returned again, but they may end the choice."""
        for token_id in token_ids:
            # Tokens unknown to the model have no text; the request is about to be rejected.
            if token_id in self._known_ids:
                self._take(token_id)
            if self.finish is not None:
                break
        self.num_tokens = len(token_ids)

    def accept(self, row: Sampled) -> TokenDelta:
        """Accept the tokens that a step sampled and return its additions. Tokens after the end are dropped."""
        token_ids, logprobs, error, _ = row
        if error is not None:
            return self.end(Finish(reason=FinishReason.ERROR, error=error, failure=FailureKind.LOGITS))
        start = self.num_tokens
        text = ""
        for token_id in token_ids:
            text += self._take(token_id)
            if self.finish is not None:
                text += self._release()
                token_ids = token_ids[: self.num_tokens - start]
                logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                break
        if logprobs is not None and self._places is not None:
            logprobs = self._places.describe(start, token_ids, logprobs)
        # Positional arguments take half the time of keywords.
        return TokenDelta(self.request_id, self.choice, start, token_ids, text, self.stats, logprobs, self.finish)

    def end(self, finish: Finish) -> TokenDelta:
        """End the choice without a further token, releasing the text held back."""
        self.finish = finish
        text = self._release()
        return TokenDelta(
            request_id=self.request_id,
            choice=self.choice,
            start=self.num_tokens,
            token_ids=(),
            text=text,
            stats=self.stats,
            finish=self.finish,
        )

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an error."""
        return self.finish is not None and self.finish.reason is FinishReason.ERROR

    @property
    def stats(self) -> SequenceStats:
        """The sequence's statistics; rebuilt only when the scheduler has changed it."""
        if self._stats is None or self._stats.preemptions is not self.sequence.preemptions:
            self._stats = _stats(self.sequence)
        return self._stats

    def _take(self, token_id: int) -> str:
        self.num_tokens = num_tokens = self.num_tokens + 1
        may_stop = num_tokens >= self._min_tokens
        if may_stop and token_id in self._stop_ids:
            self.finish = Finish(reason=FinishReason.STOP, stop=self._stop_ids[token_id])
            return ""
        text = self._detokenizer.push(token_id)
        if self._matcher is not None:
            text = self._matcher.push(text, may_stop=may_stop)
            if self._matcher.matched is not None:
                self.finish = Finish(reason=FinishReason.STOP, stop=self._matcher.matched)
                return text
        if num_tokens >= self._max_tokens:
            self.finish = _AT_ITS_LENGTH
        return text

    def _release(self) -> str:
        """Return the text held back. A stop string in it ends the choice, if nothing else than its tokens did."""
        matcher = self._matcher
        if matcher is None:
            return self._detokenizer.flush()
        if matcher.matched is not None:
            # Text after a stop string is never shown, complete characters or not.
            return ""
        text = matcher.push(self._detokenizer.flush(), may_stop=self.num_tokens >= self._min_tokens)
        if matcher.matched is None:
            return text + matcher.release()
        if self.finish is not None and self.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finish = Finish(reason=FinishReason.STOP, stop=matcher.matched)
        return text


class ConstrainedOutput(ChoiceOutput):
    """A choice with a grammar. Its matcher depends only on the tokens, so replaying them restores it.

    Where a mask has one token, it would be drawn whatever the logits are: it is added at once. The next step computes
    all that were added, and draws after the last one.
    """

    __slots__ = ("_end_ids", "_foreseen", "_grammar", "_habits", "_has_logprobs", "_masks", "forced_ids")

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        detokenizer: Detokenizer,
        limits: ModelLimits,
        grammar: Matcher,
    ) -> None:
        super().__init__(request, sequence, detokenizer, limits)
        self._grammar = grammar
        self._end_ids = request.sampling.eos_token_ids(limits.eos_token_ids)
        self._has_logprobs = request.sampling.logprobs is not None
        self._habits = Habits()
        self._foreseen: tuple[int, ...] = ()
        """Tokens that may come next."""

        self._masks: list[bytes] = []
        """The mask of the next token, and those after the tokens foreseen, as far as they are known."""

        self.forced_ids: tuple[int, ...] = ()
        """The tokens that were added to those of the last row."""

    def mask(self) -> bytes:
        """Return the tokens that may come next, see `Masks`: all zeros if none may, and the row is about to fail."""
        if not self._masks:
            mask = self._mask_after(self.num_tokens)
            self._foreseen, self._masks = (), [mask]
            if self._grammar.problem is None and not num_bytes_with_bits(mask):
                self._grammar.problem = f"after {self.num_tokens} tokens the grammar leaves none that may follow"
                if self.num_tokens < self._min_tokens:
                    self._grammar.problem += f", and min_tokens ({self._min_tokens}) forbids the end"
        return self._masks[0]

    def masks(self, drafts: Items[int]) -> tuple[bytes, ...]:
        """Return the mask of the next token, and of one after each draft."""
        self.sequence.note_run(self._has_forced_run())
        if not drafts:
            return (self.mask(),)
        if tuple(drafts) != self._foreseen[: len(drafts)]:
            self._foresee(lambda _, number: Guess(drafts[number], 1.0) if number < len(drafts) else None)
        return tuple(self._masks[: 1 + len(drafts)])

    def guesses(self, most: int, least: float) -> tuple[int, ...]:
        """Return guesses of the next tokens, which are all right with probability `least` or more."""
        if most <= 0 or self._guess(self.mask()) is None:
            return ()
        chance = 1.0

        def guess(mask: bytes, number: int) -> Guess | None:
            nonlocal chance
            found = self._guess(mask) if number < most else None
            chance *= found.probability if found is not None else 0.0
            return found if chance >= least else None

        return self._foresee(guess)

    def _guess(self, mask: bytes) -> Guess | None:
        """Return what follows where a mask is, if it is known or likely."""
        forced = only_token(mask)
        found = Guess(forced, 1.0) if forced is not None else self._habits.guess(mask)
        return found if found is not None and found.token_id not in self._stop_ids else None

    def _foresee(self, guess: Callable[[bytes, int], Guess | None]) -> tuple[int, ...]:
        """Foresee the tokens that `guess` finds, one after the other, by mask and number; return them."""
        token_ids, masks = list[int](), [self.mask()]
        while (found := guess(masks[-1], len(token_ids))) is not None:
            self._grammar.take(found.token_id)
            token_ids.append(found.token_id)
            masks.append(self._mask_after(self.num_tokens + len(token_ids)))
        if token_ids:
            self._grammar.take_back(len(token_ids))
        self._foreseen, self._masks = tuple(token_ids), masks
        return self._foreseen

    def _has_forced_run(self) -> bool:
        """Whether the next token and the one after it are forced: they are added at once if nothing is in flight."""
        token_id = None if self._has_logprobs else only_token(self.mask())
        if token_id is None:
            return False
        self._grammar.take(token_id)
        follows = only_token(self._mask_after(self.num_tokens + 1))
        self._grammar.take_back(1)
        return follows is not None

    def fitting(self, guesses: tuple[int, ...]) -> tuple[int, ...]:
        """Return the guesses before the first one that the grammar refuses."""
        return guesses[: self._grammar.num_fitting(guesses)]

    def _mask_after(self, num_tokens: int) -> bytes:
        """Return the mask of the token that follows those which the grammar has, after so many of the choice."""
        mask = self._grammar.mask(self._end_ids)
        if num_tokens < self._min_tokens:
            for token_id in self._stop_ids:
                set_token(mask, token_id, is_allowed=False)
        return bytes(mask)

    def accept(self, row: Sampled) -> TokenDelta:
        """See `ChoiceOutput.accept`."""
        if row.error is not None and self._grammar.problem is not None:
            finish = Finish(reason=FinishReason.ERROR, error=self._grammar.problem, is_rejection=True)
            return self.end(finish)
        delta = super().accept(row)
        # What a step in flight draws next cannot be added, nor a token whose log-probabilities are asked for.
        return delta if self._has_logprobs or self.sequence.is_ahead else self._with_forced(delta)

    def _with_forced(self, delta: TokenDelta) -> TokenDelta:
        """Return the additions of a step with the tokens that must follow them."""
        forced, text = list[int](), ""
        while self.finish is None and len(forced) < MAX_FORCED_TOKENS:
            token_id = only_token(self.mask())
            if token_id is None:
                break
            forced.append(token_id)
            text += self._take(token_id)
        self.forced_ids = tuple(forced)
        if not forced:
            return delta
        if self.finish is not None:
            text += self._release()
        return delta._replace(token_ids=(*delta.token_ids, *forced), text=delta.text + text, finish=self.finish)

    def _take(self, token_id: int) -> str:
        self._pass(token_id)
        text = super()._take(token_id)
        if self.finish is None:
            self._grammar.take(token_id)
            if self._grammar.problem is not None:
                # Replayed tokens of another grammar, or an executor that ignores masks.
                self.finish = Finish(reason=FinishReason.ERROR, error=self._grammar.problem, is_rejection=True)
            elif not self._end_ids and self._grammar.is_complete:
                # No token can say so.
                self.finish = Finish(reason=FinishReason.STOP)
        return text

    def _pass(self, token_id: int) -> None:
        """Learn from the next token, and keep the masks after it if it was foreseen."""
        if self._masks:
            self._habits.note(self._masks[0], token_id)
        was_foreseen = self._foreseen[:1] == (token_id,)
        self._masks = self._masks[1:] if was_foreseen else []
        self._foreseen = self._foreseen[1:] if was_foreseen else ()


class Outputs:
    """The open choices. Mutable."""

    def __init__(self, decoder: TextDecoder, limits: ModelLimits) -> None:
        self._open_stream = stream_opener(decoder)
        self._token_bytes = bytes_reader(decoder)
        self._limits = limits
        self._by_sequence: dict[int, ChoiceOutput] = {}
        self._by_request: dict[str, list[ChoiceOutput]] = {}
        self._constrained: dict[int, ConstrainedOutput] = {}
        """Those of `_by_sequence` that have a grammar."""

        self._reads: dict[int, Read] = {}
        """By sequence: what is read of its prompt, until it has been."""

        self._unread: list[int] = []
        """Sequences that were closed before their prompts were read."""

        self._finished: list[ChoiceOutput] = []

    def make(self, request: Request, sequence: Sequence, grammar: Matcher | None = None) -> ChoiceOutput:
        """Begin the output of a choice, replaying the tokens that an earlier attempt published."""
        # Of an id that the model does not know, no decoder need know the text: the request is about to be rejected.
        last = request.prompt_token_ids[-_CONTEXT_TOKENS:] if not request.is_chat else ()
        after = [token_id for token_id in last if 0 <= token_id < self._limits.vocab_size]
        detokenizer = self._open_stream(request.sampling.skip_special_tokens, after)
        if request.sampling.logprobs is not None:
            detokenizer = PlacedDetokenizer(detokenizer, self._token_bytes)
        if grammar is None:
            output = ChoiceOutput(request, sequence, detokenizer, self._limits)
        else:
            output = ConstrainedOutput(request, sequence, detokenizer, self._limits, grammar)
        output.replay(sequence.token_ids[sequence.num_prompt_tokens :])
        return output

    def open(self, output: ChoiceOutput, read: Read | None = None) -> None:
        """Register `output` to receive rows, and what is read of its prompt."""
        if read is not None:
            self._reads[output.sequence.id] = read
        self._by_sequence[output.sequence.id] = output
        self._by_request.setdefault(output.request_id, []).append(output)
        if isinstance(output, ConstrainedOutput) and output.finish is None:
            self._constrained[output.sequence.id] = output

    def of_request(self, request_id: str) -> list[ChoiceOutput]:
        """Return the open choices of a request; none if it is unknown."""
        return list(self._by_request.get(request_id, ()))

    def close(self, outputs: Iterable[ChoiceOutput]) -> None:
        """Forget choices that ended or are no longer wanted."""
        for output in outputs:
            del self._by_sequence[output.sequence.id]
            self._constrained.pop(output.sequence.id, None)
            if self._reads.pop(output.sequence.id, None) is not None:
                self._unread.append(output.sequence.id)
            siblings = self._by_request[output.request_id]
            siblings.remove(output)
            if not siblings:
                del self._by_request[output.request_id]

    @property
    def sequence_ids(self) -> set[int]:
        """The sequences whose choices are open."""
        return set(self._by_sequence)

    @property
    def are_constrained(self) -> bool:
        """Whether any open choice has a grammar."""
        return bool(self._constrained)

    def lack_masks(self, batch: Batch) -> bool:
        """Whether the mask of a row depends on a token that is in flight."""
        constrained = self._constrained
        return any(
            samples and sequence_id in constrained and start >= constrained[sequence_id].sequence.num_tokens
            for _, sequence_id, start, _, samples in batch.rows
        )

    def masks(self, batch: Batch) -> Masks:
        """Return the masks of a step's rows. All tokens before those that they sample have been read."""
        constrained = self._constrained
        return {
            sequence_id: constrained[sequence_id].masks(batch.drafts.get(sequence_id, ()))
            for _, sequence_id, _, _, samples in batch.rows
            if samples and sequence_id in constrained
        }

    def take_unread(self) -> tuple[int, ...]:
        """Return the sequences that were closed since the last call, before their prompts were read."""
        unread, self._unread = tuple(self._unread), []
        return unread

    @property
    def has_unread(self) -> bool:
        """Whether `take_unread` returns any."""
        return bool(self._unread)

    @property
    def are_reading(self) -> bool:
        """Whether any open choice reads its prompt."""
        return bool(self._reads)

    def reads(self, batch: Batch) -> Reads:
        """Return what the rows of a step read. One that follows a token in flight has been read by that step."""
        reads, by_sequence = self._reads, self._by_sequence
        return {
            sequence_id: reads[sequence_id]
            for _, sequence_id, start, _, _ in batch.rows
            if sequence_id in reads and start < by_sequence[sequence_id].sequence.num_tokens
        }

    def fitting(self, sequence_id: int, guesses: tuple[int, ...]) -> tuple[int, ...]:
        """Return the guesses of the next tokens of a sequence, up to the first one that its grammar refuses."""
        output = self._constrained.get(sequence_id)
        return guesses if output is None else output.fitting(guesses)

    def guesses(self, sequence_id: int, most: int, least: float) -> tuple[int, ...]:
        """Return what the grammar of a sequence, if it has one, makes likely: see `ConstrainedOutput.guesses`."""
        output = self._constrained.get(sequence_id)
        return () if output is None else output.guesses(most, least)

    def take_finished(self) -> list[ChoiceOutput]:
        """Return the choices that `read` or `fail` ended since the last call, and are still open."""
        finished, self._finished = self._finished, []
        return finished

    def read(self, batch: Batch, sampled: list[Sampled]) -> list[TokenDelta]:
        """Return the additions of a step to each choice that sampled a token."""
        by_sequence = self._by_sequence
        outputs = [by_sequence[sequence_id] for _, sequence_id, _, _, samples in batch.rows if samples]
        deltas = [output.accept(result) for output, result in zip(outputs, sampled, strict=True)]
        if batch.reads:
            deltas = list(map(self._with_prompt, outputs, sampled, deltas))
        self._finished += [output for output in outputs if output.finish is not None]
        return deltas

    def take_forced(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Return the open sequences to which the grammars of the rows last read have added tokens, and these."""
        forced = [output for output in self._constrained.values() if output.forced_ids]
        taken = [(output.sequence, output.forced_ids) for output in forced if output.finish is None]
        for output in forced:
            output.forced_ids = ()
        return taken

    def _with_prompt(self, output: ChoiceOutput, row: Sampled, delta: TokenDelta) -> TokenDelta:
        """Add what was read of a prompt; it ends a choice that generates nothing."""
        if row.prompt is None:
            return delta
        output.sequence.note_read()
        self._reads.pop(output.sequence.id, None)
        if output.sequence.sampling.max_tokens == 0:
            is_text = row.prompt.embedding is None
            finish = Finish(reason=FinishReason.LENGTH if is_text else FinishReason.STOP)
            delta = output.end(output.finish or finish)
        sequence = output.sequence
        stream = self._open_stream(sequence.sampling.skip_special_tokens, [])
        token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        return delta._replace(prompt=PlacedDetokenizer(stream, self._token_bytes).read(row.prompt, token_ids))

    def fail(self, sequence_id: int, finish: Finish) -> TokenDelta:
        """End the open choice that a sequence generates."""
        output = self._by_sequence[sequence_id]
        self._finished.append(output)
        return output.end(finish)


def _stop_ids(request: Request, limits: ModelLimits) -> dict[int, int | None]:
    """Map token ids that end the output to the value of `Finish.stop`."""
    sampling = request.sampling
    eos: dict[int, int | None] = dict.fromkeys(sampling.eos_token_ids(limits.eos_token_ids))
    return eos | {token_id: token_id for token_id in sampling.stop_token_ids}


def _stats(sequence: Sequence) -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        preemptions=sequence.preemptions,
        first_scheduled_s=sequence.first_scheduled_s,
        num_resumed_tokens=sequence.num_resumed_tokens,
    )
