"""Close, cancel, expire and inspect batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.protocol.calls.base import Call, FromNow, Raw, read_map, read_number
from sluice.protocol.keys import QueueKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Totals of a batch in one partition, or over all partitions."""

    id: str
    is_closed: bool
    total: int
    done: int
    failed: int
    cancelled: int
    expired: int
    completed_ms: int | None
    """When the last job of a closed batch ended."""

    deadline_ms: int | None = None
    """When its unfinished jobs expire."""

    began_ms: int | None = None
    """When the first job was submitted; None before that. The name of a batch may be reused."""

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return self.done + self.failed + self.cancelled + self.expired


def join_batch(parts: Sequence[BatchView]) -> BatchView:
    """Add up a batch over all partitions. It is closed, or complete, if that is true in every partition."""
    completed = [part.completed_ms for part in parts]
    return BatchView(
        id=parts[0].id,
        is_closed=all(part.is_closed for part in parts),
        total=sum(part.total for part in parts),
        done=sum(part.done for part in parts),
        failed=sum(part.failed for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        expired=sum(part.expired for part in parts),
        completed_ms=None if None in completed else max(ms for ms in completed if ms is not None),
        deadline_ms=max((part.deadline_ms for part in parts if part.deadline_ms is not None), default=None),
        began_ms=min((part.began_ms for part in parts if part.began_ms is not None), default=None),
    )


def close_batch(keys: QueueKeys, batch: str, *, callback_url: str | None = None) -> Call[BatchView]:
    """Close a batch: it accepts no more jobs, and writes one callback when all of them have ended."""
    return Call("close_batch", keys.fixed(), (batch, callback_url or ""), lambda reply: _read_batch(batch, reply))


def cancel_batch(keys: QueueKeys, batch: str, *, reason: str | None = None) -> Call[tuple[int, int, bool]]:
    """Close a batch and cancel one slice of its jobs; returns (ended, asked to stop, whether more are left)."""
    args = (batch, reason or "")
    return Call("cancel_batch", keys.fixed(), args, lambda reply: (reply[0], reply[1], bool(reply[2])))


def expire_batch(keys: QueueKeys, batch: str, *, deadline_ms: int | FromNow) -> Call[BatchView]:
    """Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire."""
    args = (batch, deadline_ms.left_ms(), 1) if isinstance(deadline_ms, FromNow) else (batch, deadline_ms, 0)
    return Call("expire_batch", keys.fixed(), args, lambda reply: _read_batch(batch, reply))


def inspect_batch(keys: QueueKeys, batch: str) -> Call[BatchView]:
    """Read the totals of a batch; an unknown batch has no jobs."""
    return Call("inspect_batch", keys.fixed(), (batch,), lambda reply: _read_batch(batch, reply))


def _read_batch(batch: str, reply: Raw) -> BatchView:
    numbers = read_map(reply)
    completed, deadline, began = (numbers.get(name) for name in ("completed", "deadline", "began"))
    return BatchView(
        id=batch,
        is_closed=numbers.get("closed") == "1",
        total=read_number(numbers.get("total", "0")),
        done=read_number(numbers.get("done", "0")),
        failed=read_number(numbers.get("failed", "0")),
        cancelled=read_number(numbers.get("cancelled", "0")),
        expired=read_number(numbers.get("expired", "0")),
        completed_ms=read_number(completed) if completed else None,
        deadline_ms=read_number(deadline) if deadline else None,
        began_ms=read_number(began) if began else None,
    )
