"""Move ends of jobs and batches from the queue to rq.

    {q:p}:2:callbacks ─Mover─> rq queue `sluice-webhooks-…` ──rq workers──> receivers
                        ├────> rq queue `sluice-chores-…`   ──rq worker───> files, SQL
                        └────> rq queue `sluice-gateway-…`  ──rq worker───> batches of the HTTP gateway

The mover enqueues a job in rq before it acknowledges the queue's entry. After a crash in between, the entry is read
again: rq refuses the same rq job id, and the receiver drops the same event id.

Retention is enqueued by the mover once an hour, under an id made of the hour, so several movers enqueue it once; the
gateway's sweep every second likewise.
`rq cron` is not used because it enqueues jobs as pickles.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from redis.exceptions import LockNotOwnedError, RedisError
from rq import Queue, Retry
from rq.exceptions import DuplicateJobError
from rq.job import Job
from rq.scheduler import RQScheduler

from sluice.protocol import limits
from sluice.protocol.calls import BatchView, QueueSettings, configure, inspect_batch, join_batch
from sluice.protocol.clock import wall_ms
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import WireError
from sluice.worker.callbacks import chores
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.events import Event, batch_event, job_event
from sluice.worker.callbacks.gateway_tasks import Sweeps, is_installed
from sluice.worker.callbacks.settings import CallbackSettings, rq_job_id
from sluice.worker.connection.clients import Client
from sluice.worker.connection.outage import Outage
from sluice.worker.connection.partitioned_reader import (
    OtherServerAway,
    PartitionedReader,
    PartitionStream,
    ReaderSettings,
)
from sluice.worker.connection.stream_group import Entry, keep_garbage
from sluice.worker.log import get_log

GROUP = "callbacks"
KEPT_S = 86_400
"""How long rq remembers a finished job and refuses its id."""

EXPORT_TIMEOUT_S = 3600
HOUR_S = 3600
SCHEDULE_EVERY_S = 1.0
NO_SECRET = "no SLUICE_CALLBACKS_SECRET is configured, so it cannot be signed"
LOCK_LIFE_S = 10.0
"""For one round of due retries. A mover that is killed in a round delays the next one by this."""


class Mover(PartitionedReader):
    """A mover of ends of jobs and batches from the queue to rq, one partition after the other."""

    def __init__(self, client: Client, rq_client: Client, settings: CallbackSettings) -> None:
        self._settings = settings
        self._all_keys = [QueueKeys(settings.queue, partition) for partition in range(settings.partitions)]
        timing = ReaderSettings(
            group=GROUP, name=settings.name, claim_after_s=settings.claim_after_s, block_s=settings.block_s
        )
        log = get_log(queue=settings.queue)
        super().__init__(client, {keys: keys.callbacks for keys in self._all_keys}, timing, log)
        names = settings.rq_names
        self._webhooks = rq_queue(names.webhooks, rq_client)
        self._chores = rq_queue(names.chores, rq_client)
        self._sweeps = Sweeps(rq_queue(names.gateway, rq_client)) if is_installed() else None
        self._retries = _Retries(rq_client, (self._webhooks, self._chores))
        self._rq_outage = Outage("rq's redis", log)
        self._retained_hour = -1

    def turn(self, source: PartitionStream, *, block_s: float) -> int:
        """Move one page of entries from a partition to rq, then enqueue what is due."""
        if not source.has_answered:
            self._configure(source.keys)
        entries = source.stream.read(block_s=block_s, max_bytes=limits.MAX_CALL_BYTES, max_pages=1)
        for entry in entries:
            self._move(source.keys, entry)
        if entries:
            source.stream.acknowledge([entry_id for entry_id, _ in entries])
        self._enqueue_due()
        return len(entries)

    def _enqueue_due(self) -> None:
        with self._asking_rq():
            self._retries.enqueue_due()
            if self._sweeps is not None:
                self._sweeps.enqueue_due()
        self._enqueue_retention()
        self._rq_outage.recovered()

    @contextlib.contextmanager
    def _asking_rq(self) -> Generator[None]:
        """Report an outage of rq's server, which may be another than the queue's."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise OtherServerAway(error, self._rq_outage.failed(error)) from error

    def _configure(self, keys: QueueKeys) -> None:
        """Let the queue report batches without a callback URL if, and only if, batches are exported."""
        settings = QueueSettings(export_batches=self._settings.export_folder is not None)
        run(self._client, configure(keys, settings))

    def _move(self, keys: QueueKeys, entry: Entry) -> None:
        entry_id, raw = entry
        if not raw:
            return
        try:
            event = self._read(keys, raw)
        except (WireError, KeyError, ValueError) as error:
            self._log.warning("malformed callback entry", entry=entry_id.decode(), error=str(error))
            keep_garbage(self._client, keys, keys.callbacks, b" ".join(raw.values()))
            return
        if event is None:
            return
        if self._settings.secret is None:
            # It must not wait. In the stream it would hold up exports, and count against the bound at which all submits
            # are refused; in rq nothing bounds it.
            self._log.warning("webhook refused", event_id=event.id, of=event.subject, error=NO_SECRET)
            return
        self._enqueue_webhook(event)

    def _read(self, keys: QueueKeys, raw: Mapping[bytes, bytes]) -> Event | None:
        fields = {name.decode(): value.decode() for name, value in raw.items() if name != b"spec"}
        if fields["kind"] == "batch":
            return self._complete(fields["id"], fields.get("url"))
        return job_event(keys, fields, raw[b"spec"])

    def _complete(self, batch: str, url: str | None) -> Event | None:
        """Export a batch and make its event if all partitions have completed their part; the last one's entry does."""
        views = [inspect_batch(keys, batch) for keys in self._all_keys]
        whole = join_batch([run(self._client, view) for view in views])
        if whole.completed_ms is None or not whole.total:
            return None
        self._enqueue_export(whole, whole.completed_ms)
        return batch_event(self._settings.queue, whole, whole.completed_ms, url) if url else None

    def _enqueue_webhook(self, event: Event) -> None:
        retry = Retry(max=len(self._settings.retry_after_s), interval=list(self._settings.retry_after_s))
        arguments = (event.url, event.id, event.body)
        # The resolver has time limits of its own, before that of the delivery.
        timeout_s = int(self._settings.timeout_s + 35)
        with self._asking_rq():
            _enqueue_once(self._webhooks, chores.deliver_webhook, arguments, event.id, timeout_s, retry)

    def _enqueue_export(self, batch: BatchView, completed_ms: int) -> None:
        if self._settings.export_folder is None:
            return
        queue = self._settings.queue
        name = hashlib.sha256(f"{queue} {batch.id} {completed_ms}".encode()).hexdigest()[:32]
        retry = Retry(max=len(self._settings.export_after_s), interval=list(self._settings.export_after_s))
        arguments = (queue, batch.id, self._settings.export_folder, batch.total, batch.began_ms)
        with self._asking_rq():
            _enqueue_once(self._chores, chores.export, arguments, f"export-{name}", EXPORT_TIMEOUT_S, retry)

    def _enqueue_retention(self) -> None:
        days, prompt_days = self._settings.retention_days, self._settings.prompt_retention_days
        hour = wall_ms() // 1000 // HOUR_S
        if hour == self._retained_hour or (days is None and prompt_days is None):
            return
        retry = Retry(max=2, interval=[60, 600])
        with self._asking_rq():
            _enqueue_once(self._chores, chores.retain, (days, prompt_days), f"retain-{hour}", EXPORT_TIMEOUT_S, retry)
        self._retained_hour = hour


# A record is not read here, because it may be damaged: the rq worker that takes it passes over it.
_ENQUEUE_DUE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1000)
for _, id in ipairs(due) do
  if redis.call('EXISTS', ARGV[2] .. id) == 1 then redis.pcall('HSET', ARGV[2] .. id, 'status', 'queued') end
  redis.call('RPUSH', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
end
"""


class _Retries:
    """The way back to rq's queues for jobs whose retry is due, instead of rq's scheduler and its long lock.

    rq's scheduler holds its locks from start to end, and a killed one holds them for another minute. Here a lock lasts
    for one round, so a restarted mover, or another one, continues at once. The keys are rq's, so a scheduler of rq on
    the same Redis is respected.
    """

    def __init__(self, rq_client: Client, queues: Sequence[Queue]) -> None:
        self._client = rq_client
        self._locks = {
            queue: rq_client.lock(RQScheduler.get_locking_key(queue.name), timeout=LOCK_LIFE_S, blocking=False)
            for queue in queues
        }
        self._next_s = 0.0

    def enqueue_due(self) -> None:
        """Enqueue due retries about once a second, unless another mover is doing so."""
        if time.monotonic() < self._next_s:
            return
        for queue, lock in self._locks.items():
            if not lock.acquire():
                continue
            try:
                waiting = queue.scheduled_job_registry.key
                self._client.eval(_ENQUEUE_DUE, 2, waiting, queue.key, int(time.time()), Job.redis_job_namespace_prefix)
            finally:
                # A round that outlived the lock has lost it.
                with contextlib.suppress(LockNotOwnedError):
                    lock.release()
        self._next_s = time.monotonic() + SCHEDULE_EVERY_S


def _enqueue_once(
    queue: Queue, chore: Callable[..., object], arguments: tuple[object, ...], name: str, timeout_s: int, retry: Retry
) -> None:
    """Enqueue a chore unless rq already knows its name: then it is done or enqueued."""
    half_typed: Any = queue  # Any: rq is partly untyped
    with contextlib.suppress(DuplicateJobError):
        half_typed.enqueue(
            chore,
            args=arguments,
            job_id=rq_job_id(name, queue.name),
            unique=True,
            job_timeout=timeout_s,
            retry=retry,
            result_ttl=KEPT_S,
            failure_ttl=7 * KEPT_S,
        )
