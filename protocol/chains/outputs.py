"""Outputs of jobs in the prompts of those that waited for them: `{{outputs[0]}}`. No I/O."""

import re
from collections.abc import Mapping
from dataclasses import replace

from sluice.protocol.calls import NewJob
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import encoded_prompt
from sluice.protocol.messages import Message
from sluice.protocol.wire import Prompt, decode_prompt

_REFERENCE = re.compile(r"\{\{\s*outputs\[([0-9]{1,4})\]\s*\}\}")


def used_outputs(job: NewJob, num_after: int) -> set[int]:
    """Return the positions in `after` of the outputs that a job's prompt uses.

    Raises:
        InvalidJob: there is no such position.
    """
    if b"outputs[" not in job.payload or job.prompt_tokens is not None:
        return set()
    used = {int(number) for text in _texts(decode_prompt(job.payload)) for number in _REFERENCE.findall(text)}
    if used and max(used) >= num_after:
        raise InvalidJob(f"the prompt uses outputs[{max(used)}], and after names {num_after} jobs, counted from 0")
    return used


def _texts(prompt: Prompt) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [turn.content for turn in prompt if isinstance(turn, Message)]


def rendered(job: NewJob, outputs: Mapping[int, str]) -> NewJob:
    """Return a job with the outputs in its prompt; one that is missing is empty. The digest stays that of the submit.

    Raises:
        InvalidPrompt: the prompt is too large, or empty.
    """
    if b"outputs[" not in job.payload or job.prompt_tokens is not None:
        return job

    def filled(text: str) -> str:
        return _REFERENCE.sub(lambda match: outputs.get(int(match[1]), ""), text)

    prompt = decode_prompt(job.payload)
    if isinstance(prompt, str):
        new = filled(prompt)
    else:
        turns = [turn for turn in prompt if isinstance(turn, Message)]
        new = [replace(turn, content=filled(turn.content)) for turn in turns]
    encoded = encoded_prompt(new)
    return replace(job, payload=encoded.payload, prompt_bytes=encoded.num_bytes, prompt_tokens=encoded.num_tokens)
