"""Token budget of a step: the configured one, or temporarily less after the device lacked memory."""

REST = 200
"""Successful steps before the budget is doubled again."""


class StepBudget:
    """A token budget that halves when a step lacks memory and grows back. Mutable."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_well = 0
        self.tokens = most
        """Tokens that a step may compute now. At least 1."""

    def shrink(self, num_tokens: int) -> None:
        """Halve the budget: a step of `num_tokens` lacked memory."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_well = 0

    def note_success(self) -> None:
        """Count a successful step, or part of one, towards growing back."""
        if self.tokens == self._most:
            return
        self._num_well += 1
        if self._num_well >= REST:
            self.tokens, self._num_well = min(self.tokens * 2, self._most), 0
