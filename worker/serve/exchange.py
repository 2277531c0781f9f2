"""Between Redis and the loop: two threads, each with one pipelined round trip at a time.

This thread publishes what the engine yielded since its last round trip; `pull.py` asks the queue for jobs. Output
merges while a round trip is under way or Redis is away, so the loop does not wait for Redis while it has work. First
tokens and ends are sent at once, other tokens in rounds (docs/decisions/tokens-travel-in-rounds.md), which are longer
while nobody reads. Every call may be repeated: the queue compares an advance with its channel, and pulls are numbered.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sluice.engine.request import TokenDelta
from sluice.protocol.calls import (
    AdvanceAnswer,
    Already,
    Broken,
    EndCall,
    Ok,
    Progress,
    Replaced,
    Retried,
    SendFrom,
    advance,
    count_reads,
    put_result,
)
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import End
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.progress import (
    Update,
    batches_of,
    failed_updates,
    move_large_results,
    parts_of,
    pending_updates,
)
from sluice.worker.jobs.reader_watch import ReaderWatch
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.mailbox import is_urgent
from sluice.worker.serve.pull import Pulling
from sluice.worker.serve.round_trips import PartitionCall, RoundTrip, RoundTrips

REST_S = 0.5
"""Longest sleep when there is nothing to publish."""

FLUSH_S = 3.0
"""No round trip at shutdown begins later; the worker that takes over generates unpublished output again."""

FLUSH_RETRY_S = 0.05


class Exchange:
    """The thread that publishes, and that which pulls. A component: start, stop."""

    def __init__(self, client: Client, context: WorkerContext, pulling: Pulling) -> None:
        """Prepare the thread; `start` runs it and the one that pulls. `client` belongs to this thread alone."""
        self._context = context
        self._leases = context.leases
        self._mailbox = context.mailbox
        self._unavailable = context.unavailable
        self._round_trips = RoundTrips(client, context)
        self._pulling = pulling
        self._thread = self._mailbox.thread("exchange", self._run)
        self._closing = threading.Event()
        self._to_publish: dict[str, HeldJob] = {}
        """Jobs with something to publish now, by request id."""

        self._next_round: dict[str, HeldJob] = {}
        """Jobs with tokens to publish in the next round."""

        self._round_s = 0.0
        """When the last round began, on the monotonic clock."""

        self._readers = ReaderWatch()
        self._unreleased_bytes = 0

    # ------------------------------------------------------------ called as a component

    def start(self) -> None:
        """Start both threads."""
        self._thread.start()
        self._pulling.start()

    def stop(self) -> None:
        """Publish the remaining output, in round trips that begin within `FLUSH_S`, and end both threads."""
        self._unavailable.stop()
        self._pulling.stop()
        self._closing.set()
        self._mailbox.wake()
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()
        self._flush()

    def _turn(self) -> None:
        self._drain_engine_output()
        until_round_s = self._begin_round()
        if self._send_updates() is not None:
            return
        if not self._to_publish:
            # Buffered output belongs to released jobs, or is kept with jobs until their round or checkpoint.
            self._release_buffer()
        if until_round_s > 0:
            self._mailbox.wait(until_round_s, for_urgent=True)
        else:
            self._mailbox.wait(REST_S)

    def _begin_round(self) -> float:
        """Begin a round if one is due; return the seconds until the next one."""
        now_s = monotonic_s()
        until_s = self._round_s + self._interval_s(now_s) - now_s
        if until_s > 0:
            return until_s
        if self._next_round:
            self._to_publish.update((name, job) for name, job in self._next_round.items() if job.has_updates)
            self._next_round.clear()
            self._round_s = now_s
        return 0.0

    def _interval_s(self, now_s: float) -> float:
        redis = self._context.config.redis
        if self._readers.are_there(now_s):
            return redis.stream_interval_s
        # Urgent output takes a round with it that would soon need its own round trip.
        unread_s = redis.unread_interval_s / 2 if self._to_publish else redis.unread_interval_s
        return max(redis.stream_interval_s, unread_s)

    def _release_buffer(self) -> None:
        self._mailbox.release(self._unreleased_bytes)
        self._unreleased_bytes = 0

    def _flush(self) -> None:
        """Publish all that is left, checkpoint or not."""
        deadline_s = monotonic_s() + FLUSH_S
        while monotonic_s() < deadline_s:
            self._drain_engine_output()
            self._to_publish.update({job.request_id: job for job in self._leases.all() if job.has_updates})
            round_trip = self._send_updates()
            if round_trip is None:
                return
            if not round_trip.is_complete:
                time.sleep(FLUSH_RETRY_S)

    # ------------------------------------------------------------ output of the engine

    def _drain_engine_output(self) -> None:
        for request_id in self._mailbox.take_unpublished():
            if (job := self._leases.of_request(request_id)) is not None:
                self._to_publish[request_id] = job
        steps, num_bytes = self._mailbox.take_steps()
        self._unreleased_bytes += num_bytes
        for at_s, deltas in steps:
            self._add_output(deltas, at_s, self._context.clock.ms(at_s))

    def _add_output(self, deltas: Sequence[TokenDelta], now_s: float, now_ms: int) -> None:
        of_request, urgent, later = self._leases.of_request, self._to_publish, self._next_round
        for delta in deltas:
            job = of_request(delta.request_id)
            if job is not None and job.add_output(delta, now_s=now_s, now_ms=now_ms):
                (urgent if is_urgent(delta) else later)[delta.request_id] = job

    # ------------------------------------------------------------ updates to the queue

    def _send_updates(self) -> RoundTrip | None:
        """Publish the updates that channels lack in one round trip; return None if there is nothing to send."""
        sent_s = monotonic_s()
        calls, batches = self._pending_calls(sent_s)
        if not calls:
            return None
        counts = self._count_reads(calls, sent_s)
        round_trip = self._round_trips.make(calls)
        self._on_replies(round_trip.replies, batches, counts)
        # Last, because it may raise: acknowledgements of the healthy partitions are applied.
        self._round_trips.mark_partitions(round_trip)
        if round_trip.has_answer:
            # Also the bytes of partitions that did not answer: their output is kept with its jobs until they end.
            self._release_buffer()
        return round_trip

    def _pending_calls(self, now_s: float) -> tuple[list[PartitionCall], dict[int, list[Update]]]:
        """Return the calls for what the channels lack, and the updates of each advance by its place among them."""
        calls: list[PartitionCall] = []
        batches: dict[int, list[Update]] = {}
        for keys, jobs in self._jobs_to_publish().items():
            updates = [(job, update) for job in jobs for update in self._updates_of(job, now_s)]
            updates, results = move_large_results(updates)
            calls += [call for job, result in results for call in self._put_result(keys, job, result)]
            for batch in batches_of(updates):
                batches[len(calls)] = batch
                calls.append((keys, advance(keys, self._context.incarnation, [progress for _, progress in batch])))
        return calls, batches

    def _updates_of(self, job: HeldJob, now_s: float) -> Iterable[Progress]:
        """Return the updates that the channels of a job lack; if they cannot be encoded, its ends with the error."""
        context = self._context
        try:
            return list(pending_updates(job, context.origin.of(job.spec), now_s=now_s))
        except Exception as error:  # an error in one job must end that job alone
            context.log.exception("output not encoded", job_id=job.id, attempt=job.leased.attempt)
            job.end_all(End(state=JobState.FAILED), now_ms=context.clock.ms(now_s))
            self._mailbox.lose([job.request_id])
            return failed_updates(job, context.origin.of(job.spec), error)

    def _count_reads(self, calls: list[PartitionCall], now_s: float) -> dict[int, QueueKeys]:
        """Add what counts the reads of each partition, after its updates, if that is due; return where."""
        counts: dict[int, QueueKeys] = {}
        if self._context.config.redis.unread_interval_s and self._readers.is_due(now_s):
            for keys in dict.fromkeys(keys for keys, _ in calls):
                counts[len(calls)] = keys
                calls.append((keys, count_reads(keys)))
        return counts

    def _jobs_to_publish(self) -> dict[QueueKeys, list[HeldJob]]:
        by_partition: dict[QueueKeys, list[HeldJob]] = {}
        last: QueueKeys | None = None
        group: list[HeldJob] = []
        for job in list(self._to_publish.values()):
            if not job.is_active:
                # A newer lease replaced it, or it returns to the queue.
                del self._to_publish[job.request_id]
                continue
            # Most jobs are of the same partition as the one before: its keys are hashed once.
            if job.keys is not last:
                last = job.keys
                group = by_partition.setdefault(last, [])
            group.append(job)
        return {keys: jobs for keys, jobs in by_partition.items() if keys not in self._unavailable}

    def _put_result(self, keys: QueueKeys, job: HeldJob, result: bytes) -> Iterator[PartitionCall]:
        """Write a result in parts before the end that names its length; their replies say nothing that it does not."""
        lease = (self._context.incarnation, job.id, job.leased.epoch)
        for offset, part in parts_of(result):
            yield keys, put_result(keys, *lease, offset=offset, part=part)

    def _on_replies(
        self,
        replies: Sequence[Any],  # Any: of different calls
        batches: Mapping[int, list[Update]],
        counts: Mapping[int, QueueKeys],
    ) -> None:
        answered_s = monotonic_s()
        for number, batch in batches.items():
            if not isinstance(replies[number], BaseException):
                self._on_advance_replies(batch, replies[number], answered_s)
        for number, keys in counts.items():
            if not isinstance(replies[number], BaseException):
                self._readers.note(keys, replies[number], answered_s)

    def _on_advance_replies(self, updates: list[Update], replies: list[AdvanceAnswer], now_s: float) -> None:
        ended: list[tuple[HeldJob, EndCall]] = []
        for (job, progress), reply in zip(updates, replies, strict=True):
            if (end := self._on_advance_reply(job, progress, reply, now_s)) is not None:
                ended.append((job, end))
        if ended:
            self._mailbox.forget([job.request_id for job, _ in ended if job.is_finished])
            now_ms = self._context.clock.ms(monotonic_s())
            for job, end in ended:
                self._report(job, end, now_ms)

    def _on_advance_reply(self, job: HeldJob, progress: Progress, reply: AdvanceAnswer, now_s: float) -> EndCall | None:
        """Apply an answer; return the end of a job that it released."""
        match reply:
            case Ok(stop) | Already(stop):
                end = self._acknowledge(job, progress, now_s)
                if stop is not None and not job.is_finished:
                    self._context.flag(job, stop)
                return end
            case SendFrom(offset):
                self._resend_from(job, progress.choice, offset)
            case Replaced():
                # A job that returned to the queue meanwhile is not held any more and not counted.
                self._context.meters.num_refused_writes += self._lose(job, "replaced")
            case Retried():
                self._on_retried(job, progress)
            case Broken(reason):
                self._lose(job, reason)
        return None

    def _acknowledge(self, job: HeldJob, progress: Progress, now_s: float) -> EndCall | None:
        job.acknowledge(progress, now_s=now_s)
        end = progress.end
        if end is not None and (end.retry_in_ms is not None or job.is_finished):
            return end if self._release(job) else None
        if not job.has_updates:
            self._to_publish.pop(job.request_id, None)
        return None

    def _resend_from(self, job: HeldJob, choice: int, offset: int) -> None:
        published = job.choices[choice].published
        if offset < published:
            self._context.log.warning("redis lost tokens", job_id=job.id, had=published, has=offset)
        job.resend_from(choice, offset)

    def _lose(self, job: HeldJob, why: str) -> bool:
        self._to_publish.pop(job.request_id, None)
        return self._context.lose(job, why)

    def _on_retried(self, job: HeldJob, progress: Progress) -> None:
        """Release a job that failed here: the queue starts it again later, on any worker."""
        end = progress.end
        assert end is not None, "only an end is answered so"
        if self._release(job):
            self._context.meters.num_jobs_retried += 1
            self._context.log.warning(
                "job returned for a retry",
                job_id=job.id,
                attempt=job.leased.attempt,
                failures=job.leased.failures + 1,
                error_code=end.error_code,
                error=end.error,
                retry_in_ms=end.retry_in_ms,
            )

    def _release(self, job: HeldJob) -> bool:
        """Release a job whose end the queue has acknowledged; return False if it was not held."""
        self._to_publish.pop(job.request_id, None)
        was_held = self._leases.remove(job)
        if was_held and not job.is_finished:
            # One choice ended the job; the engine may still run the others.
            self._mailbox.lose([job.request_id])
        if not len(self._leases):
            self._mailbox.wake()  # suspects are leased to an empty worker only
            if self._pulling.is_quiet:
                self._mailbox.interrupt()
        return was_held

    def _report(self, job: HeldJob, end: EndCall, now_ms: int) -> None:
        first_ms = job.record.first_token_ms
        ttft_s = (first_ms - job.leased.submitted_ms) / 1000 if first_ms is not None else None
        e2e_s = (now_ms - job.leased.submitted_ms) / 1000
        gaps = (gap for choice in job.choices for gap in choice.gaps_ms)
        self._context.ended[job.keys.queue].note(job.id)
        self._context.capacity.end(job, end.state)
        self._context.meters.ended(end.state, ttft_s=ttft_s, e2e_s=e2e_s, gaps_ms=gaps)
        self._context.log.info(
            "job ended",
            job_id=job.id,
            attempt=job.leased.attempt,
            state=end.state.value,
            finish_reason=end.reason,
            output_tokens=sum(len(choice.token_ids) for choice in job.choices),
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            **({} if end.error is None else {"error_code": end.error_code, "error": end.error}),
        )
