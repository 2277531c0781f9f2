"""What the engine is asked, and what it answers: plain values. Knows no tensors, no queue, no wire format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine.errors import InvalidSamplingParams, OutOfMemory

MAX_LOGPROBS = 20
"""Most alternatives per token whose log-probability may be asked for (as in OpenAI's API)."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""

    LENGTH = "length"
    """max_tokens, or the model's context."""

    ABORTED = "aborted"
    """The caller aborted the request."""

    ERROR = "error"
    """This request failed; the others went on."""


class FailureKind(StrEnum):
    """What went wrong with a request that could have run: constant words for programs."""

    STEP = "engine_error"
    """Steps raise with this request, and go well without it."""

    MEMORY = "out_of_memory"
    """They raise because there is no memory for it now."""

    FILE = "model_file_lost"
    """They raise because a file that the model needs cannot be read."""

    LOGITS = "bad_logits"
    """Its logits leave no token to draw: NaN, or all masked."""

    @classmethod
    def of(cls, error: BaseException) -> "FailureKind":
        """The kind of what a step, or the preparation of a request, raised."""
        # By name: whatever computes is not known here.
        is_memory = isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError"
        if is_memory or "can't allocate memory" in str(error):
            return cls.MEMORY
        return cls.FILE if isinstance(error, OSError) else cls.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    Raises:
        InvalidSamplingParams: a value is out of its range.
    """

    temperature: float = 1.0
    """0 means greedy."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this. In (0, 1]."""

    top_k: int = 0
    """Keep this many most likely tokens. 0 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one. In [0, 1]."""

    repetition_penalty: float = 1.0
    """Divide positive logits (multiply negative ones) of tokens in prompt or output. Over 0; 1 is off."""

    frequency_penalty: float = 0.0
    """Subtract this times the number of times the token is in the output. In [-2, 2]."""

    presence_penalty: float = 0.0
    """Subtract this from tokens that are in the output. In [-2, 2]."""

    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Token id to a number added to its logit. In [-100, 100]."""

    max_tokens: int = 256
    min_tokens: int = 0
    """End-of-sequence tokens and stops are not taken before this many output tokens."""

    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of the text."""

    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. n: log-probability of the chosen token and of the n most likely ones (0 to 20)."""

    seed: int = 0
    """Key of the noise, an unsigned 64-bit number: the same seed draws the same noise wherever it runs."""

    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for holds, rule, value in self._rules():
            if not holds:
                raise InvalidSamplingParams(f"{rule}, got {value}")

    def _rules(self) -> tuple[tuple[bool, str, object], ...]:
        """(whether it holds, what must be, what is): sentences are made for broken ones only, as most are not."""
        return (
            (0 <= self.temperature < float("inf"), "temperature must be 0 (greedy) or more", self.temperature),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (self.top_k >= 0, "top_k must be 0 (all tokens) or more", self.top_k),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (0 < self.repetition_penalty < float("inf"), "repetition_penalty must be over 0", self.repetition_penalty),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]", self.frequency_penalty),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be in [-2, 2]", self.presence_penalty),
            (
                all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
                "each logit_bias must be in [-100, 100]",
                self.logit_bias,
            ),
            (self.max_tokens >= 1, "max_tokens must be 1 or more", self.max_tokens),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens must be in [0, max_tokens]", self.min_tokens),
            (all(self.stop), "a stop string must not be empty", self.stop),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be in [0, {MAX_LOGPROBS}]",
                self.logprobs,
            ),
            (0 <= self.seed < 2**64, "seed must be an unsigned 64-bit number", self.seed),
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a logit depends on the tokens that are there already."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """What an earlier attempt already published of one choice: it is replayed, not generated again."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """The choice had its end published: it gets no sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing asked of the engine; it becomes one sequence per choice."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_choices: int = 1
    priority: int = 0
    """Higher goes first where the policy looks at it."""

    arrival_s: float = 0.0
    """When it was submitted, on any one clock: smaller is older."""

    tenant: str = ""
    cache_salt: str = ""
    """Sequences share cached blocks only with those of the same salt."""

    progress: tuple[ChoiceProgress, ...] = ()
    """Empty for a first attempt, else one per choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one output token, from the raw distribution (before temperature and filters)."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one choice ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string or stop token id that matched; None for end-of-sequence and other reasons."""

    error: str | None = None
    """A sentence for whoever submitted it, when the reason is ERROR."""

    is_rejection: bool = False
    """The request never started: it is bad in itself (RequestRejected), and a retry would not help."""

    failure: FailureKind = FailureKind.STEP
    """What went wrong, when the reason is ERROR and it is no rejection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """What the engine knows of a sequence's way so far; times on the engine's monotonic clock."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache when it was first scheduled."""

    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    num_resumed_tokens: int = 0
    """Output tokens that an earlier attempt had published."""


class TokenDelta(NamedTuple):
    """What one step added to one choice. A named tuple because one is made per sequence and step: write the names."""

    request_id: str
    choice: int
    start: int
    """Offset of the first of `token_ids` in the choice's output: tokens that came before."""

    token_ids: tuple[int, ...]
    text: str
    """What became visible: it may lag behind the tokens (held-back stop strings, open characters) until the end."""

    stats: SequenceStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token of `token_ids` where asked for."""

    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the engine can take in before its next step. All zero while anything waits or is preempted."""

    kv_tokens: int
    """Tokens that fit the blocks that are free or evictable."""

    prefill_tokens: int
    """Prompt tokens that the next steps can compute."""

    sequences: int
    """Sequences that may still run at once."""
