"""Duration of a step as a sum of five terms; configured, or fitted to measured steps."""

# numpy's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        pairs += _pairs(start, num_tokens)
        rows += samples
    for num_tokens, context_len in batch.padding:
        tokens += num_tokens
        kv_tokens += context_len
        pairs += _pairs(context_len - num_tokens, num_tokens)
        rows += num_tokens == 1
    return StepWork(tokens, kv_tokens, pairs, rows)


def _pairs(start: int, num_tokens: int) -> int:
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
    """Median error of predicted steps, as a share of the measured time."""

    total_error: float
    """Sum of all predicted steps over the measured sum, minus one."""

    num_steps: int


def fit(steps: Sequence[tuple[StepWork, float]]) -> Fit:
    """Fit a step time to measured (work, seconds) by least squares of the relative error, with no negative term.

    The relative error weighs a decode of 10 ms as much as a prompt of a second. The tenth of the steps with the largest
    errors in a first fit is left out as outliers.

    Raises:
        ValueError: there are fewer steps than ten.
    """
    if len(steps) < 10:
        raise ValueError(f"a fit needs 10 steps or more, got {len(steps)}")
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
    """Solve least squares without negative terms: drop the most negative one until there is none."""
    scaled = terms / seconds[:, None]
    used = [column for column in range(terms.shape[1]) if scaled[:, column].any()]
    found = np.zeros(terms.shape[1])
    while used:
        # Scale columns to one size: a pair costs a millionth of a step.
        sizes = np.linalg.norm(scaled[:, used], axis=0)
        part: NDArray[np.float64] = np.linalg.lstsq(scaled[:, used] / sizes, np.ones(len(seconds)))[0] / sizes
        if part.min() >= 0:
            found[used] = part
            break
        used.pop(int(np.argmin(part * sizes)))
    return found
