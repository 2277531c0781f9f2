"""The thread that asks the queue for jobs, beside the one that tells it what became of them.

Each has a connection of its own: while the server looks for jobs the worker reads what it answered of others, and the
other way round. Nothing orders the two but the leases: what is told of a job carries its epoch and its offset, and once
a pull has brought a job again nothing more is told of the older request. What must keep its place among the pulls is
done here too: giving back what has not begun must not miss what a pull under way is about to bring.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from producer.contract.calls import LeasedJob, PullReply, pull
from producer.contract.keys import QueueKeys
from worker.bells import Listener
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Uplink
from worker.errors import PartDied
from worker.giving_back import GivingBack
from worker.intake import PULL_AT_LEAST_EVERY_S, Pulls, has_room
from worker.leases import HeldJob
from worker.life import StepWatch
from worker.mailbox import NO_ROOM
from worker.translate import read_spec, room_of
from worker.trips import Leg, Trips


class Pulling:
    """Takes jobs while there is room for them. A part of the exchange: start, stop."""

    def __init__(self, uplink: Uplink, bell: Listener, common: Common, watch: StepWatch) -> None:
        self._uplink = uplink
        self._bell = bell
        self._common = common
        self._leases = common.leases
        self._mailbox = common.mailbox
        self._watch = watch
        self._trips = Trips(uplink.puller, common)
        self._pulls = Pulls(
            common.partitions,
            common.incarnation,
            reserve_tokens=common.config.queue.reserve_tokens,
            absences=common.absences,
        )
        self._oversized: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="pulling", daemon=True)
        self._closing = threading.Event()
        self._turning = threading.Lock()
        self.giving_back = GivingBack(uplink.puller, common)
        self._quiet = common.quiet

    def connect(self, prepare: Callable[[list[HeldJob]], None], *, cache_tokens: int) -> None:
        """Say who prepares what is pulled, and how large the engine's KV cache is; before `start`."""
        self._prepare = prepare
        self._cache_tokens = cache_tokens

    def quiet(self) -> None:
        """Pull no more."""
        self._quiet.is_asked = True
        self._mailbox.ring()

    def wait_for_pull(self) -> None:
        """Wait until the pull that is under way, if one is, has brought what it brings."""
        with self._turning:
            pass

    def resume(self) -> None:
        """Pull again."""
        self._quiet.is_asked = False
        self._mailbox.ring()

    @property
    def is_quiet(self) -> bool:
        """Whether it pulls no more."""
        return self._quiet.is_asked

    def start(self) -> None:
        """Begin to pull."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it asked for last has come."""
        self._closing.set()
        self._mailbox.ring()
        self._bell.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop must hear of it
            self._mailbox.fail(PartDied("pulling", error))

    def _turn(self) -> None:
        with self._turning:
            self.giving_back.turn()
            legs = list(self._next_pull())
            if legs:
                self._trips.make(legs)
        if not legs:
            self._rest()

    def _rest(self) -> None:
        """Nothing to ask: sleep until the engine has room, or the bell or the clock has something."""
        due_s = self.giving_back.next_due_s()
        may_pull = not self.is_quiet and not self._watch.is_overdue and has_room(self._mailbox.room())
        if may_pull:
            self._bell.listen(self._pulls.bells)
            due_s = min(due_s, self._pulls.next_due_s())
        self._mailbox.wait_to_pull(min(max(due_s - monotonic_s(), 0.001), PULL_AT_LEAST_EVERY_S))
        for keys, bell in self._bell.rung():
            self._pulls.rang(keys, bell)

    def _next_pull(self) -> Iterable[Leg]:
        # Not while the loop hangs: the beat is silent, and what is held goes to others.
        if self._closing.is_set() or self._watch.is_overdue:
            return
        now_s, beat = monotonic_s(), self._common.config.beat
        # Whoever was cut off with us, or stood still with us, could not beat either: for one life nobody is dead.
        undisturbed_s = now_s - max(self._uplink.since_s, self._common.health.stalled_s)
        asked = self._pulls.next(
            NO_ROOM if self.is_quiet else self._mailbox.room(),
            now_s=now_s,
            cache_tokens=self._cache_tokens,
            is_empty=not len(self._leases),
            may_reclaim=undisturbed_s > beat.life_s,
            holds_oversized=self._holds_oversized(),
        )
        if asked is not None:
            keys, request = asked
            request = replace(request, reclaim_until_ms=self._common.clock.ms(now_s + beat.every_s))
            yield Leg(
                keys, pull(keys, request), lambda reply: self._hear(keys, reply), lambda: self._pulls.missed(keys)
            )

    def _holds_oversized(self) -> bool:
        """Whether the job that may wait here for room has not reached the engine, which closes the room itself."""
        self._oversized &= {job_id for job_id in self._oversized if self._mailbox.is_coming(job_id)}
        return bool(self._oversized)

    def _hear(self, keys: QueueKeys, reply: PullReply) -> None:
        jobs = [_held(leased, keys) for leased in reply.jobs]
        reserve_tokens = self._common.config.queue.reserve_tokens
        self._oversized |= {job.request_id for job in jobs if not job.leased.fits}
        self._mailbox.expect([(job.request_id, room_of(job, reserve_tokens=reserve_tokens)) for job in jobs])
        for older in self._leases.take(keys, reply.number, jobs):
            self._mailbox.lose([older.request_id])
        self._pulls.heard(keys, reply, left=self._mailbox.room(), now_s=monotonic_s())
        if jobs:
            self._common.meters.num_jobs_pulled += len(jobs)
            self._log_taken(jobs)
            self._prepare(jobs)

    def _log_taken(self, jobs: list[HeldJob]) -> None:
        for job in jobs:
            self._common.log.info(
                "job taken",
                job_id=job.id,
                attempt=job.leased.attempt,
                published=job.num_published,
                resumed_from=job.leased.resumed_from,
            )


def _held(leased: LeasedJob, keys: QueueKeys) -> HeldJob:
    job = HeldJob(leased=leased, keys=keys, spec=read_spec(leased.spec))
    job.measures.first_scheduled_ms = leased.first_scheduled_ms
    job.measures.first_token_ms = leased.first_token_ms
    job.measures.prompt_tokens = leased.prompt_tokens
    return job
