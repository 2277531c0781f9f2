"""Interface of a source that guesses the next tokens of sequences; one that cuts guesses, and one that asks two."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from sluice.engine.sequence import Sequence

MAX_DEPTH = 24
"""Most guesses of a sequence that are wanted at a time."""


class Worth(NamedTuple):
    """What a guess must bring: `worth.DraftWorth` measures it."""

    probability: float
    """A guess pays for its place in a step if it and those before it are right with this probability or more."""

    token_cost: float = 0.0
    """Tokens that the engine generates in the time that a guess adds to a step: the probability without a margin."""

    tokens_per_s: float = 0.0
    """What the engine generates. Guesses that take time must bring more than it does in that time."""


class DraftSource(Protocol):
    """A source of drafts: the text so far (`suffix_drafts`), or a smaller model (`model_drafts`)."""

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """Return guesses of the tokens that follow `token_ids` of each sequence; empty if there are none.

        It is called with most of the steps of a sequence, whether it is to draft or not, so that the source can compare
        its guesses with what came.

        Args:
            sequences: all that decode in the step.
            room: 0 or more guesses are wanted of all together, and `MAX_DEPTH` of each. More of them are cut.
            worth: which guesses pay.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget `sequence`, which has ended."""
        ...


class Fitting:
    """A `DraftSource` whose guesses are cut before the first one that cannot be right."""

    def __init__(self, source: DraftSource, fitting: Callable[[int, tuple[int, ...]], tuple[int, ...]]) -> None:
        """Take the guesses of `source`; `fitting` cuts those of a sequence, by its id."""
        self._source = source
        self._fitting = fitting

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """See `DraftSource.propose`."""
        proposed = self._source.propose(sequences, room=room, worth=worth)
        return [
            self._fitting(sequence.id, guesses) if guesses else guesses
            for sequence, guesses in zip(sequences, proposed, strict=True)
        ]

    def end(self, sequence: Sequence) -> None:
        """See `DraftSource.end`."""
        self._source.end(sequence)


class Fallback:
    """A `DraftSource` that asks a second source about the sequences of which the first has no guesses."""

    def __init__(self, first: DraftSource, second: DraftSource) -> None:
        self._first = first
        self._second = second

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """See `DraftSource.propose`."""
        guesses = self._first.propose(sequences, room=room, worth=worth)
        lacking = [number for number, found in enumerate(guesses) if not found]
        room -= sum(map(len, guesses))
        if lacking and room > 0:
            others = self._second.propose([sequences[number] for number in lacking], room=room, worth=worth)
            for number, found in zip(lacking, others, strict=True):
                guesses[number] = found
        return guesses

    def end(self, sequence: Sequence) -> None:
        """See `DraftSource.end`."""
        self._first.end(sequence)
        self._second.end(sequence)
