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
_LEAST, _MOST = 0.05, 0.95
_MARGIN = 1.5
"""By which a draft must yield more: the cost of a token is an estimate."""

_FREE_TOKENS = 24
"""Tokens whose products take about as long as reading the weights: the first guess of a token's cost."""

_SPAN = 4.0
"""Factor by which the cost may differ from that guess; outliers of times differ less from the mean."""


class DraftWorth:
    """The probability from which a draft pays. Mutable: it learns from each step that only decodes."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean_tokens = self._mean_s = self._mean_yield = self._mean_draft_s = 0.0
        self._variance = self._covariance = 0.0
        self.worth = Worth(_DEFAULT)
        """What a draft must bring now."""

    def note(self, num_tokens: int, num_yielded: int, taken_s: float, draft_s: float = 0.0) -> None:
        """Note a step of decodes and drafts: tokens computed, tokens generated, its time, and that of guessing."""
        self._num_steps += 1
        share = 1 / min(self._num_steps, _MEMORY)
        if self._num_steps > _NUM_FIRST:
            taken_s = min(taken_s, _SPAN * self._mean_s)
        off_tokens, off_s = num_tokens - self._mean_tokens, taken_s - self._mean_s
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        self._mean_yield += share * (num_yielded - self._mean_yield)
        self._mean_draft_s += share * (draft_s - self._mean_draft_s)
        self._variance += share * (off_tokens * off_tokens * (1 - share) - self._variance)
        self._covariance += share * (off_tokens * off_s * (1 - share) - self._covariance)
        if self._num_steps >= _NUM_FIRST and self._mean_s > 0:
            tokens_per_s = self._mean_yield / (self._mean_s + self._mean_draft_s)
            token_cost = self._token_s * tokens_per_s
            self.worth = Worth(min(max(_MARGIN * token_cost, _LEAST), _MOST), token_cost, tokens_per_s)

    @property
    def _token_s(self) -> float:
        """Seconds that a token adds to a step: the slope of the measured steps, where they differ in tokens."""
        guess_s = self._mean_s / (self._mean_tokens + _FREE_TOKENS)
        slope_s = self._covariance / self._variance if self._variance > 0.5 else guess_s
        return min(max(slope_s, guess_s / _SPAN), guess_s * _SPAN)
