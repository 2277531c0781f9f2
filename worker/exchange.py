"""Between Redis and the loop: two threads, each with one pipelined round trip at a time.

This one tells the queue what the engine said since the last trip; `pulling` asks it for more jobs. While a trip is
under way, or Redis is away, what the engine says merges; so the loop never waits for Redis while it has work. First
tokens and ends travel at once, the tokens between them in rounds (docs/decisions/tokens-travel-in-rounds.md). Every
call may be repeated: advances are compared with what is there, pulls are numbered.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.request import Finish, FinishReason, Request, Room, TokenDelta
from producer.contract.calls import (
    AdvanceAnswer,
    Already,
    Broken,
    EndCall,
    Ok,
    Replaced,
    Retried,
    SendFrom,
    advance,
    put_result,
)
from producer.contract.keys import QueueKeys
from producer.contract.states import JobState
from producer.contract.wire import End
from worker.advance import Said, calls_of, news_of, parts_of
from worker.bells import Listener
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Connections
from worker.errors import INVALID_REQUEST, PartDied
from worker.leases import HeldJob
from worker.life import StepWatch
from worker.mailbox import is_urgent
from worker.pulling import Pulling
from worker.results import usage_of
from worker.trips import Leg, Trips

REST_S = 0.5
"""With nothing to say it looks again after this long, whoever should have woken it."""

FLUSH_S = 3.0
"""At the end, what was said is published for at most this long; the rest is generated again by whoever takes over."""


class Exchange:
    """What talks to Redis for the loop. A part: start, quiet, stop."""

    def __init__(self, connections: Connections, bell: Listener, common: Common, watch: StepWatch) -> None:
        self._common = common
        self._leases = common.leases
        self._mailbox = common.mailbox
        self._absences = common.absences
        self._watch = watch
        self._trips = Trips(connections.uplink.client, common)
        self._pulling = Pulling(connections.uplink, bell, common, watch)
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._closing = threading.Event()
        self._news: dict[str, HeldJob] = {}
        self._next_round: dict[str, HeldJob] = {}
        """Jobs that said something which waits for the next round."""

        self._round_s = 0.0
        """When that begins, on the monotonic clock."""

        self._unreleased_bytes = 0

    # ------------------------------------------------------------ what the loop calls

    def new_requests(self, room: Room, *, wait_s: float) -> list[Request]:
        """The requests that are ready, for an engine with this much room; wait up to `wait_s` for something to do.

        Raises:
            WorkerBroken: a part that the loop depends on has ended.
        """
        requests = self._mailbox.take_requests(room, wait_s=wait_s)
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
        self._pulling.connect(prepare, cache_tokens=cache_tokens)

    def start(self) -> None:
        """Begin to make round trips."""
        self._thread.start()
        self._pulling.start()

    def quiet(self) -> None:
        """Pull no more."""
        self._pulling.quiet()

    def wait_for_pull(self) -> None:
        """Wait until the pull that is under way, if one is, has brought what it brings."""
        self._pulling.wait_for_pull()

    def resume(self) -> None:
        """Pull again."""
        self._pulling.resume()

    def return_unstarted(self) -> None:
        """Hand back the jobs of which the engine has not said anything."""
        self._pulling.giving_back.ask_for_unstarted()
        self._mailbox.ring()

    def stop(self) -> None:
        """Publish what was said, for a while, and end both threads."""
        self._absences.stop()
        self._pulling.stop()
        self._closing.set()
        self._mailbox.ring()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_quiet(self) -> bool:
        """Whether it pulls no more."""
        return self._pulling.is_quiet

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
        self._pulling.giving_back.ask_later(job)
        self._mailbox.ring()

    def flagged(self, job: HeldJob, state: JobState) -> None:
        """The queue wants a job to end with `state`."""
        with self._leases.lock:
            if job.stop is None:
                job.stop = state
                self._common.log.info("job flagged", job_id=job.id, attempt=job.leased.attempt, state=state)
                if job.is_admitted:
                    self._mailbox.cancel([job.request_id])

    def drop(self, job: HeldJob) -> None:
        """A job is no longer ours."""
        self._lose(job, "replaced")

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
        until_round_s = self._begin_round()
        legs = list(self._advances())
        if legs:
            self._make_trip(legs)
            return
        if not self._news:
            self._release()  # of jobs that are gone, or kept with jobs that wait for their round or checkpoint
        if until_round_s > 0:
            self._mailbox.wait(until_round_s, for_urgent=True)
        else:
            self._mailbox.wait(REST_S)

    def _begin_round(self) -> float:
        """Let all tokens travel if it is time for it; else, the seconds until then."""
        now_s = monotonic_s()
        if now_s < self._round_s:
            return self._round_s - now_s
        if self._next_round:
            self._news.update((name, job) for name, job in self._next_round.items() if job.has_news)
            self._next_round.clear()
            self._round_s = now_s + self._common.config.redis.stream_interval_s
        return 0.0

    def _make_trip(self, legs: list[Leg]) -> bool:
        """One round trip; False if it was not answered in full."""
        trip = self._trips.make(legs)
        if trip.has_answer:
            # Of one that is away, too: what its jobs said is kept with them until they end, heard or not.
            self._release()
        return trip.is_whole

    def _release(self) -> None:
        self._mailbox.release(self._unreleased_bytes)
        self._unreleased_bytes = 0

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
        is_first = not job.has_begun or job.measures.first_token_ms is None
        if delta.finish is not None or (is_first and delta.token_ids):
            self._measure(job, delta, now_ms)
        if delta.finish is not None:
            choice.finish(self._end(job, delta.finish), now_ms=now_ms)
        assert job.spec is not None, "a job whose spec cannot be read never reaches the engine"
        if job.spec.stream or choice.is_checkpoint(now_s):
            choice.sent_s = now_s
            (self._news if is_urgent(delta) else self._next_round)[job.request_id] = job

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
        for job in list(self._news.values()):
            if self._leases.of_request(job.request_id) is not job or job.is_returning:
                # A pull has brought it again: the newer request says what there is to say. Or it goes to another.
                del self._news[job.request_id]
                continue
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
                # Not of one that we gave back while this was on its way.
                self._common.meters.num_refused_writes += self._forget(job, "replaced")
            case Retried():
                self._go_back(said)
            case Broken(reason):
                self._forget(job, reason)

    def _acknowledge(self, said: Said) -> None:
        job, progress = said.job, said.progress
        choice = job.choices[said.choice]
        choice.acknowledge(progress.start + progress.num_tokens, has_end=progress.end is not None)
        job.is_announced = job.is_announced or said.announces
        end = progress.end
        if end is not None and (end.retry_in_ms is not None or job.is_finished):
            self._finish(job, end)
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

    def _lose(self, job: HeldJob, why: str) -> bool:
        """A job is no longer ours; whether it was until now."""
        was_held = self._leases.remove(job)
        if was_held:
            self._mailbox.lose([job.request_id])
            self._common.meters.num_jobs_lost += 1
            self._common.log.warning("job lost", job_id=job.id, attempt=job.leased.attempt, why=why)
        return was_held

    def _forget(self, job: HeldJob, why: str) -> bool:
        self._news.pop(job.request_id, None)
        return self._lose(job, why)

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
        if self.is_drained:
            self._mailbox.ring()  # only an empty worker is given suspects
            if self.is_quiet:
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


def _ignore(_answer: object) -> None:
    """Whatever was wrong with a part, the end that names the whole hears it."""


def _reader(read: Callable[[Any, Any], None], about: object) -> Callable[[Any], None]:  # as in `Leg`
    def heard(reply: Any) -> None:  # noqa: ANN401  # as in `Leg`
        read(about, reply)

    return heard
