"""Job to request: the only place where the queue's words and the engine's meet. Off the loop; touches no state.

Text and chats become token ids here; token ids pass through. Whatever is wrong with one job becomes a `JobRejected`
with a code for programs and a sentence for people.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from engine.errors import InvalidSamplingParams, RequestRejected
from engine.request import Request, Room, SamplingParams
from producer.contract.wire import (
    JobOptions,
    JobSpec,
    Message,
    Prompt,
    WireError,
    decode_prompt,
    decode_spec,
    split_job_id,
)
from worker.chat import ChatTemplate
from worker.errors import INVALID_REQUEST, JobRejected
from worker.leases import HeldJob


class Encoder(Protocol):
    """Text to token ids."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """Makes requests for one model. Any thread may call it."""

    encode: Encoder
    template: ChatTemplate | None
    validate: Callable[[Request], None]
    """The engine's check that a request can ever run."""

    model: str
    """The name by which producers may ask for this model."""

    def request(self, job: HeldJob) -> Request:
        """Translate a job whose choices hold what earlier attempts published.

        Raises:
            JobRejected: it cannot run here; the others go on.
        """
        if job.spec is None:
            raise JobRejected(INVALID_REQUEST, "what the producer asked for cannot be read")
        try:
            self._check_model(job.spec)
            request = self._request(job, job.spec, decode_prompt(job.leased.payload))
            self.validate(request)
        except WireError as error:
            raise JobRejected(INVALID_REQUEST, f"the job cannot be read: {error}") from error
        except RequestRejected as error:
            raise JobRejected(code_of(error), str(error)) from error
        return request

    def _check_model(self, spec: JobSpec) -> None:
        if spec.model is not None and spec.model != self.model:
            message = f"the job asks for the model {spec.model!r}; this queue serves {self.model!r}"
            raise JobRejected("model_mismatch", message)

    def _request(self, job: HeldJob, spec: JobSpec, prompt: Prompt) -> Request:
        leased = job.leased
        tenant = split_job_id(job.id)[1]
        progress = tuple(choice.as_progress() for choice in job.choices)
        has_progress = any(one.token_ids or one.is_finished for one in progress)
        return Request(
            id=job.request_id,
            prompt_token_ids=tuple(self._token_ids(prompt, spec, leased.submitted_ms)),
            sampling=sampling_of(spec.options, leased.seed),
            num_choices=leased.choices,
            priority=leased.priority,
            arrival_s=leased.submitted_ms / 1000,
            tenant=tenant,
            cache_salt=tenant,
            progress=progress if has_progress else (),
        )

    def _token_ids(self, prompt: Prompt, spec: JobSpec, submitted_ms: int) -> tuple[int, ...] | list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=spec.add_special_tokens)
        if prompt and isinstance(prompt[0], Message):
            messages = tuple(one for one in prompt if isinstance(one, Message))
            # A template writes its own begin-of-sequence token.
            return self.encode(self._render(messages, submitted_ms), add_special_tokens=False)
        return tuple(one for one in prompt if isinstance(one, int))

    def _render(self, messages: tuple[Message, ...], submitted_ms: int) -> str:
        if self.template is None:
            raise JobRejected(INVALID_REQUEST, f"the model {self.model!r} has no chat template: send text instead")
        return self.template.render(messages, now_ms=submitted_ms)


# Jobs of one file or backend mostly ask for the same: reading a spec is the dearest part of taking a small job.
@lru_cache(maxsize=1024)
def read_spec(spec: bytes) -> JobSpec | None:
    """What the producer asked for; None if it cannot be read."""
    try:
        return decode_spec(spec)
    except (WireError, ValueError):
        return None


def sampling_of(options: JobOptions, seed: int) -> SamplingParams:
    """The engine's parameters for a job's options.

    Raises:
        InvalidSamplingParams: a value is out of its range.
    """
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=options.logit_bias,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        seed=seed,
        skip_special_tokens=options.skip_special_tokens,
    )


def room_of(job: HeldJob, *, reserve_tokens: int) -> Room:
    """The room that a leased job will take: its prompt, its tokens so far, and what it may still say, bounded."""
    num_prompt_tokens, num_published = job.leased.prompt_tokens, job.num_published
    max_tokens = job.spec.options.max_tokens if job.spec else reserve_tokens
    rests = [max(0, max_tokens - choice.published) for choice in job.choices if not choice.has_end]
    return Room(
        kv_tokens=num_prompt_tokens + num_published + sum(min(rest, reserve_tokens) for rest in rests),
        prefill_tokens=num_prompt_tokens + num_published,
        sequences=len(rests),
    )


def code_of(error: RequestRejected) -> str:
    """A constant word for a rejection: the class's name in snake case, where it says more than that it is one."""
    if type(error) is RequestRejected or isinstance(error, InvalidSamplingParams):
        return INVALID_REQUEST
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
