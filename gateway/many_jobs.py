"""Requests that are several jobs, such as texts to embed: submit them, wait for all, and cancel all if one is lost."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b

from starlette.requests import Request

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.errors import named
from sluice.gateway.openapi.options import KEY
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.readers import Readers, unless_left
from sluice.gateway.requests import traceparent_of
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import JobNotFound
from sluice.producer.operations.submission import Receipt
from sluice.protocol.jobs import CheckedJob, Options, PromptLike, encoded_prompt
from sluice.protocol.wire import JobId, JobResult

SUBMITTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of a request's jobs, in their order."""

    results: list[JobResult]
    headers: Mapping[str, str]


class ManyJobs:
    """Requests that are one job or more. Their jobs share options, deadline, trace and key."""

    def __init__(self, queues: Queues, rates: KeyRates, settings: GatewaySettings) -> None:
        self._queues, self._rates, self._settings = queues, rates, settings

    async def answers(
        self, request: Request, prompts: Sequence[PromptLike], options: Options, names: Mapping[str, str]
    ) -> Answers | None:
        """Submit a job for each prompt, and wait for their results; None if the client has left.

        Raises:
            HttpError, ProducerError: a job is refused, or ended badly. The others are cancelled, unless other requests
                read them. `names` has the API's names of parameters, as for `error_of`.
        """
        caller, key = caller_of(request), KEY.read(request)
        queue = await self._queues.of_model(options.get("model"))
        with named(names):
            jobs = self._jobs(request, caller, prompts, {**options, "stream": False, "idempotency_key": key})
            readers = _Readers(queue.readers, is_shared=key is not None)
            try:
                receipts, headers = await self._rates.submit_all(caller, jobs, lambda: _submitted(queue, jobs, readers))
                request.state.job_id = receipts[0].id
                results = await unless_left(
                    request, _results(queue, [receipt.id for receipt in receipts]), readers.leave
                )
            except BaseException:
                readers.leave()
                raise
        return None if results is None else Answers(results, headers)

    def _jobs(
        self, request: Request, caller: Caller, prompts: Sequence[PromptLike], options: Options
    ) -> list[CheckedJob]:
        """Check and encode the jobs. Their options are encoded once."""
        own = Options(deadline=timedelta(seconds=self._settings.request_limit_s), traceparent=traceparent_of(request))
        first = callers_job(caller, prompts[0], {**options, **own})
        key = first.template.idempotency_key
        return [
            first,
            *(
                replace(
                    first,
                    prompt=encoded_prompt(prompt),
                    template=first.template
                    if key is None
                    else replace(first.template, idempotency_key=_key_of(key, number)),
                )
                for number, prompt in enumerate(prompts[1:], 1)
            ),
        ]


def _key_of(key: str, number: int) -> str:
    """Return the idempotency key of a further job: no key of a client, or of another one's jobs, is the same."""
    return blake2b(f"{number} {key}".encode(), digest_size=32).hexdigest()


class _Readers:
    """The jobs that a request reads. Changes as they are submitted, and left once."""

    def __init__(self, readers: Readers, *, is_shared: bool) -> None:
        self._readers, self._is_shared = readers, is_shared
        self._job_ids: list[JobId] = []

    async def join(self, receipt: Receipt) -> None:
        """Read a job, which others may read, too, if its request has a key."""
        if self._is_shared:
            await self._readers.join(receipt.id, is_submitter=not receipt.is_duplicate)
        self._job_ids.append(receipt.id)

    def leave(self) -> None:
        """Leave all jobs."""
        job_ids, self._job_ids = self._job_ids, []
        for job_id in job_ids:
            self._readers.leave(job_id, is_shared=self._is_shared)


async def _submitted(queue: QueueClients, jobs: Sequence[CheckedJob], readers: _Readers) -> list[Receipt]:
    """Submit all jobs, and read them.

    Raises:
        ProducerError: one is refused: the first error.
    """
    turns = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def submit(job: CheckedJob) -> Receipt:
        async with turns:
            receipt = await queue.submit(job)
            await readers.join(receipt)
            return receipt

    answers = await asyncio.gather(*map(submit, jobs), return_exceptions=True)
    receipts = [answer for answer in answers if not isinstance(answer, BaseException)]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return receipts


async def _results(queue: QueueClients, job_ids: Sequence[JobId]) -> list[JobResult]:
    """Wait for the results of jobs.

    Raises:
        ProducerError: one ended badly.
    """
    if len(job_ids) == 1:
        return [await queue.following.result(job_ids[0])]
    results: dict[JobId, JobResult] = {}
    async for outcome in queue.following.results(job_ids):
        if outcome.error is not None:
            raise outcome.error
        if outcome.result is None:
            raise JobNotFound(outcome.job_id)
        results[outcome.job_id] = outcome.result
    return [results[job_id] for job_id in job_ids]
