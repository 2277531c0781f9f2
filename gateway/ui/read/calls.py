"""Calls that submit a job again: with curl, and in Python. No I/O."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from sluice.protocol.wire import Message, Prompt

UNKNOWN = "the prompt, which the queue no longer has"


def as_curl(base_url: str, queue: str, prompt: Prompt | None, options: Mapping[str, Any], *, has_keys: bool) -> str:
    """Return a shell command. The body is read from stdin, because an argument has at most 128 KiB."""
    body = json.dumps({**_asked(prompt), **_plain(options)}, indent=2)
    key = ' \\\n  -H "authorization: Bearer $SLUICE_API_KEY"' if has_keys else ""
    return (
        f"curl -s {shlex.quote(f'{base_url}/jobs?queue={queue}')}{key} \\\n"
        f"  -H 'content-type: application/json' --data-binary @- <<'BODY'\n{body}\nBODY\n"
    )


def as_python(queue: str, prompt: Prompt | None, options: Mapping[str, Any]) -> str:
    """Return a Python program."""
    values = {**_asked(prompt), **_plain(options)}
    arguments = "".join(f"        {name}={value!a},\n" for name, value in values.items() if name.isidentifier())
    return (
        "from sluice.producer import Producer\n\n"
        f"with Producer(queue={queue!a}) as producer:\n"
        f"    job = producer.submit(\n{arguments}    )\n"
        "    for event in producer.stream(job):\n"
        '        print(event.text, end="", flush=True)\n'
    )


def _asked(prompt: Prompt | None) -> Mapping[str, Any]:
    if prompt is None or isinstance(prompt, str):
        return {"prompt": UNKNOWN if prompt is None else prompt}
    if all(isinstance(part, Message) for part in prompt):
        return {"messages": [_message(part) for part in prompt if isinstance(part, Message)]}
    return {"token_ids": list(prompt)}


def _message(message: Message) -> Mapping[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    parts = {
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    given = {name: part for name, part in parts.items() if part is not None}
    return {"role": str(message.role), "content": message.content, **given}


def _plain(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options as JSON values."""
    return json.loads(json.dumps({name: value for name, value in options.items() if value is not None}, default=str))
