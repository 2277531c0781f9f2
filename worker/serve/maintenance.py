"""When to call `maintain` for each partition: timers fire and jobs of dead workers return by it. No I/O."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from sluice.protocol.calls import Maintained
from sluice.protocol.keys import QueueKeys

AT_LEAST_EVERY_S = 0.5
"""Longest time between two calls: another worker may have deregistered, or its clock have stepped."""

AT_MOST_EVERY_S = 0.05
"""Shortest time between two calls, unless a slice was full: a worker that may not be declared dead yet stays due."""


@dataclass(slots=True, eq=False)
class _Turn:
    """The calls for one partition. Changes with each of them."""

    keys: QueueKeys
    number: int = 0
    due_s: float = 0.0
    called_s: float = float("-inf")


class MaintenanceSchedule:
    """The decision which partition is due. Changes with each call and reply, on the pull thread only."""

    def __init__(self, partitions: Iterable[QueueKeys], unavailable: Container[QueueKeys] = ()) -> None:
        self._turns = {keys: _Turn(keys) for keys in partitions}
        self._unavailable = unavailable

    def next_due_s(self) -> float:
        """Return when the next call is due; infinity if all partitions are unavailable."""
        return min((turn.due_s for turn in self._there()), default=float("inf"))

    def due(self, now_s: float) -> list[tuple[QueueKeys, int]]:
        """Return the partitions that are due, each with the number of its call."""
        due = [turn for turn in self._there() if now_s >= turn.due_s]
        for turn in due:
            turn.number += 1
        return [(turn.keys, turn.number) for turn in due]

    def on_pull_reply(self, keys: QueueKeys, until_due_s: float, now_s: float) -> None:
        """Note the time until something is due, as a pull has said."""
        turn = self._turns[keys]
        turn.due_s = min(turn.due_s, max(now_s + until_due_s, turn.called_s + AT_MOST_EVERY_S))

    def on_reply(self, keys: QueueKeys, reply: Maintained, now_s: float) -> None:
        """Take the reply to a call."""
        turn = self._turns[keys]
        turn.called_s = now_s
        until_due_s = float("inf") if reply.due_ms is None else (reply.due_ms - reply.server_ms) / 1000
        turn.due_s = now_s if reply.has_more else now_s + max(0.001, min(AT_LEAST_EVERY_S, until_due_s))

    def on_missed(self, keys: QueueKeys, now_s: float) -> None:
        """Take an unanswered call: it may be repeated at any time."""
        turn = self._turns[keys]
        turn.called_s, turn.due_s = now_s, now_s + AT_MOST_EVERY_S

    def _there(self) -> list[_Turn]:
        return [turn for turn in self._turns.values() if turn.keys not in self._unavailable]
