"""A worker shows that it lives: the beat, a thread that dies with the process and falls silent when the loop hangs.

Each beat lists the jobs held and hears which of them are flagged or lost; the last one is a farewell.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from producer.contract.calls import Beat, BeatReply, Returned, beat, give_back
from producer.contract.keys import QueueKeys
from producer.contract.limits import MAX_BITE
from producer.contract.running import run, run_many
from producer.contract.states import JobState
from worker.clock import monotonic_s
from worker.common import Common
from worker.config import BeatConfig
from worker.connections import Client
from worker.errors import ExitCode, NotReady, PartDied
from worker.health import Patience
from worker.leases import HeldJob, HeldList, Leases

SLOWER_BY = 5.0
"""A step may take this many times the slowest before."""

_FORGET = 0.99
"""How much of the slowest step is remembered after each further step."""


class StepWatch:
    """The loop's stated deadline of its present step. Written by the loop, read by the beat."""

    def __init__(self, min_deadline_s: float, clock: Callable[[], float] = monotonic_s) -> None:
        self._min_deadline_s = min_deadline_s
        self._clock = clock
        self._slowest_s = 0.0
        self.busy_s = 0.0
        """Seconds spent in steps, in all."""

        self._began_s = 0.0
        self._deadline_s = float("inf")

    def begin(self) -> None:
        """A step begins: state its deadline."""
        self._began_s = self._clock()
        self._deadline_s = self._began_s + max(self._min_deadline_s, SLOWER_BY * self._slowest_s)

    def end(self) -> None:
        """The step is over."""
        self._deadline_s = float("inf")
        took_s = self._clock() - self._began_s
        self.busy_s += took_s
        self._slowest_s = max(took_s, self._slowest_s * _FORGET)

    @property
    def is_overdue(self) -> bool:
        """Whether the loop has not come back in time."""
        return self._clock() > self._deadline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """What the beat tells the rest of the worker."""

    flagged: Callable[[HeldJob, JobState], None]
    lost: Callable[[HeldJob], None]
    died: Callable[[PartDied], None]


class Life:
    """The beat thread. A part: start, quiet, stop."""

    def __init__(
        self, client: Client, incarnation: str, partitions: tuple[QueueKeys, ...], config: BeatConfig, leases: Leases
    ) -> None:
        self._client = client
        self._incarnation = incarnation
        self._partitions = partitions
        self._config = config
        self._leases = leases
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._patience = Patience()
        self._silent_ticks = 0
        self._last_s = float("-inf")
        self._has_broken = False
        self.watch = StepWatch(config.step_deadline_s)

    def connect(self, hearing: Hearing, about: Callable[[], Mapping[str, str]], common: Common) -> None:
        """Say who listens; before `start`."""
        self._hearing, self._about = hearing, about
        self._clock, self._health, self._log = common.clock, common.health, common.log
        self._patience_s = common.config.redis.patience_s

    @property
    def age_s(self) -> float:
        """Seconds since the last beat that was answered."""
        return monotonic_s() - self._last_s

    def start(self) -> None:
        """Beat once, so that the incarnation lives before it pulls, then in the background.

        Raises:
            NotReady: the first beat was not answered in time.
        """
        deadline_s = monotonic_s() + self._patience_s
        while not self._try_beat():
            if monotonic_s() > deadline_s:
                raise NotReady(f"redis did not answer the first beat within {self._patience_s:g} s")
        self._thread.start()

    def quiet(self) -> None:
        """Nothing to do: a quiet worker lives."""

    def broke(self) -> None:
        """The worker cannot go on: what it hands back may be why, and is told so to the queue."""
        self._has_broken = True

    def stop(self) -> None:
        """Stop beating, hand back what is still held, and say farewell."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._farewell()

    def _run(self) -> None:
        try:
            is_answered = True
            # A beat that was not answered has waited long enough: the life runs out.
            while not self._closing.wait(self._config.every_s if is_answered else 0):
                is_answered = self._tick()
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop must hear of it
            self._hearing.died(PartDied("beat", error))

    def _tick(self) -> bool:
        """Beat, unless the loop hangs; False if a beat was not answered."""
        if self.watch.is_overdue:
            self._fall_silent()
            return True
        if self._silent_ticks:
            self._log.info("loop goes on", silent_s=round(self.age_s, 3))
        self._silent_ticks = 0
        return self._try_beat()

    def _try_beat(self) -> bool:
        try:
            self._beat()
        except (RedisError, OSError) as error:
            self._health.failed("beat", error)
            self._closing.wait(min(self._patience.after(error), self._config.every_s))
            return False
        self._health.answered("beat")
        self._patience.reset()
        return True

    def _fall_silent(self) -> None:
        """A hung loop is dead too: its jobs go to others. Counted in ticks: a process that was stopped has not hung."""
        self._silent_ticks += 1
        if self._silent_ticks == 1:
            self._log.error("step outlasted its deadline", deadline_s=self._config.step_deadline_s)
        if self._silent_ticks * self._config.every_s > self._config.step_deadline_s + self._config.life_s:
            self._log.critical("loop hangs: ending the process")
            # Nothing else ends a process whose main thread does not come back from the device.
            os._exit(ExitCode.BROKEN)

    def _beat(self) -> None:
        lists = [self._leases.held(keys) for keys in self._partitions]
        calls = [beat(keys, self._say(held)) for keys, held in zip(self._partitions, lists, strict=True)]
        sent_s = monotonic_s()
        replies = run_many(self._client, calls)
        received_s = monotonic_s()
        if received_s - sent_s > self._config.every_s:
            self._health.stalled()
        problem = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        for held, reply in zip(lists, replies, strict=True):
            if isinstance(reply, BaseException):
                continue  # one shard's word does not wait for another's
            self._clock.read(reply.server_ms, sent_s=sent_s, received_s=received_s)
            self._hear(held, reply)
        if problem is not None:
            raise problem
        self._last_s = received_s

    def _say(self, held: HeldList) -> Beat:
        return Beat(
            incarnation=self._incarnation,
            held=tuple(held.requests),
            processed_pull=held.processed_pull,
            life_ms=int(self._config.life_s * 1000),
            about=self._about(),
        )

    def _hear(self, held: HeldList, reply: BeatReply) -> None:
        if reply.was_dead:
            self._log.warning("life had run out", held=len(held.requests), lost=len(reply.lost))
        with self._leases.lock:
            for job_id, state in reply.stops:
                if (job := self._same_lease(held, job_id)) is not None:
                    self._hearing.flagged(job, state)
            for job_id in reply.lost:
                if (job := self._same_lease(held, job_id)) is not None:
                    self._hearing.lost(job)

    def _same_lease(self, held: HeldList, job_id: str) -> HeldJob | None:
        """The held job, unless it was leased anew since the beat was sent: the reply is about the older lease."""
        job = self._leases.of_job(job_id)  # pyright: ignore[reportArgumentType]  # an id that the queue repeated
        return job if job is not None and held.requests.get(job.id) == job.request_id else None

    def _farewell(self) -> None:
        for keys in self._partitions:
            mine = [job for job in self._leases.all() if job.keys == keys]
            try:
                farewell = Farewell(is_broken=self._has_broken)
                hand_back(self._client, keys, self._incarnation, self._leases, mine, farewell)
            except (RedisError, OSError) as error:
                self._log.warning("farewell not heard", error=str(error), partition=keys.partition, held=len(mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """The incarnation ends with this."""

    is_broken: bool
    """What is handed back may be why it cannot go on."""


def hand_back(
    client: Client,
    keys: QueueKeys,
    incarnation: str,
    leases: Leases,
    jobs: Sequence[HeldJob],
    farewell: Farewell | None = None,
) -> None:
    """Return held jobs of one partition to the queue, in bites; a farewell ends the incarnation with the last one.

    Raises:
        RedisError: the queue did not answer; what was not returned is reclaimed by others.
    """
    bites = [jobs[at : at + MAX_BITE] for at in range(0, len(jobs), MAX_BITE)] or ([[]] if farewell else [])
    for number, bite in enumerate(bites, start=1):
        returned = [Returned(job_id=job.id, epoch=job.leased.epoch) for job in bite]
        is_last = farewell is not None and number == len(bites)
        is_broken = farewell is not None and farewell.is_broken
        run(client, give_back(keys, incarnation, returned, farewell=is_last, broken=is_broken))
        for job in bite:
            leases.remove(job)
