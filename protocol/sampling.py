"""The sampling options of a job. `JobOptions` declares each once.

The metadata of its fields define the checks of values, the defaults that a model may state, the features that a worker
needs, flags of `producer`, the OpenAPI document and the pages. `python -m tools.sampling_options` generates the code
for type checkers: `SamplingOptions` below, and the engine's `SamplingFields`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypedDict, get_args

from sluice.protocol import limits
from sluice.protocol.checks import (
    MAX_TOKEN_ID,
    Check,
    is_bias,
    is_integer,
    is_listing,
    is_number,
    is_text,
    is_token_id,
    is_truth,
    raise_first,
)
from sluice.protocol.errors import InvalidJob
from sluice.protocol.structured import check_stored

Feature = Literal[
    "logprobs",
    "choices",
    "logit_bias",
    "penalties",
    "structured_output",
    "prompt_logprobs",
    "embeddings",
    "classification",
    "tools",
]
"""Features that a worker needs for jobs with an option."""

FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of a sampling option, besides its name, type and default."""

    meaning: str
    """The meaning for editors, `--help` and pages: a sentence without its bounds and its period."""

    least: float | None = None
    """The minimum; likewise `most`. None: the option is not a number, or its bounds are in `meaning`."""

    most: float | None = None
    is_over_least: bool = False
    """Whether the minimum itself is refused."""

    zero: str | None = None
    """Name of the meaning of 0, if there is one: greedy, all."""

    neutral: int | float | None = None
    """The value if neither the request nor its model states one. None: no model states a default."""

    metavar: str | None = None
    """The metavar of `producer`'s flag; None: there is no flag."""

    feature: Feature | None = None
    in_responses: str | None = ""
    """The name in OpenAI's Responses API; empty: the same; None: that API lacks the option. Completions have all."""

    shape: Mapping[str, object] = field(default_factory=dict[str, object])
    """The bounds of a value that is not one number, as a JSON schema."""

    def takes(self, number: float) -> bool:
        """Return whether a number is within the bounds."""
        assert self.least is not None
        assert self.most is not None
        return (self.least < number if self.is_over_least else self.least <= number) and number <= self.most

    @property
    def rule(self) -> str:
        """The bounds, for a message `must be …`."""
        if self.most == MAX_TOKEN_ID:
            return f"{self.least} ({self.zero} tokens) or more"
        opening = "(" if self.is_over_least else "["
        return f"in {opening}{self.least}, {self.most}]" + (f", 0 is {self.zero}" if self.zero else "")

    @property
    def schema(self) -> Mapping[str, object]:
        """The bounds as a JSON schema, without the type."""
        if self.least is None:
            return self.shape
        return {"exclusiveMinimum" if self.is_over_least else "minimum": self.least, "maximum": self.most}

    @property
    def sentence(self) -> str:
        """The meaning with the bounds."""
        if self.least is None:
            return f"{self.meaning}."
        least = f"{self.least} ({self.zero})" if self.zero else str(self.least)
        if self.most == MAX_TOKEN_ID:
            return f"{self.meaning}, {least} or more."
        bounds = f"over {least} and at most {self.most}" if self.is_over_least else f"{least} to {self.most}"
        return f"{self.meaning}, {bounds}."


TOKEN_ID: Mapping[str, object] = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_STOP: Mapping[str, object] = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_CHARS}


def _option(meaning: str, *, default: Any = None, **declared: Any) -> Any:  # noqa: ANN401
    # Any: the field's annotation has the type of its default, and `Option` the types of the rest.
    metadata = {Option: Option(meaning=meaning, **declared)}
    if isinstance(default, dict):
        return field(default_factory=dict[int, float], metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The sampling options. Those with a neutral value are None if the request does not state them.

    Raises:
        InvalidJob: a value is out of its range; the message names it.
    """

    max_tokens: int | None = _option(
        "Most tokens of each choice",
        least=0,
        most=limits.MAX_TOKENS,
        neutral=limits.DEFAULT_MAX_TOKENS,
        metavar="TOKENS",
        in_responses="max_output_tokens",
    )
    min_tokens: int = _option(
        "Tokens of each choice before it may end, 0 to `max_tokens`",
        default=0,
        metavar="TOKENS",
        shape={"minimum": 0, "maximum": limits.MAX_TOKENS},
    )
    temperature: float | None = _option(
        "Randomness", least=0, most=10_000, zero="greedy", neutral=1.0, metavar="NUMBER"
    )
    top_p: float | None = _option(
        "Sample from the most likely tokens that make up this probability",
        least=0,
        most=1,
        is_over_least=True,
        neutral=1.0,
        metavar="SHARE",
    )
    top_k: int | None = _option(
        "Sample from this many most likely tokens", least=0, most=MAX_TOKEN_ID, zero="all", neutral=0, metavar="COUNT"
    )
    min_p: float | None = _option(
        "Least probability of a token, as a share of that of the most likely one",
        least=0,
        most=1,
        neutral=0.0,
        metavar="SHARE",
    )
    repetition_penalty: float | None = _option(
        "Over 1 discourages tokens of prompt and output, under 1 encourages them",
        least=0.001,
        most=1000,
        neutral=1.0,
        metavar="FACTOR",
        feature="penalties",
    )
    frequency_penalty: float = _option(
        "Subtracted from a token's logit for each time that the output has it",
        default=0.0,
        least=-2,
        most=2,
        metavar="NUMBER",
        feature="penalties",
    )
    presence_penalty: float = _option(
        "Subtracted from the logit of each token that the output has",
        default=0.0,
        least=-2,
        most=2,
        metavar="NUMBER",
        feature="penalties",
    )
    logit_bias: Mapping[int, float] = _option(
        f"Added to the logits of up to {limits.MAX_LOGIT_BIAS} tokens, by id, each -100 to 100",
        default={},
        feature="logit_bias",
        shape={
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": limits.MAX_LOGIT_BIAS,
        },
    )
    stop: tuple[str, ...] = _option(
        f"End the output before one of these up to {limits.MAX_STOPS} texts of up to {limits.MAX_STOP_CHARS}"
        " characters",
        default=(),
        shape={"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limits.MAX_STOPS}]},
    )
    stop_token_ids: tuple[int, ...] = _option(
        f"End the output at one of these up to {limits.MAX_STOP_TOKEN_IDS} tokens",
        default=(),
        shape={"items": TOKEN_ID, "maxItems": limits.MAX_STOP_TOKEN_IDS},
    )
    ignore_eos: bool = _option("Whether to continue after the model's end-of-sequence token", default=False)
    logprobs: int | None = _option(
        "Return the log-probability of each token, and those of this many most likely ones",
        least=0,
        most=limits.MAX_LOGPROBS,
        feature="logprobs",
        in_responses=None,
    )
    n: int = _option(
        "Number of choices", default=1, least=1, most=limits.MAX_CHOICES, feature="choices", in_responses=None
    )
    structured: Mapping[str, str] = _option(
        "What the text must match, one of `json_schema` (a schema), `json_object` (true), `regex`, `lark` (a grammar)"
        f" and `choice` (a list of texts), up to {limits.MAX_STRUCTURED_CHARS} characters",
        default={},
        feature="structured_output",
        shape={
            "properties": {
                "json_schema": {"type": ["object", "string"]},
                "json_object": {"const": True},
                "regex": {"type": "string", "minLength": 1},
                "lark": {"type": "string", "minLength": 1},
                "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            },
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    )
    """As stored: one pair of kind and text, or none (`sluice.protocol.structured`)."""

    prompt_logprobs: int | None = _option(
        "Return the log-probability of each token of the prompt, and those of this many most likely ones in its place",
        least=0,
        most=limits.MAX_LOGPROBS,
        feature="prompt_logprobs",
        in_responses=None,
    )
    echo: bool = _option(
        "Whether the text begins with the prompt, whose tokens have log-probabilities as `logprobs` asks",
        default=False,
        feature="prompt_logprobs",
        in_responses=None,
    )
    embed: bool = _option(
        "Whether to return a vector of the prompt instead of text",
        default=False,
        feature="embeddings",
        in_responses=None,
    )
    classify: bool = _option(
        "Whether to return the scores of the model's classes for the prompt instead of text",
        default=False,
        feature="classification",
        in_responses=None,
    )
    dimensions: int | None = _option(
        "Return only the first dimensions of a vector, scaled to length 1 again",
        least=1,
        most=limits.MAX_DIMENSIONS,
        feature="embeddings",
        in_responses=None,
    )
    skip_special_tokens: bool = _option("Whether special tokens are left out of the text", default=True)

    def __post_init__(self) -> None:
        # Types first: a range check needs a value of the right type.
        for name, (is_of_type, expected) in _TYPES.items():
            value = getattr(self, name)
            if not is_of_type(value) and not (value is None and DEFAULTS[name] is None):
                raise InvalidJob(f"{name} must be {expected}, got {value!r}")
        raise_first(self._types())
        check_stored(self.structured)
        for name, option in _BOUNDED.items():
            value = getattr(self, name)
            if value is not None and not option.takes(value):
                raise InvalidJob(f"{name} must be {option.rule}, got {value}")
        raise_first(self._sizes())

    @property
    def planned_tokens(self) -> int:
        """Most tokens of each choice, as far as known without the model."""
        if self.makes_vector:
            return 0
        return max(limits.DEFAULT_MAX_TOKENS, self.min_tokens) if self.max_tokens is None else self.max_tokens

    @property
    def is_length_stated(self) -> bool:
        """Whether the model's default has no say in the number of tokens."""
        return self.makes_vector or self.max_tokens is not None

    @property
    def makes_vector(self) -> bool:
        """Whether the output is a vector instead of text."""
        return self.embed or self.classify

    @property
    def read_logprobs(self) -> int | None:
        """How many most likely tokens each token of the prompt is returned with; None: the prompt is not read."""
        if not self.echo:
            return self.prompt_logprobs
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a worker needs for these options."""
        asked = {
            option.feature
            for name, option in _OF_FEATURES.items()
            if getattr(self, name) not in (DEFAULTS[name], option.neutral)
        }
        return tuple(feature for feature in FEATURES if feature in asked)

    def _types(self) -> Iterator[Check]:
        yield is_listing(self.stop, is_text), "stop must be text or a list of texts, in UTF-8"
        yield is_listing(self.stop_token_ids, is_token_id), "stop_token_ids must be a list of token ids"
        yield is_bias(self.logit_bias), "logit_bias must map token ids to numbers"

    def _reads(self) -> Iterator[Check]:
        if self.makes_vector:
            name = "classify" if self.classify else "embed"
            yield not (self.embed and self.classify), "embed must not be combined with `classify`"
            yield not self.max_tokens, f"max_tokens must be 0 or absent with `{name}`, got {self.max_tokens}"
            yield (
                self.logprobs is None and self.read_logprobs is None,
                f"{name} must not be combined with log-probabilities",
            )
        if self.planned_tokens == 0:
            yield self.n == 1, f"n must be 1 if nothing is generated, got {self.n}"
            yield not self.structured, "structured must not be given if nothing is generated"

    def _sizes(self) -> Iterator[Check]:
        yield not (self.structured and self.ignore_eos), "structured must not be combined with ignore_eos: it ends"
        yield from self._reads()
        max_tokens = limits.MAX_TOKENS if self.max_tokens is None else self.max_tokens
        yield (
            0 <= self.min_tokens <= max_tokens,
            f"min_tokens must be in [0, max_tokens = {max_tokens}], got {self.min_tokens}",
        )
        longest = max(map(len, self.stop), default=1)
        yield all(self.stop), "stop must not have an empty string"
        yield (
            len(self.stop) <= limits.MAX_STOPS,
            f"stop may have {limits.MAX_STOPS} strings, got {len(self.stop)}",
        )
        yield (
            longest <= limits.MAX_STOP_CHARS,
            f"stop strings may have {limits.MAX_STOP_CHARS} characters, got one of {longest}",
        )
        yield (
            len(self.stop_token_ids) <= limits.MAX_STOP_TOKEN_IDS,
            f"stop_token_ids may have {limits.MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
        )
        yield (
            len(self.logit_bias) <= limits.MAX_LOGIT_BIAS,
            f"logit_bias may name {limits.MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}",
        )
        yield all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias must have values in [-100, 100]"


OPTIONS: Mapping[str, Option] = {field.name: field.metadata[Option] for field in fields(JobOptions)}

_BOUNDED = {name: option for name, option in OPTIONS.items() if option.least is not None}
_OF_FEATURES = {name: option for name, option in OPTIONS.items() if option.feature is not None}

DEFAULTS: Mapping[str, Any] = {  # Any: of several types
    field.name: {} if field.default is MISSING else field.default for field in fields(JobOptions)
}

NEUTRAL: Mapping[str, int | float] = {
    name: option.neutral for name, option in OPTIONS.items() if option.neutral is not None
}
"""Options for which a model may state a default (in its generation_config.json), and their values if neither the
request nor the model states one.
"""

_WHOLE, _FINITE = (is_integer, "a whole number"), (is_number, "a finite number")
_TRUTH = (is_truth, "true or false")
_OF_TYPE: Mapping[object, tuple[Callable[[object], bool], str]] = {
    int: _WHOLE,
    int | None: _WHOLE,
    float: _FINITE,
    float | None: _FINITE,
    bool: _TRUTH,
}
_TYPES = {field.name: _OF_TYPE[field.type] for field in fields(JobOptions) if field.type in _OF_TYPE}
"""The check of the type, and its description for errors, by option with a single value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The values of the options that a request leaves to the model.

    The first attempt resolves them from the request, the model's defaults and `NEUTRAL`, in this order. A later attempt
    uses the same values, whatever its worker's defaults and end tokens are.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    end_token_ids: tuple[int, ...]
    """Tokens that end an output, besides those in the request."""


def sentence_of(name: str) -> str:
    """Return the meaning of an option, its bounds and its default."""
    neutral, default = NEUTRAL.get(name), DEFAULTS[name]
    if neutral is not None:
        return f"{OPTIONS[name].sentence} Default: the model's, or {neutral:g}."
    is_named = isinstance(default, bool) or default is None
    shown = default if is_named else f"{default:g}" if isinstance(default, int | float) else "none"
    return f"{OPTIONS[name].sentence} Default: {shown}."


# Generated below by `python -m tools.sampling_options`.


class SamplingOptions(TypedDict, total=False):
    """`JobOptions` as keyword arguments: any sequence for a tuple, one string for one stop."""

    max_tokens: int | None
    """Most tokens of each choice, 0 to 1000000. Default: the model's, or 256."""

    min_tokens: int
    """Tokens of each choice before it may end, 0 to `max_tokens`. Default: 0."""

    temperature: float | None
    """Randomness, 0 (greedy) to 10000. Default: the model's, or 1."""

    top_p: float | None
    """Sample from the most likely tokens that make up this probability, over 0 and at most 1. Default: the model's, or
    1.
    """

    top_k: int | None
    """Sample from this many most likely tokens, 0 (all) or more. Default: the model's, or 0."""

    min_p: float | None
    """Least probability of a token, as a share of that of the most likely one, 0 to 1. Default: the model's, or 0."""

    repetition_penalty: float | None
    """Over 1 discourages tokens of prompt and output, under 1 encourages them, 0.001 to 1000. Default: the model's, or
    1.
    """

    frequency_penalty: float
    """Subtracted from a token's logit for each time that the output has it, -2 to 2. Default: 0."""

    presence_penalty: float
    """Subtracted from the logit of each token that the output has, -2 to 2. Default: 0."""

    logit_bias: Mapping[int, float]
    """Added to the logits of up to 1024 tokens, by id, each -100 to 100. Default: none."""

    stop: str | Sequence[str]
    """End the output before one of these up to 16 texts of up to 256 characters. Default: none."""

    stop_token_ids: Sequence[int]
    """End the output at one of these up to 64 tokens. Default: none."""

    ignore_eos: bool
    """Whether to continue after the model's end-of-sequence token. Default: False."""

    logprobs: int | None
    """Return the log-probability of each token, and those of this many most likely ones, 0 to 20. Default: None."""

    n: int
    """Number of choices, 1 to 64. Default: 1."""

    structured: Mapping[str, object] | None
    """What the text must match, one of `json_schema` (a schema), `json_object` (true), `regex`, `lark` (a grammar) and
    `choice` (a list of texts), up to 131072 characters. Default: none.
    """

    prompt_logprobs: int | None
    """Return the log-probability of each token of the prompt, and those of this many most likely ones in its place, 0
    to 20. Default: None.
    """

    echo: bool
    """Whether the text begins with the prompt, whose tokens have log-probabilities as `logprobs` asks. Default: False.
    """

    embed: bool
    """Whether to return a vector of the prompt instead of text. Default: False."""

    classify: bool
    """Whether to return the scores of the model's classes for the prompt instead of text. Default: False."""

    dimensions: int | None
    """Return only the first dimensions of a vector, scaled to length 1 again, 1 to 65536. Default: None."""

    skip_special_tokens: bool
    """Whether special tokens are left out of the text. Default: True."""
