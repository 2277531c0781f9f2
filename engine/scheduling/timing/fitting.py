"""A step time fitted to measured steps: all at once (`fit`), or while the engine runs (`StepMoments`).

Both minimise the squares of the relative error, which weighs a decode of 10 ms as much as a prompt of a second, and
lets a step that was disturbed for long count little. No term is negative. What must be kept of the steps is the sums of
products of their terms (the normal equations): a step is added in constant time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles

from sluice.engine.scheduling.timing.step_time import StepTime, StepWork

_NUM_TERMS = 1 + len(StepWork._fields)
_RIDGES = (1e-9, 1e-9, 1e-6, 1e-6, 1e-6)
"""Added to the diagonal, of which each element is 1. Time that the steps cannot tell apart goes to the first two terms.
"""


class StepMoments:
    """Sums over measured steps, from which a step time is fitted. Changes with each step."""

    def __init__(self, keep: float = 1.0) -> None:
        """Begin without steps; `keep` is the share of the sums that each step leaves of those before."""
        self._keep = keep
        self._products = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._sums = [0.0] * _NUM_TERMS

    def add(self, work: StepWork, taken_s: float) -> None:
        """Add a step that took `taken_s`, over 0."""
        keep = self._keep
        # Over the time: then each step should come to 1, and what is missing is its relative error.
        terms = [1 / taken_s, *(part / taken_s for part in work)]
        self._sums = [old * keep + term for old, term in zip(self._sums, terms, strict=True)]
        for row, term in zip(self._products, terms, strict=True):
            row[:] = [old * keep + term * other for old, other in zip(row, terms, strict=True)]

    def __add__(self, other: "StepMoments") -> "StepMoments":
        total = StepMoments()
        total._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        total._products = [
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self._products, other._products, strict=True)
        ]
        return total

    def step_time(self) -> StepTime:
        """Return the step time that fits best. Where a term would be negative, the most negative one is left out."""
        terms = [0.0] * _NUM_TERMS
        used = [term for term in range(_NUM_TERMS) if self._products[term][term] > 0]
        while used:
            part = self._solve(used)
            if min(part.values()) >= 0:
                for term, share in part.items():
                    terms[term] = share / self._size(term)
                break
            used.remove(min(part, key=part.__getitem__))
        fixed_s, token_s, kv_token_s, pair_s, row_s = terms
        return StepTime(fixed_s=fixed_s, token_s=token_s, kv_token_s=kv_token_s, pair_s=pair_s, row_s=row_s)

    def _size(self, term: int) -> float:
        return sqrt(self._products[term][term])

    def _solve(self, used: list[int]) -> dict[int, float]:
        """Solve for the `used` terms by Gaussian elimination, scaled to one size: a pair costs a millionth of a step.

        The matrix is positive definite, so no pivots are searched.
        """
        sizes = [self._size(term) for term in used]
        rows = [
            [self._products[term][other] / (size * other_size) for other, other_size in zip(used, sizes, strict=True)]
            + [self._sums[term] / size]
            for term, size in zip(used, sizes, strict=True)
        ]
        for index, term in enumerate(used):
            rows[index][index] += _RIDGES[term]
        for index, pivot in enumerate(rows):
            for row in rows[:index] + rows[index + 1 :]:
                factor = row[index] / pivot[index]
                row[index:] = [a - factor * b for a, b in zip(row[index:], pivot[index:], strict=True)]
        return {term: rows[index][-1] / rows[index][index] for index, term in enumerate(used)}


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
    """Fit a step time to measured (work, seconds).

    The tenth of the steps with the largest errors in a first fit is left out as outliers.

    Raises:
        ValueError: there are fewer steps than ten.
    """
    if len(steps) < 10:
        raise ValueError(f"a fit needs 10 steps or more, got {len(steps)}")
    errors = _errors(steps, _fit(steps))
    most = quantiles(errors, n=10, method="inclusive")[-1]
    step_time = _fit(step for step, error in zip(steps, errors, strict=True) if error <= most)
    return Fit(
        step_time=step_time,
        median_error=median(_errors(steps, step_time)),
        total_error=sum(step_time.of(work) for work, _ in steps) / sum(taken_s for _, taken_s in steps) - 1,
        num_steps=len(steps),
    )


def _fit(steps: Iterable[tuple[StepWork, float]]) -> StepTime:
    moments = StepMoments()
    for work, taken_s in steps:
        moments.add(work, taken_s)
    return moments.step_time()


def _errors(steps: Sequence[tuple[StepWork, float]], step_time: StepTime) -> list[float]:
    return [abs(step_time.of(work) / taken_s - 1) for work, taken_s in steps]
