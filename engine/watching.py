"""Describe each iteration of an engine: who runs, joins, waits, is preempted and leaves, with tokens and blocks.

Knows no tensors and no text. Nothing here runs unless someone watches (`LLMEngine.watch`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.request import TokenDelta
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence

MAX_NAMED = 8
"""Waiting sequences that an iteration names."""


class Computing(NamedTuple):
    """A sequence in an iteration: it computes tokens `start` to `start + num_tokens`."""

    name: str
    start: int
    num_tokens: int
    num_blocks: int
    """Blocks that it holds."""

    def __str__(self) -> str:
        return f"{self.name} {self.num_tokens} from {self.start} in {self.num_blocks}"


class Left(NamedTuple):
    """A choice that ended, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration. A sequence is named by its request and its choice."""

    number: int
    """Counted from 1, while someone watches."""

    at_s: float
    """When it was planned, since watching began."""

    took_s: float
    joined: tuple[Computing, ...]
    """Those that have got blocks; `start` is the number of tokens that the prefix cache had."""

    running: tuple[Computing, ...]
    """Those that had blocks before."""

    left: tuple[Left, ...]
    """Those that ended. With a step in flight they are of the one before."""

    preempted: tuple[str, ...]
    """Those that have lost their blocks, and wait again."""

    waiting: tuple[str, ...]
    """The first of those that wait."""

    num_waiting: int
    max_tokens: int
    """The budget of the step."""

    num_free_blocks: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return sum(computing.num_tokens for computing in (*self.joined, *self.running))

    @property
    def has_changes(self) -> bool:
        """Whether anyone joins, leaves or is preempted."""
        return bool(self.joined or self.left or self.preempted)

    def __str__(self) -> str:
        """Return a line of numbers, and one for each group: `name tokens from start in blocks`."""
        head = (
            f"{self.number:>6}  at {self.at_s:.3f} s  {1e3 * self.took_s:.1f} ms  "
            f"{self.num_tokens} of {self.max_tokens} tokens  {len(self.joined) + len(self.running)} run  "
            f"{self.num_waiting} wait  {self.num_free_blocks} of {self.num_blocks} blocks free"
        )
        num_more = self.num_waiting - len(self.waiting)
        groups = (
            ("joins", [*map(str, self.joined)]),
            ("runs", [*map(str, self.running)]),
            ("leaves", [*map(str, self.left)]),
            ("preempted", [*self.preempted]),
            ("waits", [*self.waiting, *([f"{num_more} more"] if num_more else [])]),
        )
        return "\n".join([head, *(f"        {what:<10}{', '.join(names)}" for what, names in groups if names)])


Watcher: TypeAlias = Callable[[Iteration], None]


class Watching:
    """Between a watcher and the engine that it watches. Mutable: the last plan changes."""

    def __init__(self, scheduler: Scheduler, watcher: Watcher, clock: Callable[[], float]) -> None:
        """Prepare to describe the iterations of an engine that plans with `scheduler`."""
        self._scheduler = scheduler
        self._watcher = watcher
        self._clock = clock
        self._began_s = clock()
        self._number = 0
        self._planned: Iteration | None = None
        self._running = {sequence.id for sequence in scheduler.running}
        self._preemptions = _preemptions_of(scheduler.known)

    def note_plan(self, batch: Batch) -> None:
        """Describe a plan that was made just now, before anything of it has happened."""
        scheduler = self._scheduler
        sequences, running = scheduler.known, {sequence.id: sequence for sequence in scheduler.running}
        rows = [(row.sequence_id, _computing(running[row.sequence_id], row)) for row in batch.rows]
        waiting = scheduler.waiting.in_order()
        self._planned = Iteration(
            number=self._number + 1,
            at_s=self._clock() - self._began_s,
            took_s=0.0,
            joined=tuple(row for sequence_id, row in rows if sequence_id not in self._running),
            running=tuple(row for sequence_id, row in rows if sequence_id in self._running),
            left=(),
            preempted=tuple(_name(s) for s in sequences if s.num_preemptions > self._preemptions.get(s.id, 0)),
            waiting=tuple(map(_name, waiting[:MAX_NAMED])),
            num_waiting=scheduler.num_waiting,
            max_tokens=scheduler.max_tokens,
            num_free_blocks=scheduler.blocks.num_free_blocks,
            num_blocks=scheduler.blocks.num_blocks,
        )
        self._running = set(running)
        self._preemptions = _preemptions_of(sequences)

    def note_step(self, deltas: list[TokenDelta]) -> None:
        """Tell the watcher of the iteration planned last, with its results, unless nothing has happened."""
        planned, self._planned = self._planned, None
        left = tuple(Left(f"{d.request_id}/{d.choice}", d.finish.reason) for d in deltas if d.finish)
        if planned is not None and (planned.num_tokens or planned.preempted or left):
            self._number += 1
            took_s = self._clock() - self._began_s - planned.at_s
            self._watcher(replace(planned, took_s=took_s, left=left))


def _name(sequence: Sequence) -> str:
    return f"{sequence.request_id}/{sequence.choice}"


def _computing(sequence: Sequence, row: ScheduledRow) -> Computing:
    return Computing(_name(sequence), row.start, row.num_tokens, len(sequence.held_blocks))


def _preemptions_of(sequences: list[Sequence]) -> dict[int, int]:
    return {sequence.id: sequence.num_preemptions for sequence in sequences}
