"""Preparation: turns pulled jobs into requests. It reads the channels of a resumed job and translates the prompt.

What takes little time is prepared at once, on the thread that pulls: waking another thread would take longer. Resumed
jobs and long prompts are left to a thread, so that they do not delay pulls.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from redis.exceptions import RedisError

from sluice.engine.request import Request
from sluice.protocol.calls import Returned, decline
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, WireError, decode_entry
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.availability import RetryPolicy, is_away
from sluice.worker.connection.clients import Client
from sluice.worker.errors import JobDeclined, JobRejected
from sluice.worker.jobs.channel import ChannelLost, ChannelOutput
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.reader_waits import ReaderWaits
from sluice.worker.jobs.retries import rejection_of
from sluice.worker.model.translate import Translator
from sluice.worker.serve.context import WorkerContext

T = TypeVar("T")

PAGE_ENTRIES = 512
"""Entries of a channel to read in one round trip when a job is resumed."""

SHORT_BYTES = 4096
"""The prompts of a pull are prepared at once if they are no longer than this together: it takes milliseconds."""

FLUSH_AFTER_S = 0.001
"""Ready requests are delivered before the next job if one took longer than this to prepare."""


class Preparation:
    """The thread between pull and engine. A component: start, stop."""

    def __init__(self, client: Client, context: WorkerContext, translator: Translator) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            client: A connection for preparation alone.
            context: The worker's shared state.
            translator: Makes the requests.
        """
        self._client = client
        self._asking = threading.Lock()
        """Held for each call over `client`."""

        self._context = context
        self._translator = translator
        self._jobs: queue.SimpleQueue[list[HeldJob] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = context.mailbox.thread("preparation", self._run)

    def start(self) -> None:
        """Start to take jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the present job."""
        self._closing.set()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def put(self, jobs: list[HeldJob]) -> None:
        """Prepare these jobs, now or soon, then deliver them to the engine or end them."""
        if not any(map(_is_resumed, jobs)) and sum([len(job.leased.payload) for job in jobs]) <= SHORT_BYTES:
            self._prepare_all(jobs)
        else:
            self._jobs.put(jobs)

    def _run(self) -> None:
        while (jobs := self._jobs.get()) is not None and not self._closing.is_set():
            self._prepare_all(jobs)

    def _prepare_all(self, jobs: list[HeldJob]) -> None:
        ready: list[tuple[HeldJob, Request]] = []
        for job in jobs:
            began_s = monotonic_s()
            request = self._prepare(job)
            if request is not None:
                ready.append((job, request))
            if monotonic_s() - began_s > FLUSH_AFTER_S:
                self._deliver(ready)
                ready = []
        self._deliver(ready)

    def _prepare(self, job: HeldJob) -> Request | None:
        """Make the request of a job; return None if it ended here or goes to another worker."""
        try:
            self._resume(job)
            self._grade_resumption(job)
            targets = self._context.settings.targets(job.keys)
            request, resolved, output_format = self._translator.translate(job, targets)
        except JobDeclined as rejection:
            self._decline(job, rejection)
            return None
        except JobRejected as rejection:
            self._reject(job, rejection)
            return None
        except _NotPrepared:
            return None
        except BaseException as error:  # noqa: BLE001  # an error in one job must end that job alone
            # Panics of Rust libraries are not `Exception`s, and no signal is handled on this thread.
            self._reject(job, rejection_of(error))
            return None
        job.record_translation(request, resolved, output_format)
        return request

    def _resume(self, job: HeldJob) -> None:
        """Read what earlier attempts published; a job whose partition is unavailable is prepared later."""
        for index, choice in enumerate(job.choices):
            if choice.published or choice.has_end:
                key = job.keys.channel(job.id, index)
                job.restore(index, self._ask(job, partial(_read_channel, self._client, key, choice)))

    def _ask(self, job: HeldJob, call: Callable[[], T]) -> T:
        """Return the queue's answer to a call about a job, which is repeated after errors.

        Raises:
            _NotPrepared: the job is released, or its partition is unavailable: it is prepared again later.
        """
        retries = RetryPolicy()
        while True:
            if self._closing.is_set() or not job.is_held:
                raise _NotPrepared
            if job.keys in self._context.unavailable:
                self._context.unavailable.when_back(job.keys, lambda: self.put([job]))
                raise _NotPrepared
            try:
                with self._asking:
                    return call()
            except (RedisError, OSError) as error:
                delay_s = retries.delay_after(error)
                if is_away(error):
                    self._context.unavailable.failed(job.keys, error)
                else:
                    self._closing.wait(delay_s)

    def _grade_resumption(self, job: HeldJob) -> None:
        """Record how exactly a job continues; check what another attempt has published."""
        began_with = job.leased.fingerprint
        is_same = began_with is None or began_with == self._context.origin.of(job.spec).fingerprint
        if job.leased.attempt == 1 or not job.num_published:
            job.record_resumption("undisturbed")
            return
        job.record_resumption("same_fingerprint" if is_same else "other_fingerprint")
        if not is_same:
            self._on_other_model(job)
        self._check_channels(job, is_same=is_same)

    def _on_other_model(self, job: HeldJob) -> None:
        """Fail or continue a job that another model began. With `wait`, the queue leases it to no such worker."""
        if self._context.config.queue.on_model_change == "fail":
            message = "another model started this job, and this queue does not continue jobs under a different one"
            raise JobRejected("model_changed", message)
        self._context.log.warning("job continues under another model", job_id=job.id, attempt=job.leased.attempt)

    def _check_channels(self, job: HeldJob, *, is_same: bool) -> None:
        for choice in job.choices:
            at = len(choice.token_ids)
            if at < choice.published:
                facts = {"job_id": job.id, "attempt": job.leased.attempt, "at": at, "published": choice.published}
                if not is_same:
                    raise JobRejected("channel_lost", f"channel lost at {at}: {choice.published} were published")
                self._context.log.warning("channel lost; generating again", **facts)

    def _decline(self, job: HeldJob, rejection: JobDeclined) -> None:
        """Leave a job that this engine cannot run for a living worker whose engine may; without one, end it."""
        call = decline(job.keys, self._context.incarnation, Returned(job_id=job.id, epoch=job.leased.epoch))
        try:
            answer = self._ask(job, partial(run, self._client, call))
        except _NotPrepared:
            return
        if answer == "kept":
            self._reject(job, rejection)
        elif self._context.leases.remove(job):
            self._context.mailbox.lose([job.request_id])
            what = "job left for another engine" if answer == "returned" else "lease lost"
            self._context.log.info(what, job_id=job.id, attempt=job.leased.attempt, reason=str(rejection))

    def _reject(self, job: HeldJob, rejection: JobRejected) -> None:
        self._context.log.info(
            "job rejected", job_id=job.id, attempt=job.leased.attempt, code=rejection.code, reason=str(rejection)
        )
        end = End(state=JobState.FAILED, error=str(rejection), error_code=rejection.code)
        self._end(job, end)

    def _end(self, job: HeldJob, end: End) -> None:
        now_ms = self._context.clock.ms(monotonic_s())
        job.end_all(end, now_ms=now_ms)
        self._context.mailbox.lose([job.request_id])
        self._context.mailbox.put_unpublished(job.request_id)

    def _deliver(self, ready: list[tuple[HeldJob, Request]]) -> None:
        """Deliver requests to the loop, except those whose jobs were released, returned or flagged meanwhile."""
        requests: list[Request] = []
        with self._context.leases.lock:
            for job, request in ready:
                if not job.is_active:
                    continue
                if job.stop is not None:
                    self._end(job, End(state=job.stop))
                    continue
                job.admit()
                requests.append(request)
            if requests:
                self._context.mailbox.deliver(requests)


def _is_resumed(job: HeldJob) -> bool:
    """Return whether channels must be read to prepare a job."""
    return any(choice.published or choice.has_end for choice in job.choices)


class _NotPrepared(Exception):
    """The job is not for this engine now: it is released or waits, or the worker stops."""


def _read_channel(client: Client, key: str, lease: ChannelOutput) -> ChannelOutput:
    """Read the output of a choice from its channel, page by page. `lease` is how much of it the queue has.

    From a channel that lost entries it reads up to the first gap: fewer tokens than were published.

    Raises:
        JobRejected: An entry cannot be read.
    """
    waits = ReaderWaits(is_streamed=lease.waits.is_streamed)
    output = ChannelOutput(published=lease.published, has_end=lease.has_end, waits=waits)
    after = "-"
    while True:
        page: list[tuple[bytes, dict[bytes, bytes]]] = client.xrange(key, min=after, count=PAGE_ENTRIES)
        try:
            for _, fields in page:
                output.replay(decode_entry(next(iter(fields.values()))))
        except ChannelLost:
            return output
        except WireError as error:
            raise JobRejected("channel_damaged", f"its channel has an entry that cannot be read: {error}") from error
        if len(page) < PAGE_ENTRIES:
            return output
        after = "(" + page[-1][0].decode()
