"""Drafts of a smaller model with the same vocabulary, which generates greedily (Leviathan et al., ICML 2023).

A guess costs a step of the draft model, which computes one for each of the sequences that are worth it. How many are is
decided before each round: a guess after n others is right with the power n + 1 of the share of right guesses, and
another step of the draft model pays if its guesses bring more tokens than the engine generates in that time. The share
is that of the sequence's latest guesses, and while it has few, of all sequences. So depth follows what is accepted and
the load.

Prompts cost steps, too. All that was spent is compared with what came of it (`payoff`): if it was too much, or no guess
is worth a step, the draft model rests, and is tried again after a while.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from sluice.engine.config import StepLimits
from sluice.engine.errors import EngineBroken
from sluice.engine.executor import Executor
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.draft_rows import DraftRows
from sluice.engine.speculation.payoff import Payoff
from sluice.engine.speculation.source import MAX_DEPTH, Worth

_FIRST_RATE = 0.7
"""Assumed share of right guesses."""

_MAX_RATE = 0.98
_WEIGHT = 4
"""Guesses of a sequence that count as much as those of all."""

_MEMORY, _MEMORY_OF_ALL = 8, 64
"""Guesses over which the share is averaged, of a sequence and of all."""

_FADING = 1 - 1 / 128
"""What remains in each step of the share of a sequence that is not guessed: it is tried again some time."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Record:
    """What is known of the guesses for a sequence. Mutable."""

    num_right: float = 0.0
    num_guessed: float = 0.0
    """Both decay: they are of the latest guesses."""

    place: int = 0
    guesses: tuple[int, ...] = ()
    """The last ones, for the tokens from `place` on; empty once they were compared."""

    def note(self, is_right: bool) -> None:
        """Note whether a guess was right."""
        self.num_right += is_right - self.num_right / _MEMORY
        self.num_guessed += 1 - self.num_guessed / _MEMORY

    def fade(self) -> None:
        """Note a step without guesses: the latest ones' rate says less and less."""
        self.num_right *= _FADING
        self.num_guessed *= _FADING

    def rate(self, of_all: float) -> float:
        """Return the probability that the next guess is right."""
        return min((_WEIGHT * of_all + self.num_right) / (_WEIGHT + self.num_guessed), _MAX_RATE)


class ModelDrafts:
    """A `DraftSource` with a model. Mutable."""

    def __init__(
        self,
        executor: Executor,
        limits: StepLimits,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without knowledge; see `DraftRows` for the arguments."""
        self.rows = DraftRows(executor, limits, vocab_size=vocab_size, clock=clock)
        self._clock = clock
        self._records: dict[int, _Record] = {}
        self._rate = _FIRST_RATE
        """Share of right guesses of all sequences."""

        self._payoff = Payoff()

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """See `DraftSource.propose`.

        Raises:
            EngineBroken: the device is lost.
        """
        records = [self._compared(sequence) for sequence in sequences]
        depths = self._depths(records, room, worth) if self._payoff.pays else []
        guessed = [(sequence, depth) for sequence, depth in zip(sequences, depths, strict=False) if depth]
        if not guessed:
            if sequences and self._payoff.rest():
                self._forget_rates()
            return [()] * len(sequences)
        guesses = self._guess(guessed, worth)
        for sequence, record in zip(sequences, records, strict=True):
            record.place, record.guesses = len(sequence.token_ids), guesses.get(sequence.id, ())
        return [record.guesses for record in records]

    def end(self, sequence: Sequence) -> None:
        """See `DraftSource.end`."""
        self._records.pop(sequence.id, None)
        self.rows.release(sequence)

    def _guess(self, depths: Items[tuple[Sequence, int]], worth: Worth) -> dict[int, tuple[int, ...]]:
        """Run a round of the draft model. If it fails, it rests."""
        began_s = self._clock()
        try:
            guesses = self.rows.guess(depths)
        except EngineBroken:
            raise
        except Exception as error:  # noqa: BLE001 - the contract: anything may come from a device
            log.warning("the draft model failed and pauses: %s: %s", type(error).__name__, error)
            self.rows.release_all()
            # Earlier guesses that turn out right would end the rest.
            for record in self._records.values():
                record.guesses = ()
            self._payoff.fail()
            return {}
        num_guesses = sum(map(len, guesses.values()))
        self._payoff.spend(worth.tokens_per_s * (self._clock() - began_s) + worth.token_cost * num_guesses)
        return guesses

    def _compared(self, sequence: Sequence) -> _Record:
        """Compare the last guesses for `sequence` with its tokens since, and return their record."""
        record = self._records.setdefault(sequence.id, _Record())
        if not record.guesses:
            record.fade()
            return record
        num_right = 0
        for guess, token_id in zip(record.guesses, sequence.token_ids[record.place :], strict=False):
            self._note(record, is_right=guess == token_id)
            if guess != token_id:
                break
            num_right += 1
        # A token would have come without them; and the model has not read the last guess.
        self._payoff.gain(max(0, min(num_right, len(sequence.token_ids) - record.place - 1)))
        self.rows.note(sequence, record.place + min(num_right, len(record.guesses) - 1))
        record.guesses = ()
        return record

    def _note(self, record: _Record, *, is_right: bool) -> None:
        record.note(is_right)
        self._rate += (is_right - self._rate) / _MEMORY_OF_ALL

    def _depths(self, records: Items[_Record], room: int, worth: Worth) -> list[int]:
        """Return how many guesses are worth it for each sequence."""
        rates = [record.rate(self._rate) for record in records]
        chances, depths = rates.copy(), [0] * len(rates)
        step_cost = worth.tokens_per_s * self.rows.step_s
        for depth in range(MAX_DEPTH):
            paying = [
                number
                for number, chance in enumerate(chances)
                if chance >= worth.probability and depths[number] == depth
            ][: max(0, room)]
            if sum(chances[number] - worth.probability for number in paying) <= step_cost:
                break
            room -= len(paying)
            for number in paying:
                depths[number] += 1
                chances[number] *= rates[number]
        return depths

    def _forget_rates(self) -> None:
        self._rate = _FIRST_RATE
        for record in self._records.values():
            record.num_right = record.num_guessed = 0.0
