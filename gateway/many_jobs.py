"""Requests that are several jobs, such as texts to embed: submit them, wait for all, and cancel all if one is lost."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from starlette.requests import Request

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.openapi.options import KEY
from sluice.gateway.queues import QueueClients
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.readers import unless_left
from sluice.gateway.requests import traceparent_of
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import JobNotFound
from sluice.producer.operations.submission import Receipt
from sluice.protocol.jobs import CheckedJob, Options, PromptLike, encoded_prompt
from sluice.protocol.wire import JobId, JobResult

SUBMITTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of a request's jobs, in their order; None if its client has left."""

    results: list[JobResult] | None
    headers: Mapping[str, str]


class ManyJobs:
    """Requests that are one job or more. Their jobs share options, deadline, trace and key."""

    def __init__(self, rates: KeyRates, settings: GatewaySettings) -> None:
        self._rates, self._settings = rates, settings

    async def answers(
        self, request: Request, queue: QueueClients, prompts: Sequence[PromptLike], options: Options
    ) -> Answers:
        """Submit a job for each prompt, and wait for their results.

        Raises:
            HttpError, ProducerError: a job is refused, or ended badly. The others are cancelled.
        """
        caller, key = caller_of(request), KEY.read(request)
        jobs = self._jobs(request, caller, prompts, {**options, "stream": False, "idempotency_key": key})
        receipts, headers = await self._submitted(queue, caller, jobs)
        request.state.job_id = receipts[0].id
        if key is not None:
            for receipt in receipts:
                await queue.readers.join(receipt.id, is_submitter=not receipt.is_duplicate)

        def leave() -> None:
            for receipt in receipts:
                queue.readers.leave(receipt.id, is_shared=key is not None)

        try:
            results = await unless_left(request, _results(queue, [receipt.id for receipt in receipts]), leave)
        except Exception:
            leave()
            raise
        return Answers(results, headers)

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
                    else replace(first.template, idempotency_key=f"{key[:KEY_CHARS]}#{number}"),
                )
                for number, prompt in enumerate(prompts[1:], 1)
            ),
        ]

    async def _submitted(
        self, queue: QueueClients, caller: Caller, jobs: Sequence[CheckedJob]
    ) -> tuple[list[Receipt], Mapping[str, str]]:
        """Submit all jobs, or raise the first error and cancel those that were accepted."""
        turns = asyncio.Semaphore(SUBMITTED_AT_ONCE)

        async def submit(job: CheckedJob) -> tuple[Receipt, Mapping[str, str]]:
            async with turns:
                return await self._rates.submit(queue, caller, job)

        answers = await asyncio.gather(*map(submit, jobs), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        accepted = [answer for answer in answers if not isinstance(answer, BaseException)]
        if errors:
            for receipt, _ in accepted:
                queue.readers.leave(receipt.id, is_shared=False)
            raise errors[0]
        return [receipt for receipt, _ in accepted], accepted[-1][1]


KEY_CHARS = 240
"""Characters of a key that those of its further jobs begin with."""


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
