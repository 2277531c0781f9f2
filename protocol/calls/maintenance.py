"""Keep a partition in order (`maintain`): fire due timers, return jobs of dead workers, forget what is old."""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.protocol.calls.base import Call, Raw, check_slice
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintained:
    """The reply to a call of `maintain`."""

    num_fired: int
    """Timers that fired."""

    num_returned: int
    """Jobs of dead workers that returned to the queue, or ended."""

    has_more: bool
    """A slice was full: call again."""

    server_ms: int
    due_ms: int | None
    """When the next timer is due or the next heartbeat expires, if any."""


def maintain(
    keys: QueueKeys,
    *,
    incarnation: str = "",
    number: int = 0,
    overdue: Sequence[JobId] = (),
    may_declare_dead: bool = False,
    until_ms: int | None = None,
) -> Call[Maintained]:
    """Fire due timers and return jobs of workers whose heartbeat has expired: one slice of each.

    Anyone who may change all jobs of a queue may call it, any number of times; workers do. Jobs of workers whose death
    was reported, or that have deregistered, are returned by every caller.

    Args:
        keys: The partition.
        incarnation: The worker that calls, whose own jobs are not returned; empty for others.
        number: The number of this call: consecutive ones look at different dead workers.
        overdue: At most `SLICE_JOBS` jobs whose own deadlines are checked first, however many timers are due.
        may_declare_dead: Whether jobs of workers whose heartbeat has expired are returned. False for one lifetime of a
            heartbeat after the caller has connected, or after a stall of Redis.
        until_ms: A call that is served after this time (by the clock of the queue) declares no worker dead: Redis had
            stalled, and the heartbeats of workers that seem dead may be queued behind it.

    Raises:
        ValueError: too many jobs in `overdue`.
    """
    args = (
        incarnation,
        number,
        pack_for_script(check_slice(overdue)),
        int(may_declare_dead),
        "" if until_ms is None else until_ms,
    )
    return Call("maintain", keys.fixed(), args, _read)


def _read(reply: Raw) -> Maintained:
    num_fired, num_returned, has_more, now, due = reply
    return Maintained(
        num_fired=num_fired, num_returned=num_returned, has_more=bool(has_more), server_ms=now, due_ms=due
    )
