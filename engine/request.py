"""Requests to the engine and their results: plain values. Knows no tensors, no queue, no wire format."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, get_args

from sluice.engine.errors import AdapterError, OutOfMemory
from sluice.engine.sampling import SamplingFields


class FinishReason(StrEnum):
    """Reason why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""

    LENGTH = "length"
    """`max_tokens`, or the model's context."""

    ABORTED = "aborted"
    """The caller aborted the request."""

    ERROR = "error"
    """This request failed; others continue."""


class FailureKind(StrEnum):
    """Cause of the failure of a request that was valid: constant words for programs."""

    STEP = "engine_error"
    """Steps with this request raise, and steps without it succeed."""

    MEMORY = "out_of_memory"
    """Steps with this request raise for lack of memory."""

    FILE = "model_file_lost"
    """Steps raise because a file that the model needs cannot be read. Timeouts and lost connections are `STEP`."""

    LOGITS = "bad_logits"
    """Its logits leave no token to sample: NaN, or all masked."""

    @classmethod
    def of(cls, error: BaseException) -> "FailureKind":
        """Return the kind of an error raised by a step or by the preparation of a request."""
        # By class name: the executor's libraries are not imported here.
        is_memory = isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError"
        if is_memory or "can't allocate memory" in str(error):
            return cls.MEMORY
        is_file = isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)
        return cls.FILE if is_file or isinstance(error, AdapterError) else cls.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingFields):
    """How to choose the next token, and when to stop. The values have been checked."""

    end_token_ids: frozenset[int] | None = None
    """The model's end-of-sequence tokens. None: those of the loaded model."""

    seed: int = 0
    """Noise key, an unsigned 64-bit number: the same seed gives the same noise on every worker."""

    def eos_token_ids(self, of_model: frozenset[int]) -> frozenset[int]:
        """Return the end-of-sequence tokens that end this output; `of_model` are those of the loaded model."""
        if self.ignore_eos:
            return frozenset()
        return of_model if self.end_token_ids is None else self.end_token_ids

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on previous tokens."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one vector: that of its last token, or the mean of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """The request is for a vector of its prompt. It generates nothing."""

    pooling: Pooling = "last"
    is_normalised: bool = True
    """Whether the vector is scaled to length 1."""

    dimensions: int | None = None
    """Keep the first ones only, before the vector is scaled; None: all."""

    is_classified: bool = False
    """Whether the state goes through the model's classification head: the vector has the scores of its classes."""


CLASSES = Embed(is_normalised=False, is_classified=True)
"""The scores of classes, as transformers computes them."""

LAST_TOKEN = Embed()
"""As causal models are used that no one trained for vectors."""


GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice", "composed"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)

GrammarPart = tuple[str, GrammarKind, str]
"""One of a composed grammar: its name, kind and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the text of each choice must match."""

    kind: GrammarKind
    text: str = ""
    """A schema in JSON, a regular expression, a grammar in llguidance's form of Lark, or a list of texts in JSON.
    `json_object` has none. One that is `composed` is a list in JSON of grammars, each `[name, kind, text]`: the first
    begins, and rules of Lark refer to the others as `@name`.
    """

    @classmethod
    def composed(cls, parts: Sequence[GrammarPart]) -> "Grammar":
        """Return the grammar of these parts."""
        return cls(kind="composed", text=json.dumps(parts, ensure_ascii=False, separators=(",", ":")))

    @property
    def parts(self) -> list[GrammarPart]:
        """The parts of a composed grammar; of another one itself, without a name."""
        if self.kind != "composed":
            return [("", self.kind, self.text)]
        return [(name, kind, text) for name, kind, text in json.loads(self.text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """Output of one choice that an earlier attempt already published: it is replayed, not generated again."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """Whether the choice's end was published: it then gets no sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """The latency that a request asks for; what is None is up to the engine (`StepTargets`)."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS = LatencyTargets()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the engine; it becomes one sequence per choice."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    num_choices: int = 1
    is_chat: bool = False
    """Whether the output begins a text of its own. Otherwise it continues the prompt's."""

    priority: int = 0
    """Its class: a higher one goes first under the policy `priority`."""

    cache_salt: str = ""
    """Sequences share cached blocks only with sequences of the same salt, and of the same adapter."""

    adapter: str = ""
    """The adapter of the model that computes it, one of `ModelLimits.adapters`; empty: the model alone."""

    progress: tuple[ChoiceProgress, ...] = ()
    """Progress per choice; empty on a first attempt."""

    grammar: Grammar | None = None
    embed: Embed | None = None
    """`sampling.max_tokens` is 0 then."""

    targets: LatencyTargets = NO_TARGETS
    """Steps in which it decodes keep the strictest targets of all that decode."""


# A named tuple instead of a frozen dataclass: two are made per token with log-probabilities.
class SampledLogprobs(NamedTuple):
    """Log-probabilities at one output token, from the raw distribution (before temperature and filters)."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""

    token: bytes | None = None
    """Bytes of the chosen token; None if it has none, or before `text.logprobs` has added them."""

    top_tokens: tuple[bytes | None, ...] = ()
    """Bytes of the tokens in `top`."""

    offset: int | None = None
    """Characters of the choice's text before the token."""


UNPREDICTED = SampledLogprobs(chosen=0.0, top=())
"""Of the first token of a prompt."""


class PromptRead(NamedTuple):
    """What was read from the hidden states of a prompt."""

    embedding: bytes | None = None
    """Its vector, in float32, little-endian."""

    logprobs: tuple[SampledLogprobs, ...] | None = None
    """Of each of its tokens. That of the first, which nothing predicts, is 0, without alternatives."""

    token_ids: tuple[int, ...] = ()
    """Its tokens, and in `text` their text, if `logprobs` are there."""

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one choice ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string or stop token id that matched; None for end-of-sequence and other reasons."""

    error: str | None = None
    """A sentence for the request's producer, if the reason is ERROR."""

    is_rejection: bool = False
    """The request was rejected before it started (RequestRejected), and a retry would not help."""

    failure: FailureKind = FailureKind.STEP
    """Cause of the failure, if the reason is ERROR and the request was not rejected."""


MAX_PREEMPTIONS = 16
"""Preemptions of a sequence whose times are kept; their waits are all added up."""


@dataclass(frozen=True, slots=True)
class Preemptions:
    """When a sequence was preempted, and when it ran again; times on the engine's monotonic clock."""

    ended: tuple[tuple[float, float], ...] = ()
    """Begin and end of the first ones that are over."""

    waited_s: float = 0.0
    """The time from preemption until it ran again, of all that are over."""

    since_s: float | None = None
    """When the one began that is not over; None if it runs or never did."""

    def begin(self, now_s: float) -> "Preemptions":
        """Return these and one that begins now."""
        return Preemptions(self.ended, self.waited_s, now_s)

    def end(self, now_s: float) -> "Preemptions":
        """Return these, of which the last one ends now."""
        if self.since_s is None:
            return self
        ended = (*self.ended, (self.since_s, now_s))[:MAX_PREEMPTIONS]
        return Preemptions(ended, self.waited_s + now_s - self.since_s)


NEVER_PREEMPTED = Preemptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Statistics of a sequence so far; times on the engine's monotonic clock."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first scheduled."""

    num_preemptions: int = 0
    preemptions: Preemptions = NEVER_PREEMPTED
    first_scheduled_s: float | None = None
    num_resumed_tokens: int = 0
    """Output tokens that an earlier attempt had published."""


class TokenDelta(NamedTuple):
    """Output of one step for one choice. A named tuple, since one is made per sequence and step."""

    request_id: str
    choice: int
    start: int
    """Offset of the first of `token_ids` in the choice's output, in tokens."""

    token_ids: tuple[int, ...]
    text: str
    """Newly visible text. It may lag behind the tokens (possible stop strings, incomplete characters) until the end."""

    stats: SequenceStats
    logprobs: tuple[SampledLogprobs, ...] | None = None
    """One per token of `token_ids`, if requested."""

    finish: Finish | None = None
    prompt: PromptRead | None = None
    """What the request asks of its prompt: once in an attempt, with the first output of one of its choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What can start in the engine within its next steps.

    While a sequence waits for more than a place that comes, only what those of a lower class would give up
    (`over_class`), or nothing.
    """

    kv_tokens: int
    """Tokens that fit the free and evictable blocks."""

    prefill_tokens: int
    """Prompt tokens that the next steps can compute."""

    sequences: int
    """Sequences that may still start running, those included whose places become free within these steps."""

    over_class: int | None = None
    """None: the room is free. Else it is what the running sequences of this class would give up: it is for requests of
    a strictly higher priority."""

    num_coming: int = 0
    """Of the sequences, those whose places are not free yet."""

    def without(self, requests: Iterable[Request]) -> "Room":
        """Return what is left when these start, each with its prompt."""
        num_tokens = num_sequences = 0
        for request in requests:
            num_tokens += len(request.prompt_token_ids)
            num_sequences += request.num_choices
        return replace(
            self,
            kv_tokens=max(0, self.kv_tokens - num_tokens),
            prefill_tokens=max(0, self.prefill_tokens - num_tokens),
            sequences=max(0, self.sequences - num_sequences),
        )

    @property
    def is_some(self) -> bool:
        """Whether any request could fit."""
        return min(self.kv_tokens, self.prefill_tokens, self.sequences) > 0

    @property
    def is_taken(self) -> bool:
        """Whether all of it is taken at present, by a lower class or by sequences that are about to end."""
        return self.over_class is not None or self.num_coming >= self.sequences


NO_ROOM = Room(kv_tokens=0, prefill_tokens=0, sequences=0)
