"""Render chats with tools. A template without a place for tools gets them as text, in messages that it knows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.protocol.outputs.formats import HERMES_CALL, HERMES_END, MISTRAL_CALLS, CallFormat
from sluice.protocol.tools import NONE, OF_FUNCTION, REQUIRED, Function, ToolCall, functions_of
from sluice.protocol.wire import JobSpec, Message
from sluice.worker.errors import JobRejected
from sluice.worker.model.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTools:
    """The functions that a job's model may call, and how."""

    functions: Sequence[Function] = ()
    is_required: bool = False
    """Whether the answer must have a call."""

    named: str | None = None
    """The only function that it may call."""

    is_parallel: bool = True
    """Whether it may have several calls."""

    @classmethod
    def of(cls, spec: JobSpec) -> "JobTools":
        """Return the tools of a job: none if its model must not call any."""
        if spec.tool_choice == NONE or not spec.tools:
            return cls()
        named = spec.tool_choice.removeprefix(OF_FUNCTION) if spec.tool_choice.startswith(OF_FUNCTION) else None
        return cls(
            functions=functions_of(spec.tools),
            is_required=spec.tool_choice == REQUIRED or named is not None,
            named=named,
            is_parallel=spec.parallel_tool_calls,
        )

    @property
    def callable(self) -> Sequence[Function]:
        """The functions that may be called."""
        return [one for one in self.functions if self.named in (None, one.name)]


def render_chat(
    template: ChatTemplate, messages: Sequence[Message], tools: JobTools, calls: CallFormat, *, now_ms: int
) -> str:
    """Render a chat; `calls`: how its model writes calls.

    Raises:
        JobRejected: the template refuses these messages or fails on them.
    """
    if template.takes_tools:
        return _rendered(template, list(_named_results(messages)), tools.functions, now_ms)
    plain = [_plain(message, calls or "hermes") for message in messages]
    if tools.functions:
        plain = _introduced(plain, _INTRODUCTION.format(tools=_listed(tools.functions), example=_EXAMPLES[calls]))
    return template.render(plain, now_ms=now_ms)


def _rendered(template: ChatTemplate, messages: Sequence[Message], functions: Sequence[Function], now_ms: int) -> str:
    whole = [
        replace(one, description=one.description or "", parameters=one.parameters or _NOTHING) for one in functions
    ]
    try:
        return template.render(messages, now_ms=now_ms, tools=[one.shown for one in functions])
    except JobRejected:
        if whole == [*functions]:
            raise
        # Hermes' template fails on a function without description or parameters.
        return template.render(messages, now_ms=now_ms, tools=[one.shown for one in whole])


_NOTHING: Mapping[str, object] = {"type": "object", "properties": {}}
"""Parameters of a function that has none."""


def _named_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages; results of calls with the names of their functions, which Hermes' template demands."""
    names: dict[str | None, str] = {}
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls})
        is_nameless = message.role == "tool" and message.name is None
        yield replace(message, name=names.get(message.tool_call_id)) if is_nameless else message


def _plain(message: Message, calls: CallFormat) -> Message:
    """Return a message as one that any template knows."""
    if message.tool_calls:
        written = _written(message.tool_calls, calls)
        content = f"{message.content}\n{written}" if message.content else written
        return Message(role="assistant", content=content, name=message.name)
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    return message


def _written(made: Sequence[ToolCall], calls: CallFormat) -> str:
    key = "parameters" if calls == "llama3" else "arguments"
    texts = [json.dumps({"name": call.name, key: call.values}, ensure_ascii=False) for call in made]
    match calls:
        case "mistral":
            return f"{MISTRAL_CALLS}[{', '.join(texts)}]"
        case "llama3":
            return "; ".join(texts)
        case _:
            return "\n".join(f"{HERMES_CALL}\n{text}\n{HERMES_END}" for text in texts)


def _introduced(messages: Sequence[Message], introduction: str) -> list[Message]:
    first, *rest = messages
    if first.role in ("system", "developer"):
        return [replace(first, content=f"{first.content}\n\n{introduction}"), *rest]
    return [Message(role="system", content=introduction), *messages]


def _listed(functions: Sequence[Function]) -> str:
    return "\n".join(json.dumps(one.shown, ensure_ascii=False) for one in functions)


_EXAMPLES: dict[str, str] = {
    "hermes": f'{HERMES_CALL}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{HERMES_END}',
    "llama3": '{"name": <function-name>, "parameters": <args-json-object>}',
    "mistral": f'{MISTRAL_CALLS}[{{"name": <function-name>, "arguments": <args-json-object>}}]',
}

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, answer with its name and arguments in this form:
{example}"""
"""As in the templates of Hermes and Qwen."""
