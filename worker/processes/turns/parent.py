"""The parent of workers of which some take turns on a device; the others run as in `parent.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sluice.worker.clock import monotonic_s
from sluice.worker.log import Log
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.parent import Parent, Report
from sluice.worker.processes.turns.policy import TurnRules
from sluice.worker.processes.turns.rotation import Observer, Rotation

SWITCHING_EVERY_S = 0.1
"""Interval of looks while a worker leaves or comes: its time is measured, and jobs wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Members that take turns."""

    name: str
    rules: TurnRules
    workers: Mapping[str, Sequence[ChildSpec]]
    """The workers of each member."""

    watch: Observer


class TurnsParent(Parent):
    """A parent that lets groups of workers take turns. Changes as they come and go."""

    def __init__(
        self,
        workers: Sequence[ChildSpec],
        sidecars: Sequence[ChildSpec],
        log: Log,
        make_report: Callable[[], Report],
        groups: Sequence[Group],
    ) -> None:
        """Start nothing yet.

        Args:
            workers: All workers, those of groups too.
            sidecars: As in `Parent`. They stay while no worker runs.
            log: Where to log.
            make_report: As in `Parent`.
            groups: Those whose members take turns.
        """
        super().__init__(workers, sidecars, log, make_report)
        child_of = dict(zip(map(id, workers), self._workers, strict=True))
        self._watches = [group.watch for group in groups]
        self._rotations: list[Rotation] = []
        for group in groups:
            members = {name: [child_of[id(spec)] for spec in specs] for name, specs in group.workers.items()}
            for child in (child for children in members.values() for child in children):
                child.retire()
            own_log = log.bind(turns=group.name)
            self._rotations.append(Rotation(members, group.rules, group.watch, own_log, monotonic_s()))

    def run(self) -> int:
        """Keep the processes running as `Parent` does, and speak for the members that are away."""
        for watch in self._watches:
            watch.start()
        try:
            return super().run()
        finally:
            for watch in self._watches:
                watch.close()

    @property
    def _is_needed(self) -> bool:
        waits = not self._is_stopping and not all(rotation.is_refused for rotation in self._rotations)
        return waits or super()._is_needed

    @property
    def _look_every_s(self) -> float:
        is_switching = any(rotation.is_switching for rotation in self._rotations)
        return min(SWITCHING_EVERY_S, super()._look_every_s) if is_switching else super()._look_every_s

    def _steer(self) -> None:
        """Begin or continue switches."""
        if self._is_stopping or self._is_quiet:
            return
        for rotation in self._rotations:
            rotation.steer(monotonic_s())
