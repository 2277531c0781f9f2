"""Store the ends of responses that no client followed to the end, and delete expired responses.

The table is the work list, so a sweep may be killed at any point, and any number of sweeps may run at once.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic

from sluice.gateway.responses.ends import settle
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import HistoryUnavailable, ProducerError

PAGE = 100
"""Responses that are settled in one round trip, with their outputs in memory."""

DELETED_AT_ONCE = 1000
FOR_S = 0.5
"""How long a sweep works, but it settles at least one page. It runs each second, and batches wait for it."""

PATIENCE_S = 5.0
LOG = logging.getLogger(__name__)


def sweep_responses(redis_url: str, queue: str, database_url: str, *, after: str = "", for_s: float = FOR_S) -> str:
    """Settle the open responses of a queue, and delete the expired ones of all queues. Do nothing without the tables.

    Only of one queue, because the jobs of others may be on other servers, and would seem lost. Returns the id after
    which the next sweep continues if time is up; "" if all responses were settled.

    Raises:
        ProducerError: the queue's server cannot be used; the next sweep tries again.
    """
    with Database(database_url) as database:
        store, until_s = ResponseStore(database), monotonic() + for_s
        try:
            # First, because an error in settling must not prevent it.
            while store.delete_expired(DELETED_AT_ONCE) == DELETED_AT_ONCE and monotonic() < until_s:
                pass
            return asyncio.run(_settle(redis_url, queue, store, after, until_s))
        except HistoryUnavailable:
            return after


async def _settle(redis_url: str, queue: str, store: ResponseStore, after: str, until_s: float) -> str:
    async with AsyncProducer(redis_url, queue=queue, patience_s=PATIENCE_S) as client:
        while page := store.open_after(queue, after, PAGE):
            after = page[-1].info.id
            await _settle_each(client, store, page)
            if monotonic() > until_s:
                return after
    return ""


async def _settle_each(client: AsyncProducer, store: ResponseStore, page: Sequence[StoredResponse]) -> None:
    """Settle responses of one queue; one that cannot be read does not keep the others open."""
    try:
        await settle(client, store, page)
    except ProducerError:
        raise
    except Exception:
        if len(page) == 1:
            LOG.exception("the response %s cannot be settled; the next sweep tries again", page[0].info.id)
            return
        for response in page:
            await _settle_each(client, store, [response])
