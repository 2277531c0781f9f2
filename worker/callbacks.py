"""`worker callbacks`: what must not touch the token path, by rq. Webhooks, exports of batches, retention.

    {q:p}:callbacks ──Mover──> rq queue `webhooks` ──rq workers──> receivers
                        └────> rq queue `chores`   ──rq worker───> files, SQL

The mover takes ends that want a webhook from the queue and gives them to rq, and only then acknowledges: an event whose
mover dies in between is given again under the same rq job id, which rq refuses, and under the same event id, which the
receiver drops. rq's workers each listen to one queue (with several, a job can vanish between them), speak JSON, and run
in processes of their own that never import torch.

`rq cron` is not used: it puts its jobs into the queue as pickles. The mover enqueues retention each hour instead, under
an id made of the hour, so that several movers enqueue it once.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import redis
from rq import Queue, Retry
from rq.exceptions import DuplicateJobError
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from producer.config import redacted
from producer.contract import limits
from producer.contract.calls import BatchView, QueueSettings, configure, inspect_batch, join_batch
from producer.contract.database import HistoryError, HistoryUnreachable, open_database
from producer.contract.keys import QueueKeys
from producer.contract.running import run
from producer.contract.wire import WireError, decode_spec
from worker import chores
from worker.chore_jobs import rq_queue, rq_worker
from worker.chores import ChoreSettings
from worker.clock import wall_ms
from worker.config import LogConfig
from worker.connections import Client, connect
from worker.errors import ExitCode
from worker.log import configure_logs, get_log
from worker.migrate import prepare
from worker.stream_group import Entry, StreamGroup, keep_garbage
from worker.trouble import Trouble
from worker.webhooks import IpNetwork, Sender

GROUP = "callbacks"
WEBHOOKS_QUEUE, CHORES_QUEUE = "sluice-webhooks", "sluice-chores"
RETRY_AFTER_S = (1, 5, 25, 120, 600, 1800, 3600, 7200, 21_600)
"""Nine tries more, over nine hours and a half."""

EXPORT_AFTER_S = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 3600, 3600)
"""Tries while the history lacks ends of a batch, or cannot be read, over four hours; the last writes what is there."""

KEPT_S = 86_400
"""How long rq remembers a delivered event, and so refuses it a second time."""

EXPORT_TIMEOUT_S = 3600
HOUR_S = 3600
SCHEDULE_EVERY_S = 1.0
LOCK_EVERY_S = 30.0
RESTART_AFTER_S = 1.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """Where callbacks come from, and how they are sent."""

    redis_url: str = field(repr=False)
    """The queue's."""

    rq_url: str = field(repr=False)
    """rq's own; may be the same."""

    database_url: str = field(repr=False)
    queue: str = "default"
    partitions: int = 1
    name: str = ""
    """Of the mover in its consumer group, the same after a restart. Empty: the host's name."""

    secret: str | None = field(default=None, repr=False)
    """Keys that sign, with spaces between. None: webhooks wait in the queue until one is set."""

    networks: tuple[IpNetwork, ...] = ()
    """Networks that webhooks may reach although they are not public."""

    timeout_s: float = 10.0
    """For each wait on a receiver."""

    retry_after_s: Sequence[int] = RETRY_AFTER_S
    export_after_s: Sequence[int] = EXPORT_AFTER_S
    export_patience_s: float = 5.0
    """How long one try waits for the recorder, which is usually a moment behind."""

    webhook_workers: int = 2
    """rq workers that send, each a process: one slow receiver then does not hold up all."""

    retention_days: float | None = None
    prompt_retention_days: float | None = None
    export_folder: str | None = None
    """Where a batch is written as JSON lines when it completes. None: it is not."""

    block_s: float = 0.5
    claim_after_s: float = 15.0
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def sender(self) -> Sender | None:
        """How webhooks are sent, if they are."""
        if self.secret is None:
            return None
        return Sender(secrets=self.secret, timeout_s=self.timeout_s, networks=self.networks)

    @property
    def chores(self) -> ChoreSettings:
        """What rq's workers need of this."""
        return ChoreSettings(
            database_url=self.database_url,
            sender=self.sender,
            export_folder=self.export_folder,
            export_patience_s=self.export_patience_s,
        )


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One webhook to send. The same end makes the same event, with the same id, each time it is read."""

    id: str
    url: str
    body: str

    @classmethod
    def of(cls, url: str, kind: str, at_ms: int, data: Mapping[str, object], *, of_what: str) -> "Event":
        """Make one; `of_what` names the end: the id is made of it."""
        event_id = f"evt_{hashlib.sha256(of_what.encode()).hexdigest()[:32]}"
        body = {"id": event_id, "type": kind, "created_at_ms": at_ms, "data": data}
        return cls(id=event_id, url=url, body=json.dumps(body, ensure_ascii=False, separators=(",", ":")))


def job_event(keys: QueueKeys, fields: Mapping[str, str], spec_data: bytes) -> Event | None:
    """The event of a job's end; None where no URL asks for it.

    Raises:
        WireError, KeyError, ValueError: the entry is not one of ours.
    """
    spec = decode_spec(spec_data)
    if spec.callback_url is None:
        return None
    job_id, state, version = fields["id"], fields["state"], int(fields["version"])
    data = {
        "job_id": job_id,
        "queue": keys.queue,
        "state": state,
        "error": fields.get("error") or None,
        "batch": spec.batch or fields.get("batch") or None,
        "model": spec.model,
        "metadata": dict(spec.metadata),
    }
    return Event.of(spec.callback_url, f"job.{state}", int(fields["at"]), data, of_what=f"{job_id} {version}")


def batch_event(queue: str, batch: BatchView, completed_ms: int, url: str) -> Event:
    """The event of a whole batch's completion for one URL, the same whichever partition's end it is made of."""
    totals = {name: getattr(batch, name) for name in ("total", "done", "failed", "cancelled", "expired")}
    data = {"batch": batch.id, "queue": queue, "jobs": totals}
    return Event.of(url, "batch.completed", completed_ms, data, of_what=f"{queue} {batch.id} {completed_ms} {url}")


# ---------------------------------------------------------------- the mover


@dataclass(slots=True, eq=False)
class Ends:
    """One partition's stream of ends that want a callback. Changes as the queue is told what is wanted."""

    keys: QueueKeys
    stream: StreamGroup
    trouble: Trouble
    """Its server's: one shard may be away and the others well."""

    has_wishes: bool = False
    """Whether the queue has been told what is wanted of it; after an error it may have forgotten."""


class Mover:
    """Moves ends from the queue to rq. One turn a partition, in rotation."""

    def __init__(self, client: Client, rq_client: Client, settings: CallbackSettings) -> None:
        self._client = client
        self._settings = settings
        self._log = get_log(queue=settings.queue)
        self._partitions = [self._open(QueueKeys(settings.queue, number)) for number in range(settings.partitions)]
        self._webhooks = rq_queue(WEBHOOKS_QUEUE, rq_client)
        self._chores = rq_queue(CHORES_QUEUE, rq_client)
        self._retries = _Retries(rq_client)
        self._stopping = threading.Event()
        self._retained_hour = -1

    def _open(self, keys: QueueKeys) -> Ends:
        name, claim_after_s = self._settings.name or socket.gethostname(), self._settings.claim_after_s
        stream = StreamGroup(self._client, keys.callbacks, group=GROUP, name=name, claim_after_s=claim_after_s)
        return Ends(keys, stream, Trouble("redis", self._log))

    def run(self) -> None:
        """Move until `stop`."""
        while not self._stopping.is_set():
            for ends in self._partitions:
                if not ends.trouble.wait_s:
                    self._try_turn(ends)
            self._stopping.wait(min(ends.trouble.wait_s for ends in self._partitions))

    def _try_turn(self, ends: Ends) -> None:
        try:
            self.turn(ends, block_s=self._settings.block_s / len(self._partitions))
        except (redis.RedisError, OSError) as error:
            ends.stream.recover()
            ends.has_wishes = False
            ends.trouble.broke(error, key=ends.stream.key)
        else:
            ends.trouble.healed(key=ends.stream.key)

    def stop(self) -> None:
        """Let `run` end; may be called from a signal handler or twice."""
        self._stopping.set()

    def drain(self) -> int:
        """Move all that waits now; give how many entries that were."""
        return sum(iter(lambda: sum(self.turn(ends, block_s=0) for ends in self._partitions), 0))

    def turn(self, ends: Ends, *, block_s: float) -> int:
        """Give what waits in one partition to rq, then acknowledge it; then what is due by time. How many entries.

        Raises:
            redis.RedisError: a server does not answer; nothing is lost.
        """
        if not ends.has_wishes:
            self._ask_for_batches(ends)
        entries = ends.stream.read(block_s=block_s, max_bytes=limits.MAX_CALL_BYTES, max_pages=1)
        for entry in entries:
            self._move(ends.keys, entry)
        if entries:
            ends.stream.acknowledge([entry_id for entry_id, _ in entries])
        self._retries.enqueue_due()
        self._enqueue_retention()
        return len(entries)

    def _ask_for_batches(self, ends: Ends) -> None:
        """Have batches without a URL told too where they are exported, and nowhere else: nobody would take them."""
        wanted = QueueSettings(export_batches=self._settings.export_folder is not None)
        run(self._client, configure(ends.keys, wanted))
        ends.has_wishes = True

    def _move(self, keys: QueueKeys, entry: Entry) -> None:
        entry_id, raw = entry
        if not raw:
            return
        try:
            event = self._read(keys, raw)
        except (WireError, KeyError, ValueError) as error:
            self._log.warning("foreign entry among the callbacks", entry=entry_id.decode(), error=str(error))
            keep_garbage(self._client, keys, keys.callbacks, b" ".join(raw.values()))
            return
        if event is not None:
            self._enqueue_webhook(event)

    def _read(self, keys: QueueKeys, raw: Mapping[bytes, bytes]) -> Event | None:
        fields = {name.decode(): value.decode() for name, value in raw.items() if name != b"spec"}
        if fields["kind"] == "batch":
            return self._complete(fields["id"], fields.get("url"))
        return job_event(keys, fields, raw[b"spec"])

    def _complete(self, batch: str, url: str | None) -> Event | None:
        """Export a batch and make its event, once every partition's part is complete: the last one's entry sees it."""
        views = [inspect_batch(ends.keys, batch) for ends in self._partitions]
        whole = join_batch([run(self._client, view) for view in views])
        if whole.completed_ms is None or not whole.total:
            return None
        self._enqueue_export(whole, whole.completed_ms)
        return batch_event(self._settings.queue, whole, whole.completed_ms, url) if url else None

    def _enqueue_webhook(self, event: Event) -> None:
        retry = Retry(max=len(self._settings.retry_after_s), interval=list(self._settings.retry_after_s))
        arguments = (event.url, event.id, event.body)
        # Connecting and answering may each take the whole time, at every address.
        timeout_s = int(self._settings.timeout_s * 4 + 5)
        _enqueue_once(self._webhooks, chores.deliver_webhook, arguments, event.id, timeout_s, retry)

    def _enqueue_export(self, batch: BatchView, completed_ms: int) -> None:
        if self._settings.export_folder is None:
            return
        queue = self._settings.queue
        name = hashlib.sha256(f"{queue} {batch.id} {completed_ms}".encode()).hexdigest()[:32]
        retry = Retry(max=len(self._settings.export_after_s), interval=list(self._settings.export_after_s))
        arguments = (queue, batch.id, self._settings.export_folder, batch.total)
        _enqueue_once(self._chores, chores.export, arguments, f"export-{name}", EXPORT_TIMEOUT_S, retry)

    def _enqueue_retention(self) -> None:
        days, prompt_days = self._settings.retention_days, self._settings.prompt_retention_days
        hour = wall_ms() // 1000 // HOUR_S
        if hour == self._retained_hour or (days is None and prompt_days is None):
            return
        retry = Retry(max=2, interval=[60, 600])
        _enqueue_once(self._chores, chores.retain, (days, prompt_days), f"retain-{hour}", EXPORT_TIMEOUT_S, retry)
        self._retained_hour = hour


class _Retries:
    """Puts jobs whose time for another try has come back into rq's queues: rq's scheduler, without its process."""

    def __init__(self, rq_client: Client) -> None:
        self._scheduler = RQScheduler(
            [WEBHOOKS_QUEUE, CHORES_QUEUE], rq_client, logging_level="WARNING", serializer=JSONSerializer
        )
        self._lock_at_s = self._schedule_at_s = 0.0

    def enqueue_due(self) -> None:
        """Do it, about once a second; one mover of all holds the lock."""
        now_s = time.monotonic()
        if now_s >= self._lock_at_s:
            self._scheduler.acquire_locks()
            self._lock_at_s = now_s + LOCK_EVERY_S
        if now_s >= self._schedule_at_s:
            self._scheduler.enqueue_scheduled_jobs()
            self._schedule_at_s = now_s + SCHEDULE_EVERY_S


def _enqueue_once(  # a job's parts are many, and each caller has them all
    queue: Queue, chore: Callable[..., object], arguments: tuple[object, ...], job_id: str, timeout_s: int, retry: Retry
) -> None:
    """Enqueue under an id that rq may know already: then it is done, or on its way."""
    half_typed: Any = queue  # Any: rq's own types have holes
    with contextlib.suppress(DuplicateJobError):
        half_typed.enqueue(
            chore, args=arguments, job_id=job_id, unique=True, job_timeout=timeout_s, retry=retry, result_ttl=KEPT_S,
            failure_ttl=7 * KEPT_S,
        )  # fmt: skip


# ---------------------------------------------------------------- the processes


def work(queue: str, settings: CallbackSettings) -> None:
    """Run one rq worker on one queue, in this process, until SIGTERM or until the parent is gone."""
    configure_logs(settings.log)
    _end_with_parent()
    chores.bind(settings.chores)
    if queue == CHORES_QUEUE:
        _wait_for_history(settings)
    client = connect(settings.rq_url, timeout_s=settings.timeout_s + 30)
    rq_worker(queue, client).work(logging_level="WARNING")


def _wait_for_history(settings: CallbackSettings) -> None:
    """Exports and retention wait in rq until SQL is there; webhooks need none of it."""
    trouble = Trouble("history database", get_log(queue=settings.queue))
    while True:
        try:
            _check(settings)
        except HistoryError as error:
            time.sleep(trouble.broke(error))
        else:
            return trouble.healed()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Crew:
    """The rq workers' processes: started, started again when they die, stopped. Changes as they come and go."""

    def __init__(self, queues: Sequence[str], settings: CallbackSettings) -> None:
        # Spawned, not forked: a child must not inherit threads and connections.
        self._context = multiprocessing.get_context("spawn")
        self._settings = settings
        self._processes: dict[int, tuple[str, BaseProcess]] = {}
        self._queues = queues
        self._log = get_log(queue=settings.queue)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start all, and watch them."""
        for number, queue in enumerate(self._queues):
            self._spawn(number, queue)
        self._thread.start()

    def stop(self) -> None:
        """Ask all to end after what they are doing, and wait."""
        self._closing.set()
        self._thread.join()
        for _, process in self._processes.values():
            process.terminate()
        until_s = time.monotonic() + STOP_TIMEOUT_S
        for _, process in self._processes.values():
            process.join(max(0.1, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _spawn(self, number: int, queue: str) -> None:
        process = self._context.Process(target=work, args=(queue, self._settings), daemon=False)
        process.start()
        self._processes[number] = queue, process

    def _watch(self) -> None:
        while not self._closing.wait(RESTART_AFTER_S):
            for number, (queue, process) in list(self._processes.items()):
                if not process.is_alive():
                    self._log.warning("rq worker ended; starting it again", rq_queue=queue, exit_code=process.exitcode)
                    self._spawn(number, queue)


def main(settings: CallbackSettings) -> ExitCode:
    """Run `worker callbacks` until SIGTERM or SIGINT."""
    log = get_log(queue=settings.queue)
    try:
        _check(settings)
    except HistoryUnreachable as error:
        log.warning("exports and retention wait for the history database", error=str(error))
    except HistoryError as error:
        log.error("callbacks cannot run", error=str(error))  # noqa: TRY400  # a sentence, no traceback
        return ExitCode.MISUSED
    if settings.secret is None:
        log.warning("no secret is set: webhooks are not sent, they wait in the queue")
    crew = Crew([CHORES_QUEUE, *[WEBHOOKS_QUEUE] * (settings.webhook_workers if settings.secret else 0)], settings)
    mover = Mover(connect(settings.redis_url, timeout_s=5), connect(settings.rq_url, timeout_s=5), settings)
    with _stopped_by_signals(mover):
        crew.start()
        log.info("callbacks started", redis=redacted(settings.redis_url), rq=redacted(settings.rq_url))
        mover.run()
    crew.stop()
    log.info("callbacks stopped")
    return ExitCode.DONE


def _check(settings: CallbackSettings) -> None:
    engine = open_database(settings.database_url, is_writer=True)
    try:
        prepare(engine)
    finally:
        engine.dispose()


@contextlib.contextmanager
def _stopped_by_signals(mover: Mover) -> Generator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        mover.stop()

    before: dict[signal.Signals, Any] = {  # Any: a handler of any kind
        number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
