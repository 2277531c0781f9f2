"""The text of each token of a vocabulary, as grammars need it."""

from typing import NamedTuple, Protocol, runtime_checkable

from sluice.engine.executor import TextDecoder


class TokenTable(NamedTuple):
    """The bytes that each token adds to a text."""

    tokens: list[bytes]
    """By token id; empty for an unknown one."""

    special_ids: frozenset[int]
    """Tokens that are no part of the text: no grammar can match them."""


@runtime_checkable
class SpelledDecoder(TextDecoder, Protocol):
    """A decoder whose texts are the bytes of its tokens, one after the other."""

    def token_table(self) -> TokenTable | None:
        """Return its tokens; None if the text of a token depends on those around it."""
        ...

    def spelled(self, text: str) -> list[int]:
        """Return the tokens of `text` within another text; they may have other bytes, if the encoder changes it."""
        ...
