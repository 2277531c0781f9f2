"""Fold the raw output text of a job into the events of OpenAI's Responses API. No I/O.

The `sequence_number` of an event is 32 x the number of output characters up to and including it, plus the index of its
kind. So it depends on the text alone, not on how the text was split: a reader of the same text in other pieces, from
the channel or from a table, gets the same numbers. A client that resumes after any number gets each further character
once; its first delta may be the end of a longer one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluice.gateway.openai.items import (
    OutputItem,
    OutputItems,
    item_object,
    opened_object,
    reasoning_part,
    text_part,
)
from sluice.gateway.openai.responses import (
    ANY_OBJECT,
    OUTPUT_ITEM,
    RESPONSE,
    ResponseEnd,
    ResponseInfo,
    response_object,
)
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, or_null
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import OutputParser, Part

STRIDE = 32
"""Sequence numbers for each place in the text: one for each kind of event."""

CREATED, IN_PROGRESS = range(2)
"""Indices of the events before the first character."""

DELTA, CLOSED, OPENED, FIRST_DELTA = 0, 1, 4, 6
"""Indices at a character: of more of an item; of the three events of its end; of the two of the next item's beginning,
and of what this item begins with."""

HELD = 8
"""What is added to them for the characters that were held back until the end."""

LAST_CLOSED, ENDED = 16, STRIDE - 1
"""Indices of the end of the last item, and of the response."""


def _event_schema(kind: str, fields: dict[str, Schema]) -> Schema:
    properties = {"type": {"const": kind}, "sequence_number": NUMBER, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


_ITEM_PLACE: Schema = {"item_id": TEXT, "output_index": NUMBER}
_PLACE: Schema = {**_ITEM_PLACE, "content_index": NUMBER}
_OF_EVENTS: dict[str, dict[str, Schema]] = {
    **{f"response.{kind}": {"response": RESPONSE} for kind in ("created", "in_progress")},
    **{f"response.output_item.{kind}": {"output_index": NUMBER, "item": OUTPUT_ITEM} for kind in ("added", "done")},
    **{f"response.content_part.{kind}": {**_PLACE, "part": ANY_OBJECT} for kind in ("added", "done")},
    "response.output_text.delta": {**_PLACE, "delta": TEXT, "logprobs": list_of({})},
    "response.output_text.done": {**_PLACE, "text": TEXT, "logprobs": list_of({})},
    "response.reasoning_text.delta": {**_PLACE, "delta": TEXT},
    "response.reasoning_text.done": {**_PLACE, "text": TEXT},
    "response.function_call_arguments.delta": {**_ITEM_PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**_ITEM_PLACE, "name": TEXT, "arguments": TEXT},
    **{f"response.{kind}": {"response": RESPONSE} for kind in ("completed", "incomplete", "failed")},
    "error": {"message": TEXT, "code": or_null(TEXT), "param": or_null(TEXT), "error": ANY_OBJECT},
}
SCHEMAS: Mapping[str, Schema] = {kind: _event_schema(kind, fields) for kind, fields in _OF_EVENTS.items()}
"""Schema of each event, by its kind."""


class OutputChanged(Exception):
    """The output of an ended response does not begin with the text that was already sent."""


@dataclass(slots=True, eq=False)
class ResponseEvents:
    """The events of one response for one reader. Changes as text is added.

    Args:
        info: The response.
        after: The number of the last event that the reader has; -1: none.
    """

    info: ResponseInfo
    after: int = -1
    last: int = -1
    """The number of the last event, even if the reader already had it."""

    num_chars: int = 0
    """Number of characters of output so far."""

    format: str = ""
    """How the output marks its parts."""

    _pieces: list[str] = field(default_factory=list[str])
    _parser: OutputParser | None = None
    _output: OutputItems = field(default_factory=OutputItems)
    _opened_at: int = 0
    """The place in the text at which the last item began; with `HELD` if it was held back until the end."""

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._pieces)

    def begin(self) -> list[Object]:
        """Return the events that need no output."""
        return [
            *self._event(CREATED, "created", response=response_object(self.info, self.info.first_status)),
            *self._event(IN_PROGRESS, "in_progress", response=response_object(self.info, "in_progress")),
        ]

    def add(self, text: str, output_format: str = "") -> list[Object]:
        """Return the events of more output; its first piece has the format."""
        if self._parser is None:
            self.format = output_format
            self._parser = OutputParser(OutputFormat.read(output_format))
        self._pieces.append(text)
        self.num_chars += len(text)
        # What the reader has ends with a character.
        num_sent = min(max(0, self.after // STRIDE - self.num_chars + len(text)), len(text))
        parts = self._parser.push(text[:num_sent]), self._parser.push(text[num_sent:])
        return [event for several in parts for part in several for event in self._part_events(part)]

    def finish(self, end: ResponseEnd) -> list[Object]:
        """Return the events of the remaining output and of the end.

        Raises:
            OutputChanged: the final output does not begin with the output so far.
        """
        is_whole, so_far = end.status in ("completed", "incomplete"), self.text
        if not is_whole and not end.text:
            return self._fail(replace(end, text=so_far, format=self.format))
        if not end.text.startswith(so_far):
            raise OutputChanged
        rest = self.add(end.text[len(so_far) :], end.format)
        held = self._parser.finish() if self._parser is not None else []
        rest += [event for part in held for event in self._part_events(part, HELD)]
        return rest + (self._close_last(end) if is_whole else []) + self._ended(end)

    def _fail(self, end: ResponseEnd) -> list[Object]:
        """Return the last event of a response that failed without output, or whose output was not kept.

        Its number is the one that follows the output that the reader has.
        """
        self.num_chars = max(self.num_chars, self.after // STRIDE)
        return self._ended(end)

    def _ended(self, end: ResponseEnd) -> list[Object]:
        kind = end.status if end.status in ("completed", "incomplete") else "failed"
        return self._event(ENDED, kind, response=response_object(self.info, end.status, end))

    # ------------------------------------------------------------ items

    def _part_events(self, part: Part, held: int = 0) -> list[Object]:
        """Return the events of a part; of one that begins an item, also those of the end of the item before it."""
        before = self._output.items[-1:]
        is_new, place = self._output.add(part), part.begin if not held else self.num_chars
        item = self._output.items[-1]
        events: list[Object] = []
        if is_new:
            self._opened_at = place + held
            closing = [event for one in before for event in self._closing(one, "completed")]
            events = [*_numbered(closing, place, held + CLOSED), *_numbered(self._opening(item), place, held + OPENED)]
        if part.kind != "call":
            at = self.num_chars if held else part.at
            index = FIRST_DELTA if at + held == self._opened_at else DELTA
            events += _numbered([self._delta(item, part.text)], at, held + index)
        return self._unsent(events)

    def _close_last(self, end: ResponseEnd) -> list[Object]:
        events: list[Object] = []
        if not self._output.items:
            item = OutputItem("message", 0)
            self._output.items.append(item)
            events = list(_numbered(self._opening(item), self.num_chars, HELD + OPENED))
        closing = self._closing(self._output.items[-1], end.status)
        return self._unsent([*events, *_numbered(closing, self.num_chars, LAST_CLOSED)])

    def _opening(self, item: OutputItem) -> list[Object]:
        events = [_of(item, "output_item.added", item=opened_object(item, self.info.name))]
        if item.kind != "function_call":
            events.append(self._at(item, "content_part.added", content_index=0, part=_content(item, "")))
        return events

    def _delta(self, item: OutputItem, text: str) -> Object:
        match item.kind:
            case "message":
                return self._at(item, "output_text.delta", content_index=0, delta=text, logprobs=[])
            case "reasoning":
                return self._at(item, "reasoning_text.delta", content_index=0, delta=text)
            case "function_call":
                return self._at(item, "function_call_arguments.delta", delta=text)

    def _closing(self, item: OutputItem, status: str) -> list[Object]:
        text = item.text
        done = _of(item, "output_item.done", item=item_object(item, self.info.name, status))
        if item.kind == "function_call":
            return [self._at(item, "function_call_arguments.done", name=item.name, arguments=text), done]
        more: Object = {"logprobs": []} if item.kind == "message" else {}
        kind = "output_text.done" if item.kind == "message" else "reasoning_text.done"
        part_done = self._at(item, "content_part.done", content_index=0, part=_content(item, text))
        return [self._at(item, kind, content_index=0, text=text, **more), part_done, done]

    def _at(self, item: OutputItem, kind: str, **fields: object) -> Object:
        return _of(item, kind, item_id=item.identity(self.info.name), **fields)

    # ------------------------------------------------------------ numbers

    def _unsent(self, events: Sequence[Object]) -> list[Object]:
        """Return the events that the reader does not have."""
        if events:
            self.last = events[-1]["sequence_number"]
        return [event for event in events if event["sequence_number"] > self.after]

    def _event(self, index: int, kind: str, **fields: object) -> list[Object]:
        event = {"type": f"response.{kind}", **fields}
        return self._unsent(list(_numbered([event], self.num_chars, index)))


def _numbered(events: Sequence[Object], place: int, index: int) -> Iterator[Object]:
    """Yield events with their numbers: at a place in the text, from an index on."""
    for number, event in enumerate(events, STRIDE * place + index):
        yield {"type": event["type"], "sequence_number": number, **event}


def _of(about: OutputItem, kind: str, **fields: object) -> Object:
    return {"type": f"response.{kind}", "output_index": about.number, **fields}


def _content(item: OutputItem, text: str) -> Object:
    return text_part(text) if item.kind == "message" else reasoning_part(text)
