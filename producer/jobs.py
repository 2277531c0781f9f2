"""What a caller asks for, as the queue takes it: prompt and options -> NewJob. Knows no server.

Options are checked and encoded once in a `Template`, which then makes any number of jobs: a job of its own costs an id,
a seed, a digest and its prompt.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from time import time
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack, cast
from zlib import crc32

from producer.contract import errors as contract_errors
from producer.contract import limits
from producer.contract.calls import NewJob
from producer.contract.messages import is_text
from producer.contract.wire import (
    JobId,
    JobOptions,
    JobSpec,
    Message,
    Prompt,
    WireError,
    encode_prompt,
    encode_spec,
    new_job_id,
    split_job_id,
)
from producer.errors import InvalidJob

PromptLike: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, str]]
"""Text, token ids, or chat messages (as `{"role": …, "content": …}` or Message)."""

Moment: TypeAlias = datetime | timedelta
"""A point in time with its zone, or how long from now."""


Prepared: TypeAlias = tuple[NewJob | InvalidJob, bool]
"""A job as it is sent, or the error that stands for it; and whether its caller chose its id."""


class Options(TypedDict, total=False):
    """Everything that may be said about a job beside its prompt. Names and ranges as in the engine's SamplingParams."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    n: int
    skip_special_tokens: bool
    add_special_tokens: bool
    model: str | None
    stream: bool
    """False: tokens reach the channel in checkpoints (every 64 tokens or second) instead of at every step."""

    seed: int | None
    """Unsigned 64-bit; drawn here where it is absent."""

    priority: int
    """0 (least urgent) to 9."""

    tenant: str
    ttl_s: float | None
    """Longest wait in the queue: a job that nobody began by then expires."""

    deadline: Moment | None
    """The job expires if it has not ended by then."""

    not_before: Moment | None
    idempotency_key: str | None
    batch: str | None
    metadata: Mapping[str, str]
    traceparent: str | None
    callback_url: str | None
    job_id: JobId | None
    """Chosen by the caller: submitting it twice is submitting it once."""


OPTION_NAMES = frozenset(Options.__annotations__)
_SAMPLING = frozenset(option.name for option in fields(JobOptions))
_SPEC = ("model", "stream", "metadata", "traceparent", "callback_url", "batch", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class Job:
    """One job to submit among many, with options of its own."""

    prompt: PromptLike
    options: Options = field(default_factory=Options)


def job(prompt: PromptLike, **options: Unpack[Options]) -> Job:
    """One job to submit among many: `submit_many(job(prompt, max_tokens=n) for prompt, n in …)`."""
    return Job(prompt, options)


class EncodedPrompt(NamedTuple):
    """A prompt as it is sent. One for each job: a named tuple is quick to make."""

    payload: bytes
    num_bytes: int
    """Of its text, for the queue's estimate; 0 where the tokens are known."""

    num_tokens: int | None
    digest: bytes
    """Of all that is asked, options too."""


@dataclass(frozen=True, slots=True)
class Template:
    """Options, checked and encoded, for any number of prompts."""

    spec: bytes
    seed: int | None
    tenant: str
    priority: int
    max_tokens: int
    choices: int
    batch: str | None
    wants_callback: bool
    not_before_ms: int | None
    ttl_ms: int | None
    deadline_ms: int | None
    idempotency_key: str | None
    job_id: JobId | None
    asked: bytes
    """What a digest covers beside the prompt: options and a given seed, not the trace context or how tokens travel."""

    features: tuple[str, ...]
    """What a worker must be able to do for it."""

    partitions: int

    def new_job(self, prompt: PromptLike) -> NewJob:
        """A job for this prompt, with an id and a seed of its own where none are given.

        Raises:
            InvalidJob: the prompt is empty, too large, not UTF-8 or of no kind that is known.
        """
        drawn = os.urandom(20)
        job_id = self.job_id or self._new_id(drawn[:12].hex())
        return self.job_of(self.encode(prompt), job_id, int.from_bytes(drawn[12:]))

    def encode(self, prompt: PromptLike) -> "EncodedPrompt":
        """The prompt as it is sent, and the digest of what is asked.

        Raises:
            InvalidJob: as in `new_job`.
        """
        payload, num_bytes, num_tokens = encoded_prompt(prompt)
        return EncodedPrompt(payload, num_bytes, num_tokens, blake2b(payload + self.asked, digest_size=16).digest())

    def job_of(self, prompt: "EncodedPrompt", job_id: JobId, drawn_seed: int) -> NewJob:
        """The job of this id; the seed is taken where the options have none."""
        return NewJob(
            id=job_id,
            spec=self.spec,
            payload=prompt.payload,
            seed=drawn_seed if self.seed is None else self.seed,
            priority=self.priority,
            prompt_tokens=prompt.num_tokens,
            prompt_bytes=prompt.num_bytes,
            max_tokens=self.max_tokens,
            choices=self.choices,
            idempotency_key=self.idempotency_key,
            digest=prompt.digest,
            batch=self.batch,
            not_before_ms=self.not_before_ms,
            ttl_ms=self.ttl_ms,
            deadline_ms=self.deadline_ms,
            wants_callback=self.wants_callback,
            features=self.features,
        )

    def _new_id(self, name: str) -> JobId:
        # The same key must find the same partition, or it would not find its first job.
        spread = name if self.idempotency_key is None else self.idempotency_key
        return JobId(f"{partition_of(spread, self.partitions)}.{self.tenant}.{name}")


def template(options: Options, *, partitions: int = 1) -> Template:
    """Check and encode options.

    Raises:
        InvalidJob: a name is unknown or a value is out of its range; the message names it.
    """
    if unknown := options.keys() - OPTION_NAMES:
        raise InvalidJob(f"unknown option {min(unknown)!r}. Options are: {', '.join(sorted(OPTION_NAMES))}.")
    try:
        return _template(options, partitions)
    except (contract_errors.InvalidJob, WireError) as error:
        raise InvalidJob(str(error)) from error


def _template(options: Options, partitions: int) -> Template:
    spec = _spec(options)
    asked = encode_spec(replace(spec, traceparent=None, stream=True))
    seed = options.get("seed")
    tenant, priority = options.get("tenant", "default"), options.get("priority", 0)
    new_job_id(tenant)  # checks the name
    if seed is not None:
        _check_whole("seed", seed, 2**64 - 1)
    _check_whole("priority", priority, limits.MAX_PRIORITY)
    if (job_id := options.get("job_id")) is not None and split_job_id(job_id)[1] != tenant:
        raise InvalidJob(f"job_id {job_id!r} belongs to another tenant than {tenant!r}")
    return Template(
        spec=encode_spec(spec),
        seed=seed,
        tenant=tenant,
        priority=priority,
        max_tokens=spec.options.max_tokens,
        choices=spec.options.n,
        batch=spec.batch,
        wants_callback=spec.callback_url is not None,
        not_before_ms=moment_ms("not_before", options.get("not_before")),
        ttl_ms=_ttl_ms(options.get("ttl_s")),
        deadline_ms=moment_ms("deadline", options.get("deadline")),
        idempotency_key=_key(options.get("idempotency_key")),
        job_id=job_id,
        asked=asked + repr(seed).encode(),
        features=_features(spec.options),
        partitions=partitions,
    )


def _features(options: JobOptions) -> tuple[str, ...]:
    """In the words in which workers state what they can do."""
    is_penal = options.repetition_penalty != 1 or options.frequency_penalty != 0 or options.presence_penalty != 0
    asked = (
        ("logprobs", options.logprobs is not None),
        ("choices", options.n > 1),
        ("logit_bias", bool(options.logit_bias)),
        ("penalties", is_penal),
    )
    return tuple(name for name, is_asked in asked if is_asked)


def _spec(options: Options) -> JobSpec:
    # Any: JobOptions and JobSpec check each value's type themselves, whatever the caller's type checker has seen.
    values: dict[str, Any] = dict(options)
    sampling = {name: value for name, value in values.items() if name in _SAMPLING}
    if isinstance(stop := sampling.get("stop"), str):
        sampling["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if isinstance(listing := sampling.get(name), list):
            sampling[name] = tuple(cast("list[object]", listing))
    return JobSpec(options=JobOptions(**sampling), **{name: values[name] for name in _SPEC if name in values})


def encoded_prompt(prompt: PromptLike) -> tuple[bytes, int, int | None]:
    """The prompt's encoding, its length in bytes of text, and in tokens where that is known.

    Raises:
        InvalidJob: it is empty, too large, not UTF-8 or of no kind that is known.
    """
    try:
        plain = as_prompt(prompt)
        return encode_prompt(plain), *_size(plain)
    except (contract_errors.InvalidJob, WireError) as error:
        raise InvalidJob(str(error)) from error


def as_prompt(prompt: object) -> Prompt:
    """The prompt as the wire knows it."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidJob(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    items = cast("Sequence[object]", prompt)
    if items and isinstance(items[0], (Message, Mapping)):
        return tuple(map(_message, items))
    return tuple(cast("Sequence[int]", items))  # encode_prompt looks at each


def _message(turn: object) -> Message:
    if isinstance(turn, Message):
        return turn
    kind = type(turn).__name__
    # Any: Message checks what the values are.
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", turn) if isinstance(turn, Mapping) else {}
    if not {"role", "content"} <= parts.keys() <= {"role", "content", "name"}:
        found = ", ".join(map(str, parts)) or kind
        raise InvalidJob(f"a message has a role, a content and perhaps a name; got {found}")
    return Message(**parts)


def _size(prompt: Prompt) -> tuple[int, int | None]:
    if isinstance(prompt, str):
        return (len(prompt) if prompt.isascii() else len(prompt.encode())), None
    if isinstance(prompt[0], Message):
        return sum(len(turn.content.encode()) for turn in cast("tuple[Message, ...]", prompt)), None
    return 0, len(prompt)


def partition_of(name: str, partitions: int) -> int:
    """The partition that a job (by the last part of its id, or by its idempotency key) belongs to."""
    return crc32(name.encode()) % partitions if partitions > 1 else 0


def _check_whole(name: str, value: object, most: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most):
        raise InvalidJob(f"{name} must be a whole number in [0, {most}], got {value!r}")


def _ttl_ms(ttl_s: object) -> int | None:
    if ttl_s is None:
        return None
    if not isinstance(ttl_s, (int, float)) or not 0 < ttl_s < 10**9:
        raise InvalidJob(f"ttl_s must be a number of seconds over 0, got {ttl_s!r}")
    return max(1, round(ttl_s * 1000))


def moment_ms(name: str, moment: object) -> int | None:
    """A point in time as milliseconds; None for none.

    Raises:
        InvalidJob: it is no point in time.
    """
    match moment:
        case None:
            return None
        case timedelta():
            return round((time() + moment.total_seconds()) * 1000)
        case datetime() if moment.tzinfo is not None:
            return round(moment.timestamp() * 1000)
        case _:
            raise InvalidJob(f"{name} must be a datetime with its time zone, or a timedelta from now, got {moment!r}")


def _key(key: object) -> str | None:
    if key is None:
        return None
    if isinstance(key, str) and is_text(key) and 0 < len(key) <= limits.MAX_IDEMPOTENCY_KEY_CHARS:
        return key
    raise InvalidJob(f"idempotency_key must be 1 to {limits.MAX_IDEMPOTENCY_KEY_CHARS} characters, got {key!r:.100}")


def only_prompt(prompt: PromptLike | None, messages: PromptLike | None, token_ids: Sequence[int] | None) -> PromptLike:
    """The one of the three that is given.

    Raises:
        InvalidJob: none or several are.
    """
    given = [value for value in (prompt, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidJob(f"give one of prompt, messages and token_ids, not {len(given)} of them")
    return given[0]


class Workshop:
    """Makes jobs of what callers hand over: prompts, which take the shared options, and jobs with some of their own."""

    def __init__(self, options: Options, *, partitions: int) -> None:
        self._options = options
        self._partitions = partitions
        self._shared = template(options, partitions=partitions)

    def prepare(self, item: PromptLike | Job) -> Prepared:
        """The job encoded, or the error that stands for it."""
        try:
            if not isinstance(item, Job):
                return self._shared.new_job(item), self._shared.job_id is not None
            own = template({**self._options, **item.options}, partitions=self._partitions)
            return own.new_job(item.prompt), own.job_id is not None
        except InvalidJob as error:
            return error, False
