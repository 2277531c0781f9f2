"""Outputs of jobs in the prompts of those that waited for them: `{{outputs[0]}}`. No I/O."""

import re
from collections.abc import Mapping
from dataclasses import replace

from sluice.protocol import limits
from sluice.protocol.calls import NewJob
from sluice.protocol.errors import InvalidJob, InvalidPrompt
from sluice.protocol.jobs import encoded_prompt
from sluice.protocol.messages import Message
from sluice.protocol.wire import Prompt, decode_prompt

_REFERENCE = re.compile(r"\{\{\s*outputs\[([0-9]{1,4})\]\s*\}\}")
_ATTEMPT = re.compile(r"\{\{\s*outputs?\b[^{}]*\}\}", re.IGNORECASE)
"""A reference, or what was probably meant as one."""


def used_outputs(job: NewJob, num_after: int) -> set[int]:
    """Return the positions in `after` of the outputs that a job's prompt uses.

    Raises:
        InvalidJob: there is no such position, or a reference is misspelled.
    """
    if b"{{" not in job.payload or job.prompt_tokens is not None:
        return set()
    attempts = {match[0] for text in _texts(decode_prompt(job.payload)) for match in _ATTEMPT.finditer(text)}
    used = set[int]()
    for attempt in sorted(attempts):
        reference = _REFERENCE.fullmatch(attempt)
        if reference is None:
            raise InvalidJob(
                f"{attempt:.100} is no output: write {{{{outputs[0]}}}} for the text of the first job in after"
            )
        used.add(int(reference[1]))
    if used and max(used) >= num_after:
        raise InvalidJob(f"the prompt uses outputs[{max(used)}], and after names {num_after} jobs, counted from 0")
    return used


def _texts(prompt: Prompt) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [turn.content for turn in prompt if isinstance(turn, Message)]


def _num_chars(text: str, outputs: Mapping[int, str]) -> int:
    """Return the length of a text with the outputs in it."""
    return len(text) + sum(len(outputs.get(int(match[1]), "")) - len(match[0]) for match in _REFERENCE.finditer(text))


def rendered(job: NewJob, outputs: Mapping[int, str]) -> NewJob:
    """Return a job with the outputs in its prompt; one that is missing is empty. The digest stays that of the submit.

    Raises:
        InvalidPrompt: the prompt is too large, or empty.
    """
    if b"outputs[" not in job.payload or job.prompt_tokens is not None:
        return job

    prompt = decode_prompt(job.payload)
    # Before the text is made: a reference of 14 bytes may become a megabyte. A character takes at least a byte.
    num_chars = sum(_num_chars(text, outputs) for text in _texts(prompt))
    if num_chars > limits.MAX_PROMPT_BYTES:
        raise InvalidPrompt(f"the prompt is {num_chars} characters; at most {limits.MAX_PROMPT_BYTES} bytes are taken")

    def filled(text: str) -> str:
        return _REFERENCE.sub(lambda match: outputs.get(int(match[1]), ""), text)

    if isinstance(prompt, str):
        new = filled(prompt)
    else:
        turns = [turn for turn in prompt if isinstance(turn, Message)]
        new = [replace(turn, content=filled(turn.content)) for turn in turns]
    encoded = encoded_prompt(new)
    return replace(job, payload=encoded.payload, prompt_bytes=encoded.num_bytes, prompt_tokens=encoded.num_tokens)
