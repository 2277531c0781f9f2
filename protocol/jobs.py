"""Build jobs: prompt and options in, `NewJob` out. No I/O.

A `Template` has options that are checked and encoded once, and builds any number of jobs from them. Each further job
costs only an id, a seed, a digest and the encoding of its prompt.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from typing import Any, TypeAlias, Unpack, cast
from zlib import crc32

from sluice.protocol import limits
from sluice.protocol.calls import FromNow, NewJob, SourceLine
from sluice.protocol.checks import is_listing, is_number, is_text
from sluice.protocol.errors import InvalidJob, InvalidPrompt, did_you_mean
from sluice.protocol.job_ids import check_tenant, job_id_of, split_job_id
from sluice.protocol.sampling import JobOptions, SamplingOptions
from sluice.protocol.structured import stored_structured
from sluice.protocol.tools import ToolCall, stored_choice, stored_tools
from sluice.protocol.wire import JobId, JobSpec, Message, Prompt, WireError, encode_prompt, encode_spec

PromptLike: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, object]]
"""Text, token ids, or chat messages as in OpenAI's API: `{"role": …, "content": …}`."""

Moment: TypeAlias = datetime | timedelta
"""A point in time with a time zone, or a duration from now, by the server's clock."""

Identify: TypeAlias = Callable[[bytes], tuple[JobId, int]]
"""Returns the id and the seed of a job, given the digest of its prompt and options."""

Prepared: TypeAlias = tuple[NewJob | InvalidJob, bool]
"""An encoded job, or the error that replaces it; and whether the caller chose its id."""


class Options(SamplingOptions, total=False):
    """The options of a job, for sampling and for queueing."""

    add_special_tokens: bool
    """Whether the tokenizer adds special tokens, such as begin-of-sequence, to a text prompt. Default: True."""

    as_chat: bool
    """True sends a text prompt as a user message, if the model has a chat template. Default: False."""

    tools: Sequence[Mapping[str, object]]
    """Functions that the model may call, as in OpenAI's API. Default: none."""

    tool_choice: str | Mapping[str, object]
    """Whether it must call one: `auto`, `none`, `required`, or a function as in OpenAI's API. Default: auto."""

    parallel_tool_calls: bool
    """Whether an answer may have several calls. Default: True."""

    model: str | None
    """Model that the worker must serve. Default: None, the one that the queue serves."""

    stream: bool
    """False publishes tokens in checkpoints (every 64 tokens or every second) instead of at every step, and a job
    that is done before its first checkpoint has no channel, only its result. Default: True.
    """

    awaited: bool
    """Whether the end of a job that is not streamed wakes who waits for it at once. Otherwise `result` finds it within
    50 ms. Default: False.
    """

    seed: int | None
    """Seed of the sampling, an unsigned 64-bit number. Default: None, drawn at random."""

    priority: int
    """Priority class, 0 (least urgent) to 9. Default: 0."""

    tenant: str
    """Owner of the job: 1 to 64 lower-case letters, digits, `_` and `-`. Default: "default"."""

    ttl_s: float | None
    """Longest wait in the queue: a job that has not started by then expires. Default: None, no limit."""

    deadline: Moment | None
    """The job expires if it has not ended by then. Default: None."""

    not_before: Moment | None
    """The job starts no sooner. Default: None, at once."""

    idempotency_key: str | None
    """Key by which a repeated submit returns the first job; 1 to 256 characters. Default: None."""

    batch: str | None
    """Batch of the job: 1 to 64 letters, digits and any of `_.:-`. Default: None."""

    metadata: Mapping[str, str]
    """Up to 16 pairs that history, exports and webhooks include. Default: none."""

    traceparent: str | None
    """W3C trace context. Default: None."""

    callback_url: str | None
    """http or https URL that is called when the job has ended. Default: None."""

    job_id: JobId | None
    """Chosen by the caller: the queue accepts a job of the same id only once. Default: None, a random one."""


MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"})
"""Fields of a message."""

SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)
OPTION_NAMES = frozenset(Options.__annotations__)
PROMPTS = ("prompt", "messages", "token_ids")
"""The fields of which a job, written as JSON, has one: its prompt."""

_SPEC = (
    *("model", "stream", "awaited", "metadata", "traceparent", "callback_url", "batch"),
    *("add_special_tokens", "as_chat", "tools", "tool_choice", "parallel_tool_calls"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One of many jobs to submit, with additional options."""

    prompt: PromptLike
    options: Options = field(default_factory=Options)


def job(prompt: PromptLike, **options: Unpack[Options]) -> Job:
    """Describe one of many jobs to submit: `submit_many(job(prompt, max_tokens=n) for prompt, n in …)`."""
    return Job(prompt, options)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in the encoding that the queue stores."""

    payload: bytes
    num_bytes: int
    """Bytes of the text; 0 for token ids."""

    num_tokens: int | None
    """Number of tokens; None if only a tokenizer can count them."""


@dataclass(frozen=True, slots=True)
class Template:
    """Checked and encoded options, from which jobs are built."""

    spec: bytes
    seed: int | None
    tenant: str
    priority: int
    max_tokens: int
    is_length_stated: bool
    choices: int
    batch: str | None
    wants_callback: bool
    ttl_ms: int | None
    asked: bytes
    """Input of the digest besides the prompt: options and a given seed, but not trace context or how it is read."""

    features: tuple[str, ...]
    """Features that a worker needs for these jobs."""

    not_before_ms: int | FromNow | None = None
    deadline_ms: int | FromNow | None = None
    idempotency_key: str | None = None
    job_id: JobId | None = None

    def new_job(
        self,
        prompt: PromptLike | EncodedPrompt,
        identify: Identify | None = None,
        source: SourceLine | None = None,
        *,
        partitions: int = 1,
    ) -> NewJob:
        """Build a job for this prompt.

        Args:
            prompt: The prompt.
            identify: Returns the job's id and seed. Default: the id of the options, or a random one; and a random seed.
                A seed in the options takes precedence.
            source: The line of a bulk file that the prompt is from.
            partitions: Number of partitions of the queue; not used with `identify`, which chooses one itself.

        Raises:
            InvalidPrompt: the prompt is empty, too large, not UTF-8 or of an unknown kind.
            InvalidJob: the id of the options names a partition that the queue does not have.
        """
        encoded = prompt if isinstance(prompt, EncodedPrompt) else encoded_prompt(prompt)
        digest = blake2b(encoded.payload + self.asked, digest_size=16).digest()
        job_id, seed = self._random_identity(partitions) if identify is None else identify(digest)
        return NewJob(
            id=job_id,
            spec=self.spec,
            payload=encoded.payload,
            seed=seed if self.seed is None else self.seed,
            priority=self.priority,
            prompt_tokens=encoded.num_tokens,
            prompt_bytes=encoded.num_bytes,
            max_tokens=self.max_tokens,
            is_length_stated=self.is_length_stated,
            choices=self.choices,
            idempotency_key=self.idempotency_key,
            digest=digest,
            batch=self.batch,
            not_before_ms=self.not_before_ms,
            ttl_ms=self.ttl_ms,
            deadline_ms=self.deadline_ms,
            wants_callback=self.wants_callback,
            features=self.features,
            source=source,
        )

    def _random_identity(self, partitions: int) -> tuple[JobId, int]:
        drawn = os.urandom(20)
        if self.job_id is None:
            job_id = self._new_id(drawn[:12].hex(), partitions)
        else:
            job_id = self.job_id
            _check_partition(job_id, partitions)
        return job_id, int.from_bytes(drawn[12:])

    def _new_id(self, name: str, partitions: int) -> JobId:
        # Equal idempotency keys must map to the same partition, where the first job is.
        spread = name if self.idempotency_key is None else self.idempotency_key
        return job_id_of(partition_of(spread, partitions), self.tenant, name)


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that is checked and encoded, still without its id, which names a partition, and its seed."""

    template: Template
    prompt: EncodedPrompt

    @property
    def is_chosen(self) -> bool:
        """Whether the caller chose the id."""
        return self.template.job_id is not None

    @property
    def is_open(self) -> bool:
        """Whether the job has neither an id nor an idempotency key, so that a repeated submit would be another job."""
        return self.template.job_id is None and self.template.idempotency_key is None

    @property
    def num_tokens(self) -> int:
        """Tokens that it may use: those of its prompt, estimated for text, and all that it may generate."""
        num_tokens = self.prompt.num_tokens
        if num_tokens is None:
            num_tokens = ceil(self.prompt.num_bytes / limits.DEFAULT_BYTES_PER_TOKEN)
        return num_tokens + self.template.choices * self.template.max_tokens

    def with_id(self, job_id: JobId) -> "CheckedJob":
        """Return the job with this id, which must be one of its tenant."""
        return replace(self, template=replace(self.template, job_id=job_id))

    def new_job(self, partitions: int) -> NewJob:
        """Build the job for a queue with this number of partitions.

        Raises:
            InvalidJob: the id names a partition that the queue does not have.
        """
        return self.template.new_job(self.prompt, partitions=partitions)


def checked_job(prompt: PromptLike, options: Options, *, states_length: bool = False) -> CheckedJob:
    """Check and encode a job; the arguments are those of `template`.

    Raises:
        InvalidJob: a name is unknown or a value is out of its range; the message names it.
    """
    return CheckedJob(template(options, states_length=states_length), encoded_prompt(prompt))


def template(options: Options, *, states_length: bool = False) -> Template:
    """Check and encode options.

    Args:
        options: The options.
        states_length: Whether to state the `max_tokens` that are planned, because the model's default may be larger.

    Raises:
        InvalidJob: a name is unknown or a value is out of its range; the message names it.
    """
    try:
        return _with_own(_shared_template(options, states_length=states_length), options)
    except InvalidJob:
        raise
    except WireError as error:
        raise InvalidJob(str(error)) from error
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise InvalidJob(f"an option cannot be read: {error}") from error


_PLAIN = frozenset((str, int, float, bool, type(None)))
_OWN = frozenset(("deadline", "idempotency_key", "job_id", "not_before"))
"""Options of one job, which are in neither its spec nor its digest."""

_RARE = frozenset(("seed", "traceparent"))
"""Options that few jobs have in common."""


def _shared_template(options: Options, *, states_length: bool) -> Template:
    """Return the template without the options of `_OWN`."""
    given = {name: value for name, value in options.items() if name not in _OWN}
    for name in _RARE:
        if given.get(name) is None:
            given.pop(name, None)
    plain = tuple([(name, type(value), value) for name, value in given.items()])
    # Checking takes most of a submit's time, and most submits of a client have the options of an earlier one.
    if all(kind in _PLAIN for _, kind, _ in plain) and _RARE.isdisjoint(given):
        return _plain_template(cast("tuple[_PlainOption, ...]", plain), states_length=states_length)
    return _template(cast("Options", given), states_length=states_length)


_PlainOption: TypeAlias = tuple[str, type, str | float | None]
"""Name, type and value: 1, 1.0 and True are equal."""


@lru_cache(maxsize=256)
def _plain_template(options: tuple[_PlainOption, ...], *, states_length: bool) -> Template:
    return _template(cast("Options", {name: value for name, _, value in options}), states_length=states_length)


def _with_own(shared: Template, options: Options) -> Template:
    if all(options.get(name) is None for name in _OWN):
        return shared
    if (job_id := options.get("job_id")) is not None:
        _check_owner(job_id, shared.tenant)
    return replace(
        shared,
        not_before_ms=moment_ms("not_before", options.get("not_before")),
        deadline_ms=moment_ms("deadline", options.get("deadline")),
        idempotency_key=_key(options.get("idempotency_key")),
        job_id=job_id,
    )


def _template(options: Options, *, states_length: bool) -> Template:
    _check_names(options, OPTION_NAMES)
    spec = _spec(options)
    if states_length and not spec.options.is_length_stated:
        spec = replace(spec, options=replace(spec.options, max_tokens=spec.options.planned_tokens))
    digested = encode_spec(spec, without=("traceparent", "stream", "awaited"))
    _check_reads(spec.options)
    seed = options.get("seed")
    tenant, priority = options.get("tenant", "default"), options.get("priority", 0)
    check_tenant(tenant)
    if seed is not None:
        check_seed(seed)
    _check_whole("priority", priority, limits.MAX_PRIORITY)
    return Template(
        spec=encode_spec(spec),
        seed=seed,
        tenant=tenant,
        priority=priority,
        max_tokens=spec.options.planned_tokens,
        is_length_stated=spec.options.is_length_stated,
        choices=spec.options.n,
        batch=spec.batch,
        wants_callback=spec.callback_url is not None,
        ttl_ms=_ttl_ms(options.get("ttl_s")),
        asked=digested + repr(seed).encode(),
        features=spec.features,
    )


def _check_reads(options: JobOptions) -> None:
    is_read = options.makes_vector or options.read_logprobs is not None
    if options.max_tokens == 0 and not is_read:
        raise InvalidJob("max_tokens must be 1 or more, got 0, unless the prompt is read (`echo`)")
    if options.dimensions is not None and not options.embed:
        raise InvalidJob("dimensions must not be given without `embed`")


def _spec(options: Options) -> JobSpec:
    # Any: JobOptions and JobSpec check each value's type themselves, whatever the caller's type checker has seen.
    values: dict[str, Any] = dict(options)
    sampling = sampling_options({name: value for name, value in values.items() if name in SAMPLING_NAMES})
    if "tools" in values:
        values["tools"] = stored_tools(values["tools"])
    if "tool_choice" in values:
        values["tool_choice"] = stored_choice(values["tool_choice"])
    return JobSpec(options=sampling, **{name: values[name] for name in _SPEC if name in values})


def sampling_options(options: Mapping[str, Any]) -> JobOptions:  # Any: as in `_spec`
    """Check the options of `SamplingOptions`.

    Raises:
        InvalidJob: a name is unknown or a value is out of its range; the message names it.
    """
    _check_names(options, SAMPLING_NAMES)
    values = dict(options)
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if isinstance(listing := values.get(name), list):
            values[name] = tuple(cast("list[object]", listing))
    if "structured" in values:
        values["structured"] = stored_structured(values["structured"])
    return JobOptions(**values)


def _check_names(options: Mapping[str, object], names: frozenset[str]) -> None:
    if unknown := options.keys() - names:
        hint = did_you_mean(min(unknown), names) or "."
        raise InvalidJob(f"unknown option {min(unknown)!r}{hint} Options are: {', '.join(sorted(names))}.")


def encoded_prompt(prompt: PromptLike) -> EncodedPrompt:
    """Check and encode a prompt.

    Raises:
        InvalidPrompt: the prompt is empty, too large, not UTF-8 or of an unknown kind.
    """
    try:
        plain = as_prompt(prompt)
        return EncodedPrompt(encode_prompt(plain), *_size(plain))
    except (InvalidJob, WireError) as error:
        raise InvalidPrompt(str(error)) from error


def as_prompt(prompt: object) -> Prompt:
    """Convert a prompt to the protocol's type."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidJob(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    items = cast("Sequence[object]", prompt)
    if items and isinstance(items[0], (Message, Mapping)):
        return tuple(map(_message, items))
    return tuple(cast("Sequence[int]", items))  # encode_prompt checks each item


def _message(turn: object) -> Message:
    if isinstance(turn, Message):
        return turn
    kind = type(turn).__name__
    # Any: Message checks the types of the values.
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", turn) if isinstance(turn, Mapping) else {}
    needed = ("role",) if parts.get("tool_calls") else ("role", "content")
    if not {*needed} <= parts.keys() <= MESSAGE_FIELDS:
        names = ", ".join(map(str, parts)) or kind
        lacks = " and ".join(name for name in needed if name not in parts)
        missing = f"; {lacks} is missing" if lacks and parts else ""
        raise InvalidJob(f"a message has a role, a content and perhaps a name or tool calls; got {names}{missing}")
    content = parts.get("content")
    return Message(
        role=parts["role"],
        content="" if content is None and parts.get("tool_calls") else joined_text(content),
        name=parts.get("name"),
        reasoning=parts.get("reasoning_content"),
        tool_calls=_tool_calls(parts.get("tool_calls")),
        tool_call_id=parts.get("tool_call_id"),
    )


def _tool_calls(calls: object) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message in OpenAI's format."""
    if calls is None:
        return ()
    if not is_listing(calls, lambda call: isinstance(call, Mapping)):
        raise InvalidJob(f"tool_calls of a message must be a list of calls, got {calls!r:.100}")
    return tuple(map(_tool_call, cast("Sequence[Mapping[str, object]]", calls)))


def _tool_call(call: Mapping[str, object]) -> ToolCall:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidJob(f"a tool call of a message must have type 'function' and a function, got {call!r:.100}")
    # Any: ToolCall checks each part.
    parts = cast("Mapping[str, Any]", function)
    return ToolCall(id=cast("Any", call.get("id")), name=parts.get("name", ""), arguments=parts.get("arguments", ""))


def joined_text(content: Any) -> Any:  # noqa: ANN401  # Message checks any other value
    """Join a message's content if it is a list of OpenAI's text parts.

    Raises:
        InvalidJob: a part is not text.
    """
    if not isinstance(content, list):
        return content
    parts = [
        cast("dict[str, object]", part) if isinstance(part, dict) else {} for part in cast("list[object]", content)
    ]
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidJob(f"content of type {part.get('type')!r} is not supported: give text")
    return "".join(cast("str", part["text"]) for part in parts)


def _size(prompt: Prompt) -> tuple[int, int | None]:
    if isinstance(prompt, str):
        return (len(prompt) if prompt.isascii() else len(prompt.encode())), None
    if isinstance(prompt[0], Message):
        return sum(turn.num_bytes for turn in cast("tuple[Message, ...]", prompt)), None
    return 0, len(prompt)


def partition_of(name: str, partitions: int) -> int:
    """Return the partition of a job from the last part of its id, or from its idempotency key."""
    return crc32(name.encode()) % partitions if partitions > 1 else 0


def check_seed(seed: object) -> None:
    """Check that a seed is an unsigned 64-bit number.

    Raises:
        InvalidJob: it is not one.
    """
    _check_whole("seed", seed, 2**64 - 1)


def _check_whole(name: str, value: object, most: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most):
        raise InvalidJob(f"{name} must be a whole number in [0, {most}], got {value!r}")


def _check_owner(job_id: str, tenant: str) -> None:
    if split_job_id(job_id)[1] != tenant:
        raise InvalidJob(f"job_id {job_id!r} belongs to another tenant than {tenant!r}")


def _check_partition(job_id: str, partitions: int) -> None:
    partition = split_job_id(job_id)[0]
    if partition >= partitions:
        raise InvalidJob(f"job_id {job_id!r} names partition {partition}; this queue has {partitions}, counted from 0")


def _ttl_ms(ttl_s: object) -> int | None:
    if ttl_s is None:
        return None
    if not is_number(ttl_s) or not 0 < cast("float", ttl_s) < limits.MAX_TTL_S:
        raise InvalidJob(f"ttl_s must be a number of seconds over 0 and under {limits.MAX_TTL_S}, got {ttl_s!r:.100}")
    return max(1, round(cast("float", ttl_s) * 1000))


def moment_ms(name: str, moment: object) -> int | FromNow | None:
    """Convert a point in time to milliseconds of wall clock, a duration to a time from now; None stays None.

    Raises:
        InvalidJob: the value is neither a point in time with a zone nor a duration.
    """
    match moment:
        case None:
            return None
        case timedelta():
            return FromNow(round(moment.total_seconds() * 1000))
        case datetime() if moment.tzinfo is not None:
            if moment.timestamp() < 0:
                raise InvalidJob(f"{name} must be after 1970, got {moment.isoformat()}")
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
    """Return the only prompt of the three that is given.

    Raises:
        InvalidJob: none or several are given.
    """
    prompts = [value for value in (prompt, messages, token_ids) if value is not None]
    if len(prompts) != 1:
        raise InvalidJob(f"give one of prompt, messages and token_ids, not {len(prompts)} of them")
    return prompts[0]


class JobEncoder:
    """A builder of jobs from prompts, which take the shared options, and from `Job` values with additional ones."""

    def __init__(self, options: Options, *, partitions: int) -> None:
        self._options = options
        self._partitions = partitions
        self._shared = template(options)

    def prepare(self, item: PromptLike | Job) -> Prepared:
        """Encode a job, or return the error that replaces it."""
        try:
            if not isinstance(item, Job):
                return self._shared.new_job(item, partitions=self._partitions), self._shared.job_id is not None
            own = checked_job(item.prompt, {**self._options, **item.options})
            return own.new_job(self._partitions), own.is_chosen
        except InvalidJob as error:
            return error, False
