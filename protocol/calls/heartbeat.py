"""Renew a worker's heartbeat (`beat`), or report that its process has ended (`report_death`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.protocol.calls.base import Call, Raw
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The heartbeat of a worker."""

    incarnation: str
    held: tuple[JobId, ...]
    processed_pull: int
    """Number of the last pull whose jobs are all in `held` or have ended."""

    expiry_ms: int
    """Time until this heartbeat expires."""

    about: Mapping[str, str] = field(default_factory=dict[str, str])
    """Host, pid, device, version, model, running, waiting …: shown by `worker status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The reply to a heartbeat."""

    server_ms: int
    was_dead: bool
    """Whether the previous heartbeat had expired. Jobs that were not reclaimed are still its own."""

    stops: tuple[tuple[JobId, JobState], ...]
    """Flagged jobs: end each with that state."""

    lost: tuple[JobId, ...]
    """Jobs in `held` that another worker has leased; drop them."""

    settings_stamp: str
    """Changes with the queue's settings; empty if no worker has read them since Redis lost them."""

    ready_jobs: int
    """Waiting jobs that a worker with room would take; 0 while the queue is paused."""


def beat(keys: QueueKeys, beat: Beat) -> Call[BeatReply]:
    """Renew the heartbeat of an incarnation, and return leases whose pull reply was lost."""
    about = [text for pair in beat.about.items() for text in pair]
    args = (beat.incarnation, beat.processed_pull, beat.expiry_ms, pack_for_script(beat.held), *about)
    return Call("beat", keys.fixed(), args, _read_beat)


def _read_beat(reply: Raw) -> BeatReply:
    now, was_dead, stops, lost, stamp, ready = reply
    words = [word.decode() for word in stops]
    pairs = zip(words[::2], words[1::2], strict=True)
    return BeatReply(
        server_ms=now,
        was_dead=bool(was_dead),
        stops=tuple((JobId(job_id), JobState(state)) for job_id, state in pairs),
        lost=tuple(JobId(job_id.decode()) for job_id in lost),
        settings_stamp=stamp.decode(),
        ready_jobs=ready,
    )


def report_death(keys: QueueKeys, incarnation: str) -> Call[bool]:
    """Report that the process of an incarnation has ended: other workers reclaim its jobs at once.

    Call it only when the process is gone. Returns False if the incarnation is not registered: nothing to reclaim.
    """
    return Call("report_death", keys.fixed(), (incarnation,), bool)
