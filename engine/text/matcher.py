"""What may follow the text of a choice with a grammar. Read `Matcher` first.

llguidance does the matching (M. Moskal et al., https://github.com/guidance-ai/llguidance): an Earley parser over
lexemes whose regular expressions are matched by derivatives.
"""

import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, TypeVar

from sluice.engine.batch import mask_bytes

_Found = TypeVar("_Found")

_FULL = "too many states"
"""In the error of a matcher whose lexer has as many states as it may have."""

_LIMITED = "lexer error"
"""In the errors of limits."""

_SPOILED = "the grammar was left at output token {}: {}"
_TOO_COSTLY = "the grammar takes too much time or memory after output token {}: {}"
_MAX_REASON_CHARS = 300


class CompiledGrammar:
    """A compiled grammar. Mutable.

    The matchers of one have their lexer in common: states that one has found, the others know. Their number is limited,
    and a lexer that is full is replaced.
    """

    def __init__(self, compile_it: Callable[[], Any], vocab_size: int, num_bytes: int) -> None:
        """Compile it.

        Args:
            compile_it: returns a matcher of llguidance, or raises.
            vocab_size: of the model.
            num_bytes: what it counts for in a cache.
        """
        self._compile = compile_it
        self._latest: Any = compile_it()
        self.vocab_size = vocab_size
        self.num_bytes = num_bytes

    def matcher_of_choice(self) -> "Matcher":
        """Return a matcher at the beginning of a text."""
        return Matcher(self)

    @property
    def origin(self) -> Any:  # noqa: ANN401 - llguidance's, which is optional
        """A matcher at the beginning of a text, to be copied. The copies have its lexer."""
        return self._latest

    def replace(self, origin: object) -> bool:
        """Replace an origin whose lexer is full, unless this was done before; return whether it is replaced now."""
        is_latest = self._latest is origin
        if is_latest:
            self._latest = self._compile()
        return is_latest


class Matcher:
    """What may follow the text of one choice. Mutable.

    It depends on the tokens alone: where the common lexer is full, it continues with a new one. Only if that is not
    enough, either, the grammar is too large.
    """

    __slots__ = ("_grammar", "_matcher", "_origin", "_renewed_at", "_token_ids", "problem")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._origin = grammar.origin
        self._matcher = self._origin.deep_copy()
        self._token_ids: list[int] = []
        self._renewed_at = -1
        """How many tokens it had when it began with an empty lexer."""

        self.problem: str | None = None
        """Why no token may follow, in a sentence."""

    def take(self, token_id: int) -> None:
        """Take the next token of the text."""
        self._try(lambda matcher: matcher.consume_token(token_id))
        self._token_ids.append(token_id)

    def take_back(self, num_tokens: int) -> None:
        """Forget the last tokens, and the problem if there is one: it came with them."""
        del self._token_ids[len(self._token_ids) - num_tokens :]
        if self.problem is not None or not self._matcher.rollback(num_tokens):
            self.problem = None
            self._begin()

    def mask(self, end_ids: Iterable[int]) -> bytearray:
        """Return the tokens that may follow, see `Masks`; those of `end_ids` where the text may end."""
        vocab_size = self._grammar.vocab_size
        found = self._try(lambda matcher: matcher.compute_bitmask())
        if found is None:
            return bytearray(mask_bytes(vocab_size))
        bits = bytearray(found)
        # The token after the vocabulary stands for the end.
        may_end = bits[vocab_size >> 3] >> (vocab_size & 7) & 1
        bits[vocab_size >> 3] &= ~(1 << (vocab_size & 7)) & 0xFF
        for token_id in end_ids:
            set_token(bits, token_id, is_allowed=bool(may_end))
        return bits[: mask_bytes(vocab_size)]

    def num_fitting(self, token_ids: Items[int]) -> int:
        """Return how many of these tokens, one after the other, may follow."""
        return self._try(lambda matcher: int(matcher.validate_tokens(list(token_ids)))) or 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self.problem is None and bool(self._matcher.is_stopped())

    def _try(self, call: Callable[[Any], _Found]) -> _Found | None:
        """Return what `call` returns for the library's matcher; None if there is a problem."""
        while self.problem is None:
            found = call(self._matcher)
            if not self._matcher.is_error():
                return found
            self._recover()
        return None

    def _recover(self) -> None:
        """Begin with an emptier lexer if the present one is full; else there is a problem."""
        error, num_tokens = self._matcher.get_error(), len(self._token_ids)
        if _FULL in error and self._renewed_at < num_tokens:
            if self._grammar.replace(self._origin):
                self._renewed_at = num_tokens
            self._origin = self._grammar.origin
            self._begin()
            return
        sentence = _TOO_COSTLY if _LIMITED in error.lower() else _SPOILED
        self.problem = sentence.format(num_tokens, reason_of(error))

    def _begin(self) -> None:
        """Replay the tokens from the beginning."""
        self._matcher = self._origin.deep_copy()
        if self._token_ids:
            self._matcher.consume_tokens(self._token_ids)


def set_token(mask: bytearray, token_id: int, *, is_allowed: bool) -> None:
    """Allow or ban a token in a mask."""
    bit = 1 << (token_id & 7)
    mask[token_id >> 3] = mask[token_id >> 3] | bit if is_allowed else mask[token_id >> 3] & ~bit & 0xFF


def only_token(mask: bytes) -> int | None:
    """Return the token that a mask allows; None if it allows none, or more than one."""
    rest = mask.lstrip(b"\0")
    if not rest or rest[0].bit_count() != 1 or num_bytes_with_bits(rest) != 1:
        return None
    return 8 * (len(mask) - len(rest)) + rest[0].bit_length() - 1


def num_bytes_with_bits(mask: bytes) -> int:
    """Count the bytes of a mask that allow a token.

    By numpy: where most of 6,144 bytes are zeros, `bytes.count` takes 6 to 10 us, and this 2.
    """
    import numpy as np  # here, since commands import this module and start without numpy

    return int(np.count_nonzero(np.frombuffer(mask, dtype=np.uint8)))


def reason_of(error: str) -> str:
    """Return the first line of an error, shortened."""
    first = re.split(r"\n|<state>", error.strip(), maxsplit=1)[0].strip()
    return first if len(first) <= _MAX_REASON_CHARS else first[:_MAX_REASON_CHARS] + "…"
