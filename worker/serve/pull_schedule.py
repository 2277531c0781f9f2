"""When to pull, from which partition and for how much room. No I/O."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from sluice.engine.request import NO_ROOM, Room
from sluice.protocol.calls import Notification, PullReply, PullRequest
from sluice.protocol.keys import QueueKeys

PULL_AT_LEAST_EVERY_S = 0.5
"""Longest time between pulls without a notification, and between calls of `maintain`."""

LOOK_EVERY_S = 0.02
"""A full worker looks this often whether jobs of a higher class wait. It receives no notifications: these are for
workers with free room."""


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

    has_left_higher: bool = False
    """Whether jobs of a higher class may wait that a pull for them did not bring. The next one is at `due_s`."""

    def is_due(self, room: Room, now_s: float, *, is_empty: bool) -> bool:
        """Return whether a pull could bring jobs."""
        if self.is_draining and not is_empty:
            return now_s >= self.due_s
        if room.over_class is not None:
            return self.has_more or now_s >= self.due_s
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


class PullSchedule:
    """Decisions on when to pull, from which partition and for how much room. Called by the pull thread only."""

    def __init__(
        self,
        partitions: Iterable[QueueKeys],
        incarnation: str,
        *,
        reserve_tokens: int,
        unavailable: Container[QueueKeys] = (),
    ) -> None:
        self._turns = [_Turn(keys) for keys in partitions]
        self._incarnation = incarnation
        self._reserve_tokens = reserve_tokens
        self._unavailable = unavailable

    @property
    def last_notifications(self) -> dict[QueueKeys, str]:
        """The last notification id of each partition that a pull has covered."""
        return {turn.keys: turn.last_notification for turn in self._turns}

    def next_due_s(self) -> float:
        """Return when the next pull is due without an event; infinity if all partitions are unavailable."""
        return min((turn.due_s for turn in self._there()), default=float("inf"))

    def next(
        self, room: Room, *, now_s: float, cache_tokens: int, is_empty: bool, holds_oversized: bool
    ) -> tuple[QueueKeys, PullRequest] | None:
        """Return the pull to make now, if any; partitions take turns.

        Without room, it repeats an unanswered pull, and lets another worker have the notification that it received.
        """
        turn = self._next_turn(room, now_s, is_empty=is_empty)
        if turn is None:
            return None
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
        there = self._there()
        due = (turn for turn in there if turn.is_due(room, now_s, is_empty=is_empty) and room.is_some)
        owed = (turn for turn in there if turn.has_missed or turn.woken_by is not None)
        return next(due, None) or next(owed, None)

    def _there(self) -> list[_Turn]:
        return [turn for turn in self._turns if turn.keys not in self._unavailable]

    def on_reply(self, keys: QueueKeys, reply: PullReply, *, left: Room, now_s: float) -> None:
        """Take an answered pull: advance the number, and let another partition go first."""
        turn = self._turn_of(keys)
        turn.number = reply.number + 1
        turn.last_notification = reply.last_notification
        turn.has_more = reply.has_more and not reply.is_paused
        turn.woken_by, turn.has_missed = None, False
        turn.is_draining = reply.drain_for_suspects
        # Whatever room becomes free is more than room that is not free.
        turn.left = left if turn.is_for_free_room and left.over_class is None else NO_ROOM
        turn.has_left_higher = left.over_class is not None and not reply.jobs
        until_then_s = (reply.look_again_ms - reply.server_ms) / 1000 if reply.look_again_ms is not None else 1e9
        turn.due_s = now_s + max(0.001, min(PULL_AT_LEAST_EVERY_S, until_then_s))
        self._turns.remove(turn)
        self._turns.append(turn)

    def on_readied(self, keys: QueueKeys, now_s: float) -> None:
        """Pull now: jobs may have become ready."""
        self._turn_of(keys).due_s = now_s

    def on_look(self, keys: QueueKeys, *, is_waiting: bool, now_s: float) -> None:
        """Note whether jobs of a class over the room's wait: pull for them now, unless the last pull left them."""
        turn = self._turn_of(keys)
        turn.has_left_higher = turn.has_left_higher and is_waiting
        if is_waiting and not turn.has_left_higher:
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
