"""Create responses: the row first, then the job.

A gateway that is killed in between leaves a row without a job. No client knows its id, but one that sends the same
Idempotency-Key again finds it and submits the same job; a job of the same id is accepted only once. Without such a
client, the sweep ends it as lost. Nor may a row go whose job a second request has submitted meanwhile.
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
from sluice.protocol.jobs import CheckedJob, Options
from sluice.protocol.wire import JobId

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Created:
    """A response whose job the queue has, or that has ended."""

    response: StoredResponse
    queue: QueueClients
    rates: Mapping[str, str]
    """Headers that say what its key has left."""

    is_shared: bool
    """Whether other requests may read its job, which is not stored: they have its idempotency key."""


@dataclass(frozen=True, slots=True)
class _Asked:
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
        """Create a response, or find that of an earlier request with the same idempotency key.

        Raises:
            HttpError, ProducerError: it is refused.
        """
        if key is not None and not 0 < len(key) <= limits.MAX_IDEMPOTENCY_KEY_CHARS:
            raise bad_request(f"Idempotency-Key must be 1 to {limits.MAX_IDEMPOTENCY_KEY_CHARS} characters")
        queue = await self._queues.of_model(request.model)
        earlier = await self._earlier(request.previous_id, caller.tenant)
        asked = self._asked(request, earlier, caller, key, body)
        new = self._response(asked, queue, caller, request.model or await self._queues.model_of(queue))
        if not request.is_stored:
            return await self._submit_unstored(new, queue, caller, asked)
        return await self._add(new, queue, caller, asked)

    # ------------------------------------------------------------ the conversation

    async def _earlier(self, previous_id: str | None, tenant: str) -> list[StoredResponse]:
        """Return the responses that a new one continues.

        Raises:
            HttpError: they are unknown, not another tenant's to continue, unfinished, failed or too many.
        """
        if previous_id is None:
            return []
        found = await SQL.run(self._store.conversation, previous_id, tenant)
        if not found or found[-1].info.id != previous_id or len(found) != found[-1].depth + 1:
            raise _bad_previous(
                f"there is no response {previous_id[:80]!r}, or an earlier response of its conversation was deleted",
                "not_found",
                404,
            )
        if len(found) > MAX_DEPTH:
            raise _bad_previous(f"a conversation may have {MAX_DEPTH} responses before its newest", "too_deep")
        end = found[-1].end or await self._end_of(found[-1])
        if end is None:
            raise _bad_previous("the previous response is unfinished", "unfinished")
        if end.status not in ("completed", "incomplete"):
            raise _bad_previous(f"the previous response is {end.status}", "failed")
        return [*found[:-1], replace(found[-1], end=end)]

    async def _end_of(self, response: StoredResponse) -> ResponseEnd | None:
        found = await settle(served(self._queues, response.queue).submitting, self._store, [response])
        end = found[response.info.id]
        return end if isinstance(end, ResponseEnd) else None

    # ------------------------------------------------------------ the row and the job

    def _asked(
        self,
        request: ResponseRequest,
        earlier: Sequence[StoredResponse],
        caller: Caller,
        key: str | None,
        body: Mapping[str, object],
    ) -> _Asked:
        """Return the request with its job, which is checked before anything is written.

        Raises:
            InvalidJob: a value is wrong.
        """
        turns = [(one.input, one.end.text) for one in earlier if one.end is not None]
        prompt = conversation_messages(request.instructions, turns, request.input)
        limit_s = self._settings.response_days * DAY_S if request.is_background else self._settings.request_limit_s
        own = Options(
            deadline=timedelta(seconds=limit_s),
            # One in the background may be streamed later.
            stream=request.is_stream or request.is_background,
            # A stored response is found by its own key, and its job has an id of its own.
            idempotency_key=None if request.is_stored else key,
        )
        # How the answer is read may differ.
        same = json.dumps({**body, "stream": None}, sort_keys=True).encode()
        job = callers_job(caller, prompt, cast("Options", {**request.options, **own}))
        return _Asked(request, job, key, hashlib.sha256(same).hexdigest(), len(earlier))

    def _response(self, asked: _Asked, queue: QueueClients, caller: Caller, model: str) -> StoredResponse:
        request, name, created_ms = asked.request, token_hex(24), wall_ms()
        partition = queue.partitions.choose(name)
        info = ResponseInfo(
            job_id=JobId(f"{partition}.{caller.tenant}.{name}"),
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
            depth=asked.depth,
            idempotency_key=asked.idempotency_key,
            digest=asked.digest,
        )

    async def _add(self, new: StoredResponse, queue: QueueClients, caller: Caller, asked: _Asked) -> Created:
        """Write the row and submit the job, unless an earlier request with the same idempotency key did."""
        rates = await self._rates.charge(caller.key, asked.job)
        try:
            known = await self._quota.add(self._store.add, new)
            if known is None:
                await self._submit(new, queue, asked)
                return Created(new, queue, rates, is_shared=False)
            queue = await self._repeat(known, asked)
        except (ProducerError, HttpError):
            await self._rates.give_back(caller.key, asked.job)
            raise
        known = replace(known, end=None) if known.end == LOST else known
        return Created(known, queue, await self._rates.give_back(caller.key, asked.job) or rates, is_shared=False)

    async def _submit(self, new: StoredResponse, queue: QueueClients, asked: _Asked) -> None:
        try:
            await queue.submit(asked.job.with_id(new.info.job_id))
        except ProducerError as error:
            if not may_be_accepted(error):
                await SQL.run(self._store.withdraw, new)
            elif asked.idempotency_key is None:
                queue.abandoned.add(new.info.job_id)
            raise

    async def _submit_unstored(
        self, new: StoredResponse, queue: QueueClients, caller: Caller, asked: _Asked
    ) -> Created:
        is_shared = asked.idempotency_key is not None
        receipt, rates = await self._rates.submit(queue, caller, asked.job)
        if is_shared:
            await queue.readers.join(receipt.id, is_submitter=not receipt.is_duplicate)
        response = replace(new, info=replace(new.info, job_id=receipt.id))
        return Created(response, queue, rates, is_shared)

    async def _repeat(self, known: StoredResponse, asked: _Asked) -> QueueClients:
        """Submit the job of an earlier request again, if it has not ended or is lost, and return its queue.

        Raises:
            IdempotencyConflict: the earlier request asked for something else.
        """
        if known.digest != asked.digest:
            raise IdempotencyConflict(known.info.job_id)
        queue = served(self._queues, known.queue)
        if known.end is None or known.end == LOST:
            await queue.submit(asked.job.with_id(known.info.job_id))
            # The sweep may have found it lost just now, and looks at open ones only.
            await SQL.run(self._store.reopen, known.info.id)
        return queue


def served(queues: Queues, name: str) -> QueueClients:
    """Return a queue by its name.

    Raises:
        HttpError: 503, this gateway does not serve it.
    """
    try:
        return queues[name]
    except KeyError:
        raise HttpError(503, "server_error", "this gateway does not serve the queue of the response") from None


def _bad_previous(message: str, code: str, status: int = 400) -> HttpError:
    return bad_request(message, code=f"previous_response_{code}", param="previous_response_id", status=status)
