"""Whether guesses that take time yield more than they cost, counted in tokens."""

_LEAST_ROUNDS = 32
"""Rounds before it is judged: the first ones also compute prompts."""

_DECAY = 1 - 1 / 128
_FIRST_REST, _LONGEST_REST = 128, 8192
"""Steps after which guessing that did not pay is tried again: the first time, and at most."""


class Payoff:
    """What rounds of guesses gained and cost lately. Mutable."""

    def __init__(self) -> None:
        self._gained = self._spent = 0.0
        self._num_rounds = 0
        self._num_rested = 0
        self._rest = _FIRST_REST

    @property
    def pays(self) -> bool:
        """Whether further rounds are worth it, as far as is known."""
        return self._num_rounds < _LEAST_ROUNDS or self._gained >= self._spent

    def spend(self, num_tokens: float) -> None:
        """Note a round, and how many tokens the engine generates in the time that it took."""
        self._gained *= _DECAY
        self._spent = self._spent * _DECAY + num_tokens
        self._num_rounds += 1
        self._num_rested = 0
        if self._num_rounds >= _LEAST_ROUNDS and self.pays:
            self._rest = _FIRST_REST

    def gain(self, num_tokens: float) -> None:
        """Note tokens that came from guesses."""
        self._gained += num_tokens

    def rest(self) -> bool:
        """Note a step without a round, and return whether it is time to try again; each rest is twice as long."""
        self._num_rested += 1
        if self._num_rested < self._rest:
            return False
        self._gained = self._spent = 0.0
        self._num_rounds = self._num_rested = 0
        self._rest = min(2 * self._rest, _LONGEST_REST)
        return True

    def fail(self) -> None:
        """Begin the longest rest."""
        self._gained, self._spent = 0.0, 1.0
        self._num_rounds, self._num_rested, self._rest = _LEAST_ROUNDS, 0, _LONGEST_REST
