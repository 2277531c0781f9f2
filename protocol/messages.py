"""The messages between producer and worker, as self-validating values. No encoding, no I/O."""

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, NewType, get_args

from sluice.protocol import callback_urls, limits
from sluice.protocol.checks import Check, is_listing, is_mapping, is_short, is_text, is_token_id, raise_first
from sluice.protocol.errors import InvalidJob
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import ParsedOutput, parse_output
from sluice.protocol.sampling import JobOptions, ResolvedOptions
from sluice.protocol.states import JobState
from sluice.protocol.tools import AUTO, ToolCall, tool_checks

JobId = NewType("JobId", str)
"""`<partition>.<tenant>.<random>`: the keys of a job are derived from its id."""

Role = Literal["system", "user", "assistant", "tool", "developer"]

_ROLES = get_args(Role)
BATCH_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{limits.MAX_BATCH_CHARS}}}")
TRACE_CONTEXT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
"""W3C's `traceparent` of version 0: the ids of trace and span, and flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat.

    Raises:
        InvalidJob: the role is unknown, the content is not text, or a part belongs to another role.
    """

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    """What the assistant thought before it answered. Templates of some models show it."""

    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of an assistant's message."""

    tool_call_id: str | None = None
    """The call whose result a message of role `tool` has."""

    def __post_init__(self) -> None:
        raise_first(self._checks())

    @property
    def num_bytes(self) -> int:
        """Bytes of its text."""
        calls = sum(len(call.name) + len(call.arguments.encode()) for call in self.tool_calls)
        return len(self.content.encode()) + len((self.reasoning or "").encode()) + calls

    def _checks(self) -> Iterator[Check]:
        yield self.role in _ROLES, f"role must be one of {', '.join(_ROLES)}, got {self.role!r}"
        yield is_text(self.content), "a message's content must be text in UTF-8"
        for name in ("name", "reasoning", "tool_call_id"):
            value = getattr(self, name)
            yield value is None or is_text(value), f"a message's {name} must be text in UTF-8"
        are_calls = is_listing(self.tool_calls, lambda item: isinstance(item, ToolCall))
        yield are_calls, "a message's tool_calls must be calls of functions"
        is_assistant = self.role == "assistant" or not (self.tool_calls or self.reasoning)
        yield is_assistant, "only a message of role assistant has tool_calls or reasoning"
        yield self.tool_call_id is None or self.role == "tool", "only a message of role tool has a tool_call_id"


Prompt = str | tuple[Message, ...] | tuple[int, ...]
"""Text, chat messages, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Options and metadata of a job, from submit to end. Opaque to the scripts, except `model`.

    Raises:
        InvalidJob: a value is out of its range; the message names it.
    """

    options: JobOptions = field(default_factory=JobOptions)
    model: str | None = None
    """The required model; None accepts the model that the queue serves."""

    stream: bool = True
    """False publishes tokens in checkpoints (every 64 tokens or every second) instead of at every step, and a job
    that is done before its first checkpoint has no channel, only its result."""

    awaited: bool = False
    """Whether the end is written to the channel in any case, to wake who waits for it."""

    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    traceparent: str | None = None
    """W3C trace context."""

    callback_url: str | None = None
    batch: str | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer adds special tokens, such as begin-of-sequence, to a text prompt."""

    as_chat: bool = False
    """Whether a text prompt is sent as a user message, if the model has a chat template."""

    tools: tuple[str, ...] = ()
    """The functions that the model may call, each in JSON (`sluice.protocol.tools`)."""

    tool_choice: str = AUTO
    """Whether it must call one: `auto`, `none`, `required`, or `function:` and its name."""

    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""

    def __post_init__(self) -> None:
        raise_first(self._checks())

    def _checks(self) -> Iterator[Check]:
        for name in ("stream", "awaited", "add_special_tokens", "as_chat", "parallel_tool_calls"):
            yield isinstance(getattr(self, name), bool), f"{name} must be true or false, got {getattr(self, name)!r}"
        yield (
            is_short(self.model, limits.MAX_MODEL_CHARS),
            f"model must be text of 1 to {limits.MAX_MODEL_CHARS} characters",
        )
        yield is_short(self.traceparent, limits.MAX_TRACEPARENT_CHARS), "traceparent must be a W3C trace context"
        yield (
            self.batch is None or (is_text(self.batch) and BATCH_NAME.fullmatch(self.batch) is not None),
            f"batch must be 1 to {limits.MAX_BATCH_CHARS} letters, digits and any of _.:-, got {self.batch!r}",
        )
        problem = None if self.callback_url is None else callback_urls.problem_of(self.callback_url)
        yield problem is None, f"callback_url {problem}"
        yield from self._metadata_checks()
        yield from tool_checks(self.tools, self.tool_choice)
        is_ending = not (self.tools and self.options.ignore_eos)
        yield is_ending, "tools must not be combined with ignore_eos: an output with calls ends"
        yield not self.tools or self.options.planned_tokens > 0, "tools must not be given if nothing is generated"

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a worker needs for such a job."""
        return (*self.options.features, *(("tools",) if self.tools else ()))

    def _metadata_checks(self) -> Iterator[Check]:
        yield is_mapping(self.metadata), f"metadata must be a map, got {type(self.metadata).__name__}"
        pairs = list(self.metadata.items())
        yield (
            len(pairs) <= limits.MAX_METADATA_PAIRS,
            f"metadata may have {limits.MAX_METADATA_PAIRS} pairs, got {len(pairs)}",
        )
        yield (
            all(is_text(key) and 1 <= len(key) <= limits.MAX_METADATA_KEY_CHARS for key, _ in pairs),
            f"metadata keys must be text of 1 to {limits.MAX_METADATA_KEY_CHARS} characters",
        )
        yield (
            all(is_text(value) and len(value) <= limits.MAX_METADATA_VALUE_CHARS for _, value in pairs),
            f"metadata values must be text of at most {limits.MAX_METADATA_VALUE_CHARS} characters",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: that of the chosen token, and (id, log-probability) of the most likely."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    token: bytes | None = None
    """Bytes of the chosen token, which may end within a character; a special token's text. None for an unknown id."""

    top_tokens: tuple[bytes | None, ...] = ()
    """Bytes of the tokens in `top`; empty if they are unknown."""

    offset: int | None = None
    """Characters of the choice's text before the token. Tokens that share a character have the same offset."""

    @property
    def text(self) -> str | None:
        """Text of the chosen token; parts of characters become U+FFFD."""
        return None if self.token is None else self.token.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one job."""

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
    """Error code, such as `prompt_too_long` (see docs/reference/errors.md)."""

    usage: Usage | None = None


class ChannelEntry(NamedTuple):
    """One entry of a channel, as readers see it: the output of one advance.

    A named tuple, because it is cheaper to create than a frozen dataclass, and readers create one for each entry.

    Its stream id is `<offset after it>-0`. The id of an end is `<offset>-<1 + requeues>`; an end has no tokens, only
    the text that it releases.
    """

    start: int
    """Number of tokens before the entry."""

    token_ids: tuple[int, ...]
    text: str
    """New text. It may lag behind the tokens until the end."""

    time_ms: int
    """Time of the server's clock, as estimated by the worker, at which the last token was sampled."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    end: End | None = None
    """How the choice ended; set in its last entry."""

    format: str = ""
    """How the choice's text marks its parts (`sluice.protocol.outputs`); set in its first entry, empty for no marks."""

    @property
    def offset(self) -> int:
        """Number of tokens after the entry."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What a job asked of its prompt's tokens."""

    text: str
    token_ids: tuple[int, ...]
    is_echoed: bool = False
    """Whether the job asked for output that begins with the prompt (`echo`)."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each token. That of the first, which nothing predicts, is 0, without alternatives. None if they were dropped
    because the result would be too large.
    """


@dataclass(frozen=True, kw_only=True)  # without slots: what was parsed is kept
class ChoiceResult:
    """The output of one choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    vector: bytes | None = None
    """The vector of the prompt, in float32, little-endian."""

    prompt: PromptResult | None = None
    """Of the first choice."""

    format: str = ""
    """How the text marks its parts, as in `ChannelEntry`."""

    @cached_property
    def parsed(self) -> ParsedOutput:
        """The text taken apart: `content`, `reasoning`, and the `calls` of functions."""
        return parse_output(OutputFormat.read(self.format), self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The output of a job, as stored at its result key."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage
    model: str | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text if self.choices else ""

    @property
    def embedding(self) -> list[float] | None:
        """The vector of the prompt; None if the job did not ask for it."""
        vector = self.choices[0].vector if self.choices else None
        return None if vector is None else list(array("f", vector))

    @property
    def prompt(self) -> PromptResult | None:
        """What the job asked of its prompt's tokens; None if it asked nothing."""
        return self.choices[0].prompt if self.choices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The representation of a measurement in the history, as metadata of its field of `JobRecord`."""

    column: str
    """Name of the column; one in seconds (`_s`) is computed from a field in milliseconds (`_ms`)."""

    meaning: str
    """Comment of the column."""

    table: Literal["jobs", "attempts"] = "jobs"
    view: str | None = None
    """View that has the column, besides its table."""

    bits: int = 64
    """Size of an integer column."""


def _measured(column: str, meaning: str, *, default: object = None, **shown: Any) -> Any:  # noqa: ANN401
    # Any: the field's annotation has the type of its default, and `Measure` the types of the rest.
    return field(default=default, metadata={Measure: Measure(column=column, meaning=meaning, **shown)})


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """Measurements of a job, which its worker sends with its end. Times are wall-clock milliseconds of the server.

    Mutable: the worker that holds the job fills it as it runs.

    Columns, comments, upserts and views of the history, and its page, are derived from these fields.
    """

    model: str | None = _measured("model", "of the worker that ended it, also by a refusal")
    fingerprint: str | None = _measured("fingerprint", "of weights, tokenizer, template, dtype and noise")
    worker: str | None = _measured("worker", "host and process of the owner, or its incarnation")
    finish_reason: str | None = _measured(
        "reason", "stop or length when done; else why it was cancelled, expired or returned"
    )
    prompt_tokens: int | None = _measured(
        "prompt_tokens",
        "exact, once it has ended; none if it was never scheduled: nothing was computed",
    )
    cached_tokens: int | None = _measured("cached_tokens", "prompt tokens found in the prefix cache")
    output_tokens: int | None = _measured("output_tokens", "of all choices")
    resumed_tokens: int = _measured("resumed_tokens", "tokens taken over from an earlier attempt", default=0)
    preemptions: int = _measured(
        "preemptions", "how often its last attempt had to wait for blocks after it had begun", default=0, bits=32
    )
    preempted_ms: int = _measured("preempted_s", "the waits of all its preemptions", default=0, table="attempts")
    preemption_times: tuple[tuple[int, int | None], ...] = _measured(
        "preemption_times",
        "of its first 16: [[ms from started_ms, ms until it ran again]]",
        default=(),
        table="attempts",
    )
    first_scheduled_ms: int | None = _measured("scheduled_ms", "first scheduled by an engine", view="job_times")
    first_token_ms: int | None = _measured("first_token_ms", "first token on the channel", view="job_times")
    last_token_ms: int | None = _measured(
        "last_token_ms", "last token computed; none if the last attempt computed none"
    )
    itl_p50_ms: float | None = _measured(
        "itl_p50_s", "median gap between two tokens of this job", view="hourly_latency"
    )
    itl_p99_ms: float | None = _measured("itl_p99_s", "99th percentile of these gaps", view="hourly_latency")
    itl_max_ms: float | None = _measured(
        "itl_max_s", "longest wait of a reader, with takeovers, outages and preemption"
    )
    gap_ms: float | None = _measured(
        "gap_s", "longest wait of a reader in it, from the last token of the one before", table="attempts"
    )
    resolved: ResolvedOptions | None = _measured(  # noqa: RUF009  # a field, as the others
        "sampling", "values of options that a model may state, as used; and its end tokens"
    )
    exactness: str | None = _measured("exactness", "undisturbed, same_fingerprint or other_fingerprint")


EventKind = Literal["submitted", "started", "returned", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEvent:
    """One change of the state of a job, for SQL. A higher `version` of the same submission wins."""

    kind: EventKind
    job_id: JobId
    version: int
    at_ms: int
    fields: Mapping[str, bytes | int | None]
    """all: submitted_ms. submitted: queue, priority, prompt_tokens, cost, spec, seed,
    batch, not_before_ms, deadline_ms, ttl_ms, digest, custom_id, line and endpoint (of a line of a bulk file), prompt
    (if the history keeps prompts) or prompt_to_hash (if it keeps their hashes). started: epoch, attempt, incarnation.
    returned: why, epoch, gap_ms, seen_ms (its worker's last heartbeat). ended: state, reason, error, error_code,
    epoch, attempt, incarnation, gap_ms, record (encoded JobRecord, if a worker ended it), result (encoded, if the
    history keeps results) or result_bytes (its length, if it is too large for an event: read it from its key). A field
    without a value is absent. Text, seeds (decimal) and encoded messages are bytes."""


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt is valid.

    Raises:
        InvalidJob: the prompt is empty, not UTF-8, or of the wrong type.
    """
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise InvalidJob("the prompt is not valid UTF-8")
        if not prompt:
            raise InvalidJob("the prompt is empty")
        return
    is_chat = is_listing(prompt, lambda item: isinstance(item, Message))
    is_known = is_chat or is_listing(prompt, is_token_id)
    raise_first([(is_known, "a prompt is text, a list of messages, or a list of token ids")])
    raise_first([(len(prompt) > 0, "the prompt is empty")])
