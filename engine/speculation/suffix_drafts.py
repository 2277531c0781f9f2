"""Drafts from the text so far: what followed the last time that the last tokens occurred.

They occurred in the sequence's own prompt or output (prompt lookup decoding: Saxena, 2023), or in a recent output of
the same cache salt, which is the tenant (as in SuffixDecoding: Oliaro et al., NeurIPS 2025): edits of a text repeat the
first, jobs from one template repeat the second. An occurrence is followed token by token, and only if it differs from
what came is another one searched. If there is none, it is followed again from a token that it has a few places later:
after a word that was replaced, dropped or added, and after the field of a template.

Following costs no step, so the share of right guesses is known of every sequence at every time, whether drafts are
verified or not: by the length of the match, since a long one continues more often.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import log

from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import MAX_DEPTH, Worth
from sluice.engine.speculation.suffix_index import MIN_MATCH, SuffixIndex

MAX_TOKENS = 2**15
"""Latest tokens of a sequence, and of the recent outputs of a salt, that are searched."""

MAX_SALTS = 64
"""Salts whose recent outputs are kept: those of the latest sequences."""

_NEAR = 8
"""Places after a wrong guess at which an occurrence is followed again."""

_PATIENCE = 4
"""Tokens after a wrong guess for which it is tried."""

_LENGTHS = (MIN_MATCH, 6, 16)
"""Matches of fewer tokens than the first, the second, the third, and of more have a rate each."""

_FIRST_RATES = (0.3, 0.3, 0.6, 0.9)
"""Assumed of the first sequence of a salt."""

_MEMORY, _MEMORY_OF_SALT = 8, 64
"""Guesses over which a rate is averaged: of a sequence, and of its salt, with which a new sequence begins."""

_LEAST_RATE, _MAX_RATE = 0.01, 0.98


@dataclass(slots=True, eq=False)
class _Salt:
    """What is known of the sequences of one salt. Mutable."""

    recent: SuffixIndex = field(default_factory=lambda: SuffixIndex(max_size=MAX_TOKENS))
    """Recent outputs, one after another."""

    rates: list[float] = field(default_factory=lambda: list(_FIRST_RATES))


@dataclass(slots=True, eq=False)
class _Follower:
    """A sequence, and the occurrence that it follows. Mutable."""

    salt: _Salt
    rates: list[float]
    own: SuffixIndex = field(default_factory=lambda: SuffixIndex(max_size=MAX_TOKENS))
    """Its own tokens, as far as they were seen."""

    followed: SuffixIndex | None = None
    """The index with the occurrence; None if there is none."""

    place: int = 0
    """Of the next token, in `followed`."""

    length: int = 0
    """Tokens that agreed so far. 0: the last guess was wrong, and the occurrence is not followed."""

    num_lost: int = 0
    """Tokens since then."""


class SuffixDrafts:
    """A `DraftSource` without a model. Mutable."""

    def __init__(self) -> None:
        self._followers: dict[int, _Follower] = {}
        self._salts: OrderedDict[str, _Salt] = OrderedDict()
        """By cache salt, the latest used last."""

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        """See `DraftSource.propose`."""
        most, probability = min(MAX_DEPTH, room), worth.probability
        return [self._propose(sequence, most, probability) for sequence in sequences]

    def end(self, sequence: Sequence) -> None:
        """See `DraftSource.end`. Its output becomes the latest of its salt."""
        if (follower := self._followers.pop(sequence.id, None)) is not None:
            follower.salt.recent.extend(sequence.token_ids[sequence.num_prompt_tokens :])

    def _propose(self, sequence: Sequence, most: int, worth: float) -> tuple[int, ...]:
        """Follow `sequence`, and return guesses."""
        follower = self._followers.get(sequence.id)
        if follower is None:
            salt = self._salt(sequence.cache_salt)
            follower = self._followers[sequence.id] = _Follower(salt, salt.rates.copy())
        if new := sequence.token_ids[follower.own.num_tokens :]:
            if follower.followed is not None:
                self._follow(follower, follower.followed, new)
            follower.own.extend(new)
            if not follower.length:
                self._search(follower, sequence)
        if follower.followed is None or not follower.length:
            return ()
        rate = min(max(follower.rates[_kind(follower.length)], _LEAST_RATE), _MAX_RATE)
        # A match of n tokens lasts for d more with probability (n + 1) / (n + 1 + d), by Laplace's rule.
        lasting = int((follower.length + 1) * (1 - worth) / worth)
        depth = min(most, lasting, int(log(worth) / log(rate)))
        return follower.followed.tokens(follower.place, depth) if depth > 0 else ()

    def _salt(self, name: str) -> _Salt:
        """Return the record of a salt, and forget the one used the longest time ago."""
        salt = self._salts.pop(name, None) or _Salt()
        self._salts[name] = salt
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        return salt

    def _follow(self, follower: _Follower, followed: SuffixIndex, token_ids: list[int]) -> None:
        """Compare the tokens that came with the guesses."""
        for token_id in token_ids:
            if not follower.length:
                _resume(follower, followed, token_id)
                continue
            is_right = followed.has(follower.place) and followed.token(follower.place) == token_id
            kind = _kind(follower.length)
            follower.rates[kind] += (is_right - follower.rates[kind]) / _MEMORY
            of_salt = follower.salt.rates
            of_salt[kind] += (is_right - of_salt[kind]) / _MEMORY_OF_SALT
            if is_right:
                follower.place, follower.length = follower.place + 1, follower.length + 1
            else:
                follower.length = follower.num_lost = 0
                _resume(follower, followed, token_id)
        if not followed.has(follower.place):
            follower.followed, follower.length = None, 0

    def _search(self, follower: _Follower, sequence: Sequence) -> None:
        """Find the longest occurrence of the last tokens; the sequence's own if another one is not longer."""
        if sequence.num_tokens < MIN_MATCH:
            return
        for index in (follower.own, follower.salt.recent):
            match = index.find(sequence.token_ids, follower.own.key)
            if match is not None and match.length > follower.length:
                follower.followed, (follower.place, follower.length) = index, match


def _resume(follower: _Follower, followed: SuffixIndex, token_id: int) -> None:
    """Follow the occurrence again if it has `token_id` soon after the place where it differed."""
    follower.num_lost += 1
    near = followed.tokens(follower.place, _NEAR) if follower.num_lost <= _PATIENCE else ()
    if token_id in near:
        follower.place += near.index(token_id) + 1
        follower.length = 1


def _kind(length: int) -> int:
    """Return which of the rates is that of a match of `length` tokens."""
    shortest, shorter, short = _LENGTHS
    return (length >= shortest) + (length >= shorter) + (length >= short)
