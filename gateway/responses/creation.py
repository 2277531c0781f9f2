"""Create responses: the row first, then the job.

A gateway that is killed in between leaves a row without a job. No client knows its id, but a client that repeats the
Idempotency-Key finds the row and submits the same job; a job id is accepted only once. Without such a client, the
sweep ends the response as lost. A row must not be deleted if a second request has submitted its job in the meantime.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from secrets import token_hex
from typing import cast

from sluice.gateway.access import Caller
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.openai.items import unknown_calls
from sluice.gateway.openai.response_requests import ResponseRequest
from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo, conversation_messages
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.readers import may_be_accepted
from sluice.gateway.responses.ends import settle
from sluice.gateway.responses.store import LOST, MAX_DEPTH, ResponseStore, StoredResponse
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.tables.quota import Quota
from sluice.gateway.threads import SQL
from sluice.producer.errors import IdempotencyConflict, ProducerError
from sluice.protocol import limits
from sluice.protocol.clock import wall_ms
from sluice.protocol.job_ids import job_id_of
from sluice.protocol.jobs import CheckedJob, Options

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Created:
    """A response whose job the queue has, or that has ended."""

    response: StoredResponse
    queue: QueueClients
    rates: Mapping[str, str]
    """Rate limit headers."""

    is_shared: bool
    """Whether requests with the same idempotency key may read the job of this response, which is not stored."""


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request with its job."""

    request: ResponseRequest
    job: CheckedJob
    idempotency_key: str | None
    digest: str
    depth: int


class Creation:
    """Creates responses."""

    def __init__(
        self, queues: Queues, rates: KeyRates, settings: GatewaySettings, store: ResponseStore, quota: Quota
    ) -> None:
        self._queues, self._rates, self._settings, self._store, self._quota = queues, rates, settings, store, quota

    async def create(
        self, request: ResponseRequest, caller: Caller, body: Mapping[str, object], key: str | None
    ) -> Created:
        """Create a response, or return that of an earlier request with the same idempotency key.

        Raises:
            HttpError, ProducerError: the request is refused.
        """
        if key is not None and not 0 < len(key) <= limits.MAX_IDEMPOTENCY_KEY_CHARS:
            raise bad_request(f"Idempotency-Key must be 1 to {limits.MAX_IDEMPOTENCY_KEY_CHARS} characters")
        queue = await self._queues.of_model(request.model)
        earlier = await self._earlier(request.previous_id, caller.tenant)
        prepared = self._prepared(request, earlier, caller, key, body)
        new = self._response(prepared, queue, caller, request.model or await self._queues.model_of(queue))
        if not request.is_stored:
            return await self._submit_unstored(new, queue, caller, prepared)
        return await self._add(new, queue, caller, prepared)

    # ------------------------------------------------------------ the conversation

    async def _earlier(self, previous_id: str | None, tenant: str) -> list[StoredResponse]:
        """Return the responses that a new one continues.

        Raises:
            HttpError: one is unknown, of another tenant, unfinished or failed, or there are too many.
        """
        if previous_id is None:
            return []
        conversation = await SQL.run(self._store.conversation, previous_id, tenant)
        if (
            not conversation
            or conversation[-1].info.id != previous_id
            or len(conversation) != conversation[-1].depth + 1
        ):
            raise _bad_previous(
                f"there is no response {previous_id[:80]!r}, or an earlier response of its conversation was deleted",
                "not_found",
                404,
            )
        if len(conversation) > MAX_DEPTH:
            raise _bad_previous(f"a conversation may have {MAX_DEPTH} responses before its newest", "too_deep")
        end = conversation[-1].end or await self._end_of(conversation[-1])
        if end is None:
            raise _bad_previous("the previous response is unfinished", "unfinished")
        if end.status not in ("completed", "incomplete"):
            raise _bad_previous(f"the previous response is {end.status}", "failed")
        return [*conversation[:-1], replace(conversation[-1], end=end)]

    async def _end_of(self, response: StoredResponse) -> ResponseEnd | None:
        settled = await settle(served(self._queues, response.queue).submitting, self._store, [response])
        end = settled[response.info.id]
        return end if isinstance(end, ResponseEnd) else None

    # ------------------------------------------------------------ the row and the job

    def _prepared(
        self,
        request: ResponseRequest,
        earlier: Sequence[StoredResponse],
        caller: Caller,
        key: str | None,
        body: Mapping[str, object],
    ) -> _PreparedRequest:
        """Return the request with its job, which is checked before the row is written.

        Raises:
            InvalidJob, HttpError: a value is wrong.
        """
        turns = [(response.info, response.input, response.end) for response in earlier if response.end is not None]
        prompt = conversation_messages(request.instructions, turns, request.input)
        if (unknown := next(unknown_calls(prompt), None)) is not None:
            raise bad_request(
                f"input has the output of the call {unknown!r:.80}, which the conversation lacks", param="input"
            )
        limit_s = self._settings.response_days * DAY_S if request.is_background else self._settings.request_limit_s
        own = Options(
            deadline=timedelta(seconds=limit_s),
            # A response in the background may be streamed later.
            stream=request.is_stream or request.is_background,
            # A stored response is found by the key in its row, and its job by its id.
            idempotency_key=None if request.is_stored else key,
        )
        # A repeated request may differ in `stream`.
        same = json.dumps({**body, "stream": None}, sort_keys=True).encode()
        job = callers_job(caller, prompt, cast("Options", {**request.options, **own}))
        return _PreparedRequest(request, job, key, hashlib.sha256(same).hexdigest(), len(earlier))

    def _response(self, prepared: _PreparedRequest, queue: QueueClients, caller: Caller, model: str) -> StoredResponse:
        request, name, created_ms = prepared.request, token_hex(24), wall_ms()
        partition = queue.partitions.choose(name)
        info = ResponseInfo(
            job_id=job_id_of(partition, caller.tenant, name),
            created_ms=created_ms,
            model=model,
            options=request.shown,
            previous_id=request.previous_id,
            is_background=request.is_background,
            is_stored=request.is_stored,
        )
        return StoredResponse(
            info=info,
            tenant=caller.tenant,
            queue=queue.name,
            expires_ms=created_ms + round(self._settings.response_days * DAY_S * 1000),
            input=request.input,
            depth=prepared.depth,
            idempotency_key=prepared.idempotency_key,
            digest=prepared.digest,
        )

    async def _add(
        self, new: StoredResponse, queue: QueueClients, caller: Caller, prepared: _PreparedRequest
    ) -> Created:
        """Write the row and submit the job, unless an earlier request with the same idempotency key did so."""
        rates = await self._rates.charge(caller.key, prepared.job)
        try:
            existing = await self._quota.add(self._store.add, new)
            if existing is None:
                await self._submit(new, queue, prepared)
                return Created(new, queue, rates, is_shared=False)
            queue = await self._repeat(existing, prepared)
        except (ProducerError, HttpError):
            await self._rates.give_back(caller.key, prepared.job)
            raise
        existing = replace(existing, end=None) if existing.end == LOST else existing
        return Created(existing, queue, await self._rates.give_back(caller.key, prepared.job) or rates, is_shared=False)

    async def _submit(self, new: StoredResponse, queue: QueueClients, prepared: _PreparedRequest) -> None:
        try:
            await queue.submit(prepared.job.with_id(new.info.job_id))
        except ProducerError as error:
            if not may_be_accepted(error):
                await SQL.run(self._store.withdraw, new)
            elif prepared.idempotency_key is None:
                queue.abandoned.add(new.info.job_id)
            raise

    async def _submit_unstored(
        self, new: StoredResponse, queue: QueueClients, caller: Caller, prepared: _PreparedRequest
    ) -> Created:
        is_shared = prepared.idempotency_key is not None
        receipt, rates = await self._rates.submit(queue, caller, prepared.job)
        if is_shared:
            await queue.readers.join(receipt.id, is_submitter=not receipt.is_duplicate)
        response = replace(new, info=replace(new.info, job_id=receipt.id))
        return Created(response, queue, rates, is_shared)

    async def _repeat(self, existing: StoredResponse, prepared: _PreparedRequest) -> QueueClients:
        """Submit the job of an earlier request again unless it has ended; return its queue.

        Raises:
            IdempotencyConflict: the earlier request was different.
        """
        if existing.digest != prepared.digest:
            raise IdempotencyConflict(existing.info.job_id)
        queue = served(self._queues, existing.queue)
        if existing.end is None or existing.end == LOST:
            await queue.submit(prepared.job.with_id(existing.info.job_id))
            # The sweep may just have ended it as lost, and looks at open responses only.
            await SQL.run(self._store.reopen, existing.info.id)
        return queue


def served(queues: Queues, name: str) -> QueueClients:
    """Return a queue by its name.

    Raises:
        HttpError: 503, this gateway does not serve the queue.
    """
    try:
        return queues[name]
    except KeyError:
        raise HttpError(503, "server_error", "this gateway does not serve the queue of the response") from None


def _bad_previous(message: str, code: str, status: int = 400) -> HttpError:
    return bad_request(message, code=f"previous_response_{code}", param="previous_response_id", status=status)
