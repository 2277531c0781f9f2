"""Store the ends of responses that nobody followed to the end, and delete those whose time is over.

The table is the list of what is to be done, so a sweep may be killed anywhere, and any number may run.
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
"""Responses that are looked at in one round trip: their outputs are in memory at once."""

DELETED_AT_ONCE = 1000
FOR_S = 0.5
"""How long a sweep works; it looks at one page at least. One runs each second, and batches wait for it."""

PATIENCE_S = 5.0
LOG = logging.getLogger(__name__)


def sweep_responses(redis_url: str, queue: str, database_url: str, *, after: str = "", for_s: float = FOR_S) -> str:
    """Look at the open responses of a queue, and delete expired ones of all. Without the tables, there are none.

    Only of one queue, because others may be on other servers: here, their jobs would seem lost. Returns the id after
    which the next sweep goes on if time is up; "" if all were looked at.

    Raises:
        ProducerError: the queue's server cannot be used; the next sweep tries again.
    """
    with Database(database_url) as database:
        store, until_s = ResponseStore(database), monotonic() + for_s
        try:
            # First: what cannot be settled must not keep them.
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


async def _settle_each(client: AsyncProducer, store: ResponseStore, found: Sequence[StoredResponse]) -> None:
    """Settle responses of one queue; one that cannot be read keeps none of the others open."""
    try:
        await settle(client, store, found)
    except ProducerError:
        raise
    except Exception:
        if len(found) == 1:
            LOG.exception("the response %s cannot be settled; the next sweep tries again", found[0].info.id)
            return
        for one in found:
            await _settle_each(client, store, [one])
