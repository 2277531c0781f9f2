"""Outbox -> history: a process of its own, so that the token path never waits for SQL. Read `Recorder.turn` first.

Events are read from each partition's outbox through the consumer group `recorder`, written in one transaction, and
only then acknowledged and deleted. Whatever dies in between, events are written again, which changes nothing: see
`worker.history.rows`. Several recorders may run on one queue; each has a name, finds its own unacknowledged events
under it after a restart, and takes over those that another has left lying.

The database away: the same events are tried again with back-off; nothing else stops, the outbox holds the rest.
"""

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal

import redis
from sqlalchemy.engine import Engine

from producer.config import redacted
from producer.contract.database import HistoryError, HistoryUnreachable, open_database
from producer.contract.keys import QueueKeys
from producer.contract.wire import OutboxEvent, WireError, decode_events, split_job_id
from worker.clock import wall_ms
from worker.connections import Client, connect
from worker.errors import ExitCode
from worker.history.rows import JobChange, changes_of
from worker.history.writer import BatchName, HistoryAway, HistoryWriter
from worker.log import get_log
from worker.migrate import prepare
from worker.stream_group import PAGE_ENTRIES, Entry, StreamGroup, keep_garbage
from worker.trouble import Trouble

GROUP = "recorder"
ENTRY_FIELD = b"e"
PAGES_PER_TURN = 20
"""Short entries: up to 2000 in one transaction. Long ones stop at `TURN_BYTES`."""

TURN_BYTES = 8 * 1024 * 1024
COUNT_SHARE = 20
"""Counting batches may take a twentieth of the time, however large they are."""

COUNT_EVERY_S = 0.1
FINISH_S = 5.0


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


@dataclass(frozen=True, slots=True)
class Outbox:
    """One partition's outbox."""

    keys: QueueKeys
    stream: StreamGroup
    trouble: Trouble
    """Its server's: one shard may be away and the others well."""


class Recorder:
    """Moves events from the outboxes of one queue into one database."""

    def __init__(
        self, client: Client, writer: HistoryWriter, settings: RecorderSettings, stopping: threading.Event | None = None
    ) -> None:
        name = settings.name or socket.gethostname()
        self._client = client
        self._writer = writer
        self._settings = settings
        self._log = get_log(queue=settings.queue, recorder=name)
        self._outboxes = [self._open(QueueKeys(settings.queue, p), name) for p in range(settings.partitions)]
        self._history_trouble = Trouble("history database", self._log)
        self._stopping = stopping or threading.Event()
        self._to_count: list[BatchName] = []
        # What the process before wrote last may not have been counted.
        self._has_written = True
        self._count_at_s = 0.0
        self.num_recorded = 0
        """Events written so far."""

    def _open(self, keys: QueueKeys, name: str) -> Outbox:
        claim_after_s = self._settings.claim_after_s
        stream = StreamGroup(self._client, keys.outbox, group=GROUP, name=name, claim_after_s=claim_after_s)
        return Outbox(keys, stream, Trouble("redis", self._log))

    def run(self) -> None:
        """Record until `stop`; then what is there, for `FINISH_S` at most."""
        while not self._stopping.is_set():
            for outbox in self._outboxes:
                if not outbox.trouble.wait_s:
                    self._try_turn(outbox, block_s=self._settings.block_s / len(self._outboxes))
            self._stopping.wait(min(outbox.trouble.wait_s for outbox in self._outboxes))
        until_s = time.monotonic() + FINISH_S
        for outbox in self._outboxes:
            while self._try_turn(outbox, block_s=0) and time.monotonic() < until_s:
                pass

    def stop(self) -> None:
        """Let `run` end after what is there; may be called from a signal handler or twice."""
        self._stopping.set()

    def drain(self) -> int:
        """Record all that is in the outboxes now; give how many entries that were."""
        return sum(iter(lambda: sum(self.turn(outbox, block_s=0) for outbox in self._outboxes), 0))

    def turn(self, outbox: Outbox, *, block_s: float) -> int:
        """Read, write, acknowledge: one transaction's worth of one outbox; give how many entries were recorded.

        Raises:
            redis.RedisError: Redis does not answer; nothing is lost.
        """
        entries = outbox.stream.read(block_s=block_s, max_bytes=TURN_BYTES, max_pages=PAGES_PER_TURN)
        is_written = bool(entries) and self._write(outbox, entries)
        if is_written:
            outbox.stream.acknowledge([entry_id for entry_id, _ in entries])
        self._count_batches()
        return len(entries) if is_written else 0

    def _try_turn(self, outbox: Outbox, *, block_s: float) -> int:
        try:
            num_entries = self.turn(outbox, block_s=block_s)
        except redis.RedisError as error:
            outbox.stream.recover()
            outbox.trouble.broke(error, key=outbox.stream.key)
            return 0
        outbox.trouble.healed(key=outbox.stream.key)
        if 0 < num_entries < PAGE_ENTRIES:
            self._stopping.wait(self._settings.linger_s)
        return num_entries

    def _write(self, outbox: Outbox, entries: Sequence[Entry]) -> bool:
        """Write until the database takes it; False when asked to stop before it did."""
        events = [event for entry in entries for event in self._events_of(outbox, entry)]
        changes = changes_of(outbox.keys.queue, events, keep_prompts=self._settings.keep_prompts)
        cleaned = self._write_patiently(list(changes.values()))
        if cleaned is None:
            return False
        for job_id, reason in cleaned:
            self._log.warning("row cleaned", job_id=job_id, error=reason)
        self.num_recorded += len(events)
        self._has_written = True
        return True

    def _write_patiently(self, changes: Sequence[JobChange]) -> list[tuple[str, str]] | None:
        while True:
            try:
                cleaned = self._writer.write(changes)
            except HistoryAway as error:
                if self._stopping.wait(self._history_trouble.broke(error)):
                    return None
            else:
                self._history_trouble.healed()
                return cleaned

    def _events_of(self, outbox: Outbox, entry: Entry) -> list[OutboxEvent]:
        entry_id, fields = entry
        if not fields:
            return []
        data = fields.get(ENTRY_FIELD, b" ".join(fields.values()))
        try:
            return [self._with_result(outbox, event) for event in _checked(data)]
        except WireError as error:
            self._log.warning("foreign entry in the outbox", entry=entry_id.decode(), error=str(error))
            keep_garbage(self._client, outbox.keys, outbox.stream.key, data)
            return []

    def _with_result(self, outbox: Outbox, event: OutboxEvent) -> OutboxEvent:
        """A result too large for an outbox entry is read from its key, if it is still what the end was about."""
        size_bytes = event.fields.get("result_bytes")
        if size_bytes is None:
            return event
        data = self._client.get(outbox.keys.result(event.job_id))
        if data is None or len(data) != size_bytes:
            return event
        return replace(event, fields={**event.fields, "result": data})

    def _count_batches(self) -> None:
        """Count one open batch, now and then, as long as something was written since all were counted."""
        began_s = time.monotonic()
        if began_s < self._count_at_s:
            return
        try:
            if not self._to_count and self._has_written:
                self._to_count, self._has_written = self._writer.open_batches(), False
            if self._to_count:
                self._writer.count_batch(self._to_count.pop(), now_ms=wall_ms())
        except HistoryAway as error:
            self._has_written = True
            self._history_trouble.broke(error)
        ended_s = time.monotonic()
        self._count_at_s = ended_s + max(COUNT_EVERY_S, (ended_s - began_s) * COUNT_SHARE)


def _checked(data: bytes) -> list[OutboxEvent]:
    """The events of an entry.

    Raises:
        WireError: not events, or not of jobs.
    """
    events = decode_events(data)
    for event in events:
        split_job_id(event.job_id)
        if not 0 < event.version < 2**63:
            raise WireError(f"job {event.job_id} has version {event.version}, which no script writes")
    return events


# ---------------------------------------------------------------- the process


def main(*, redis_url: str, database_url: str, settings: RecorderSettings, until_eof: bool = False) -> ExitCode:
    """Run `worker record` until SIGTERM or SIGINT, or with `until_eof` until standard input ends."""
    log = get_log()
    stopping = threading.Event()
    with _stopped_by_signals(stopping):
        if until_eof:
            threading.Thread(target=_stop_at_eof, args=(stopping,), daemon=True).start()
        try:
            engine = open_database(database_url, is_writer=True)
            _prepare_patiently(engine, stopping)
        except HistoryError as error:
            log.error("the history cannot be used", error=str(error))  # noqa: TRY400  # a sentence, no traceback
            return ExitCode.MISUSED
        client = connect(redis_url, timeout_s=max(5.0, settings.block_s * 2))
        recorder = Recorder(client, HistoryWriter(engine), settings, stopping)
        places = {"redis": redacted(redis_url), "database": engine.url.render_as_string(hide_password=True)}
        log.info("recorder started", **places)
        recorder.run()
        engine.dispose()
    log.info("recorder stopped", recorded=recorder.num_recorded)
    return ExitCode.DONE


def _prepare_patiently(engine: Engine, stopping: threading.Event) -> None:
    """Wait for the database to be there, then make it ready.

    Raises:
        HistoryError: it is there, but its schema is not what this release needs.
    """
    trouble = Trouble("history database", get_log())
    while not stopping.is_set():
        try:
            prepare(engine)
        except HistoryUnreachable as error:
            stopping.wait(trouble.broke(error))
        else:
            trouble.healed()
            return


@contextlib.contextmanager
def _stopped_by_signals(stopping: threading.Event) -> Generator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_at_eof(stopping: threading.Event) -> None:
    """The worker that started this process holds the other end: it ends with the worker, however that dies."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    stopping.set()
