"""Entries of token channels: read the replies of XREAD and XRANGE."""

from collections.abc import Iterator
from typing import cast

from sluice.producer.operations.operation import Entries, Reply


def channel_entries(reply: Reply) -> Iterator[tuple[str, Entries]]:
    """Yield (key, [(entry id, encoded ChannelEntry)]) from the reply of an XREAD."""
    # [[key, [[id, [field, value]], …]], …], or nil.
    for key, entries in cast("list[tuple[bytes, Reply]]", reply or []):
        yield key.decode(), channel_rows(entries)


def channel_rows(reply: Reply) -> Entries:
    """Return (entry id, encoded ChannelEntry) pairs from the reply of an XRANGE."""
    return [(entry_id.decode(), fields[1]) for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", reply)]


def is_end_id(entry_id: str) -> bool:
    """Return whether an entry ends its channel: the id of an end is `<offset>-<1 + requeues>`."""
    return not entry_id.endswith("-0")
