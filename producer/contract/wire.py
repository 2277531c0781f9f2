"""The messages between producer and worker: msgpack with a version. Knows no Redis and no engine.

Scripts carry these as opaque strings; only `calls.py` packs what a script itself unpacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType

from producer.contract.states import JobState

WIRE_VERSION = 1
"""Written first in every message; readers accept this and all lower ones."""

JobId = NewType("JobId", str)
"""`<partition>.<tenant>.<random>`: keys can be built from the id alone."""

Role = Literal["system", "user", "assistant", "tool", "developer"]


class WireError(ValueError):
    """Bytes are not a message of a version that is known here, or break a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str
    name: str | None = None


Prompt = str | tuple[Message, ...] | tuple[int, ...]
"""Text, chat messages, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How to generate. Names and ranges as in the engine's SamplingParams; checked against `limits`.

    Raises:
        InvalidJob: a value is out of its range (a sentence that names it).
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What stays with the job from submit to end; opaque to the scripts."""

    options: JobOptions = field(default_factory=JobOptions)
    model: str | None = None
    """The model the producer expects; None takes whatever the queue serves."""

    stream: bool = True
    """False: the channel gets a checkpoint every 64 tokens or second instead of every step."""

    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    traceparent: str | None = None
    """W3C trace context."""

    callback_url: str | None = None
    batch: str | None = None
    add_special_tokens: bool = True
    """Whether a text prompt gets the tokenizer's begin-of-sequence token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one token: the chosen one's, and (id, log-probability) of the most likely."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one job."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one choice ended."""

    state: JobState
    finish_reason: str | None = None
    """`stop` or `length` when done."""

    error: str | None = None
    error_code: str | None = None
    """A constant word for programs, such as `prompt_too_long` (see docs/operations.md)."""

    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEntry:
    """One entry of a channel: what one advance added. The entry's stream id is `<offset after it>-0`."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    time_ms: int
    """Wall clock (the server's, as mapped by the worker) when its last token was drawn."""

    end: End | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """The whole output of one choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The whole output of a job, as kept at its result key."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What the worker measured of a job, for its history row; times are wall-clock milliseconds of the server."""

    model: str | None = None
    fingerprint: str | None = None
    worker: str | None = None
    """Host and process of the last owner."""

    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    resumed_tokens: int = 0
    preemptions: int = 0
    first_scheduled_ms: int | None = None
    first_token_ms: int | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_max_ms: float | None = None
    exactness: str | None = None
    """Grade of a resumed job: `undisturbed`, `same_fingerprint`, `other_fingerprint`."""


EventKind = Literal["submitted", "started", "returned", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEvent:
    """One change of a job's state on its way to SQL. A higher `version` of the same job wins."""

    kind: EventKind
    job_id: JobId
    version: int
    at_ms: int
    fields: Mapping[str, bytes | int | None]
    """submitted: queue, priority, prompt_tokens, cost, spec, seed, batch, not_before_ms, deadline_ms, ttl_ms, prompt (opt.).
    started: epoch, attempt, incarnation. returned: why, epoch. ended: state, reason, error, error_code, epoch,
    attempt, incarnation, record (encoded JobRecord or None), result (encoded, where the history keeps results)."""


def new_job_id(tenant: str, partition: int = 0) -> JobId:
    """Draw a fresh job id."""
    raise NotImplementedError


def split_job_id(job_id: str) -> tuple[int, str, str]:
    """Partition, tenant and random part of an id.

    Raises:
        WireError: not a job id.
    """
    raise NotImplementedError


def encode_prompt(prompt: Prompt) -> bytes:
    raise NotImplementedError


def decode_prompt(data: bytes) -> Prompt:
    raise NotImplementedError


def encode_spec(spec: JobSpec) -> bytes:
    raise NotImplementedError


def decode_spec(data: bytes) -> JobSpec:
    raise NotImplementedError


def encode_entry(entry: ChannelEntry) -> bytes:
    raise NotImplementedError


def decode_entry(data: bytes) -> ChannelEntry:
    raise NotImplementedError


def encode_result(result: JobResult) -> bytes:
    raise NotImplementedError


def decode_result(data: bytes) -> JobResult:
    raise NotImplementedError


def encode_record(record: JobRecord) -> bytes:
    raise NotImplementedError


def decode_record(data: bytes) -> JobRecord:
    raise NotImplementedError


def decode_events(data: bytes) -> list[OutboxEvent]:
    raise NotImplementedError
