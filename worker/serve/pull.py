"""The thread that pulls jobs and calls `maintain`, alongside the one that publishes output (`exchange.py`).

Each has its own connection, so the server works on one while the worker reads from the other. Only leases order the
two threads: an update carries its job's epoch and offset, and a job that is pulled again is another `HeldJob` whose
predecessor publishes nothing more. Jobs are returned on this thread too, between pulls.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from redis.exceptions import RedisError

from sluice.engine.request import NO_ROOM
from sluice.protocol.calls import PullReply, PullRequest, maintain, pull
from sluice.protocol.keys import QueueKeys
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Uplink
from sluice.worker.connection.listeners import WakeupListener
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.model.translate import read_spec, room_of
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.maintenance import MaintenanceSchedule
from sluice.worker.serve.pull_schedule import LOOK_EVERY_S, PULL_AT_LEAST_EVERY_S, PullSchedule
from sluice.worker.serve.round_trips import RoundTrips


class Pulling:
    """The pulling of jobs while there is room for them. The exchange starts and stops it."""

    def __init__(
        self,
        uplink: Uplink,
        listener: WakeupListener,
        context: WorkerContext,
        returns: ReturnQueue,
        prepare: Callable[[list[HeldJob]], None],
    ) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            uplink: The connection to pull over, and since when it stands.
            listener: Wakes the thread when jobs may have become ready.
            context: The worker's shared state.
            returns: The jobs to return between pulls.
            prepare: Takes the jobs that a pull brought; must not take long.
        """
        self._uplink = uplink
        self._listener = listener
        self._context = context
        self._leases = context.leases
        self._mailbox = context.mailbox
        self._watchdog = context.watchdog
        self._returns = returns
        self._prepare = prepare
        self._round_trips = RoundTrips(uplink.puller, context)
        self._schedule = PullSchedule(
            context.partitions,
            context.incarnation,
            reserve_tokens=context.config.queue.reserve_tokens,
            unavailable=context.unavailable,
            weights={share.name: share.weight for share in context.config.queue.shares},
        )
        self._maintenance = MaintenanceSchedule(context.partitions, context.unavailable)
        self._oversized: set[str] = set()
        self._has_several_queues = len(context.config.queue.names) > 1
        self._look_s = 0.0
        """When a full worker looks for jobs again."""

        self._thread = self._mailbox.thread("pulling", self._run)
        self._closing = threading.Event()
        self._turning = threading.Lock()
        self._quiet = context.quiet

    def quiet(self) -> None:
        """Stop pulling."""
        self._quiet.is_asked = True
        self._mailbox.wake()

    def wait_for_pull(self) -> None:
        """Wait until the pull under way, if there is one, has been answered."""
        with self._turning:
            pass

    def resume(self) -> None:
        """Pull again."""
        self._quiet.is_asked = False
        self._mailbox.wake()

    @property
    def is_quiet(self) -> bool:
        """Whether it does not pull."""
        return self._quiet.is_asked

    def start(self) -> None:
        """Start to pull."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the pull under way."""
        self._closing.set()
        self._mailbox.wake()
        self._listener.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()

    def _turn(self) -> None:
        with self._turning:
            self._returns.turn()
            self._maintain()
            pull = self._next_pull()
            if pull is not None:
                self._pull(*pull)
        if pull is None:
            self._rest()

    def _maintain(self) -> None:
        if self._closing.is_set() or self._watchdog.is_overdue or not (due := self._maintenance.due(monotonic_s())):
            return
        beat, now_s = self._context.config.beat, monotonic_s()
        # Other workers may have been cut off or stalled with this one: for one lifetime it declares none of them dead.
        undisturbed_s = now_s - max(self._uplink.since_s, self._context.health.stalled_s)
        calls = [
            maintain(
                keys,
                incarnation=self._context.incarnation,
                number=number,
                may_declare_dead=undisturbed_s > beat.life_s,
                until_ms=self._context.clock.ms(now_s + beat.every_s),
            )
            for keys, number in due
        ]
        round_trip = self._round_trips.make([(keys, call) for (keys, _), call in zip(due, calls, strict=True)])
        now_s = monotonic_s()
        for (keys, _), reply in zip(due, round_trip.replies, strict=True):
            if isinstance(reply, BaseException):
                self._maintenance.on_missed(keys, now_s)
            else:
                self._maintenance.on_reply(keys, reply, now_s)
                if reply.num_fired or reply.num_returned:
                    self._schedule.on_readied(keys, now_s)
        self._round_trips.mark_partitions(round_trip)

    def _pull(self, keys: QueueKeys, request: PullRequest) -> None:
        asked_s = monotonic_s()
        round_trip = self._round_trips.make([(keys, pull(keys, request))])
        (reply,) = round_trip.replies
        if isinstance(reply, BaseException):
            self._schedule.on_missed(keys)
        else:
            self._on_pull_reply(keys, reply, asked_s)
        self._round_trips.mark_partitions(round_trip)

    def _rest(self) -> None:
        """Sleep until the engine has room, a notification arrives, or a time is due."""
        due_s, room = float("inf"), self._mailbox.room()
        if not self.is_quiet and not self._watchdog.is_overdue and room.is_some:
            due_s = self._schedule.next_due_s(room)
            if room.is_taken:
                due_s = min(due_s, self._look_s)
            else:
                self._listener.listen(self._schedule.last_notifications)
        if not self._watchdog.is_overdue:
            due_s = min(due_s, self._maintenance.next_due_s())
        self._mailbox.wait_to_pull(min(max(due_s - monotonic_s(), 0.001), PULL_AT_LEAST_EVERY_S))
        for keys, notification in self._listener.take_notified():
            self._schedule.on_notified(keys, notification)

    def _next_pull(self) -> tuple[QueueKeys, PullRequest] | None:
        # While the loop hangs there is no heartbeat, and other workers take the held jobs.
        if self._closing.is_set() or self._watchdog.is_overdue:
            return None
        now_s = monotonic_s()
        room = NO_ROOM if self.is_quiet else self._mailbox.room()
        if room.is_some and room.is_taken and now_s >= self._look_s:
            self._look(room.over_class, now_s)
        turn = self._schedule.next(
            room,
            now_s=now_s,
            cache_tokens=self._context.cache_tokens,
            is_empty=not len(self._leases),
            holds_oversized=self._holds_oversized(),
        )
        if turn is None:
            return None
        keys, request = turn
        queue = self._context.config.queue
        return keys, replace(
            request,
            own_model=self._context.origin.fingerprints if queue.on_model_change == "wait" else None,
            model_wait_ms=round(queue.model_wait_s * 1000),
        )

    def _look(self, over_class: int | None, now_s: float) -> None:
        """See whether jobs that may start here wait. A pull costs the server many times as much, even if none do."""
        self._look_s = now_s + LOOK_EVERY_S
        partitions = self._context.partitions
        if self._has_several_queues:
            self._schedule.on_waiting([keys for keys in partitions if self._exists(keys, keys.heads_over(-1))])
        for keys in partitions:
            if over_class is not None and not self._schedule.may_interrupt(keys):
                continue
            heads = keys.heads_over(-1 if over_class is None else over_class)
            if heads and (is_waiting := self._exists(keys, heads)) is not None:
                self._schedule.on_look(keys, is_waiting=is_waiting, now_s=now_s)

    def _exists(self, keys: QueueKeys, names: Sequence[str]) -> bool | None:
        """Return whether one of these keys exists; None if the partition does not answer."""
        if keys in self._context.unavailable:
            return None
        try:
            return self._round_trips.exists(names)
        except (RedisError, OSError) as error:
            self._context.unavailable.failed(keys, error)
            return None

    def _holds_oversized(self) -> bool:
        """Return whether an oversized job is on its way to the engine; there the engine itself reports no room."""
        self._oversized &= {request_id for request_id in self._oversized if self._mailbox.is_coming(request_id)}
        return bool(self._oversized)

    def _on_pull_reply(self, keys: QueueKeys, reply: PullReply, asked_s: float) -> None:
        jobs = [self._leases.new_job(leased, keys, read_spec(leased.spec)) for leased in reply.jobs]
        reserve_tokens = self._context.config.queue.reserve_tokens
        self._oversized |= {job.request_id for job in jobs if not job.leased.fits}
        rooms = [room_of(job, reserve_tokens=reserve_tokens) for job in jobs]
        # Resumed jobs take longer: their channels are read.
        is_timed = not any(job.num_published for job in jobs)
        coming = [(job.request_id, room) for job, room in zip(jobs, rooms, strict=True)]
        self._mailbox.expect(coming, asked_s if is_timed else None)
        for older in self._leases.take(keys, reply.number, jobs):
            self._mailbox.lose([older.request_id])
        now_s, tokens = monotonic_s(), sum(room.kv_tokens for room in rooms)
        self._schedule.on_reply(keys, reply, left=self._mailbox.room(), now_s=now_s, tokens=tokens)
        if reply.due_ms is not None:
            self._maintenance.on_pull_reply(keys, (reply.due_ms - reply.server_ms) / 1000, now_s)
        if jobs:
            self._context.meters.jobs_pulled[keys.queue] += len(jobs)
            self._context.meters.tokens_pulled[keys.queue] += tokens
            self._log_taken(jobs)
            self._prepare(jobs)

    def _log_taken(self, jobs: list[HeldJob]) -> None:
        for job in jobs:
            self._context.log.info(
                "job taken",
                job_id=job.id,
                attempt=job.leased.attempt,
                published=job.num_published,
                resumed_from=job.leased.resumed_from,
            )
