"""Format the events of a job as the chunks of OpenAI's streams. No I/O."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.producer.operations.follow import StreamEvent
from sluice.protocol.openai_format.bodies import Object, usage_object
from sluice.protocol.openai_format.logprobs import chat_logprobs, completion_logprobs
from sluice.protocol.openai_format.requests import CHAT, Endpoint
from sluice.protocol.openai_format.tools import delta_object, finish_reason_of
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import OutputParser
from sluice.protocol.wire import JobId, TokenLogprobs, Usage


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
    _parsers: dict[int, OutputParser] = field(default_factory=dict[int, OutputParser])
    """Of choices whose text has marks."""

    _callers: set[int] = field(default_factory=set[int])
    """The choices that call functions."""

    _usage: Usage | None = None

    def of(self, event: StreamEvent) -> list[Object]:
        """Return the chunks of an event: none while its text is held back, two for text that ends the choice."""
        end, choice = event.end, event.choice
        is_done = end is not None and end.finish_reason is not None
        if event.format and choice not in self._parsers and self.endpoint == CHAT:
            self._parsers[choice] = OutputParser(OutputFormat.read(event.format))
        parser = self._parsers.get(choice)
        chunks = self._plain(event, is_done=is_done) if parser is None else self._parsed(event, parser, is_done=is_done)
        if end is not None and end.finish_reason is not None:
            reason = finish_reason_of(end.finish_reason, has_calls=choice in self._callers)
            chunks.append(self._last(choice, reason))
            self._note(end.usage)
        return chunks

    def is_plain(self, choice: int) -> bool:
        """Return whether the text of a choice has no marks."""
        return choice not in self._parsers

    def _plain(self, event: StreamEvent, *, is_done: bool) -> list[Object]:
        if not (event.text or event.logprobs or (is_done and event.choice not in self._begun)):
            return []
        if self.endpoint == CHAT:
            return [self._chunk(event, {"content": event.text}, event.logprobs)]
        logprobs = completion_logprobs(event.token_ids, event.logprobs)
        choice = {"index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": None}
        self._begun.add(event.choice)
        return [self._envelope([choice])]

    def _parsed(self, event: StreamEvent, parser: OutputParser, *, is_done: bool) -> list[Object]:
        """Return the chunks of the parts that an event completes. The first has the log-probabilities of its tokens."""
        parts = parser.push(event.text) + (parser.finish() if is_done else [])
        if any(part.kind == "call" for part in parts):
            self._callers.add(event.choice)
        deltas = [delta_object(self.job_id, event.choice, part) for part in parts]
        if not deltas and (event.logprobs or (is_done and event.choice not in self._begun)):
            deltas = [{"content": ""}]
        logprobs = [event.logprobs, *[None] * len(deltas)]
        return [self._chunk(event, delta, of_tokens) for delta, of_tokens in zip(deltas, logprobs, strict=False)]

    def _note(self, usage: Usage | None) -> None:
        # Each end counts the tokens of all choices up to it, and ends arrive in any order.
        if usage is not None and (self._usage is None or usage.output_tokens >= self._usage.output_tokens):
            self._usage = usage

    def usage(self) -> list[Object]:
        """Return the chunk with the usage, if the client asked for it."""
        if not self.has_usage or self._usage is None:
            return []
        return [{**self._envelope([]), "usage": usage_object(self._usage)}]

    def _chunk(self, event: StreamEvent, delta: Object, logprobs: Sequence[TokenLogprobs] | None) -> Object:
        role = {} if event.choice in self._begun else {"role": "assistant"}
        self._begun.add(event.choice)
        shown = chat_logprobs(event.token_ids, logprobs)
        choice = {"index": event.choice, "delta": {**role, **delta}, "logprobs": shown, "finish_reason": None}
        return self._envelope([choice])

    def _last(self, choice: int, finish_reason: str | None) -> Object:
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
