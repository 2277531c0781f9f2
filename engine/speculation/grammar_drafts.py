"""Drafts from grammars: what a sequence must say next, and what it chose before where it has little choice."""

from collections.abc import Callable
from collections.abc import Sequence as Items

from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import MAX_DEPTH, Worth


class GrammarDrafts:
    """A `DraftSource` for sequences with a grammar; of others it guesses nothing."""

    def __init__(self, guesses: Callable[[int, int, float], tuple[int, ...]]) -> None:
        """Take guesses from `guesses`: it is given a sequence's id, how many are wanted, and the least probability."""
        self._guesses = guesses

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """See `DraftSource.propose`."""
        most = min(MAX_DEPTH, room)
        return [self._guesses(sequence.id, most, worth.probability) for sequence in sequences]

    def end(self, sequence: Sequence) -> None:
        """See `DraftSource.end`. A choice takes what it knows with it."""
