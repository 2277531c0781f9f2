"""Format calls of functions, and thoughts, as in OpenAI's chats. No I/O."""

from hashlib import blake2b
from typing import Any

from sluice.protocol.outputs.parser import Part
from sluice.protocol.wire import ChoiceResult

Object = dict[str, Any]  # Any: JSON

TOOL_CALLS = "tool_calls"
"""The reason for which a choice with calls finishes."""


def call_id(name: str, choice: int, call: int) -> str:
    """Return the id of a call: the same for every reader of a job.

    Args:
        name: The job's id, or what a file shows of it.
        choice: The number of the choice.
        call: The number of the call in it.
    """
    return f"call_{blake2b(f'{name}/{choice}/{call}'.encode(), digest_size=12).hexdigest()}"


def message_object(name: str, index: int, choice: ChoiceResult) -> Object:
    """Format the message of a choice; `name` as in `call_id`."""
    output = choice.parsed
    message: Object = {
        "role": "assistant",
        "content": output.content if output.content or not output.calls else None,
        "refusal": None,
    }
    if output.reasoning is not None:
        message["reasoning_content"] = output.reasoning
    if output.calls:
        message[TOOL_CALLS] = [
            _call_object(call_id(name, index, number), call.name, call.arguments)
            for number, call in enumerate(output.calls)
        ]
    return message


def parsed_object(choice: ChoiceResult) -> Object | None:
    """Format the parts of a choice's text for readers that also get the text; None if it marks none."""
    if not choice.format:
        return None
    parsed = choice.parsed
    calls = [call._asdict() for call in parsed.calls]
    return {"content": parsed.content, "reasoning": parsed.reasoning, "calls": calls}


def finish_reason_of(reason: str | None, *, has_calls: bool) -> str | None:
    """Return why a choice finished, in OpenAI's words."""
    return TOOL_CALLS if has_calls and reason == "stop" else reason


def delta_object(name: str, index: int, part: Part) -> Object:
    """Format a part of a stream; `name` as in `call_id`."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text}
        case "call":
            call = _call_object(call_id(name, index, part.call), part.text, "")
            return {"content": None, TOOL_CALLS: [{"index": part.call, **call}]}
        case "arguments":
            return {TOOL_CALLS: [{"index": part.call, "function": {"arguments": part.text}}]}


def _call_object(identity: str, name: str, arguments: str) -> Object:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
