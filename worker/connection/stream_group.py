"""Read a stream through a consumer group, with at-least-once delivery. Knows nothing of the entries' meaning.

A reader's name is stable across restarts. It first reads its own unacknowledged entries, then claims entries that
another reader has left unacknowledged for too long, then reads new ones.
"""

import time
from collections.abc import Mapping, Sequence

import redis

from sluice.protocol import limits
from sluice.protocol.keys import QueueKeys
from sluice.worker.connection.clients import Client

PAGE_ENTRIES = 100

Entry = tuple[bytes, Mapping[bytes, bytes]]
"""(id, fields). The fields are empty if the entry was deleted while it was pending."""


# A script, because at maxmemory Redis refuses every command of a MULTI, including these two.
_ACKNOWLEDGE = """
redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
return redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
"""

# The same for an outbox, whose bytes are counted. Only entries that this call deletes are subtracted; an empty outbox
# has none, whatever was counted.
_ACKNOWLEDGE_COUNTED = """
local num_bytes = 0
for i = 2, #ARGV, 2 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  num_bytes = num_bytes + redis.call('XDEL', KEYS[1], ARGV[i]) * ARGV[i + 1]
end
local before = tonumber(redis.call('HGET', KEYS[2], 'outbox_bytes') or '') or 0
local left = redis.call('XLEN', KEYS[1]) > 0 and math.max(0, before - num_bytes) or 0
redis.call('HSET', KEYS[2], 'outbox_bytes', string.format('%d', left))
"""

# At maxmemory, Redis refuses a growing write as a script's first write, and allows it after any other write.
_WRITE = "redis.call('DEL', KEYS[1] .. ':nothing') return redis.call(unpack(ARGV))"


def write_even_when_full(client: Client, key: str, *command: str | bytes | int) -> None:
    """Run one command on `key` that Redis would refuse at maxmemory, because here it leads to freed memory.

    Raises:
        redis.RedisError: the command is refused for another reason, or the server is unreachable.
    """
    client.eval(_WRITE, 1, key, *command)


def keep_garbage(client: Client, keys: QueueKeys, where: str, what: bytes) -> None:
    """Keep a malformed entry for inspection, truncated, in a stream of bounded length."""
    key, cut = keys.key("garbage"), what[: limits.GARBAGE_ENTRY_BYTES]
    bound = ("MAXLEN", "~", limits.GARBAGE_MAXLEN)
    write_even_when_full(client, key, "XADD", key, *bound, "*", "where", where, "what", cut)


# Redis keeps each consumer for ever, also of a host that will not come back. One without pending entries is only a
# name: a reader that lives creates it again when it reads. A script, because an entry may be delivered in between, and
# deleting a consumer forgets what it has pending.
_FORGET_IDLE = """
local forgotten = 0
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local about = {}
  for i = 1, #flat, 2 do about[flat[i]] = flat[i + 1] end
  if about.name ~= ARGV[2] and about.pending == 0 and about.idle > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], about.name)
    forgotten = forgotten + 1
  end
end
return forgotten
"""
CONSUMER_KEPT_S = 3600.0
"""How long to keep the name of a reader that has stopped reading and has nothing unacknowledged."""


class StreamGroup:
    """One reader's view of a stream. Changes as it is read."""

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        group: str,
        name: str,
        claim_after_s: float,
        consumer_kept_s: float = CONSUMER_KEPT_S,
    ) -> None:
        self.key = key
        self._client = client
        self._group = group
        self._name = name
        self._claim_after_s = claim_after_s
        self._consumer_kept_ms = int(consumer_kept_s * 1000)
        self._has_group = False
        self._own_cursor: bytes | None = b"0"
        self._claim_cursor: bytes = b"0-0"
        self._claim_at_s = 0.0

    def read(self, *, block_s: float, max_bytes: int, max_pages: int) -> list[Entry]:
        """Return the next entries, and wait up to `block_s` for new ones if there are no others.

        Raises:
            redis.RedisError: the call failed. Call `recover` before the next read.
        """
        if not self._has_group:
            self._create_group()
        entries = self._read_own() if self._own_cursor is not None else []
        if not entries and time.monotonic() >= self._claim_at_s:
            entries = self._claim()
        return entries or self._read_new(block_s, max_bytes, max_pages)

    def acknowledge(self, ids: Sequence[bytes]) -> None:
        """Acknowledge and delete entries atomically."""
        self._client.eval(_ACKNOWLEDGE, 1, self.key, self._group, *ids)

    def acknowledge_counted(self, entries: Sequence[Entry], counters: str) -> None:
        """Do as `acknowledge`, and subtract the entries from `outbox_bytes` in the hash `counters`."""
        sized = [part for entry_id, fields in entries for part in (entry_id, sum(map(len, fields.values())))]
        self._client.eval(_ACKNOWLEDGE_COUNTED, 2, self.key, counters, self._group, *sized)

    def recover(self) -> None:
        """Reset after an error: the group may be gone, and a lost reply may have delivered entries."""
        self._has_group, self._own_cursor = False, b"0"

    def _create_group(self) -> None:
        try:
            # From the beginning, to include entries that were written before the first reader started.
            write_even_when_full(self._client, self.key, "XGROUP", "CREATE", self.key, self._group, "0", "MKSTREAM")
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._has_group = True

    def _read_own(self) -> list[Entry]:
        entries = self._read_group(self._own_cursor or b"0", block_ms=None)
        self._own_cursor = entries[-1][0] if entries else None
        return entries

    def _claim(self) -> list[Entry]:
        idle_ms = int(self._claim_after_s * 1000)
        self._claim_cursor, claimed, *_ = self._client.xautoclaim(
            self.key, self._group, self._name, idle_ms, self._claim_cursor, count=PAGE_ENTRIES
        )
        if self._claim_cursor == b"0-0":
            self._claim_at_s = time.monotonic() + self._claim_after_s / 2
            self._client.eval(_FORGET_IDLE, 1, self.key, self._group, self._name, self._consumer_kept_ms)
        # Redis before 7.0 returns nil for an entry that is pending but deleted.
        return [(entry_id, fields or {}) for entry_id, fields in claimed if entry_id is not None]

    def _read_new(self, block_s: float, max_bytes: int, max_pages: int) -> list[Entry]:
        entries: list[Entry] = []
        size_bytes = 0
        for _ in range(max_pages):
            page = self._read_group(b">", block_ms=None if entries else int(block_s * 1000) or None)
            entries += page
            size_bytes += sum(len(value) for _, fields in page for value in fields.values())
            if len(page) < PAGE_ENTRIES or size_bytes > max_bytes:
                break
        return entries

    def _read_group(self, after: bytes, *, block_ms: int | None) -> list[Entry]:
        reply = self._client.xreadgroup(self._group, self._name, {self.key: after}, count=PAGE_ENTRIES, block=block_ms)
        return [(entry_id, fields or {}) for _, entries in reply for entry_id, fields in entries]
