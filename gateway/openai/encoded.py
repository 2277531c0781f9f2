"""Encode the chunks of OpenAI's streams as server-sent events. No I/O.

Nearly all events add only text to a choice that has begun, so the JSON around the text is encoded once a choice.
"""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii

from sluice.gateway.openai.chunks import StreamChunks
from sluice.producer.operations.follow import StreamEvent
from sluice.protocol.openai_format.bodies import Object

MARK = "\0"
"""Placeholder for the text. A chunk has no other NUL after it."""


def server_sent(value: Object) -> bytes:
    """Encode one event, in ASCII, because httpx treats U+2028 as a line end."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True, eq=False)
class EncodedChunks:
    """The encoded chunks of one stream. Caches the JSON before and after the text of each choice."""

    chunks: StreamChunks
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])

    def of(self, event: StreamEvent) -> bytes:
        """Return the encoded chunks of an event; see `StreamChunks.of`."""
        around = self._around.get(event.choice)
        if around is not None and event.text and event.end is None and not event.logprobs:
            return around[0] + encode_basestring_ascii(event.text).encode() + around[1]
        chunks = self.chunks.of(event)
        if chunks and around is None and self.chunks.is_plain(event.choice):
            self._around[event.choice] = self._around_text(event)
        return b"".join(map(server_sent, chunks))

    def usage(self) -> bytes:
        """Return the encoded chunk with the usage, if the client asked for it."""
        return b"".join(map(server_sent, self.chunks.usage()))

    def _around_text(self, event: StreamEvent) -> tuple[bytes, bytes]:
        [chunk] = self.chunks.of(event._replace(text=MARK, end=None, logprobs=None, format=""))
        before, _, after = server_sent(chunk).rpartition(json.dumps(MARK).encode())
        return before, after
