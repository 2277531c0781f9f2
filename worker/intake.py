"""What comes in: when to pull and for how much, and the thread that makes requests of what was pulled.

A job is prepared off the loop and off the exchange: its channels are read if it is resumed, its prompt is translated.
"""

import queue
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from engine.request import Request, Room
from producer.contract.calls import PullReply, PullRequest
from producer.contract.keys import QueueKeys
from producer.contract.states import JobState
from producer.contract.wire import End
from worker.channel import read_channel
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Client
from worker.errors import JobRejected, PartDied
from worker.health import Patience, is_away
from worker.leases import HeldJob
from worker.retries import rejection_of
from worker.translate import Translator

PULL_AT_LEAST_EVERY_S = 0.5
"""Without a bell: the dead ring none, and their jobs are found by pulling."""

FLUSH_AFTER_S = 0.001
"""Requests that are ready do not wait for one that takes longer than this to prepare."""


@dataclass(slots=True, eq=False)
class _Turn:
    """Where pulling from one partition stands. Changes with each reply."""

    keys: QueueKeys
    number: int = 1
    bell: str = "0-0"
    has_more: bool = True
    has_rung: bool = False
    due_s: float = 0.0
    left: Room | None = None
    """Room that the last pull left unused; more room than this is a reason to pull again."""

    has_missed: bool = False
    """The last pull was not answered: what it took, if it took anything, is told to whoever repeats its number."""

    is_draining: bool = False
    """A job that may only run apart waits for this worker to be empty."""

    def is_due(self, room: Room, now_s: float, *, is_empty: bool) -> bool:
        """Whether a pull could bring something."""
        if self.is_draining and not is_empty:
            return False
        return self.has_more or self.has_rung or now_s >= self.due_s or self._has_grown(room)

    def _has_grown(self, room: Room) -> bool:
        left = self.left
        if left is None:
            return False
        grown = room.sequences > left.sequences or room.kv_tokens > left.kv_tokens
        grown = grown or room.prefill_tokens > left.prefill_tokens
        if not grown:
            self.left = room
        return grown


class Pulls:
    """Decides when to pull, from which partition, for how much. Only the pulling thread calls it."""

    def __init__(
        self,
        partitions: Iterable[QueueKeys],
        incarnation: str,
        *,
        reserve_tokens: int,
        absences: Container[QueueKeys] = (),
    ) -> None:
        self._turns = [_Turn(keys) for keys in partitions]
        self._incarnation = incarnation
        self._reserve_tokens = reserve_tokens
        self._absences = absences

    @property
    def bells(self) -> dict[QueueKeys, str]:
        """The bell's last id of each partition, as pulls returned it: nothing rung after it has been looked at."""
        return {turn.keys: turn.bell for turn in self._turns}

    def next_due_s(self) -> float:
        """When the next pull is due if nothing happens before; infinity if all are away."""
        return min((turn.due_s for turn in self._there()), default=float("inf"))

    def next(
        self, room: Room, *, now_s: float, cache_tokens: int, is_empty: bool, may_reclaim: bool, holds_oversized: bool
    ) -> tuple[QueueKeys, PullRequest] | None:
        """The pull to make now, if any; partitions take turns. One that was missed is repeated even without room."""
        turn = self._next_turn(room, now_s, is_empty=is_empty)
        if turn is None:
            return None
        return turn.keys, PullRequest(
            incarnation=self._incarnation,
            number=turn.number,
            kv_tokens=room.kv_tokens,
            prefill_tokens=room.prefill_tokens,
            sequences=room.sequences,
            cache_tokens=cache_tokens,
            is_empty=is_empty and has_room(room),
            holds_oversized=holds_oversized,
            may_reclaim=may_reclaim,
            reserve_tokens=self._reserve_tokens,
        )

    def _next_turn(self, room: Room, now_s: float, *, is_empty: bool) -> _Turn | None:
        there = self._there()
        due = (one for one in there if one.is_due(room, now_s, is_empty=is_empty) and has_room(room))
        missed = (one for one in there if one.has_missed)
        return next(due, None) or next(missed, None)

    def _there(self) -> list[_Turn]:
        return [turn for turn in self._turns if turn.keys not in self._absences]

    def heard(self, keys: QueueKeys, reply: PullReply, *, left: Room, now_s: float) -> None:
        """A pull was answered: the next one has the next number, and another partition goes first."""
        turn = self._turn_of(keys)
        turn.number = reply.number + 1
        turn.bell = reply.bell
        turn.has_more = reply.has_more and not reply.is_paused
        turn.has_rung = turn.has_missed = False
        turn.is_draining = reply.drain_for_suspects
        turn.left = left
        until_then_s = (reply.look_again_ms - reply.server_ms) / 1000 if reply.look_again_ms is not None else 1e9
        turn.due_s = now_s + max(0.001, min(PULL_AT_LEAST_EVERY_S, until_then_s))
        self._turns.remove(turn)
        self._turns.append(turn)

    def missed(self, keys: QueueKeys) -> None:
        """A pull was not answered: another partition goes first, for its shard may be well."""
        turn = self._turn_of(keys)
        turn.has_missed = True
        self._turns.remove(turn)
        self._turns.append(turn)

    def rang(self, keys: QueueKeys, bell: str) -> None:
        """The bell of a partition rang: something may have become ready."""
        turn = self._turn_of(keys)
        turn.has_rung = turn.has_rung or _order(bell) > _order(turn.bell)

    def _turn_of(self, keys: QueueKeys) -> _Turn:
        return next(turn for turn in self._turns if turn.keys == keys)


def has_room(room: Room) -> bool:
    """Whether any job could fit."""
    return min(room.sequences, room.kv_tokens, room.prefill_tokens) > 0


def _order(stream_id: str) -> tuple[int, int]:
    ms, _, number = stream_id.partition("-")
    return int(ms), int(number or 0)


@dataclass(slots=True)
class _Ready:
    """Requests that wait for the next hand-over."""

    jobs: list[HeldJob] = field(default_factory=list[HeldJob])
    requests: list[Request] = field(default_factory=list[Request])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asides:
    """Where jobs go that do not go to the engine."""

    ended: Callable[[HeldJob], None]
    waits: Callable[[HeldJob], None]
    """It was begun by another model, and waits for a worker that has it."""


class Preparation:
    """The thread between pull and engine. A part: start, quiet, stop."""

    def __init__(self, client: Client, common: Common, translator: Translator, asides: Asides) -> None:
        self._client = client
        self._common = common
        self._translator = translator
        self._asides = asides
        self._jobs: queue.SimpleQueue[list[HeldJob] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def quiet(self) -> None:
        """Nothing to do: what was pulled is still prepared."""

    def stop(self) -> None:
        """Stop after the job at hand."""
        self._closing.set()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def put(self, jobs: list[HeldJob]) -> None:
        """Prepare these, and hand them to the engine or end them."""
        self._jobs.put(jobs)

    def _run(self) -> None:
        try:
            while (jobs := self._jobs.get()) is not None and not self._closing.is_set():
                self._prepare_all(jobs)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop must hear of it
            self._common.mailbox.fail(PartDied("intake", error))

    def _prepare_all(self, jobs: list[HeldJob]) -> None:
        ready = _Ready()
        for job in jobs:
            began_s = monotonic_s()
            request = self._prepare(job)
            if request is not None:
                ready.jobs.append(job)
                ready.requests.append(request)
            if monotonic_s() - began_s > FLUSH_AFTER_S:
                self._hand_over(ready)
                ready = _Ready()
        self._hand_over(ready)

    def _prepare(self, job: HeldJob) -> Request | None:
        """Make a request of a job; None if it ended here or is no longer ours."""
        try:
            self._resume(job)
            self._check_model(job)
            request = self._translator.request(job)
        except JobRejected as rejection:
            self._reject(job, rejection)
            return None
        except _NotOurs:
            return None
        except BaseException as error:  # noqa: BLE001  # one job's prompt must end that job alone, whatever it sets off
            # Libraries written in Rust panic with what is no Exception; and nothing interrupts this thread.
            self._reject(job, rejection_of(error))
            return None
        job.measures.prompt_tokens = len(request.prompt_token_ids)
        job.forget_prompt()
        return request

    def _resume(self, job: HeldJob) -> None:
        """Rebuild what earlier attempts published; while its partition is away, the others go first."""
        patience = Patience()
        for index, choice in enumerate(job.choices):
            while choice.published or choice.has_end:
                if self._closing.is_set() or self._common.leases.of_request(job.request_id) is not job:
                    raise _NotOurs
                if job.keys in self._common.absences:
                    self._common.absences.when_back(job.keys, lambda: self.put([job]))
                    raise _NotOurs
                try:
                    key = job.keys.channel(job.id, index)
                    job.choices[index] = read_channel(
                        self._client, key, published=choice.published, has_end=choice.has_end
                    )
                except (RedisError, OSError) as error:
                    delay_s = patience.after(error)
                    if is_away(error):
                        self._common.absences.failed(job.keys, error)
                    else:
                        self._closing.wait(delay_s)
                else:
                    break

    def _check_model(self, job: HeldJob) -> None:
        measures, began_with = job.measures, job.leased.fingerprint
        measures.resumed_tokens = job.num_published
        is_same = began_with is None or began_with == self._common.origin.fingerprint
        if job.leased.attempt == 1 or not job.num_published:
            measures.exactness = "undisturbed"
            return
        measures.exactness = "same_fingerprint" if is_same else "other_fingerprint"
        if not is_same:
            self._meet_other_model(job)
        self._check_channels(job, is_same=is_same)

    def _meet_other_model(self, job: HeldJob) -> None:
        match self._common.config.queue.on_model_change:
            case "continue":
                self._common.log.warning("job goes on under another model", job_id=job.id, attempt=job.leased.attempt)
            case "fail":
                message = "another model began this job, and this queue does not go on under a different one"
                raise JobRejected("model_changed", message)
            case "wait":
                self._common.log.info("job waits for its model", job_id=job.id, attempt=job.leased.attempt)
                self._asides.waits(job)
                raise _NotOurs

    def _check_channels(self, job: HeldJob, *, is_same: bool) -> None:
        for choice in job.choices:
            at = len(choice.token_ids)
            if at < choice.published:
                facts = {"job_id": job.id, "attempt": job.leased.attempt, "at": at, "published": choice.published}
                if not is_same:
                    raise JobRejected("channel_lost", f"channel lost at {at}: {choice.published} were published")
                self._common.log.warning("channel lost; generating again", **facts)

    def _reject(self, job: HeldJob, rejection: JobRejected) -> None:
        self._common.log.info(
            "job rejected", job_id=job.id, attempt=job.leased.attempt, code=rejection.code, reason=str(rejection)
        )
        end = End(state=JobState.FAILED, error=str(rejection), error_code=rejection.code)
        self._end(job, end)

    def _end(self, job: HeldJob, end: End) -> None:
        now_ms = self._common.clock.ms(monotonic_s())
        job.end_all(end, now_ms=now_ms)
        self._common.mailbox.lose([job.request_id])
        self._asides.ended(job)

    def _hand_over(self, ready: _Ready) -> None:
        """Give requests to the loop, unless their jobs were lost, handed back or flagged in the meantime."""
        requests: list[Request] = []
        with self._common.leases.lock:
            for job, request in zip(ready.jobs, ready.requests, strict=True):
                if job.is_returning or self._common.leases.of_request(job.request_id) is not job:
                    continue
                if job.stop is not None:
                    self._end(job, End(state=job.stop))
                    continue
                job.is_admitted = True
                requests.append(request)
            if requests:
                self._common.mailbox.deliver(requests)


class _NotOurs(Exception):
    """The job was lost, waits for another worker or its partition, or the worker stops while it was being prepared."""
