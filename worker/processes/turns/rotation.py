"""The workers of one group: exactly one member's run at a time. Asks one to stop, then starts the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from signal import SIGKILL
from typing import Protocol

from sluice.protocol.workers import LOADING, WAITING_FOR_ITS_TURN
from sluice.worker.log import Log
from sluice.worker.processes.child_process import ChildProcess
from sluice.worker.processes.turns.costs import SwitchCosts
from sluice.worker.processes.turns.observed import Seen, demand_of
from sluice.worker.processes.turns.policy import Card, Credit, Demand, TurnRules, choose

ASIDE_S, MAX_ASIDE_S = 10.0, 300.0
"""For how long a member whose worker fails to start is set aside, at first and at most."""


class Observer(Protocol):
    """What `Watch` is to a rotation."""

    @property
    def seen(self) -> Mapping[str, Seen]: ...

    def state(self, states: Mapping[str, str | None]) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    """The worker processes of one model. Changes as they start, fail and leave."""

    name: str
    processes: Sequence[ChildProcess]
    left_s: float
    """When it last left the device."""

    num_failed_before: int = 0
    num_failures: int = 0
    """Failed starts since the last one that succeeded."""

    aside_until_s: float = -inf

    @property
    def is_there(self) -> bool:
        """Whether a process runs or is due."""
        return any(one.is_needed for one in self.processes)

    @property
    def is_loaded(self) -> bool:
        """Whether all its processes are ready to generate."""
        return all(one.is_loaded for one in self.processes)

    @property
    def has_failed(self) -> bool:
        """Whether a process ended before it was ready, since the member was enlisted."""
        return self._num_failed > self.num_failed_before

    @property
    def _num_failed(self) -> int:
        return sum(one.num_failed_starts for one in self.processes)

    def enlist(self) -> None:
        """Start its processes."""
        self.num_failed_before = self._num_failed
        for one in self.processes:
            one.enlist()

    def dismiss(self) -> None:
        """Ask its processes to end."""
        for one in self.processes:
            one.dismiss()

    def kill(self) -> None:
        """End its processes."""
        for one in self.processes:
            one.signal(SIGKILL)

    def set_aside(self, now_s: float) -> float:
        """Start it no more for a while, or for ever if its settings are wrong; return for how long."""
        self.dismiss()
        pause_s = inf if any(one.is_refused for one in self.processes) else ASIDE_S * 2**self.num_failures
        pause_s = pause_s if pause_s == inf else min(pause_s, MAX_ASIDE_S)
        self.num_failures, self.aside_until_s = min(self.num_failures + 1, 10), now_s + pause_s
        return pause_s


class Rotation:
    """The turns of one group. Changes with each switch; `steer` is called again and again."""

    def __init__(
        self,
        members: Mapping[str, Sequence[ChildProcess]],
        rules: TurnRules,
        watch: Observer,
        log: Log,
        now_s: float,
    ) -> None:
        """Start nothing yet.

        Args:
            members: The processes of each member, none of which may be due.
            rules: The group's.
            watch: Sees the queues.
            log: Where to log.
            now_s: The time on the caller's clock.
        """
        self._members = {name: _Member(name, processes, now_s) for name, processes in members.items()}
        self._rules = rules
        self._watch = watch
        self._log = log
        self._costs = SwitchCosts(members)
        self._credit = Credit.full(self._costs.expected(), rules)
        self._now_s = now_s
        self._present: _Member | None = None
        self._leaving: _Member | None = None
        self._is_killed = False
        self._asked_s: float | None = None
        """When the turn was given to the present member; None once that is ready."""

        self._since_s = now_s
        """When the present member was ready; what was seen before does not count."""

        self._weight = 1.0
        self._say()

    @property
    def is_refused(self) -> bool:
        """Whether no member's worker can run with its settings."""
        return all(member.aside_until_s == inf for member in self._members.values())

    @property
    def is_switching(self) -> bool:
        """Whether a member leaves or comes."""
        return self._leaving is not None or self._asked_s is not None

    def steer(self, now_s: float) -> None:
        """Look at processes and queues, and begin or continue a switch."""
        self._credit = self._credit.grown(now_s - self._now_s, self._costs.expected(), self._rules)
        self._now_s = now_s
        if self._leaving is not None and not self._has_left(self._leaving):
            return
        if self._present is not None and self._present.has_failed:
            self._fail(self._present)
        elif self._present is None or self._is_ready(self._present):
            if self._present is not None and not self._present.is_there:
                self._end_turn(self._present)
            self._decide()

    def _has_left(self, leaving: _Member) -> bool:
        """Return whether the member that was asked to stop has; kill it if it takes too long."""
        if leaving.is_there:
            asked_s = leaving.left_s
            if self._now_s - asked_s >= self._rules.stop_s and not self._is_killed:
                self._log.warning("worker did not stop in time: killed", workers=leaving.name)
                self._is_killed = True
                leaving.kill()
            return False
        self._leaving, self._is_killed = None, False
        if self._present is not None:
            self._present.enlist()
        return True

    def _end_turn(self, present: _Member) -> None:
        """Take the device from a member whose worker was asked to end by someone else."""
        self._leave(present)
        self._present = None
        self._say()

    def _fail(self, present: _Member) -> None:
        """Take the device from a member whose worker does not start."""
        pause_s = present.set_aside(self._now_s)
        self._log.warning("worker does not start: others have its turn", workers=present.name, pause_s=pause_s)
        self._leave(present)
        self._present, self._asked_s = None, None
        self._say()

    def _is_ready(self, present: _Member) -> bool:
        """Return whether the member has its turn, and note how long it took when it begins."""
        if self._asked_s is None:
            return True
        if not present.is_loaded:
            return False
        cost_s = self._now_s - self._asked_s
        self._asked_s, self._since_s, present.num_failures = None, self._now_s, 0
        self._costs.note(present.name, cost_s)
        self._credit = self._credit.spent(cost_s, self._costs.expected())
        self._log.info("turn began", workers=present.name, switch_s=round(cost_s, 3))
        self._say()
        return True

    def _decide(self) -> None:
        demands = self._demands()
        if demands is None:
            return
        present = self._present
        own = next((one for one in demands if present is not None and one.name == present.name), None)
        if own is not None:
            self._weight = max(self._weight, own.weight)
        card = Card(
            present=None if present is None else present.name,
            costs=self._costs.expected(),
            credit_s=self._credit.seconds,
            turn_s=self._now_s - self._since_s,
            weight=self._weight,
        )
        chosen = choose(demands, card, self._rules)
        if chosen is not None and chosen != card.present:
            self._switch(next(one for one in demands if one.name == chosen), own)

    def _demands(self) -> Sequence[Demand] | None:
        """Return what the queues ask for; None if they were not all seen since the last switch."""
        seen = self._watch.seen
        if any(name not in seen or seen[name].at_s < self._since_s for name in self._members):
            return None
        return [
            demand_of(
                name,
                seen[name],
                away_s=None if member is self._present else self._now_s - member.left_s,
                can_run=self._now_s >= member.aside_until_s,
            )
            for name, member in self._members.items()
        ]

    def _switch(self, chosen: Demand, present: Demand | None) -> None:
        """Give the turn to another member."""
        facts = {} if present is None else {"before": present.name, "left_waiting": present.waiting_jobs}
        self._log.info("turn given", workers=chosen.name, waiting_jobs=chosen.waiting_jobs, **facts)
        leaving, self._present = self._present, self._members[chosen.name]
        self._asked_s, self._weight = self._now_s, chosen.weight
        if leaving is None:
            self._present.enlist()
        else:
            leaving.dismiss()
            self._leave(leaving)
        self._say()

    def _leave(self, leaving: _Member) -> None:
        leaving.left_s = self._now_s
        self._leaving, self._since_s = leaving, self._now_s

    def _say(self) -> None:
        """State in heartbeats who waits for the device."""
        states: dict[str, str | None] = dict.fromkeys(self._members, WAITING_FOR_ITS_TURN)
        if self._present is not None:
            states[self._present.name] = None if self._asked_s is None else LOADING
        self._watch.state(states)
