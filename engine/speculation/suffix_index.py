"""Where the last tokens of a text occurred before, among the latest tokens of another text or of itself.

The index is that of deflate (RFC 1951, `zlib`): a ring of tokens, the last place of each hash of `MIN_MATCH` tokens,
and for each place the one before it with the same hash. Old tokens are forgotten as the ring overwrites them, at no
cost. A suffix automaton finds the same matches, but cannot forget and needs twenty times the memory.

Knows nothing of sequences or tensors.
"""

# numpy's types are partial.
# pyright: reportUnknownMemberType=false

from array import array
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 3
"""Tokens that must agree before one is predicted."""

MAX_MATCH = 32
"""Agreeing tokens beyond which no match is better than another."""

MAX_CANDIDATES = 8
"""Places compared in a search. The latest come first, and most texts repeat the latest."""

_MIN_SIZE = 256
_FACTOR = 0x9E3779B1
_BITS = 10
"""Of a hash that move up with each token: after `MIN_MATCH` tokens the first has left it."""

_HASH_BITS = MIN_MATCH * _BITS
_HASH_MASK = (1 << _HASH_BITS) - 1
_BULK = 24
"""Tokens from which numpy is faster than a loop."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text."""

    place: int
    """Of the token that followed it."""

    length: int
    """Tokens that agree, at most `MAX_MATCH`."""


class SuffixIndex:
    """The latest tokens of a text, by the tokens before them. Mutable: it grows to `max_size`, then forgets.

    A token has a place, its number in the text. 20 bytes a token of the size, which is a power of two.
    """

    __slots__ = (
        "_heads",
        "_mask",
        "_max_candidates",
        "_max_size",
        "_previous",
        "_shift",
        "_size",
        "_tokens",
        "key",
        "num_tokens",
    )

    def __init__(self, *, max_size: int, max_candidates: int = MAX_CANDIDATES) -> None:
        self._max_size = 1 << (max(max_size, _MIN_SIZE) - 1).bit_length()
        self._max_candidates = max_candidates
        self.num_tokens = 0
        """Tokens so far, with those that are forgotten."""

        self.key = 0
        """Hash of the last `MIN_MATCH` tokens: the same for the same tokens in any index."""

        self._allocate(_MIN_SIZE)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(len(array) * array.itemsize for array in (self._tokens, self._previous, self._heads))

    def extend(self, text: Items[int]) -> None:
        """Add tokens at the end."""
        if self.num_tokens + len(text) > self._size < self._max_size:
            self._grow(self.num_tokens + len(text))
        if len(text) >= _BULK:
            # What is longer would overwrite itself.
            for start in range(0, len(text), self._size // 2):
                self._extend_by_arrays(text[start : start + self._size // 2])
            return
        for token_id in text:
            self._append(token_id)

    def find(self, text: Items[int], key: int) -> Match | None:
        """Return the longest earlier occurrence of the last tokens of `text`, the latest of equally long ones.

        Args:
            text: MIN_MATCH tokens or more.
            key: of the index that ends with them.
        """
        place = self._heads[key >> self._shift]
        if place < MIN_MATCH:
            return None  # most tokens of most texts end here
        oldest, best, longest = self._oldest, -1, MIN_MATCH - 1
        for _ in range(self._max_candidates):
            if place < oldest:
                break
            length = self._num_common(text, place)
            if length > longest:
                best, longest = place, length
                if length >= MAX_MATCH:
                    break
            place = self._previous[place & self._mask]
        return Match(best, longest) if best >= 0 else None

    def has(self, place: int) -> bool:
        """Whether the token at `place` has come and is not forgotten."""
        return self._oldest <= place < self.num_tokens

    def token(self, place: int) -> int:
        """Return the token at a place that it has."""
        return self._tokens[place & self._mask]

    def tokens(self, place: int, count: int) -> tuple[int, ...]:
        """Return up to `count` tokens from a place that it has."""
        start = place & self._mask
        end = start + min(count, self.num_tokens - place)
        if end <= self._size:
            return tuple(self._tokens[start:end])
        return (*self._tokens[start:], *self._tokens[: end - self._size])

    @property
    def _oldest(self) -> int:
        """The first place that is not forgotten, and has MIN_MATCH tokens before it."""
        return max(self.num_tokens - self._size, 0) + MIN_MATCH

    def _num_common(self, text: Items[int], place: int) -> int:
        """Count the tokens before `place` that agree with the last ones of `text`."""
        tokens, mask = self._tokens, self._mask
        most = min(MAX_MATCH, len(text), place - max(self.num_tokens - self._size, 0))
        for count in range(1, most + 1):
            if tokens[(place - count) & mask] != text[-count]:
                return count - 1
        return most

    def _append(self, token_id: int) -> None:
        place, key = self.num_tokens, self.key
        at, chain = place & self._mask, key >> self._shift
        heads = self._heads
        self._previous[at] = heads[chain]
        heads[chain] = place
        self._tokens[at] = token_id
        self.key = (key << _BITS ^ token_id * _FACTOR) & _HASH_MASK
        self.num_tokens = place + 1

    def _extend_by_arrays(self, text: Items[int]) -> None:
        """`_append` for many tokens, at most half of the ring."""
        count, first, mask = len(text), self.num_tokens, self._mask
        tokens = np.frombuffer(self._tokens, dtype=np.int32)
        previous, heads = (np.frombuffer(array, dtype=np.int64) for array in (self._previous, self._heads))
        places = np.arange(first, first + count)
        tokens[places & mask] = text
        keys = _hashes(np.concatenate((self._recent(), np.asarray(text, dtype=np.int64))))
        self.key = int(keys[-1])
        keys = keys[:-1] >> self._shift
        order = keys.argsort(kind="stable")
        keys, places = keys[order], places[order]
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = keys[1:] != keys[:-1]
        before = np.empty_like(places)
        before[1:] = places[:-1]
        before[is_first] = heads[keys[is_first]]
        previous[places & mask] = before
        is_last = np.append(is_first[1:], True)
        heads[keys[is_last]] = places[is_last]
        self.num_tokens = first + count

    def _recent(self) -> NDArray[np.int64]:
        """Return the last `MIN_MATCH` tokens; before the first there are zeros, as in `key`."""
        recent = [0] * MIN_MATCH + [self.token(place) for place in range(max(0, self.num_tokens - 3), self.num_tokens)]
        return np.array(recent[-MIN_MATCH:], dtype=np.int64)

    def _grow(self, num_tokens: int) -> None:
        """Enlarge the ring, which has not forgotten anything yet, for `num_tokens` if it may."""
        text = self._tokens[: self.num_tokens]
        self.num_tokens = self.key = 0
        self._allocate(min(1 << (num_tokens - 1).bit_length(), self._max_size))
        if text:
            self._extend_by_arrays(text)

    def _allocate(self, size: int) -> None:
        self._size, self._mask, self._shift = size, size - 1, _HASH_BITS - size.bit_length() + 1
        self._tokens = array("i", bytes(4 * size))
        self._previous = array("q", bytes(8 * size))
        self._heads = array("q", bytes(8 * size))


def _hashes(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the hash of each `MIN_MATCH` tokens that follow each other."""
    mixed = tokens * _FACTOR
    return (mixed[:-2] << 2 * _BITS ^ mixed[1:-1] << _BITS ^ mixed[2:]) & _HASH_MASK
