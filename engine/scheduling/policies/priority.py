"""Higher priority first, with aging to prevent starvation."""

from sluice.engine.sequence import Sequence


class Priority:
    """A point of priority is worth `age_step_s` seconds of age.

    A sequence of priority p can be overtaken only by those of a higher priority q that arrive within `(q - p) *
    age_step_s` after it: that bounds its wait. All sequences age at the same rate, so the order of two of them never
    changes, and the key needs no clock.
    """

    def __init__(self, age_step_s: float) -> None:
        self._age_step_s = age_step_s

    def order(self, sequence: Sequence) -> tuple[float, int]:
        """See `Policy.order`."""
        return (sequence.arrival_s - sequence.priority * self._age_step_s, sequence.id)
