"""The items of OpenAI's Responses API: what a response has as input, and what its output becomes. No I/O.

Stored items have our form: a message is `{role, content}`; `function_call`, `function_call_output` and `reasoning` have
their type, and text in place of parts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.tools import call_id
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import OutputParser, Part

Item = Mapping[str, Any]  # Any: JSON
"""An item in our form."""

ItemKind = Literal["message", "reasoning", "function_call"]

_PREFIXES: Mapping[ItemKind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_KINDS: Mapping[str, ItemKind] = {"content": "message", "reasoning": "reasoning"}


@dataclass(slots=True, eq=False)
class OutputItem:
    """An item of an output so far. Mutable: it grows with the output."""

    kind: ItemKind
    number: int
    """Its place in the output, from 0."""

    name: str = ""
    """Of a call: that of the function."""

    call: int = 0
    """Of a call: its number."""

    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """The text, or the arguments."""
        return "".join(self.pieces)

    def identity(self, name: str) -> str:
        """Return its id in the response with the name `name`."""
        prefix = f"{_PREFIXES[self.kind]}_{name}"
        return prefix if self.number == 0 else f"{prefix}_o{self.number}"

    def as_input(self, name: str) -> Item:
        """Return it in our form, as the input of a later response."""
        match self.kind:
            case "message":
                return {"role": "assistant", "content": self.text}
            case "reasoning":
                return {"type": "reasoning", "text": self.text}
            case "function_call":
                identity = call_id(name, 0, self.call)
                return {"type": self.kind, "call_id": identity, "name": self.name, "arguments": self.text}


class OutputItems:
    """The items of an output so far. Mutable."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []

    def add(self, part: Part) -> bool:
        """Add a part of the output to the last item; return whether it begins another one."""
        kind = _KINDS.get(part.kind, "function_call")
        is_new = part.kind == "call" or not self.items or self.items[-1].kind != kind
        if is_new:
            name = part.text if part.kind == "call" else ""
            self.items.append(OutputItem(kind, len(self.items), name, part.call))
        if part.kind != "call":
            self.items[-1].pieces.append(part.text)
        return is_new


def items_of(output_format: str, text: str) -> list[OutputItem]:
    """Take the text of an output apart."""
    parser, items = OutputParser(OutputFormat.read(output_format)), OutputItems()
    for part in [*parser.push(text), *parser.finish()]:
        items.add(part)
    return items.items


def item_object(item: OutputItem, name: str, status: str) -> Object:
    """Format an item of the output of the response with the name `name`."""
    about: Object = {"id": item.identity(name), "type": item.kind, "status": status}
    match item.kind:
        case "message":
            return {**about, "role": "assistant", "content": [text_part(item.text)]}
        case "reasoning":
            return {**about, "summary": [], "content": [reasoning_part(item.text)]}
        case "function_call":
            identity = call_id(name, 0, item.call)
            return {**about, "call_id": identity, "name": item.name, "arguments": item.text}


def opened_object(item: OutputItem, name: str) -> Object:
    """Format an item that has just begun."""
    empty = item_object(OutputItem(item.kind, item.number, item.name, item.call), name, "in_progress")
    return empty if item.kind == "function_call" else {**empty, "content": []}


def text_part(text: str) -> Object:
    """Format the content of an output message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> Object:
    """Format the content of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def input_object(item: Item, identity: str) -> Object:
    """Format an item of the input."""
    match item.get("type"):
        case None:
            is_own = item["role"] == "assistant"
            part = text_part(item["content"]) if is_own else {"type": "input_text", "text": item["content"]}
            about = {"id": identity, "type": "message", "role": item["role"], "status": "completed"}
            return {**about, "content": [part]}
        case "reasoning":
            content = [reasoning_part(item["text"])]
            return {"id": identity, "type": "reasoning", "summary": [], "content": content, "status": "completed"}
        case _:
            return {"id": identity, **item, "status": "completed"}


def messages_of(items: Iterable[Item]) -> list[Object]:
    """Return the messages of a chat for items. Calls, and the thoughts before an answer, are parts of its message."""
    messages: list[Object] = []
    for item in items:
        match item.get("type"):
            case None:
                _add_message(messages, item)
            case "reasoning":
                messages.append({"role": "assistant", "content": "", "reasoning_content": item["text"]})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
            case _:
                messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    return messages


def _add_message(messages: list[Object], item: Item) -> None:
    thought = messages[-1] if messages and item["role"] == "assistant" else {}
    if "reasoning_content" in thought and not thought["content"] and "tool_calls" not in thought:
        messages[-1] = {**thought, "content": item["content"]}
    else:
        messages.append({"role": item["role"], "content": item["content"]})


def unknown_calls(messages: Sequence[Object]) -> Iterator[str]:
    """Yield the ids of calls of which the messages have the output, and not the call before it."""
    known: set[str] = set()
    for message in messages:
        known.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            yield message["tool_call_id"]
