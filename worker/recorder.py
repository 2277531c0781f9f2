"""Outbox -> history: a process of its own, so that the token path never waits for SQL. Read `Recorder.turn` first.

Events are read from each partition's outbox through the consumer group `recorder`, written in one transaction, and
only then acknowledged and deleted. Whatever dies in between, events are written again, which changes nothing:
see `history_rows`. Several recorders may run on one queue; each has a name, finds its own unacknowledged events under
it after a restart, and takes over those that another has left lying.

The database away: the same events are tried again with back-off; nothing else stops, the outbox holds the rest.
"""

import contextlib
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import redis
import structlog

from producer.contract import limits
from producer.contract.database import HistoryError, open_database
from producer.contract.keys import QueueKeys
from producer.contract.wire import OutboxEvent, WireError, decode_events, split_job_id
from worker.connections import Client, connect, redacted
from worker.errors import ExitCode
from worker.history_rows import JobChange, changes_of
from worker.history_writer import HistoryAway, HistoryWriter
from worker.migrate import prepare

GROUP = "recorder"
ENTRY_FIELD = b"e"
PAGE_ENTRIES = 100
PAGES_PER_TURN = 20
"""Short entries: up to 2000 in one transaction. Long ones stop at `TURN_BYTES`."""

TURN_BYTES = 8 * 1024 * 1024
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 15.0
REFRESH_SHARE = 20
"""Counting batches may take a twentieth of the time, however large they are."""

REFRESH_EVERY_S = 0.25

Log = structlog.typing.FilteringBoundLogger
Entry = tuple[bytes, bytes | None]
"""(id, packed events); None when the entry was deleted, or is not one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """Which outboxes, and how patiently."""

    queue: str = "default"
    partitions: int = 1
    name: str = ""
    """Of this recorder in the consumer group, the same after a restart. Empty: the host's name."""

    keep_prompts: Literal["none", "hash", "full"] = "full"
    """At most this much of the prompts that the queue puts into its events."""

    block_s: float = 0.5
    """An idle recorder asks again after this long; it hears of new events at once."""

    linger_s: float = 0.02
    """Wait this long after a small transaction, so that the next one has more rows."""

    claim_after_s: float = 15.0
    """Events that another recorder has held for this long are written by this one too."""


@dataclass(slots=True, eq=False)
class _Outbox:
    """One partition's outbox, as this recorder sees it. Changes as it is read."""

    keys: QueueKeys
    has_group: bool = False
    own_cursor: bytes | None = b"0"
    """How far this recorder's own pending entries are read; None when there are no more."""

    claim_cursor: bytes = b"0-0"
    claim_at_s: float = 0.0

    @property
    def key(self) -> str:
        """The stream."""
        return self.keys.key("outbox")


class Trouble:
    """Says a thing once when it breaks and once when it heals, and how long to wait in between."""

    def __init__(self, what: str, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._log, self._clock = what, log, clock
        self._since_s: float | None = None
        self._delay_s = FIRST_RETRY_S

    def broke(self, error: Exception, **facts: object) -> float:
        """Note a failure; give the seconds to wait before the next try."""
        if self._since_s is None:
            self._since_s = self._clock()
            self._log.warning(f"{self._what} is away", error=str(error), **facts)
        delay_s, self._delay_s = self._delay_s, min(self._delay_s * 2, LONGEST_RETRY_S)
        return delay_s * random.uniform(0.5, 1.0)

    def healed(self) -> None:
        """Note a success."""
        if self._since_s is not None:
            self._log.info(f"{self._what} is back", down_s=round(self._clock() - self._since_s, 3))
        self._since_s, self._delay_s = None, FIRST_RETRY_S


class Recorder:
    """Moves events from the outboxes of one queue into one database."""

    def __init__(self, client: Client, writer: HistoryWriter, settings: RecorderSettings) -> None:
        self._client = client
        self._writer = writer
        self._settings = settings
        self._name = settings.name or socket.gethostname()
        self._outboxes = [_Outbox(QueueKeys(settings.queue, p)) for p in range(settings.partitions)]
        self._log = structlog.get_logger().bind(queue=settings.queue, recorder=self._name)
        self._redis_trouble = Trouble("redis", self._log)
        self._history_trouble = Trouble("history database", self._log)
        self._stopping = threading.Event()
        self._last_write_ms = time.time_ns() // 1_000_000
        self._refresh_at_s = 0.0
        self.num_recorded = 0
        """Events written so far."""

    def run(self) -> None:
        """Record until `stop`; then once more what is there."""
        while not self._stopping.is_set():
            for outbox in self._outboxes:
                self._try_turn(outbox, block_s=self._settings.block_s / len(self._outboxes))
        for outbox in self._outboxes:
            self._try_turn(outbox, block_s=0)

    def stop(self) -> None:
        """Let `run` end after what it is writing; may be called from a signal handler or twice."""
        self._stopping.set()

    def drain(self) -> int:
        """Record all that is in the outboxes now; give how many entries that were."""
        return sum(iter(lambda: sum(self.turn(outbox, block_s=0) for outbox in self._outboxes), 0))

    def turn(self, outbox: _Outbox, *, block_s: float) -> int:
        """Read, write, acknowledge: one transaction's worth of one outbox; give how many entries.

        Raises:
            redis.RedisError: Redis does not answer; nothing is lost.
        """
        entries = self._read(outbox, block_s=block_s)
        if entries and self._write(outbox, entries):
            self._acknowledge(outbox, entries)
        self._refresh_batches()
        return len(entries)

    def _try_turn(self, outbox: _Outbox, *, block_s: float) -> None:
        try:
            num_entries = self.turn(outbox, block_s=block_s)
        except redis.RedisError as error:
            outbox.has_group = False
            self._stopping.wait(self._redis_trouble.broke(error, key=outbox.key))
            return
        self._redis_trouble.healed()
        if 0 < num_entries < PAGE_ENTRIES:
            self._stopping.wait(self._settings.linger_s)

    # ---------------------------------------------------------------- reading

    def _read(self, outbox: _Outbox, *, block_s: float) -> list[Entry]:
        """This recorder's own pending entries first, then those of the dead, then new ones."""
        if not outbox.has_group:
            self._create_group(outbox)
        entries = self._read_own(outbox) if outbox.own_cursor is not None else []
        if not entries and time.monotonic() >= outbox.claim_at_s:
            entries = self._claim(outbox)
        return entries or self._read_new(outbox, block_s)

    def _create_group(self, outbox: _Outbox) -> None:
        try:
            # From the beginning: events written before the first recorder ran are events too.
            self._client.xgroup_create(outbox.key, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        outbox.has_group, outbox.own_cursor = True, b"0"

    def _read_own(self, outbox: _Outbox) -> list[Entry]:
        entries = self._read_group(outbox, outbox.own_cursor or b"0", block_ms=None)
        outbox.own_cursor = entries[-1][0] if entries else None
        return entries

    def _claim(self, outbox: _Outbox) -> list[Entry]:
        idle_ms = int(self._settings.claim_after_s * 1000)
        outbox.claim_cursor, found, *_ = self._client.xautoclaim(
            outbox.key, GROUP, self._name, idle_ms, outbox.claim_cursor, count=PAGE_ENTRIES
        )
        if outbox.claim_cursor == b"0-0":
            outbox.claim_at_s = time.monotonic() + self._settings.claim_after_s / 2
        # Before Redis 7.0 an entry that is pending but deleted is answered as nothing; it needs no record.
        return [_entry(entry_id, values) for entry_id, values in found if entry_id is not None]

    def _read_new(self, outbox: _Outbox, block_s: float) -> list[Entry]:
        entries: list[Entry] = []
        block_ms = int(block_s * 1000) or None
        for _ in range(PAGES_PER_TURN):
            page = self._read_group(outbox, b">", block_ms=None if entries else block_ms)
            entries += page
            if len(page) < PAGE_ENTRIES or sum(len(data or b"") for _, data in entries) > TURN_BYTES:
                break
        return entries

    def _read_group(self, outbox: _Outbox, after: bytes, *, block_ms: int | None) -> list[Entry]:
        streams = {outbox.key: after}
        reply = self._client.xreadgroup(GROUP, self._name, streams, count=PAGE_ENTRIES, block=block_ms)
        return [_entry(entry_id, values) for _, entries in reply for entry_id, values in entries]

    # ---------------------------------------------------------------- writing

    def _write(self, outbox: _Outbox, entries: Sequence[Entry]) -> bool:
        """Write until the database takes it; False when asked to stop before it did."""
        changes, num_events = self._changes(outbox, entries)
        while True:
            try:
                cleaned = self._writer.write(changes)
            except HistoryAway as error:
                if self._stopping.wait(self._history_trouble.broke(error)):
                    return False
            else:
                break
        self._history_trouble.healed()
        for job_id, reason in cleaned:
            self._log.warning("row cleaned", job_id=job_id, error=reason)
        self.num_recorded += num_events
        self._last_write_ms = time.time_ns() // 1_000_000
        return True

    def _changes(self, outbox: _Outbox, entries: Sequence[Entry]) -> tuple[list[JobChange], int]:
        events = [event for entry in entries for event in self._events_of(outbox, entry)]
        changes = changes_of(outbox.keys.queue, events, keep_prompts=self._settings.keep_prompts)
        return list(changes.values()), len(events)

    def _events_of(self, outbox: _Outbox, entry: Entry) -> list[OutboxEvent]:
        entry_id, data = entry
        if data is None:
            return []
        try:
            events = decode_events(data)
            for event in events:
                split_job_id(event.job_id)
        except WireError as error:
            self._log.warning("foreign entry in the outbox", entry=entry_id.decode(), error=str(error))
            kept = {"where": outbox.key, "what": data[: limits.GARBAGE_ENTRY_BYTES]}
            self._client.xadd(outbox.keys.key("garbage"), kept, maxlen=limits.GARBAGE_MAXLEN)
            return []
        return events

    def _acknowledge(self, outbox: _Outbox, entries: Sequence[Entry]) -> None:
        ids = [entry_id for entry_id, _ in entries]
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.xack(outbox.key, GROUP, *ids)
            pipeline.xdel(outbox.key, *ids)
            pipeline.execute()

    def _refresh_batches(self) -> None:
        """Count one open batch that has changed since it was counted, now and then."""
        began_s = time.monotonic()
        if began_s < self._refresh_at_s:
            return
        try:
            has_more = self._writer.refresh_batch(
                now_ms=time.time_ns() // 1_000_000, counted_before_ms=self._last_write_ms
            )
        except HistoryAway as error:
            self._history_trouble.broke(error)
            has_more = False
        ended_s = time.monotonic()
        cost_s = (ended_s - began_s) * REFRESH_SHARE
        self._refresh_at_s = ended_s + max(cost_s, 0 if has_more else REFRESH_EVERY_S)


def _entry(entry_id: bytes, values: Mapping[bytes, bytes]) -> Entry:
    if not values:
        return entry_id, None
    # An entry of another program has no such field; what it holds is kept in the garbage.
    return entry_id, values.get(ENTRY_FIELD, b" ".join(values.values()))


# ---------------------------------------------------------------- the process


def main(*, redis_url: str, database_url: str, settings: RecorderSettings, until_eof: bool = False) -> ExitCode:
    """Run `worker record` until SIGTERM or SIGINT, or with `until_eof` until standard input ends."""
    log = structlog.get_logger()
    try:
        engine = open_database(database_url, is_writer=True)
        prepare(engine)
    except HistoryError as error:
        log.error("the history cannot be used", error=str(error))  # noqa: TRY400  # a sentence, no traceback
        return ExitCode.MISUSED
    recorder = Recorder(connect(redis_url, timeout_s=max(5.0, settings.block_s * 2)), HistoryWriter(engine), settings)
    log.info("recorder started", redis=redacted(redis_url), database=engine.url.render_as_string(hide_password=True))
    with _stopped_by_signals(recorder):
        if until_eof:
            threading.Thread(target=_stop_at_eof, args=(recorder,), daemon=True).start()
        recorder.run()
    log.info("recorder stopped", recorded=recorder.num_recorded)
    return ExitCode.DONE


@contextlib.contextmanager
def _stopped_by_signals(recorder: Recorder) -> Generator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        recorder.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_at_eof(recorder: Recorder) -> None:
    """The worker that started this process holds the other end: it ends with the worker, however that dies."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    recorder.stop()
