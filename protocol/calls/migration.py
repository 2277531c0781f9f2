"""The calls of `worker migrate-queue`, which moves a partition from keys of format 1 to the present ones. No I/O.

Each call moves a slice, and what it moves it moves whole: after a crash, the calls are made again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.protocol.calls.base import Call, Raw, check_slice, read_words
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What is left of format 1."""

    is_ended: bool
    """Whether the format has ended in this partition: its scripts refuse every call."""

    waiting_jobs: int
    running_jobs: int
    num_unread: int
    """Events and callbacks that nobody has read."""

    living_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLanes:
    """The reply to a call of `migrate_lanes`."""

    num_moved: int
    has_more: bool


def close_format_1(keys: QueueKeys, sentence: str) -> Call[bool]:
    """Take over the settings and weights of format 1, and refuse submits of its clients from now on.

    Returns whether this call closed the format.

    Args:
        keys: The partition.
        sentence: What these clients show.
    """
    return Call("close_format_1", keys.fixed(), (sentence,), bool)


def migrate_lanes(keys: QueueKeys) -> Call[MovedLanes]:
    """Move a slice of the jobs on lanes, in their order."""

    def read(reply: Raw) -> MovedLanes:
        num_moved, has_more = reply
        return MovedLanes(num_moved=num_moved, has_more=bool(has_more))

    return Call("migrate_lanes", keys.fixed(), (), read)


def migrate_jobs(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[str]]:
    """Move jobs in any state; return for each what became of it, as the script describes.

    Raises:
        ValueError: there are more than a slice.
    """
    return Call("migrate_jobs", keys.fixed(), (pack_for_script(check_slice(job_ids)),), read_words)


def migrate_batches(keys: QueueKeys, names: Sequence[str]) -> Call[int]:
    """Move batches; return how many.

    Raises:
        ValueError: there are more than a slice.
    """
    return Call("migrate_batches", keys.fixed(), (pack_for_script(check_slice(names)),), int)


def migrate_streams(keys: QueueKeys) -> Call[int]:
    """Move a slice of the unread events and callbacks; return how many."""
    return Call("migrate_streams", keys.fixed(), (), int)


def finish_format_1(keys: QueueKeys, sentence: str, *, may_end: bool) -> Call[Remainder]:
    """Say what is left of format 1, and end it if that is nothing.

    Args:
        keys: The partition.
        sentence: What a person finds in place of the keys.
        may_end: Whether to end it. The caller has moved every job that it found.
    """

    def read(reply: Raw) -> Remainder:
        is_ended, waiting, running, unread, living = reply
        return Remainder(
            is_ended=bool(is_ended),
            waiting_jobs=waiting,
            running_jobs=running,
            num_unread=unread,
            living_workers=living,
        )

    return Call("finish_format_1", keys.fixed(), (sentence, int(may_end)), read)
