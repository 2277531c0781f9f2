"""The sampling options of a job, as the engine has them.

Written by `python -m tools.sampling_options` from `protocol/sampling.py`, which checks their values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_GRAMMAR_CHARS = 131_072
"""Of a grammar, or of each part of one that is composed."""

MAX_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities are returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """How to choose the next token, and when to stop: each option with its default if no model states one."""

    max_tokens: int = 256
    """Most tokens of each choice, 0 to 1000000."""

    min_tokens: int = 0
    """Tokens of each choice before it may end, 0 to `max_tokens`."""

    temperature: float = 1.0
    """Randomness, 0 (greedy) to 10000."""

    top_p: float = 1.0
    """Sample from the most likely tokens that make up this probability, over 0 and at most 1."""

    top_k: int = 0
    """Sample from this many most likely tokens, 0 (all) or more."""

    min_p: float = 0.0
    """Least probability of a token, as a share of that of the most likely one, 0 to 1."""

    repetition_penalty: float = 1.0
    """Over 1 discourages tokens of prompt and output, under 1 encourages them, 0.001 to 1000."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output has it, -2 to 2."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output has, -2 to 2."""

    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of up to 1024 tokens, by id, each -100 to 100."""

    stop: tuple[str, ...] = ()
    """End the output before one of these up to 16 texts of up to 256 characters."""

    stop_token_ids: tuple[int, ...] = ()
    """End the output at one of these up to 64 tokens."""

    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence token."""

    logprobs: int | None = None
    """Return the log-probability of each token, and those of this many most likely ones, 0 to 20."""

    prompt_logprobs: int | None = None
    """Return the log-probability of each token of the prompt, and those of this many most likely ones in its place, 0
    to 20.
    """

    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
