"""For how many steps ahead the engine offers the places of sequences whose ends are certain.

A pull takes some milliseconds from the offer to the job. A place that is offered that much earlier is used in the step
after it becomes free; one that is offered sooner would only keep a job from other workers.
"""

MAX_STEPS = 16
"""Room leaves one block for the growth of each running sequence: about as many tokens."""

_KEEP = 0.9


class Lookahead:
    """The number of steps. Changes with each step, and with what a pull takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long ahead, as `Engine.look_ahead` says; 0 looks at the next step alone."""

        self._step_s = 0.0

    def note_step(self, taken_s: float) -> None:
        """Note how long a step took."""
        self._step_s = _KEEP * self._step_s + (1 - _KEEP) * taken_s if self._step_s else taken_s

    @property
    def num_steps(self) -> int:
        """Steps that end within this time, and the one in which it ends: at least one."""
        if self._step_s <= 0:
            return 1
        return min(MAX_STEPS, 1 + int(self.seconds / self._step_s))
