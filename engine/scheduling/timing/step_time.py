"""Duration of a step as a sum of five terms, and the number of prompt tokens that can be computed in a time."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from sluice.engine.batch import Batch


class StepWork(NamedTuple):
    """Work of a step, including padding."""

    num_tokens: int
    """Tokens that go through the products of all layers."""

    num_kv_tokens: int
    """Tokens whose keys and values are read: the context of each row."""

    num_pairs: int
    """Pairs of a computed token and one that it attends to, in rows of more than one token."""

    num_rows: int
    """Rows whose logits are computed."""


def work_of(batch: Batch) -> StepWork:
    """Return the work of `batch`, including padding."""
    tokens = kv_tokens = pairs = rows = 0
    for _, _, start, num_tokens, samples in batch.rows:
        tokens += num_tokens
        kv_tokens += start + num_tokens
        pairs += num_pairs(start, num_tokens)
        rows += samples
    for num_tokens, context_len in batch.padding:
        tokens += num_tokens
        kv_tokens += context_len
        pairs += num_pairs(context_len - num_tokens, num_tokens)
        rows += num_tokens == 1
    # A draft is a token and a row of logits; what it attends to is read for its row anyway.
    num_drafts = batch.num_drafts
    return StepWork(tokens + num_drafts, kv_tokens + num_drafts, pairs, rows + num_drafts)


def num_pairs(start: int, num_tokens: int) -> int:
    """Count pairs: each token attends to `start` tokens, to those before it in the row, and to itself.

    0 for a decode.
    """
    return 0 if num_tokens == 1 else num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: a fixed part, and one for each part of its work."""

    fixed_s: float
    """Reading weights, launching kernels, running the scheduler."""

    token_s: float = 0.0
    kv_token_s: float = 0.0
    pair_s: float = 0.0

    row_s: float = 0.0
    """Per row of logits, with its sampled token."""

    def of(self, work: StepWork) -> float:
        """Return the seconds that `work` takes."""
        return (
            self.fixed_s
            + self.token_s * work.num_tokens
            + self.kv_token_s * work.num_kv_tokens
            + self.pair_s * work.num_pairs
            + self.row_s * work.num_rows
        )

    def num_prompt_tokens(self, start: int, seconds: float) -> float:
        """Return how many tokens of a prompt, from token `start` on, a step computes in `seconds` more.

        The pairs of n tokens grow with n * n, so n solves a quadratic equation. Infinite if tokens take no time.
        """
        seconds -= self.kv_token_s * start + self.row_s
        if seconds <= 0:
            return 0.0
        each_s = self.token_s + self.kv_token_s + self.pair_s * (start + 0.5)
        root = each_s + sqrt(each_s * each_s + 2 * self.pair_s * seconds)
        return 2 * seconds / root if root else inf

    def __str__(self) -> str:
        return (
            f"{self.fixed_s * 1e3:.3g} ms + {self.token_s * 1e6:.3g} us/token + "
            f"{self.kv_token_s * 1e9:.3g} ns/KV token + {self.pair_s * 1e9:.3g} ns/pair + {self.row_s * 1e6:.3g} us/row"
        )
