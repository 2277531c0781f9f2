"""Speculation: add drafts to the decodes of a planned step, where they pay. Read `Drafting.extend`.

A row with drafts computes its next token and the drafts after it, and samples after each. `Scheduler.commit` keeps what
was verified (`sluice.engine.speculation.verification`); keys and values of wrong drafts are overwritten by later steps,
since only tokens that were kept count as computed.

Drafts take the rest: of the step's tokens, and of the blocks beyond one for each running sequence, so they never
cause a preemption, and prompts go first.

While a step is in flight (lag 1), its tokens are known only to the device. A sequence with drafts in flight waits until
they have landed, so it computes in every second step: it must have enough drafts to make up for the step that it
misses. One that has enough waits for the step in flight, if the next step has room for its drafts.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from sluice.engine.batch import MAX_DRAFTS, Batch
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.scheduling.row_slots import RowSlots
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.payoff import Payoff
from sluice.engine.speculation.source import MAX_DEPTH, DraftSource, Worth
from sluice.engine.speculation.worth import MOST_PROBABLE, DraftWorth

_LEAST_YIELD = 0.05
"""Least expected right drafts per row for a step to get any: with drafts, the host takes longer to lay it out."""

_LEAST_RIGHT = 1.5
"""Right drafts to be expected of a sequence that misses a step for them, in which it would have got a token."""

_FIRST_SHARE = 0.5
"""Assumed share of drafts that are right, until some were verified."""

_MEMORY = 48
"""Drafts over which the share is averaged."""

_TRIES_AFTER = 128
"""Steps without drafts after which some are tried again, however few were right."""


_REST = 128
"""Steps without drafts after one that failed with drafts and succeeded without."""


@dataclass(slots=True, eq=False)
class _Offers:
    """Guesses that fit one step, by sequence id. Mutable."""

    room: int
    """Further drafts that the step may have."""

    num_drafts: int = 0
    guesses: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    def add(self, sequence: Sequence, guesses: tuple[int, ...]) -> None:
        """Offer `guesses`, for which there is room, to `sequence`."""
        self.guesses[sequence.id] = guesses
        self.num_drafts += len(guesses)
        self.room -= len(guesses)


class Drafting:
    """Drafts of the running sequences. Mutable."""

    def __init__(
        self,
        source: DraftSource,
        limits: ModelLimits,
        blocks: BlockManager,
        slots: RowSlots,
        clock: Callable[[], float],
        *,
        overlaps: bool,
    ) -> None:
        """Start without knowledge.

        Args:
            source: guesses.
            limits: of the model.
            blocks: of the scheduler.
            slots: of the scheduler.
            clock: seconds, monotonic.
            overlaps: whether a step is planned while another one is in flight.
        """
        self._source = source
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._clock = clock
        self._overlaps = overlaps
        self._worth = DraftWorth()
        self._payoff = Payoff()
        """Of the steps in which only the surest drafts pay."""

        self._share = _FIRST_SHARE
        """Of verified drafts that were right."""

        self._counted = (0, 0)
        """Drafts that were verified, and that were right, when the last step was planned."""

        self._num_without = 0
        """Steps since the last one with drafts."""

        self._num_resting = 0
        """Steps that get none."""

        self._draft_s = 0.0
        """Time that the guesses of the last step took."""

        self._last: tuple[Batch, float, int] | None = None
        """The last step if it only decoded, when it was planned, and how many drafts had been right until then."""

    def extend(
        self, batch: Batch, *, tokens_left: int, running: Items[Sequence], num_drafted: int, num_accepted: int
    ) -> Batch:
        """Return the planned step with drafts, and without sequences that wait for the step in flight.

        Args:
            batch: the step, without writes.
            tokens_left: tokens that the step may compute besides.
            running: the running sequences; a block for each stays free.
            num_drafted: drafts of all steps so far.
            num_accepted: those that were right.
        """
        if self._num_resting:
            self._num_resting -= 1
            self._last = None
            return batch
        self._note_last(batch, num_accepted)
        worth = self._worth.of_step(len(batch.rows))
        self._note_share(num_drafted, num_accepted, worth)
        room = min(MAX_DRAFTS, tokens_left)
        drafts, waiting = ({}, {}) if self._is_idle(worth) else self._guesses(batch, room, running, worth)
        self._num_without = 0 if drafts else self._num_without + 1
        if drafts or waiting:
            rows = tuple(row for row in batch.rows if row.sequence_id not in waiting)
            batch = replace(batch, rows=rows, drafts=drafts)
        is_decode = bool(batch.rows) and all(row.num_tokens == 1 for row in batch.rows)
        self._last = (batch, self._clock(), num_accepted) if is_decode else None
        return batch

    def rest(self) -> None:
        """Let steps have no drafts for a while: one failed with drafts, of memory for instance, and not without."""
        self._num_resting = _REST

    def end(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that have ended."""
        for sequence in sequences:
            self._source.end(sequence)

    def _guesses(
        self, batch: Batch, room: int, running: Items[Sequence], worth: Worth
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Return the drafts of this step, and those of the next one, whose sequences wait for it."""
        now, later = self._offers(batch, room, running, worth)
        least = _LEAST_YIELD * len(batch.rows) / worth.probability
        waiting = later.guesses if later.num_drafts >= least else {}
        return self._with_blocks(batch, now.guesses, len(running)) if now.num_drafts >= least else {}, waiting

    def _offers(self, batch: Batch, room: int, running: Items[Sequence], worth: Worth) -> tuple[_Offers, _Offers]:
        """Return the guesses for this step, and those that the next step will have, of sequences that wait for it."""
        # One that was forced to add tokens decodes more than one of them.
        decodes = [
            (sequence, row.start < len(sequence.token_ids))
            for row, sequence in zip(batch.rows, self._slots.of(batch), strict=True)
            if row.samples and (row.num_tokens == 1 or row.start >= sequence.num_prompt_tokens)
        ]
        began_s = self._clock()
        proposed = self._source.propose([sequence for sequence, _ in decodes], room=room, worth=worth)
        self._draft_s = self._clock() - began_s
        if worth.probability >= MOST_PROBABLE:
            self._payoff.spend(self._draft_s * worth.tokens_per_s)
        # Sequences whose drafts are in flight will have drafts in the next step, too.
        num_in_flight = sum(sequence.num_launched_drafts for sequence in running) if self._overlaps else 0
        now, later = _Offers(room), _Offers(room - num_in_flight, num_in_flight)
        for (sequence, is_known), guesses in zip(decodes, proposed, strict=True):
            offers = now if is_known else later
            most = max(0, min(offers.room, MAX_DEPTH))
            if guesses and (fitting := self._fitting(sequence, guesses[:most], len(running))):
                offers.add(sequence, fitting)
        return now, later

    def _fitting(self, sequence: Sequence, guesses: tuple[int, ...], num_spare: int) -> tuple[int, ...]:
        """Return the guesses before the last token of `sequence` for which there are blocks; none if too few.

        `num_spare` of the free blocks are not for drafts.
        """
        most = self._limits.most_cached_tokens(sequence.num_prompt_tokens, sequence.sampling.max_tokens)
        num_free = max(0, self._blocks.num_free_blocks // self._limits.blocks_per_entry - num_spare)
        num_slots = sequence.num_slots + num_free * self._blocks.block_size
        guesses = guesses[: max(0, min(most, num_slots) - len(sequence.token_ids))]
        is_tried = not self._overlaps or self._num_without >= _TRIES_AFTER
        return guesses if is_tried or len(guesses) * self._share >= _LEAST_RIGHT else ()

    def _with_blocks(
        self, batch: Batch, guesses: dict[int, tuple[int, ...]], num_spare: int
    ) -> dict[int, tuple[int, ...]]:
        """Get blocks for the guesses of a step, and return those that have got them."""
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence in self._slots.of(batch):
            offered = guesses.get(sequence.id)
            if not offered or not (kept := self._fitting(sequence, offered, num_spare)):
                continue
            drafts[sequence.id] = kept
            if len(sequence.token_ids) + len(kept) > sequence.num_slots:
                self._blocks.try_grow(sequence, len(sequence.token_ids) + len(kept))
                self._slots.note_growth(sequence)
        return drafts

    def _is_idle(self, worth: Worth) -> bool:
        """Whether a step gets no drafts, since only the surest would pay, and to look for them costs more."""
        is_idle = worth.probability >= MOST_PROBABLE and not self._payoff.pays and not self._payoff.rest()
        self._draft_s = 0.0
        return is_idle

    def _note_share(self, num_drafted: int, num_accepted: int, worth: Worth) -> None:
        """Learn from the drafts that were verified since the last call."""
        drafted, accepted = num_drafted - self._counted[0], num_accepted - self._counted[1]
        self._counted = (num_drafted, num_accepted)
        self._share += (accepted - self._share * drafted) / max(_MEMORY, drafted)
        if worth.probability >= MOST_PROBABLE:
            self._payoff.gain(accepted - worth.token_cost * drafted)

    def _note_last(self, batch: Batch, num_accepted: int) -> None:
        """Learn from the time since the last step was planned, unless the engine was idle meanwhile."""
        if self._last is None or batch.num_joined == len(batch.rows):
            return
        last, began_s, num_before = self._last
        num_yielded = len(last.rows) + num_accepted - num_before
        taken_s = self._clock() - began_s
        self._worth.note(last.num_tokens, num_yielded, taken_s, num_rows=len(last.rows), draft_s=self._draft_s)
