"""What a text with a grammar chose where the grammar left it little choice: guesses of what it chooses there again.

Between two fields of JSON a grammar leaves a space, a line break or none, and a model keeps to one. So a whole passage
from one value to the next is known but for these choices. Knows no grammar: only masks, and the tokens drawn at them.
"""

from typing import NamedTuple

from sluice.engine.text.matcher import num_bytes_with_bits

_MOST_BYTES = 32
"""Bytes with bits of a narrow mask: the others are of free text."""

_PRIOR_SHARE, _PRIOR_COUNT = 0.75, 2
"""Assumed of guesses at a mask that was met once: this share is right, as if so many had shown it."""


class Guess(NamedTuple):
    """A token that may come next."""

    token_id: int
    probability: float


class Habits:
    """The tokens that one text has at narrow masks. Mutable."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[bytes, tuple[int, int, int]] = {}
        """By mask: the token drawn last, how often it was the one before it, too, and of how many times."""

    def note(self, mask: bytes, token_id: int) -> None:
        """Note the token that followed where `mask` was."""
        if not _is_narrow(mask):
            return
        last, num_right, num_guesses = self._at.get(mask, (token_id, -1, -1))
        self._at[mask] = token_id, num_right + (last == token_id), num_guesses + 1

    def guess(self, mask: bytes) -> Guess | None:
        """Return what will follow where `mask` is; None if nothing is known of it."""
        if not self._at or (found := self._at.get(mask)) is None:
            return None
        token_id, num_right, num_guesses = found
        return Guess(token_id, (num_right + _PRIOR_SHARE * _PRIOR_COUNT) / (num_guesses + _PRIOR_COUNT))


def _is_narrow(mask: bytes) -> bool:
    return num_bytes_with_bits(mask) <= _MOST_BYTES
