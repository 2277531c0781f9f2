"""Most tokens of a step: as configured, or fewer for a while where the device had no memory for that many."""

REST = 200
"""Steps that go well before twice as many tokens are tried again."""


class StepBudget:
    """Halves with each step that lacked memory, and grows back. Changes with how steps go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_well = 0
        self.tokens = most
        """What a step may compute now. At least 1."""

    def shrink(self, num_tokens: int) -> None:
        """A step of `num_tokens` lacked memory."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_well = 0

    def note_success(self) -> None:
        """A step, or a part of one, went well."""
        if self.tokens == self._most:
            return
        self._num_well += 1
        if self._num_well >= REST:
            self.tokens, self._num_well = min(self.tokens * 2, self._most), 0
