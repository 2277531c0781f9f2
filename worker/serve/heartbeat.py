"""The worker's heartbeat: a thread that dies with the process, and stops beating when the loop hangs.

Each heartbeat lists the held jobs and returns which of them are flagged or lost. At shutdown the worker deregisters, so
other workers take over what it held without waiting for its lifetime to expire.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from redis.exceptions import RedisError

from sluice.protocol.calls import Beat, BeatReply, beat
from sluice.protocol.keys import QueueKeys, by_queue
from sluice.protocol.limits import CAPACITY
from sluice.protocol.redis.execution import run_many
from sluice.protocol.states import JobState
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.availability import RetryPolicy
from sluice.worker.connection.clients import Client
from sluice.worker.errors import ExitCode, NotReady
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import HeldList
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.give_back import return_jobs


class Heartbeat:
    """The heartbeat thread. A component: start, stop."""

    def __init__(self, client: Client, context: WorkerContext, status: Callable[[], Mapping[str, str]]) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            client: A connection for this thread alone.
            context: The worker's shared state.
            status: Facts about the worker, sent with each heartbeat.
        """
        self._client = client
        self._context = context
        self._status = status
        self._config = context.config.beat
        self._watchdog = context.watchdog
        self._leases = context.leases
        self._health = context.health
        self._log = context.log
        self._closing = threading.Event()
        self._thread = context.mailbox.thread("heartbeat", self._run)
        self._retries = RetryPolicy()
        self._silent_ticks = 0
        self._last_s = float("-inf")
        self._has_broken = False
        self._settings = context.settings

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat that was answered."""
        return monotonic_s() - self._last_s

    def start(self) -> None:
        """Send one heartbeat, so that the incarnation is alive before it pulls, then continue on the thread.

        Raises:
            NotReady: The first heartbeat was not answered in time.
        """
        patience_s = self._context.config.redis.patience_s
        deadline_s = monotonic_s() + patience_s
        while not self._try_beat():
            if monotonic_s() > deadline_s:
                raise NotReady(f"redis did not answer the first heartbeat within {patience_s:g} s")
        self._thread.start()

    def mark_broken(self) -> None:
        """Deregister as broken at `stop`, because a returned job may be the cause."""
        self._has_broken = True

    def stop(self) -> None:
        """Stop the heartbeat, return the jobs that are still held, and deregister."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._deregister()

    def _run(self) -> None:
        is_answered = True
        # A heartbeat that was not answered has used up its interval: retry without a pause.
        while not self._closing.wait(self._config.every_s if is_answered else 0):
            is_answered = self._tick()

    def _tick(self) -> bool:
        """Send a heartbeat, unless the loop hangs; return False if one was not answered."""
        self._expire_jobs()
        if self._watchdog.is_overdue:
            self._stay_silent()
            return True
        if self._silent_ticks:
            self._log.info("loop runs again", silent_s=round(self.age_s, 3))
        self._silent_ticks = 0
        return self._try_beat()

    def _expire_jobs(self) -> None:
        """End jobs whose deadline has passed: the queue's timers may be many, and fire in slices."""
        now_ms = self._context.clock.ms(monotonic_s())
        for job in self._leases.all():
            deadline_ms = job.leased.deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                self._context.flag(job, JobState.EXPIRED)

    def _try_beat(self) -> bool:
        try:
            self._beat()
        except (RedisError, OSError) as error:
            self._health.failed("heartbeat", error)
            self._closing.wait(min(self._retries.delay_after(error), self._config.every_s))
            return False
        self._health.answered("heartbeat")
        self._retries.reset()
        return True

    def _stay_silent(self) -> None:
        """Let the incarnation expire, so that other workers take the jobs of a hung loop; end the process later.

        The wait is counted in ticks, not in seconds: a process that was stopped and continued has not hung.
        """
        self._silent_ticks += 1
        if self._silent_ticks == 1:
            self._log.error("step outlasted its deadline", deadline_s=self._config.step_deadline_s)
        if self._silent_ticks * self._config.every_s > self._config.step_deadline_s + self._config.life_s:
            self._log.critical("loop hangs: ending the process")
            # Only this ends a process whose main thread does not return from the device.
            os._exit(ExitCode.BROKEN)

    def _beat(self) -> None:
        partitions = self._context.partitions
        lists = [self._leases.held(keys) for keys in partitions]
        calls = [beat(keys, self._make_beat(held)) for keys, held in zip(partitions, lists, strict=True)]
        sent_s = monotonic_s()
        replies = run_many(self._client, calls)
        received_s = monotonic_s()
        if received_s - sent_s > self._config.every_s:
            self._health.stalled()
        problem = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        stamps: dict[QueueKeys, str] = {}
        num_ready = 0
        for keys, held, reply in zip(partitions, lists, replies, strict=True):
            if isinstance(reply, BaseException):
                continue  # the replies of other shards still count
            self._context.clock.read(reply.server_ms, sent_s=sent_s, received_s=received_s)
            self._on_reply(keys, held, reply)
            stamps[keys] = reply.settings_stamp
            num_ready += reply.ready_jobs
        self._context.capacity.note_backlog(has_backlog=num_ready > 0 and not self._context.quiet.is_asked)
        if problem is not None:
            raise problem
        self._last_s = received_s
        for keys, stamp in stamps.items():
            if names := self._settings.update(self._client, keys, stamp):
                where = {"queue": keys.queue, "partition": keys.partition}
                self._log.warning("settings were missing; written again", **where, names=names)
        if (tokens_per_s := self._context.capacity.take_news()) is not None:
            self._keep_capacity(tokens_per_s)

    def _keep_capacity(self, tokens_per_s: float) -> None:
        """Write the rate to every queue, for when no worker is left."""
        for first, *_ in by_queue(self._context.partitions).values():
            # Not of the beat, which has succeeded: a server that is full refuses this. The next window has a new rate.
            with suppress(RedisError, OSError):
                self._client.hset(first.key("config"), CAPACITY, f"{tokens_per_s:.1f}")

    def _make_beat(self, held: HeldList) -> Beat:
        return Beat(
            incarnation=self._context.incarnation,
            held=tuple(held.requests),
            processed_pull=held.processed_pull,
            expiry_ms=int(self._config.life_s * 1000),
            about=self._status(),
        )

    def _on_reply(self, keys: QueueKeys, held: HeldList, reply: BeatReply) -> None:
        if reply.was_dead:
            self._log.warning("heartbeat lifetime expired", held=len(held.requests), lost=len(reply.lost))
        with self._leases.lock:
            for job_id, state in reply.stops:
                if (job := self._same_lease(keys, held, job_id)) is not None:
                    self._context.flag(job, state)
            for job_id in reply.lost:
                if (job := self._same_lease(keys, held, job_id)) is not None:
                    self._context.lose(job, "replaced")

    def _same_lease(self, keys: QueueKeys, held: HeldList, job_id: str) -> HeldJob | None:
        """Return the held job, unless it was leased again after the heartbeat was sent: the reply is not about it."""
        job = self._leases.of_job(keys, job_id)  # pyright: ignore[reportArgumentType]  # an id that the queue repeated
        return job if job is not None and held.requests.get(job.id) == job.request_id else None

    def _deregister(self) -> None:
        for keys in self._context.partitions:
            jobs = [job for job in self._leases.all() if job.keys == keys]
            try:
                return_jobs(self._client, keys, self._context, jobs, leaves="broken" if self._has_broken else "clean")
            except (RedisError, OSError) as error:
                facts = {"error": str(error), "queue": keys.queue, "partition": keys.partition, "held": len(jobs)}
                self._log.warning("deregistration not answered", **facts)
