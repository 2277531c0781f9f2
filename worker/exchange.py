"""Between Redis and the loop: one pipelined round trip at a time, on a thread of its own.

A trip carries what the engine said since the last one, and asks for more jobs. While it is under way, or Redis is away,
what the engine says merges; so the loop never waits for Redis while it has work. Every call may be repeated: advances
are compared with what is there, pulls are numbered.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError

from engine.request import Finish, FinishReason, Request, Room, TokenDelta
from producer.contract.calls import (
    AdvanceAnswer,
    Already,
    Broken,
    Call,
    EndCall,
    LeasedJob,
    Ok,
    PullReply,
    Replaced,
    Retried,
    SendFrom,
    advance,
    pull,
    put_result,
)
from producer.contract.keys import QueueKeys
from producer.contract.running import run_many
from producer.contract.states import JobState
from producer.contract.wire import End
from worker.advance import Said, calls_of, news_of, parts_of
from worker.bells import Listener
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Connections
from worker.errors import INVALID_REQUEST, PartDied
from worker.giving_back import GivingBack
from worker.intake import PULL_AT_LEAST_EVERY_S, Pulls, has_room
from worker.leases import HeldJob
from worker.life import StepWatch
from worker.mailbox import NO_ROOM
from worker.results import usage_of
from worker.translate import read_spec, room_of

FLUSH_S = 3.0
"""At the end, what was said is published for at most this long; the rest is generated again by whoever takes over."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One call of a round trip, and what its reply means."""

    keys: QueueKeys
    call: Call[Any]  # replies of different calls travel together
    read: Callable[[Any], None]
    missed: Callable[[], None] = lambda: None
    """Its reply is an error."""


class Exchange:
    """The thread that talks to Redis for the loop. A part: start, quiet, stop."""

    def __init__(self, connections: Connections, bell: Listener, common: Common, watch: StepWatch) -> None:
        self._uplink = connections.uplink
        self._client = connections.uplink.client
        self._bell = bell
        self._common = common
        self._leases = common.leases
        self._mailbox = common.mailbox
        self._absences = common.absences
        self._watch = watch
        self._pulls = Pulls(
            common.partitions,
            common.incarnation,
            reserve_tokens=common.config.queue.reserve_tokens,
            absences=common.absences,
        )
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._closing = threading.Event()
        self._news: dict[str, HeldJob] = {}
        self._oversized: set[str] = set()
        self._giving_back = GivingBack(self._client, common)
        self._unreleased_bytes = 0
        self.is_quiet = False

    # ------------------------------------------------------------ what the loop calls

    def new_requests(self, room: Room, *, wait: bool) -> list[Request]:
        """The requests that are ready, for an engine with this much room; `wait` for something to do when it is idle.

        Raises:
            WorkerBroken: a part that the loop depends on has ended.
        """
        requests = self._mailbox.take_requests(room, wait=wait)
        self._watch.begin()
        return requests

    def cancelled(self) -> list[str]:
        """Requests that should end."""
        return self._mailbox.take_cancelled()

    def lost(self) -> list[str]:
        """Requests whose jobs are no longer ours: nobody wants to hear of them."""
        return self._mailbox.take_lost()

    def publish(self, deltas: Sequence[TokenDelta]) -> None:
        """Let what a step yielded travel; returns at once unless Redis has been away for very long."""
        self._watch.end()
        self._mailbox.put_deltas(deltas)

    def interrupt(self) -> None:
        """Let a loop that waits come back once; from any thread, or a signal handler."""
        self._mailbox.interrupt()

    # ------------------------------------------------------------ life as a part

    def connect(self, prepare: Callable[[list[HeldJob]], None], *, cache_tokens: int) -> None:
        """Say who prepares what is pulled, and how large the engine's KV cache is; before `start`."""
        self._prepare = prepare
        self._cache_tokens = cache_tokens

    def start(self) -> None:
        """Begin to make round trips."""
        self._thread.start()

    def quiet(self) -> None:
        """Pull no more."""
        self.is_quiet = True
        self._mailbox.ring()

    def resume(self) -> None:
        """Pull again."""
        self.is_quiet = False
        self._mailbox.ring()

    def return_unstarted(self) -> None:
        """Hand back the jobs of which the engine has not said anything."""
        self._giving_back.ask_for_unstarted()
        self._mailbox.ring()

    def stop(self) -> None:
        """Publish what was said, for a while, and end the thread."""
        self._closing.set()
        self._absences.stop()
        self._mailbox.ring()
        self._bell.stop()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_drained(self) -> bool:
        """Whether no job is held."""
        return not len(self._leases)

    # ------------------------------------------------------------ what other threads say

    def ended(self, job: HeldJob) -> None:
        """A job ended without the engine."""
        self._mailbox.put_ended(job.request_id)

    def wait_for_model(self, job: HeldJob) -> None:
        """A job that another model began: keep it for a while, then let the others have it."""
        self._mailbox.forget([job.request_id])
        self._giving_back.ask_later(job)

    def flagged(self, job: HeldJob, state: JobState) -> None:
        """The queue wants a job to end with `state`."""
        with self._leases.lock:
            if job.stop is None:
                job.stop = state
                self._common.log.info("job flagged", job_id=job.id, attempt=job.leased.attempt, state=state)
                if job.is_admitted:
                    self._mailbox.cancel([job.request_id])

    def drop(self, job: HeldJob, why: str = "replaced") -> None:
        """A job is no longer ours."""
        if self._leases.remove(job):
            self._mailbox.lose([job.request_id])
            self._common.meters.num_jobs_lost += 1
            self._common.log.warning("job lost", job_id=job.id, attempt=job.leased.attempt, why=why)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._flush()
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop must hear of it
            self._mailbox.fail(PartDied("exchange", error))

    def _turn(self) -> None:
        self._take_what_was_said()
        # First: there may always be something to say.
        self._giving_back.turn()
        legs = [*self._advances(), *self._next_pull()]
        if legs:
            self._make_trip(legs)
        else:
            self._rest()

    def _make_trip(self, legs: list[Leg]) -> bool:
        """One round trip; False if it was not answered in full. Whoever did not answer is left out of the next ones."""
        beat_every_s, sent_s = self._common.config.beat.every_s, monotonic_s()
        replies = self._send(legs)
        if monotonic_s() - sent_s > beat_every_s:
            self._common.health.stalled()
        problems = _read_all(legs, replies)
        for keys, problem in problems.items():
            self._absences.failed(keys, problem)
        if answered := {leg.keys for leg in legs} - problems.keys():
            self._answered(answered)
        return not problems

    def _send(self, legs: list[Leg]) -> list[Any]:  # as in `Leg`
        """The reply to each; where nothing came back, the error is every reply."""
        try:
            return run_many(self._client, [leg.call for leg in legs])
        except (RedisError, OSError) as error:
            return [error] * len(legs)

    def _answered(self, partitions: Iterable[QueueKeys]) -> None:
        for keys in partitions:
            self._absences.answered(keys)
        self._common.meters.num_round_trips += 1
        # Of one that is away, too: what its jobs said is kept with them until they end, heard or not.
        self._mailbox.release(self._unreleased_bytes)
        self._unreleased_bytes = 0

    def _rest(self) -> None:
        """Nothing to say and nothing to ask: sleep until the loop, the bell or the clock has something."""
        if not self._may_pull or not has_room(self._mailbox.room()):
            self._mailbox.wait(PULL_AT_LEAST_EVERY_S)
            return
        self._bell.listen(self._pulls.bells)
        due_s = self._pulls.next_due_s() - monotonic_s()
        self._mailbox.wait(min(max(due_s, 0.001), PULL_AT_LEAST_EVERY_S))
        for keys, bell in self._bell.rung():
            self._pulls.rang(keys, bell)

    def _flush(self) -> None:
        """Publish the last words, checkpoints or not."""
        deadline_s = monotonic_s() + FLUSH_S
        while monotonic_s() < deadline_s:
            self._take_what_was_said()
            self._news.update({job.request_id: job for job in self._leases.all() if job.has_news})
            legs = list(self._advances())
            if not legs:
                return
            if not self._make_trip(legs):
                threading.Event().wait(0.05)

    # ------------------------------------------------------------ what the engine said

    def _take_what_was_said(self) -> None:
        for request_id in self._mailbox.take_ended():
            if (job := self._leases.of_request(request_id)) is not None:
                self._news[request_id] = job
        steps, num_bytes = self._mailbox.take_steps()
        self._unreleased_bytes += num_bytes
        for step in steps:
            now_ms = self._common.clock.ms(step.at_s)
            for delta in step.deltas:
                self._take(delta, step.at_s, now_ms)

    def _take(self, delta: TokenDelta, now_s: float, now_ms: int) -> None:
        job = self._leases.of_request(delta.request_id)
        if job is None or job.is_returning:
            return
        choice = job.choices[delta.choice]
        choice.extend(delta, now_s=now_s, now_ms=now_ms)
        if delta.token_ids or delta.finish is not None:
            self._measure(job, delta, now_ms)
        if delta.finish is not None:
            choice.finish(self._end(job, delta.finish), now_ms=now_ms)
        assert job.spec is not None, "a job whose spec cannot be read never reaches the engine"
        if job.spec.stream or choice.is_checkpoint(now_s):
            choice.sent_s = now_s
            self._news[job.request_id] = job

    def _measure(self, job: HeldJob, delta: TokenDelta, now_ms: int) -> None:
        job.has_begun = True
        measures, stats = job.measures, delta.stats
        if delta.token_ids and measures.first_token_ms is None:
            measures.first_token_ms = now_ms
        if measures.first_scheduled_ms is None and stats.first_scheduled_s is not None:
            measures.first_scheduled_ms = self._common.clock.ms(stats.first_scheduled_s)
        if delta.finish is not None:
            measures.preemptions += stats.num_preemptions
            measures.cached_tokens = max(measures.cached_tokens, stats.num_cached_tokens)

    def _end(self, job: HeldJob, finish: Finish) -> End:
        usage = usage_of(job.measures, job.choices)
        match finish.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return End(state=JobState.DONE, finish_reason=finish.reason.value, usage=usage)
            case FinishReason.ABORTED:
                return End(state=job.stop or JobState.CANCELLED, usage=usage)
            case FinishReason.ERROR:
                code = INVALID_REQUEST if finish.is_rejection else finish.failure.value
                return End(state=JobState.FAILED, error=finish.error, error_code=code, usage=usage)

    # ------------------------------------------------------------ what is said to the queue

    def _advances(self) -> Iterable[Leg]:
        by_partition: dict[QueueKeys, list[HeldJob]] = {}
        for job in self._news.values():
            by_partition.setdefault(job.keys, []).append(job)
        for keys, jobs in by_partition.items():
            if keys in self._absences:
                continue
            said = [one for job in jobs for one in news_of(job, self._common.origin)]
            yield from self._large_results(keys, said)
            for call in calls_of(said):
                progress = [one.progress for one in call]
                yield Leg(keys, advance(keys, self._common.incarnation, progress), _reader(self._hear_advance, call))

    def _large_results(self, keys: QueueKeys, said: list[Said]) -> Iterable[Leg]:
        """Results too large for an end: written in parts, fenced as the end is, in the same trip before it."""
        large = {one.job.request_id: one for one in said if one.large_result is not None}
        for one in large.values():
            for offset, part in parts_of(one.large_result or b""):
                lease = (self._common.incarnation, one.job.id, one.job.leased.epoch)
                yield Leg(keys, put_result(keys, *lease, offset=offset, part=part), _ignore)

    def _hear_advance(self, said: list[Said], answers: list[AdvanceAnswer]) -> None:
        for one, answer in zip(said, answers, strict=True):
            self._hear_answer(one, answer)

    def _hear_answer(self, said: Said, answer: AdvanceAnswer) -> None:
        job = said.job
        match answer:
            case Ok(stop) | Already(stop):
                self._acknowledge(said)
                if stop is not None and not job.is_finished:
                    self.flagged(job, stop)
            case SendFrom(offset):
                self._send_from(job, said.choice, offset)
            case Replaced():
                self._common.meters.num_refused_writes += 1
                self._forget(job, "replaced")
            case Retried():
                self._go_back(said)
            case Broken(reason):
                self._forget(job, reason)

    def _acknowledge(self, said: Said) -> None:
        job, progress = said.job, said.progress
        choice = job.choices[said.choice]
        choice.acknowledge(progress.start + progress.num_tokens, has_end=progress.end is not None)
        job.is_announced = job.is_announced or said.announces
        is_over = progress.end is not None and progress.end.retry_in_ms is not None
        if job.is_finished or is_over:
            self._finish(job, progress.end)
        elif not job.has_news:
            self._news.pop(job.request_id, None)

    def _send_from(self, job: HeldJob, index: int, offset: int) -> None:
        choice = job.choices[index]
        if offset < choice.published:
            # Redis lost its last second: what else it acknowledged of this job may be gone too.
            self._common.log.warning("redis lost tokens", job_id=job.id, had=choice.published, has=offset)
            for other in job.choices:
                other.has_end = False
        choice.acknowledge(offset, has_end=False)

    def _forget(self, job: HeldJob, why: str) -> None:
        self._news.pop(job.request_id, None)
        self.drop(job, why)

    def _finish(self, job: HeldJob, end: EndCall | None) -> None:
        """The queue has acknowledged every end, or one that ends the others too: the job is nobody's."""
        if self._let_go(job):
            self._report(job, end)

    def _go_back(self, said: Said) -> None:
        """The job failed here, and is tried again when its time comes, here or elsewhere."""
        job, end = said.job, said.progress.end
        assert end is not None, "only an end is answered so"
        if self._let_go(job):
            self._common.meters.num_jobs_retried += 1
            self._common.log.warning(
                "job goes back to be tried again",
                job_id=job.id,
                attempt=job.leased.attempt,
                failures=job.leased.failures + 1,
                error_code=end.error_code,
                error=end.error,
                retry_in_ms=end.retry_in_ms,
            )

    def _let_go(self, job: HeldJob) -> bool:
        self._news.pop(job.request_id, None)
        was_held = self._leases.remove(job)
        if was_held and job.is_finished:
            self._mailbox.forget([job.request_id])
        elif was_held:
            # Its other choices may still run.
            self._mailbox.lose([job.request_id])
        if self.is_quiet and self.is_drained:
            self._mailbox.interrupt()
        return was_held

    def _report(self, job: HeldJob, end: EndCall | None) -> None:
        now_ms = self._common.clock.ms(monotonic_s())
        first_ms = job.measures.first_token_ms
        ttft_s = (first_ms - job.leased.submitted_ms) / 1000 if first_ms is not None else None
        e2e_s = (now_ms - job.leased.submitted_ms) / 1000
        state = end.state if end else JobState.DONE
        gaps = (gap for choice in job.choices for gap in choice.gaps_ms)
        self._common.meters.ended(state, ttft_s=ttft_s, e2e_s=e2e_s, gaps_ms=gaps)
        self._common.log.info(
            "job ended",
            job_id=job.id,
            attempt=job.leased.attempt,
            state=state.value,
            finish_reason=end.reason if end else None,
            output_tokens=sum(len(choice.token_ids) for choice in job.choices),
            ttft_s=ttft_s,
            e2e_s=e2e_s,
        )

    # ------------------------------------------------------------ what is asked of the queue

    @property
    def _may_pull(self) -> bool:
        """Not while the loop hangs: the beat is silent, and what is held goes to others."""
        return not self.is_quiet and not self._watch.is_overdue

    def _next_pull(self) -> Iterable[Leg]:
        if self._closing.is_set() or self._watch.is_overdue:
            return
        now_s, beat = monotonic_s(), self._common.config.beat
        # Whoever was cut off with us, or stood still with us, could not beat either: for one life nobody is dead.
        undisturbed_s = now_s - max(self._uplink.since_s, self._common.health.stalled_s)
        asked = self._pulls.next(
            NO_ROOM if self.is_quiet else self._mailbox.room(),
            now_s=now_s,
            cache_tokens=self._cache_tokens,
            is_empty=self.is_drained,
            may_reclaim=undisturbed_s > beat.life_s,
            holds_oversized=self._holds_oversized(),
        )
        if asked is not None:
            keys, request = asked
            request = replace(request, reclaim_until_ms=self._common.clock.ms(now_s + beat.every_s))
            yield Leg(keys, pull(keys, request), _reader(self._hear_pull, keys), lambda: self._pulls.missed(keys))

    def _holds_oversized(self) -> bool:
        """Whether the job that may wait here for room has not reached the engine, which closes the room itself."""
        self._oversized &= {job_id for job_id in self._oversized if self._mailbox.is_coming(job_id)}
        return bool(self._oversized)

    def _hear_pull(self, keys: QueueKeys, reply: PullReply) -> None:
        jobs = [_held(leased, keys) for leased in reply.jobs]
        reserve_tokens = self._common.config.queue.reserve_tokens
        self._oversized |= {job.request_id for job in jobs if not job.leased.fits}
        self._mailbox.expect([(job.request_id, room_of(job, reserve_tokens=reserve_tokens)) for job in jobs])
        for older in self._leases.take(keys, reply.number, jobs):
            self._news.pop(older.request_id, None)
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


def _read_all(legs: Sequence[Leg], replies: Sequence[Any]) -> dict[QueueKeys, RedisError | OSError]:  # as in `Leg`
    """Let each reply be heard; the first error of each partition that had one."""
    problems: dict[QueueKeys, RedisError | OSError] = {}
    for leg, reply in zip(legs, replies, strict=True):
        if isinstance(reply, (RedisError, OSError)):
            problems.setdefault(leg.keys, reply)
            leg.missed()
        elif isinstance(reply, BaseException):
            raise reply
        else:
            leg.read(reply)
    return problems


def _ignore(_answer: object) -> None:
    """Whatever was wrong with a part, the end that names the whole hears it."""


def _reader(read: Callable[[Any, Any], None], about: object) -> Callable[[Any], None]:  # as in `Leg`
    def heard(reply: Any) -> None:  # noqa: ANN401  # as in `Leg`
        read(about, reply)

    return heard
