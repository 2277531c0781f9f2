"""Write events from the outboxes to the history, in a separate process so that the token path never waits for SQL.

Read `Recorder.turn` first. It reads events from an outbox through the consumer group `recorder`, writes them in one
transaction, then acknowledges and deletes them. After a crash in between, the same events are written again, which is
idempotent (`history.rows`). Several recorders may serve one queue. Each finds its unacknowledged events by its
name after a restart, and claims events that another recorder has abandoned.

If the database is unreachable, the recorder retries with backoff. The outbox keeps further events meanwhile.
"""

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import redis
from sqlalchemy.engine import Engine

from sluice.history.database import HistoryError, open_database
from sluice.history.rows import JobChange, Submission, changes_of, submit_time
from sluice.history.writer import BatchName, HistoryAway, HistoryWriter
from sluice.protocol import limits
from sluice.protocol.clock import wall_ms
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.urls import redacted
from sluice.protocol.states import JobState
from sluice.protocol.wire import OutboxEvent, WireError, decode_events
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.outage import Outage
from sluice.worker.connection.partitioned_reader import PartitionedReader, PartitionStream, ReaderSettings
from sluice.worker.connection.stream_group import Entry, keep_garbage
from sluice.worker.endpoints import database_url_of, find_redis, traces_endpoint_of
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.recorder.migrate import prepare, wait_for_history
from sluice.worker.stopping import FINISH_S, stop_at_eof, stopped_by_signals

GROUP = "recorder"
ENTRY_FIELD = b"e"
PAGES_PER_TURN = 20
"""Up to 2000 entries in one transaction, or `TURN_BYTES`."""

TURN_BYTES = 8 * 1024 * 1024
"""Most bytes of entries in one transaction. A result that has a key of its own has a transaction of its own, too."""

COUNT_SHARE = 20
"""Counting batches takes at most one twentieth of the time."""

COUNT_EVERY_S = 0.1
LOOK_EVERY_S = 1.0
"""Look this often for open batches while none is open."""

Answer = TypeVar("Answer")
OnEnded = Callable[[Sequence[Submission]], None]
ReadEntry = tuple[Entry, list[OutboxEvent]]
"""An entry of an outbox and its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """Which outboxes to record, and timing."""

    queues: tuple[str, ...] = ("default",)
    partitions: int = 1
    """Of each queue."""

    name: str = ""
    """Consumer name of this recorder, stable across restarts. Empty means the host name."""

    keep_prompts: Literal["none", "hash", "full"] = "full"
    """Upper limit on the kept form of prompts, even if events contain more."""

    block_s: float = 0.5
    """Time limit of a blocking read; new events end it at once."""

    linger_s: float = 0.2
    """Pause after a small transaction, so that the next one has more rows: a transaction takes 2 to 3 ms whatever it
    writes. Divided by the number of partitions."""

    claim_after_s: float = 15.0
    """Claim events that another recorder has held for this long."""

    otlp_traces_endpoint: str | None = None
    """URL that takes traces of ended jobs; none are exported if it is None."""


class Recorder(PartitionedReader):
    """A writer of events from the outboxes of queues to one database."""

    def __init__(
        self,
        client: Client,
        writer: HistoryWriter,
        settings: RecorderSettings,
        stopping: threading.Event | None = None,
        *,
        on_ended: OnEnded | None = None,
    ) -> None:
        """Prepare a recorder.

        Args:
            client: A connection to the queues' server.
            writer: Of the history.
            settings: What to record.
            stopping: Set to end `run`.
            on_ended: Called after the ends of these jobs are in the history, perhaps repeatedly. Must not block.
        """
        name = settings.name or socket.gethostname()
        all_keys = [QueueKeys(queue, number) for queue in settings.queues for number in range(settings.partitions)]
        timing = ReaderSettings(
            group=GROUP,
            name=name,
            claim_after_s=settings.claim_after_s,
            block_s=settings.block_s,
            linger_s=settings.linger_s,
        )
        log = get_log(queue=" ".join(settings.queues), recorder=name)
        super().__init__(client, {keys: keys.outbox for keys in all_keys}, timing, log, stopping)
        self._writer = writer
        self._settings = settings
        self._database_outage = Outage("history database", log)
        self._on_ended = on_ended
        self._to_count: list[BatchName] = []
        # The previous process may have ended before it counted its last rows.
        self._has_written = True
        self._count_at_s = 0.0
        self.num_recorded = 0
        """Events written so far."""

    def run(self) -> None:
        """Record until `stop`, then drain the outboxes for at most `FINISH_S`."""
        super().run()
        self.drain_for(FINISH_S)

    def turn(self, source: PartitionStream, *, block_s: float) -> int:
        """Read, write and acknowledge some entries of one outbox."""
        num_written = 0
        for entries in _portions(source.stream.read(block_s=block_s, max_bytes=TURN_BYTES, max_pages=PAGES_PER_TURN)):
            if not self._write(source, entries):
                break
            source.stream.acknowledge_counted(entries, source.keys.key("counters"))
            num_written += len(entries)
        self._count_batches()
        return num_written

    def _write(self, outbox: PartitionStream, entries: Sequence[Entry]) -> bool:
        """Write entries, retrying while the database is unreachable. Return False if stopped before."""
        read = [(entry, self._events_of(outbox, entry)) for entry in entries]
        try:
            changes = self._fold(outbox, _events_in(read))
        except Exception:  # noqa: BLE001  # whatever it is, it is the fault of one entry, which goes to the garbage
            read = [entry for entry in read if self._is_sound(outbox, entry)]
            changes = self._fold(outbox, _events_in(read))
        if not self._write_changes(changes):
            return False
        events = _events_in(read)
        for event in events:
            if "result_bytes" in event.fields and not self._write_result(outbox, event):
                return False
        self.num_recorded += len(events)
        self._has_written = True
        if self._on_ended is not None:
            self._on_ended([change.submission for change in changes if change.job["state"] in _ENDED])
        return True

    def _write_result(self, outbox: PartitionStream, event: OutboxEvent) -> bool:
        """Write a result that was too large for its entry, alone, from its key. Return False if stopped before."""
        data = self._client.get(outbox.keys.result(event.job_id))
        if data is None or len(data) != event.fields["result_bytes"]:
            return self._miss_result(outbox, event)
        whole = replace(event, fields={**event.fields, "result": data})
        return self._write_changes(self._fold(outbox, [whole]))

    def _miss_result(self, outbox: PartitionStream, event: OutboxEvent) -> bool:
        """Report a result that was deleted before it was read, in the log, in the row and in a counter."""
        size_bytes = event.fields["result_bytes"]
        advice = "record sooner, or raise --result-ttl"
        self._log.warning("result is missing from the queue", job_id=event.job_id, bytes=size_bytes, advice=advice)
        changes = self._fold(outbox, [event])
        for change in changes:
            change.job["record_error"] = f"its result of {size_bytes} bytes was deleted in the queue before it was read"
        with suppress(redis.ResponseError):  # any user who submits may damage the counters
            self._client.hincrby(outbox.keys.key("counters"), "results_missed", 1)
        return self._write_changes(changes)

    def _write_changes(self, changes: Sequence[JobChange]) -> bool:
        """Write changes, retrying while the database is unreachable. Return False if stopped before."""
        cleaned = self._patiently(lambda: self._writer.write(changes))
        for job_id, reason in cleaned or ():
            self._log.warning("row cleaned", job_id=job_id, error=reason)
        return cleaned is not None

    def _fold(self, outbox: PartitionStream, events: Sequence[OutboxEvent]) -> list[JobChange]:
        return list(changes_of(outbox.keys.queue, events, keep_prompts=self._settings.keep_prompts).values())

    def _is_sound(self, outbox: PartitionStream, entry: ReadEntry) -> bool:
        try:
            self._fold(outbox, entry[1])
        except Exception as error:  # noqa: BLE001  # as above
            self._discard(outbox, entry[0], error)
            return False
        return True

    def _discard(self, outbox: PartitionStream, entry: Entry, error: Exception) -> None:
        entry_id, fields = entry
        self._log.warning("malformed outbox entry", entry=entry_id.decode(), error=str(error)[:500])
        keep_garbage(self._client, outbox.keys, outbox.stream.key, _data_of(fields))

    def _patiently(self, do: Callable[[], Answer]) -> Answer | None:
        """Retry while the database is unreachable. Return None if stopped before."""
        while True:
            try:
                answer = do()
            except HistoryAway as error:
                if self._stopping.wait(self._database_outage.failed(error)):
                    return None
            else:
                self._database_outage.recovered()
                return answer

    def _events_of(self, outbox: PartitionStream, entry: Entry) -> list[OutboxEvent]:
        if not entry[1]:
            return []
        try:
            events = decode_events(_data_of(entry[1]))
        except WireError as error:
            self._discard(outbox, entry, error)
            return []
        # One call of a script writes the events of several tenants: those of others are recorded.
        return [event for event in events if self._is_ours(outbox, entry, event)]

    def _is_ours(self, outbox: PartitionStream, entry: Entry, event: OutboxEvent) -> bool:
        try:
            _check(event, outbox.keys)
        except WireError as error:
            self._discard(outbox, entry, error)
            return False
        return True

    def _count_batches(self) -> None:
        """Count one open batch at intervals, if rows were written since the last full count."""
        began_s = time.monotonic()
        if began_s < self._count_at_s:
            return
        try:
            rest_s = self._count_next()
        except HistoryAway as error:
            self._has_written = True
            rest_s = self._database_outage.failed(error)
        ended_s = time.monotonic()
        self._count_at_s = ended_s + max(rest_s, (ended_s - began_s) * COUNT_SHARE)

    def _count_next(self) -> float:
        """Count the next batch, if there is one. Return the seconds until the next look."""
        rest_s = COUNT_EVERY_S
        if self._to_count or self._has_written:
            if not self._to_count:
                self._to_count, self._has_written = self._writer.open_batches(), False
                rest_s = COUNT_EVERY_S if self._to_count else LOOK_EVERY_S
            if self._to_count:
                self._writer.count_batch(self._to_count.pop(), now_ms=wall_ms())
            self._database_outage.recovered()
        return rest_s


def _portions(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield entries in portions of at most `TURN_BYTES`, or of one entry. Redis sends pages by their number only."""
    portion, size_bytes = list[Entry](), 0
    for entry in entries:
        entry_bytes = sum(map(len, entry[1].values()))
        if portion and size_bytes + entry_bytes > TURN_BYTES:
            yield portion
            portion, size_bytes = [], 0
        portion.append(entry)
        size_bytes += entry_bytes
    if portion:
        yield portion


def _events_in(read: Sequence[ReadEntry]) -> list[OutboxEvent]:
    return [event for _, events in read for event in events]


def _data_of(fields: Mapping[bytes, bytes]) -> bytes:
    return fields.get(ENTRY_FIELD, b" ".join(fields.values()))


def _check(event: OutboxEvent, keys: QueueKeys) -> None:
    """Check an event: any user that may submit can write one.

    Raises:
        WireError: no script writes such an event.
    """
    if split_job_id(event.job_id)[0] != keys.partition:
        raise WireError(f"job {event.job_id} does not belong to partition {keys.partition}")
    if not 0 <= event.at_ms < 2**63:
        raise WireError(f"an event of job {event.job_id} is at {event.at_ms} ms, which no script writes")
    if not 0 < event.version <= limits.MAX_VERSION:
        raise WireError(f"job {event.job_id} has version {event.version}, which no script writes")
    submit_time(event)
    if event.kind == "ended" and event.fields.get("state", b"failed") not in _FINAL:
        raise WireError(f"job {event.job_id} ended in a state that no script writes")


_ENDED = frozenset(state for state in JobState if state.is_terminal)
_FINAL = tuple(state.encode() for state in _ENDED)


# ---------------------------------------------------------------- the process


def run_recorder(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool) -> ExitCode:
    """Run `worker record`.

    Raises:
        ConfigError: no URL is given and no server can be started on this host.
    """
    configure_logs(config.log)
    settings = RecorderSettings(
        queues=config.queue.names,
        partitions=config.queue.num_partitions,
        keep_prompts=config.history.keep_prompts or "full",
        otlp_traces_endpoint=traces_endpoint_of(config),
    )
    urls = {"redis_url": find_redis(config, environ).url, "database_url": database_url_of(config, environ)}
    return main(**urls, settings=settings, until_eof=until_eof)


def main(*, redis_url: str, database_url: str, settings: RecorderSettings, until_eof: bool = False) -> ExitCode:
    """Run `worker record` until SIGTERM, SIGINT or, with `until_eof`, the end of standard input."""
    log = get_log()
    stopping = threading.Event()
    with ended_by_threads(log), stopped_by_signals(stopping.set):
        if until_eof:
            stop_at_eof(stopping.set)
        try:
            engine = open_database(database_url, is_writer=True)
            wait_for_history(lambda: prepare(engine), log, stopping)
        except HistoryError as error:
            log.error("history cannot be used", error=str(error))  # noqa: TRY400  # the message is enough
            return ExitCode.MISUSED
        client = connect(redis_url, timeout_s=max(5.0, settings.block_s * 2))
        with _traces(engine, settings, log) as on_ended:
            recorder = Recorder(client, HistoryWriter(engine), settings, stopping, on_ended=on_ended)
            endpoints = {"redis": redacted(redis_url), "database": engine.url.render_as_string(hide_password=True)}
            log.info("recorder started", **endpoints)
            recorder.run()
        engine.dispose()
    log.info("recorder stopped", recorded=recorder.num_recorded)
    return ExitCode.DONE


@contextmanager
def _traces(engine: Engine, settings: RecorderSettings, log: Log) -> Generator[OnEnded | None]:
    """Export traces while the recorder runs, if an endpoint is set."""
    if settings.otlp_traces_endpoint is None:
        yield None
        return
    # Imported here because it is an extra, and costs nothing where it is not used.
    from sluice.worker.traces.exporter import TraceExporter

    exporter = TraceExporter(engine, settings.otlp_traces_endpoint, log)
    exporter.start()
    try:
        yield exporter.ended
    finally:
        exporter.stop()
