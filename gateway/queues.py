"""The queues that the gateway serves, and the choice of the queue for a model."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import cast

from sluice.gateway.errors import SERVER, HttpError, bad_request
from sluice.gateway.partitions import Partitions, ServedModel
from sluice.gateway.readers import Abandoned, Readers, may_be_accepted
from sluice.gateway.settings import GatewaySettings, ServedQueue
from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import InvalidSetting, LessDurable, QueueUnreachable
from sluice.producer.operations.submission import Receipt
from sluice.protocol.chains.chain import After
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.offers import Offer

SUBMIT_PATIENCE_S = 1.0
"""A request is answered with 503 when Redis cannot be reached for this long, or is silent for three seconds."""

READY_LIMIT_S = 2.5
"""Time limit of the readiness check."""

FOLLOW_PATIENCE_S = 60.0
"""Streams of accepted jobs wait this long for Redis to return."""

KNOWN_FOR_S = 600.0
"""Requests for a model are accepted for this long after its last worker has gone: it may be restarting."""

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueClients:
    """One queue, with the clients that all requests share."""

    name: str
    submitting: AsyncProducer
    """Fails soon while Redis is unreachable."""

    following: AsyncProducer
    """Waits for Redis to return. For jobs that the queue has."""

    readers: Readers
    abandoned: Abandoned
    partitions: Partitions

    async def submit(self, job: CheckedJob, after: After | None = None) -> Receipt:
        """Submit a job. A job that is less durable than its queue requires is served all the same.

        An error would make clients submit it again, as another job. For the same reason, a job whose submit was not
        answered in time is cancelled, unless clients can find it by its id or key.

        Raises:
            ProducerError: as `AsyncProducer.submit_checked`, except for LessDurable.
        """
        try:
            return await self.submitting.submit_checked(self.partitions.placed(job), after=after)
        except QueueUnreachable as error:
            if error.job_id is not None and may_be_accepted(error) and job.is_open:
                self.abandoned.add(error.job_id)
            raise
        except LessDurable as error:
            LOG.warning("A job is less durable than its queue requires", extra={"fields": {"why": str(error)}})
            return cast("Receipt", error.receipt)  # typed as object: the class cannot import Receipt


class Queues:
    """The queues of a gateway. Changes as workers start and stop.

    Args:
        settings: The settings with the queues.
        look_every_s: Least time between two reads of the heartbeats, in seconds.

    Raises:
        InvalidSetting: the Redis URL or the name of a queue is wrong.
    """

    def __init__(self, settings: GatewaySettings, *, look_every_s: float = 1.0) -> None:
        self._clients = {queue.name: _clients(queue, settings) for queue in settings.queues}
        self._configured = dict(settings.model_queues)
        self._wrong: dict[str, InvalidSetting] = {}
        self._served: dict[str, Mapping[str, ServedModel]] = {}
        self._adapters: set[str] = set()
        """All that were ever seen."""

        self._seen_s: dict[str, dict[str, float]] = {name: {} for name in self._clients}
        self._look_every_s, self._looked_s = look_every_s, float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Queues":
        return self

    async def __aexit__(self, *_raised: object) -> None:
        async with AsyncExitStack() as stack:
            for clients in self._clients.values():
                await stack.enter_async_context(clients.submitting)
                await stack.enter_async_context(clients.following)
                stack.push_async_callback(clients.partitions.close)
                stack.push_async_callback(clients.abandoned.close)
                stack.push_async_callback(clients.readers.close)

    def __iter__(self) -> Iterator[QueueClients]:
        return iter(self._clients.values())

    def __getitem__(self, name: str) -> QueueClients:
        """Return a queue by its name; KeyError if the gateway does not serve it."""
        return self._clients[name]

    @property
    def first(self) -> QueueClients:
        """The queue of requests that name no model; the limits of API keys are counted there."""
        return next(iter(self))

    async def of_model(self, model: object) -> QueueClients:
        """Return the queue whose workers serve a model; of several, the first in the settings.

        The settings may name the queue of a model that has no worker yet. While no model is known, a gateway with one
        queue accepts every name: the job waits there.

        Raises:
            HttpError: 404, the model is unknown; the message lists those that are known. 400, the model is not text.
            InvalidSetting: the model is unknown, and a queue that could not be read may serve it.
            QueueUnreachable: the server does not answer.
        """
        if model is not None and not isinstance(model, str):
            raise bad_request("model must be text", param="model")
        by_model = await self._by_model()
        if model is None or (not by_model and len(self._clients) == 1):
            return self.first
        if model not in by_model:
            self._check_wrong()
            raise unknown_model(model, by_model)
        return self._clients[by_model[model]]

    async def models(self) -> tuple[str, ...]:
        """Return the models that living workers or the settings name, in alphabetical order.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        await self.look()
        living = (name for seen_s in self._seen_s.values() for name, at_s in seen_s.items() if self._is_new(at_s))
        return tuple(sorted({*living, *self._configured}))

    def offers_of(self, model: str) -> list[Offer]:
        """Return what the engines of a model's living workers can run, as of the last look, each different one once."""
        texts = {text for served in self._served.values() if model in served for text in served[model].offers}
        return [Offer.read(text) for text in sorted(texts)]

    def parent_of(self, model: str) -> str | None:
        """Return the model whose adapter a living worker serves by this name; None if it is no adapter."""
        parents = (served[model].parent for served in self._served.values() if model in served)
        return next(filter(None, parents), None)

    async def model_of(self, clients: QueueClients) -> str:
        """Return the name of a model that a queue's workers serve, and no adapter; "" if none is known."""
        by_model = await self._by_model()
        names = {name for name, queue in by_model.items() if queue == clients.name}
        return min(names - self._adapters, default="")

    async def look(self) -> None:
        """Read the heartbeats of all queues, unless they were read less than `look_every_s` ago.

        A queue whose settings do not match counts as one without workers, unless this is true of all queues.

        Raises:
            InvalidSetting: the settings match no queue.
            QueueUnreachable: the server does not answer.
        """
        if monotonic() - self._looked_s >= self._look_every_s:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)  # shared by all requests that wait for it
        if len(self._wrong) == len(self._clients):
            self._check_wrong()

    async def check_ready(self) -> None:
        """Check that the settings match those of the queues, and that a server answers, within `READY_LIMIT_S`.

        Raises:
            HttpError, QueueRefused: as `check`.
            InvalidSetting, QueueUnreachable: as `look`.
        """
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                await self.check()
                await self.look()
        except TimeoutError as error:
            raise QueueUnreachable(f"no server answered within {READY_LIMIT_S:g} s") from error

    async def check(self) -> None:
        """Check that the settings match those of the queues.

        Raises:
            HttpError: 503, a queue has another number of partitions, or a wrong setting.
            QueueRefused: a server does not accept jobs.
        """
        for clients in self:
            try:
                await clients.partitions.check()
            except InvalidSetting as error:
                LOG.warning("The gateway is not ready: %s", error)
                raise HttpError(503, SERVER, str(error), "gateway_misconfigured") from error

    async def _look(self) -> None:
        served = await asyncio.gather(*(_served(clients.partitions) for clients in self))
        self._looked_s = now_s = monotonic()
        by_queue = dict(zip(self._clients, served, strict=True))
        self._wrong = {name: models for name, models in by_queue.items() if isinstance(models, InvalidSetting)}
        if len(self._wrong) < len(by_queue):  # otherwise each request fails, and its error is logged
            for error in self._wrong.values():
                LOG.warning("The gateway does not serve a queue: %s", error)
        for name, models in by_queue.items():
            new: Mapping[str, ServedModel] = {} if isinstance(models, InvalidSetting) else models
            self._served[name] = new
            self._adapters |= {model for model, served in new.items() if served.parent is not None}
            seen_s = self._seen_s[name] | dict.fromkeys(new, now_s)
            self._seen_s[name] = {model: at_s for model, at_s in seen_s.items() if now_s - at_s < KNOWN_FOR_S}

    def _check_wrong(self) -> None:
        """Raise the error of the first queue whose settings do not match, if there is one.

        Raises:
            InvalidSetting: the settings do not match.
        """
        for error in self._wrong.values():
            raise InvalidSetting(str(error))

    async def _by_model(self) -> Mapping[str, str]:
        """Return the queue of each model: from living workers first, then from earlier ones, then from the settings."""
        await self.look()
        by_model = dict(self._configured)
        for is_new in (False, True):
            for queue, seen_s in reversed(self._seen_s.items()):
                by_model |= {name: queue for name, at_s in seen_s.items() if self._is_new(at_s) == is_new}
        return by_model

    def _is_new(self, at_s: float) -> bool:
        return at_s == self._looked_s


def unknown_model(model: str, known: Iterable[str]) -> HttpError:
    """Return the error for a model that is not served."""
    return bad_request(
        f"the model {model!r} is not served; served: {', '.join(sorted(known)) or 'none'}",
        code="model_not_found",
        param="model",
        status=404,
    )


def _clients(queue: ServedQueue, settings: GatewaySettings) -> QueueClients:
    submitting, following = (
        AsyncProducer(settings.redis_url, queue=queue.name, partitions=queue.partitions, patience_s=patience_s)
        for patience_s in (SUBMIT_PATIENCE_S, FOLLOW_PATIENCE_S)
    )
    readers = Readers(submitting, submitting.target, settings)
    abandoned = Abandoned(submitting, settings.request_limit_s)
    partitions = Partitions(settings.redis_url, submitting)
    return QueueClients(queue.name, submitting, following, readers, abandoned, partitions)


async def _served(partitions: Partitions) -> Mapping[str, ServedModel] | InvalidSetting:
    try:
        return await partitions.models()
    except InvalidSetting as error:
        return error
