"""When to pull, from which partition and for how much room. No I/O."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from sluice.engine.request import NO_ROOM, Room
from sluice.protocol.calls import Notification, PullReply, PullRequest
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import SUSPECT_DEATHS

PULL_AT_LEAST_EVERY_S = 0.5
"""Longest time between pulls without a notification, and between calls of `maintain`."""

LOOK_EVERY_S = 0.02
"""A full worker looks this often whether jobs wait that may start here: of a higher class, or in places that running
ones are about to leave. It receives no notifications: these are for workers with free room."""


@dataclass(slots=True, eq=False)
class _Turn:
    """The state of pulling from one partition. Changes with each pull and reply."""

    keys: QueueKeys
    number: int = 1
    last_notification: str = "0-0"
    has_more: bool = True
    woken_by: Notification | None = None
    due_s: float = 0.0
    left: Room | None = None
    """Room that the last pull left unused; pull again once there is more."""

    is_for_free_room: bool = True
    """Whether the last pull was for free room. After any other, all room that is free has not been asked for."""

    has_missed: bool = False
    """Whether the last pull was not answered: repeating its number returns the jobs that it may have leased."""

    is_draining: bool = False
    """Whether a suspect, which runs alone, waits for this worker to be empty. Pulls show that it continues to drain."""

    is_isolated: bool = False
    """Whether suspects of this partition run here: until the worker is empty, it takes no other jobs."""

    has_left_any: bool = False
    """Whether jobs may wait that a pull of a full worker did not bring. The next one is at `due_s`."""

    may_interrupt: bool = True
    """Whether a pull may bring jobs of a higher class to a full worker: not while a queue that has had less waits."""

    is_paused: bool = False

    def is_due(self, room: Room, now_s: float, *, is_empty: bool) -> bool:
        """Return whether a pull could bring jobs."""
        if self.is_draining and not is_empty:
            return now_s >= self.due_s
        if room.over_class is not None:
            return self.may_interrupt and (self.has_more or now_s >= self.due_s)
        return self.has_more or self.woken_by is not None or now_s >= self.due_s or self._has_grown(room)

    def _has_grown(self, room: Room) -> bool:
        left = self.left
        if left is None:
            return False
        grown = room.sequences > left.sequences or room.kv_tokens > left.kv_tokens
        grown = grown or room.prefill_tokens > left.prefill_tokens
        if not grown:
            self.left = room
        return grown


@dataclass(slots=True, eq=False)
class FairShares:
    """Which queue goes first, by start-time fair queueing (Goyal et al., SIGCOMM 1996). Changes with each pull.

    A pull starts at the virtual time, or where the last one of its queue ended, if that is later. It ends later by its
    cost divided by the queue's weight. The virtual time is the start of the last pull. So a queue that had no jobs
    starts at the virtual time: it has saved nothing up, and owes nothing.
    """

    weights: Mapping[str, int]
    """1 for a queue that is not in it."""

    _now: float = field(default=0.0, init=False)
    _ends: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def start_of(self, turn: _Turn) -> float:
        """Return where the next pull of a partition's queue starts. The least goes first."""
        return max(self._now, self._ends.get(turn.keys.queue, 0.0))

    def charge(self, turn: _Turn, tokens: int) -> None:
        """Charge a queue for the jobs that a pull brought."""
        if tokens:
            self._now = self.start_of(turn)
            self._ends[turn.keys.queue] = self._now + tokens / self.weights.get(turn.keys.queue, 1)


class PullSchedule:
    """Decisions on when to pull, from which partition and for how much room. Called by the pull thread only.

    Of the queues that have a partition to pull from, the one that has had the least for its weight goes first; the
    partitions of one queue take turns.
    """

    def __init__(
        self,
        partitions: Iterable[QueueKeys],
        incarnation: str,
        *,
        reserve_tokens: int,
        unavailable: Container[QueueKeys] = (),
        weights: Mapping[str, int] | None = None,
    ) -> None:
        self._turns = [_Turn(keys) for keys in partitions]
        self._shares = FairShares(weights or {})
        self._incarnation = incarnation
        self._reserve_tokens = reserve_tokens
        self._unavailable = unavailable

    @property
    def last_notifications(self) -> dict[QueueKeys, str]:
        """The last notification id of each partition that a pull has covered."""
        return {turn.keys: turn.last_notification for turn in self._turns}

    def next_due_s(self, room: Room) -> float:
        """Return when the next pull is due without an event; infinity if no partition may be pulled from."""
        is_free = room.over_class is None
        return min((turn.due_s for turn in self._open() if is_free or turn.may_interrupt), default=float("inf"))

    def next(
        self, room: Room, *, now_s: float, cache_tokens: int, is_empty: bool, holds_oversized: bool
    ) -> tuple[QueueKeys, PullRequest] | None:
        """Return the pull to make now, if any.

        Without room, or if suspects of another partition come first, it repeats an unanswered pull, and lets another
        worker have the notification that it received.
        """
        turn = self._next_turn(room, now_s, is_empty=is_empty)
        if turn is None:
            return None
        if turn not in self._open() or (room.over_class is not None and not turn.may_interrupt):
            room = NO_ROOM
        turn.is_for_free_room = room.is_some and room.over_class is None
        return turn.keys, PullRequest(
            incarnation=self._incarnation,
            number=turn.number,
            kv_tokens=room.kv_tokens,
            prefill_tokens=room.prefill_tokens,
            sequences=room.sequences,
            cache_tokens=cache_tokens,
            is_empty=is_empty and room.is_some,
            holds_oversized=holds_oversized,
            reserve_tokens=self._reserve_tokens,
            woken_by=turn.woken_by,
            over_class=room.over_class,
        )

    def _next_turn(self, room: Room, now_s: float, *, is_empty: bool) -> _Turn | None:
        if is_empty:
            for turn in self._turns:
                turn.is_isolated = False
        due = [turn for turn in self._open() if turn.is_due(room, now_s, is_empty=is_empty) and room.is_some]
        owed = [turn for turn in self._there() if turn.has_missed or turn.woken_by is not None]
        return min(due or owed, key=self._shares.start_of, default=None)

    def _open(self) -> list[_Turn]:
        """List the partitions to take jobs from: if suspects run, or wait for this worker to be empty, theirs alone."""
        there = self._there()
        isolated = [turn for turn in there if turn.is_isolated]
        return isolated or [turn for turn in there if turn.is_draining] or there

    def _there(self) -> list[_Turn]:
        return [turn for turn in self._turns if turn.keys not in self._unavailable]

    def on_reply(self, keys: QueueKeys, reply: PullReply, *, left: Room, now_s: float, tokens: int = 0) -> None:
        """Take an answered pull: advance the number, and let another partition go first.

        `tokens` are what its jobs take of the KV cache.
        """
        turn = self._turn_of(keys)
        self._shares.charge(turn, tokens)
        turn.number = reply.number + 1
        turn.last_notification = reply.last_notification
        turn.is_paused = reply.is_paused
        turn.has_more = reply.has_more and not reply.is_paused
        turn.woken_by, turn.has_missed = None, False
        turn.is_draining = reply.drain_for_suspects
        if reply.jobs:
            turn.is_isolated = any(job.deaths >= SUSPECT_DEATHS for job in reply.jobs)
        # Whatever room becomes free is more than room that is not free.
        turn.left = left if turn.is_for_free_room and left.over_class is None else NO_ROOM
        turn.has_left_any = left.is_some and left.is_taken and not reply.jobs
        until_then_s = (reply.look_again_ms - reply.server_ms) / 1000 if reply.look_again_ms is not None else 1e9
        turn.due_s = now_s + max(0.001, min(PULL_AT_LEAST_EVERY_S, until_then_s))
        self._turns.remove(turn)
        self._turns.append(turn)

    def on_readied(self, keys: QueueKeys, now_s: float) -> None:
        """Pull now: jobs may have become ready."""
        self._turn_of(keys).due_s = now_s

    def on_waiting(self, waiting: Container[QueueKeys]) -> None:
        """Note which partitions have jobs: a queue interrupts no jobs while one that has had less for its weight waits.

        Otherwise a queue with high classes would take a full worker, whatever the weights.
        """
        starts = [self._shares.start_of(turn) for turn in self._there() if turn.keys in waiting and not turn.is_paused]
        for turn in self._turns:
            turn.may_interrupt = self._shares.start_of(turn) <= min(starts, default=float("inf"))

    def may_interrupt(self, keys: QueueKeys) -> bool:
        """Return whether jobs of this partition may take the places of running jobs of a lower class."""
        return self._turn_of(keys).may_interrupt

    def on_look(self, keys: QueueKeys, *, is_waiting: bool, now_s: float) -> None:
        """Note whether jobs that may start here wait: pull for them now, unless the last pull left them."""
        turn = self._turn_of(keys)
        turn.has_left_any = turn.has_left_any and is_waiting
        if is_waiting and not turn.has_left_any:
            turn.due_s = now_s

    def on_missed(self, keys: QueueKeys) -> None:
        """Take an unanswered pull: repeat its number later, and let another partition go first."""
        turn = self._turn_of(keys)
        turn.has_missed = True
        self._turns.remove(turn)
        self._turns.append(turn)

    def on_notified(self, keys: QueueKeys, notification: Notification) -> None:
        """Take a notification: jobs may have become ready."""
        self._turn_of(keys).woken_by = notification

    def _turn_of(self, keys: QueueKeys) -> _Turn:
        return next(turn for turn in self._turns if turn.keys == keys)
