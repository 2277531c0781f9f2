"""Fold the raw output text of a job into the events of OpenAI's Responses API. No I/O.

The `sequence_number` of an event is 8 x the number of output characters up to and including it, plus the index of its
kind. So it depends on the text alone, not on how the text was split: a reader of the same text in other pieces, from
the channel or from a table, gets the same numbers. A client that resumes after any number gets each further character
once; its first delta may be the end of a longer one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.gateway.openai.responses import (
    ANY_OBJECT,
    MESSAGE,
    OUTPUT_TEXT,
    RESPONSE,
    ResponseEnd,
    ResponseInfo,
    message_item,
    output_items,
    response_object,
    text_part,
)
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, or_null
from sluice.protocol.openai_format.bodies import Object

STRIDE = 8
"""Sequence numbers for each place in the text: one for each kind of event."""

CREATED, IN_PROGRESS, ITEM_ADDED, PART_ADDED = range(4)
"""Indices of the events before the first character."""

DELTA = 0
"""The index of a delta; the same as `CREATED`, which occurs only before the first character."""

TEXT_DONE, PART_DONE, ITEM_DONE, ENDED = range(4, 8)
"""Indices of the events after the last character."""


def _event_schema(kind: str, fields: dict[str, Schema]) -> Schema:
    properties = {"type": {"const": kind}, "sequence_number": NUMBER, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


_PLACE: Schema = {"item_id": TEXT, "output_index": NUMBER, "content_index": NUMBER}
_OF_EVENTS: dict[str, dict[str, Schema]] = {
    **{f"response.{kind}": {"response": RESPONSE} for kind in ("created", "in_progress")},
    **{f"response.output_item.{kind}": {"output_index": NUMBER, "item": MESSAGE} for kind in ("added", "done")},
    **{f"response.content_part.{kind}": {**_PLACE, "part": OUTPUT_TEXT} for kind in ("added", "done")},
    "response.output_text.delta": {**_PLACE, "delta": TEXT, "logprobs": list_of({})},
    "response.output_text.done": {**_PLACE, "text": TEXT, "logprobs": list_of({})},
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

    _pieces: list[str] = field(default_factory=list[str])

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

    def add(self, text: str) -> list[Object]:
        """Return the events of more output."""
        if not text:
            return []
        opening = self._open() if self.num_chars == 0 else []
        num_sent = min(max(0, self.after // STRIDE - self.num_chars), len(text))
        self._pieces.append(text)
        self.num_chars += len(text)
        return opening + self._part_event(DELTA, "output_text.delta", delta=text[num_sent:], logprobs=[])

    def finish(self, end: ResponseEnd) -> list[Object]:
        """Return the events of the remaining output and of the end.

        Raises:
            OutputChanged: the final output does not begin with the output so far.
        """
        is_whole, so_far = end.status in ("completed", "incomplete"), self.text
        if not is_whole and not end.text:
            return self._fail(replace(end, text=so_far))
        if not end.text.startswith(so_far):
            raise OutputChanged
        rest = self.add(end.text[len(so_far) :])
        return rest + (self._close(end) if is_whole else []) + self._ended(end)

    def _fail(self, end: ResponseEnd) -> list[Object]:
        """Return the last event of a response that failed without output, or whose output was not kept.

        Its number is the one that follows the output that the reader has.
        """
        self.num_chars = max(self.num_chars, self.after // STRIDE)
        return self._ended(end)

    def _ended(self, end: ResponseEnd) -> list[Object]:
        kind = end.status if end.status in ("completed", "incomplete") else "failed"
        return self._event(ENDED, kind, response=response_object(self.info, end.status, end))

    def _open(self) -> list[Object]:
        item = message_item(self.info, "in_progress", [])
        return [
            *self._event(ITEM_ADDED, "output_item.added", output_index=0, item=item),
            *self._part_event(PART_ADDED, "content_part.added", part=text_part("")),
        ]

    def _close(self, end: ResponseEnd) -> list[Object]:
        [item] = output_items(self.info, end)
        return [
            *(self._open() if self.num_chars == 0 else []),
            *self._part_event(TEXT_DONE, "output_text.done", text=end.text, logprobs=[]),
            *self._part_event(PART_DONE, "content_part.done", part=text_part(end.text)),
            *self._event(ITEM_DONE, "output_item.done", output_index=0, item=item),
        ]

    def _part_event(self, index: int, kind: str, **fields: object) -> list[Object]:
        place = {"item_id": self.info.item_id, "output_index": 0, "content_index": 0}
        return self._event(index, kind, **place, **fields)

    def _event(self, index: int, kind: str, **fields: object) -> list[Object]:
        """Return a list of one event; empty if the reader already has it."""
        self.last = STRIDE * self.num_chars + index
        if self.last <= self.after:
            return []
        return [{"type": f"response.{kind}", "sequence_number": self.last, **fields}]
