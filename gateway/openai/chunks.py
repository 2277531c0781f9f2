"""Format the events of a job as the chunks of OpenAI's streams. No I/O."""

import time
from dataclasses import dataclass, field

from sluice.producer.operations.follow import StreamEvent
from sluice.protocol.openai_format.bodies import Object, usage_object
from sluice.protocol.openai_format.logprobs import chat_logprobs, completion_logprobs
from sluice.protocol.openai_format.requests import CHAT, Endpoint
from sluice.protocol.wire import JobId, Usage


@dataclass(slots=True, eq=False)
class StreamChunks:
    """The chunks of one stream. Tracks which choices have begun, and the usage so far.

    A chat's role is sent with its first text: benchmarks measure the time to the first token by the first chunk.
    """

    endpoint: Endpoint
    job_id: JobId
    model: str
    has_usage: bool
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set[int])
    _usage: Usage | None = None

    def of(self, event: StreamEvent) -> list[Object]:
        """Return the chunks of an event: none while its text is held back, two for text that ends the choice."""
        end = event.end
        chunks: list[Object] = []
        is_done = end is not None and end.finish_reason is not None
        if event.text or event.logprobs or (is_done and event.choice not in self._begun):
            chunks.append(self._chunk(event, finish_reason=None))
            self._begun.add(event.choice)
        if end is not None and end.finish_reason is not None:
            chunks.append(self._last(event.choice, end.finish_reason))
            self._note(end.usage)
        return chunks

    def _note(self, usage: Usage | None) -> None:
        # Each end counts the tokens of all choices up to it, and ends arrive in any order.
        if usage is not None and (self._usage is None or usage.output_tokens >= self._usage.output_tokens):
            self._usage = usage

    def usage(self) -> list[Object]:
        """Return the chunk with the usage, if the client asked for it."""
        if not self.has_usage or self._usage is None:
            return []
        return [{**self._envelope([]), "usage": usage_object(self._usage)}]

    def _chunk(self, event: StreamEvent, finish_reason: str | None) -> Object:
        if self.endpoint != CHAT:
            logprobs = completion_logprobs(event.token_ids, event.logprobs)
            choice = {"index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": finish_reason}
            return self._envelope([choice])
        role = {} if event.choice in self._begun else {"role": "assistant"}
        logprobs = chat_logprobs(event.token_ids, event.logprobs)
        choice = {"index": event.choice, "delta": {**role, "content": event.text}, "logprobs": logprobs}
        return self._envelope([{**choice, "finish_reason": finish_reason}])

    def _last(self, choice: int, finish_reason: str) -> Object:
        content: Object = {"delta": {}} if self.endpoint == CHAT else {"text": ""}
        return self._envelope([{"index": choice, **content, "logprobs": None, "finish_reason": finish_reason}])

    def _envelope(self, choices: list[Object]) -> Object:
        is_chat = self.endpoint == CHAT
        chunk: Object = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.job_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }
        return {**chunk, "usage": None} if self.has_usage else chunk
