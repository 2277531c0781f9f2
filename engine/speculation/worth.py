"""How likely a draft must be right to pay for its place in a step, measured while the engine runs.

A draft that is right with probability p yields p tokens, and makes the step longer by what a token costs. In that time
the engine yields tokens anyway: a draft pays if it yields more (the marginal value theorem). So a reader alone on a
machine that waits for its memory gets long drafts, and a full one gets none but the surest.
"""

from sluice.engine.speculation.source import Worth

_MEMORY = 64
"""Steps over which times are averaged."""

_NUM_FIRST = 4
"""Steps after which the averages are used."""

_DEFAULT = 0.5
_LEAST = 0.05
MOST_PROBABLE = 0.95
"""A draft that is right with this probability always has its place: text that is copied fills whole steps."""

_MARGIN = 1.5
"""By which a draft must yield more: the cost of a token is an estimate."""

_FREE_TOKENS = 24
"""Tokens whose products take about as long as reading the weights: the first guess of a token's cost."""

_SPAN = 4.0
"""Factor by which the cost may differ from that guess; outliers of times differ less from the mean."""

_ALIKE = 8
"""Steps in a row that other work on the machine makes longer alike: they say as much of it as one."""


class DraftWorth:
    """The probability from which a draft pays. Mutable: it learns from each step that only decodes."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean_rows = self._mean_tokens = self._mean_s = self._mean_yield = self._mean_draft_s = 0.0
        self._variance = self._covariance = self._variance_s = 0.0

    def note(self, num_tokens: int, num_yielded: int, taken_s: float, *, num_rows: int, draft_s: float = 0.0) -> None:
        """Note a step of decodes and drafts: tokens computed, tokens generated, its time, and that of guessing."""
        self._num_steps += 1
        share = 1 / min(self._num_steps, _MEMORY)
        if self._num_steps > _NUM_FIRST:
            taken_s = min(taken_s, _SPAN * self._mean_s)
        off_tokens, off_s = num_tokens - self._mean_tokens, taken_s - self._mean_s
        self._mean_rows += share * (num_rows - self._mean_rows)
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        self._mean_yield += share * (num_yielded - self._mean_yield)
        self._mean_draft_s += share * (draft_s - self._mean_draft_s)
        self._variance += share * (off_tokens * off_tokens * (1 - share) - self._variance)
        self._covariance += share * (off_tokens * off_s * (1 - share) - self._covariance)
        self._variance_s += share * (off_s * off_s * (1 - share) - self._variance_s)

    def of_step(self, num_rows: int) -> Worth:
        """Return what a draft must bring in a step of `num_rows`.

        Its time and its tokens are those of the mean step, for so many rows: a batch that has just filled up is not
        judged by the few sequences that ran before.
        """
        if self._num_steps < _NUM_FIRST or self._mean_s <= 0 or num_rows == 0:
            return Worth(_DEFAULT)
        scale = num_rows / self._mean_rows
        num_tokens, token_s = scale * self._mean_tokens, self._token_s
        # No step is shorter than its tokens are long.
        step_s = max(self._mean_s + token_s * (num_tokens - self._mean_tokens), token_s * num_tokens)
        tokens_per_s = scale * self._mean_yield / (step_s + self._mean_draft_s)
        token_cost = token_s * tokens_per_s
        return Worth(min(max(_MARGIN * token_cost, _LEAST), MOST_PROBABLE), token_cost, tokens_per_s)

    @property
    def _token_s(self) -> float:
        """Seconds that a token adds to a step: the slope of the measured steps, as far as it is known.

        The slope and the first guess are averaged, each weighted by its precision: the mean of the posterior of a
        normal distribution. So where the times of steps differ by other work on the machine, and hardly by their
        tokens, the guess stays.
        """
        guess_s = self._mean_s / (self._mean_tokens + _FREE_TOKENS)
        if self._variance <= 0:
            return guess_s
        slope_s = self._covariance / self._variance
        residual = max(self._variance_s - slope_s * self._covariance, 0.0)
        error = residual * _ALIKE / (self._variance * min(self._num_steps, _MEMORY))
        known = guess_s * guess_s / (guess_s * guess_s + error)
        return min(max(guess_s + known * (slope_s - guess_s), guess_s / _SPAN), guess_s * _SPAN)
