"""Encode the chunks of OpenAI's streams as server-sent events. No I/O.

Nearly all events add only text to a choice that has begun: what is around the text is encoded once for each choice.
"""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii

from sluice.gateway.openai.chunks import StreamChunks
from sluice.producer.operations.follow import StreamEvent
from sluice.protocol.openai_format.bodies import Object

MARK = "\0"
"""Stands for the text; nothing after it in a chunk looks the same."""


def server_sent(value: Object) -> bytes:
    """Encode one event. ASCII, because httpx takes U+2028 for the end of a line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True, eq=False)
class EncodedChunks:
    """The encoded chunks of one stream. Holds what is around the text of each choice."""

    chunks: StreamChunks
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])

    def of(self, event: StreamEvent) -> bytes:
        """Return the chunks of an event, as `StreamChunks.of`."""
        around = self._around.get(event.choice)
        if around is not None and event.text and event.end is None and not event.logprobs:
            return around[0] + encode_basestring_ascii(event.text).encode() + around[1]
        found = self.chunks.of(event)
        if found and around is None:
            self._around[event.choice] = self._around_text(event)
        return b"".join(map(server_sent, found))

    def usage(self) -> bytes:
        """Return the chunk that counts tokens, if the client asked for it."""
        return b"".join(map(server_sent, self.chunks.usage()))

    def _around_text(self, event: StreamEvent) -> tuple[bytes, bytes]:
        [chunk] = self.chunks.of(event._replace(text=MARK, end=None, logprobs=None))
        before, _, after = server_sent(chunk).rpartition(json.dumps(MARK).encode())
        return before, after
