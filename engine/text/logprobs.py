"""Bytes and places of tokens with log-probabilities. Other requests do not run this code. Knows no steps, no queue."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from sluice.engine.executor import TextDecoder
from sluice.engine.request import PromptRead, SampledLogprobs
from sluice.engine.text.detokenizer import Detokenizer

TokenBytes = Callable[[int], bytes | None]
"""The bytes of a token; None if it has none."""


@runtime_checkable
class BytesDecoder(TextDecoder, Protocol):
    """A decoder that knows the bytes of each token."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None for an unknown id."""
        ...


def bytes_reader(decoder: TextDecoder) -> TokenBytes:
    """Return a function that reads the bytes of one token; from any other decoder it is the text of the token alone."""
    if isinstance(decoder, BytesDecoder):
        return decoder.token_bytes
    return lambda token_id: decoder.decode([token_id], skip_special_tokens=False).encode()


class PlacedDetokenizer:
    """A detokenizer that records where each token's text begins. Grows with each token."""

    __slots__ = ("_detokenizer", "_offsets", "_token_bytes")

    def __init__(self, detokenizer: Detokenizer, token_bytes: TokenBytes) -> None:
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._offsets = [0]
        """Characters that were complete before each token, and at last after all of them."""

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        text = self._detokenizer.push(token_id)
        self._offsets.append(self._offsets[-1] + len(text))
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._detokenizer.flush()

    def read(self, prompt: PromptRead, token_ids: Sequence[int]) -> PromptRead:
        """Return what was read of a prompt with its tokens and their text, as the first that this detokenizes."""
        if prompt.logprobs is None:
            return prompt
        text = "".join([self.push(token_id) for token_id in token_ids]) + self.flush()
        described = self.describe(0, token_ids, prompt.logprobs)
        return prompt._replace(logprobs=described, token_ids=tuple(token_ids), text=text)

    def describe(
        self, start: int, token_ids: Sequence[int], logprobs: Sequence[SampledLogprobs]
    ) -> tuple[SampledLogprobs, ...]:
        """Return the log-probabilities of tokens from position `start` on with their bytes and offsets.

        A token that ends the output is not detokenized; its text would begin after all others.
        """
        read, offsets = self._token_bytes, self._offsets[start:]
        return tuple(
            [
                # Positional arguments take half the time of keywords.
                SampledLogprobs(chosen, top, read(token_id), tuple([read(other) for other, _ in top]), offset)
                for token_id, (chosen, top, _, _, _), offset in zip(token_ids, logprobs, offsets, strict=False)
            ]
        )
