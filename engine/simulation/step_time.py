"""How long a step takes, as a sum of five terms; given, or fitted to measured steps."""

# numpy's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch


class StepWork(NamedTuple):
    """What a step computes, padding included."""

    num_tokens: int
    """Tokens that go through the products of all layers."""

    num_kv_tokens: int
    """Tokens whose keys and values are read: the context of each row."""

    num_pairs: int
    """Pairs of a computed token and one that it attends to, in rows of more than one token."""

    num_rows: int
    """Rows whose logits are computed."""


def work_of(batch: Batch) -> StepWork:
    """What `batch` computes, padding included."""
    tokens = kv_tokens = pairs = rows = 0
    for _, start, num_tokens, samples in batch.sequences:
        tokens += num_tokens
        kv_tokens += start + num_tokens
        pairs += _pairs(start, num_tokens)
        rows += samples
    for num_tokens, context_len in batch.padding:
        tokens += num_tokens
        kv_tokens += context_len
        pairs += _pairs(context_len - num_tokens, num_tokens)
        rows += num_tokens == 1
    return StepWork(tokens, kv_tokens, pairs, rows)


def _pairs(start: int, num_tokens: int) -> int:
    """Each token attends to the `start` before its row, to those before it in the row, and itself; 0 for a decode."""
    return 0 if num_tokens == 1 else num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: what it takes at all, and what each part of its work adds."""

    fixed_s: float
    """Weights are read, kernels launched, the scheduler runs."""

    token_s: float = 0.0
    kv_token_s: float = 0.0
    pair_s: float = 0.0

    row_s: float = 0.0
    """For each row of logits, and the token drawn from it."""

    def of(self, work: StepWork) -> float:
        """Seconds that `work` takes."""
        return (
            self.fixed_s
            + self.token_s * work.num_tokens
            + self.kv_token_s * work.num_kv_tokens
            + self.pair_s * work.num_pairs
            + self.row_s * work.num_rows
        )

    def __str__(self) -> str:
        return (
            f"{self.fixed_s * 1e3:.3g} ms + {self.token_s * 1e6:.3g} us/token + "
            f"{self.kv_token_s * 1e9:.3g} ns/KV token + {self.pair_s * 1e9:.3g} ns/pair + {self.row_s * 1e6:.3g} us/row"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A step time fitted to measured steps."""

    step_time: StepTime
    median_error: float
    """Half of the steps are predicted better than this, as a share of what was measured."""

    total_error: float
    """The sum of all steps as predicted, over the sum as measured, less one."""

    num_steps: int


def fit(steps: Sequence[tuple[StepWork, float]]) -> Fit:
    """Fit a step time to measured (work, seconds) by least squares of the relative error, no term below zero.

    Of the relative error, because a decode of 10 ms matters as much as a prompt of a second. A tenth of the steps is
    left out, those that the first fit misses most: what else the machine did is not the model's.

    Raises:
        ValueError: there are fewer steps than ten.
    """
    if len(steps) < 10:
        raise ValueError(f"a step time is fitted to 10 steps or more, got {len(steps)}")
    terms = np.array([(1, *work) for work, _ in steps], dtype=np.float64)
    seconds = np.array([taken_s for _, taken_s in steps])
    errors = _errors(terms, seconds, _fit(terms, seconds))
    kept = errors <= np.quantile(errors, 0.9)
    found = _fit(terms[kept], seconds[kept])
    fixed_s, token_s, kv_token_s, pair_s, row_s = (float(term) for term in found)
    return Fit(
        step_time=StepTime(fixed_s=fixed_s, token_s=token_s, kv_token_s=kv_token_s, pair_s=pair_s, row_s=row_s),
        median_error=float(np.median(_errors(terms, seconds, found))),
        total_error=float((terms @ found).sum() / seconds.sum() - 1),
        num_steps=len(steps),
    )


def _errors(
    terms: NDArray[np.float64], seconds: NDArray[np.float64], found: NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.abs(terms @ found / seconds - 1)


def _fit(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative terms: the most negative one is left out until there is none."""
    scaled = terms / seconds[:, None]
    used = [column for column in range(terms.shape[1]) if scaled[:, column].any()]
    found = np.zeros(terms.shape[1])
    while used:
        # Columns of one size: what a pair costs is a millionth of what a step costs.
        sizes = np.linalg.norm(scaled[:, used], axis=0)
        part: NDArray[np.float64] = np.linalg.lstsq(scaled[:, used] / sizes, np.ones(len(seconds)))[0] / sizes
        if part.min() >= 0:
            found[used] = part
            break
        used.pop(int(np.argmin(part * sizes)))
    return found
