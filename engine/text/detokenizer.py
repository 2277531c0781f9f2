"""Convert the tokens of one choice to text as they arrive. Knows no stop strings, no steps, no queue.

Tokens are taken one at a time, so the visible text after k tokens depends only on those k tokens, not on steps. An
incomplete character is held back; bytes that can never form one show as U+FFFD, at once or with the next byte.

Three implementations, fastest first:
- `ByteDetokenizer` where a token is a run of bytes (byte-level BPE: Llama 3, Qwen, GPT-2);
- `PieceDetokenizer` where it is a piece of text or one byte (SentencePiece with byte fallback: Llama 2, Gemma);
- `WindowDetokenizer` for any other decoder: it decodes the last tokens twice and shows the difference.

The first two are exact where bytes form characters: their output equals the decoding of all tokens at once. The third
is exact if the decoder does not change early text when tokens are appended.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sluice.engine.executor import TextDecoder

_OPEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
_LOST_BYTE = re.compile("[\udc80-\udcff]")
"""A byte that is part of no character, as `surrogateescape` decodes it."""


class Detokenizer(Protocol):
    """Incremental conversion of one choice's tokens to text."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that it completed."""
        ...

    def flush(self) -> str:
        """Return the text held back: no further token follows."""
        ...


@runtime_checkable
class StreamingDecoder(TextDecoder, Protocol):
    """A decoder with a better way to stream than decoding windows."""

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> Detokenizer:
        """Begin the text of a choice. It follows the text of the tokens `after`, if there are any."""
        ...


def stream_opener(decoder: TextDecoder) -> Callable[[bool, Sequence[int]], Detokenizer]:
    """Return the best detokenizer factory of `decoder`, with or without special tokens, after other tokens."""
    if isinstance(decoder, StreamingDecoder):
        return lambda skips, after: decoder.stream(skip_special_tokens=skips, after=after)
    return lambda skips, after: WindowDetokenizer(decoder, skip_special_tokens=skips, after=after)


class ByteDetokenizer:
    """For tokens that are runs of bytes: the text is the UTF-8 of all bytes, errors replaced."""

    __slots__ = ("_open", "_pieces")

    def __init__(self, pieces: Mapping[int, str | bytes]) -> None:
        """Begin a text.

        Args:
            pieces: by token id, its text if its bytes are whole characters, else its bytes. Shared, never changed here.
        """
        self._pieces = pieces
        self._open = b""

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        piece = self._pieces[token_id]
        if not self._open and isinstance(piece, str):
            return piece
        data = self._open + (piece.encode() if isinstance(piece, str) else piece)
        text, num_read = utf_8_decode(data, "replace", False)
        self._open = data[num_read:]
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._open.decode(errors="replace")
        self._open = b""
        return text


class PieceDetokenizer:
    """For tokens that are pieces of text, or single bytes where no piece exists.

    Each byte that is part of no character shows as U+FFFD. The decoder itself replaces the characters too that are in
    one run of byte tokens with such a byte, but those before it were shown already.
    """

    __slots__ = ("_open", "_pieces", "_strips_space")

    def __init__(self, pieces: Mapping[int, str | int], *, strips_first_space: bool) -> None:
        """Begin a text.

        Args:
            pieces: by token id, its text, or its byte as a number. Shared, never changed here.
            strips_first_space: whether one space at the very beginning is dropped.
        """
        self._pieces = pieces
        self._open = b""
        self._strips_space = strips_first_space

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            return self._push_byte(piece)
        if not self._strips_space and not self._open:
            return piece
        # Tokens without text (skipped special tokens) do not end a character.
        return self.flush() + self._begin(piece) if piece else ""

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = _OPEN * len(self._open)
        self._open = b""
        return self._begin(text)

    def _push_byte(self, byte: int) -> str:
        self._open += bytes([byte])
        text, num_read = utf_8_decode(self._open, "surrogateescape", False)
        self._open = self._open[num_read:]
        return self._begin(_LOST_BYTE.sub(_OPEN, text))

    def _begin(self, text: str) -> str:
        if not self._strips_space or not text:
            return text
        self._strips_space = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """For any decoder: a token's text is what a window of the last tokens gains from it when decoded."""

    __slots__ = ("_before", "_decoder", "_skip_special_tokens", "_tokens")

    def __init__(self, decoder: TextDecoder, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._tokens = list(after)
        """The window: tokens already shown, for context, then those whose text is incomplete."""

        if self._decode(self._tokens).endswith(_OPEN):
            self._tokens.clear()
        self._before = len(self._tokens)
        """Number of tokens already shown."""

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        self._tokens.append(token_id)
        shown, text = self._decode(self._tokens[: self._before]), self._decode(self._tokens)
        if text.endswith(_OPEN):
            # Tokens without text, such as skipped ones, are not part of the open character.
            self._tokens[self._before :] = [token for token in self._tokens[self._before :] if self._decode([token])]
        num_open = len(self._tokens) - self._before
        is_open = text.endswith(_OPEN) or len(text) <= len(shown)
        if is_open and num_open < _LONGEST_CHARACTER:
            return ""
        if len(text) <= len(shown):
            # These tokens have no text: keep the tokens before them as context.
            del self._tokens[self._before :]
            return ""
        del self._tokens[: self._before]
        self._before = num_open
        return text[len(shown) :]

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._decode(self._tokens)[len(self._decode(self._tokens[: self._before])) :]
        self._tokens, self._before = [], 0
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens) if token_ids else ""
