"""Store the ends of responses that nobody followed to the end, and delete those whose time is over.

The table is the list of what is to be done, so a sweep may be killed anywhere, and any number may run.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import groupby

from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import HistoryUnavailable, ProducerError
from sluice.producer.gateway.responses.ends import settle
from sluice.producer.gateway.responses.store import ResponseStore, StoredResponse
from sluice.producer.gateway.tables.database import Database

PAGE = 100
"""Responses that are looked at in one round trip: their outputs are in memory at once."""

DELETED_AT_ONCE = 1000
PATIENCE_S = 5.0
LOG = logging.getLogger(__name__)


def sweep_responses(redis_url: str, database_url: str) -> None:
    """Look at all open responses, and delete expired ones. Without the tables, there are none.

    Raises:
        ProducerError: the queues' server cannot be used; the next sweep tries again.
    """
    with Database(database_url) as database:
        store = ResponseStore(database)
        try:
            # First: what cannot be settled must not keep them.
            while store.delete_expired(DELETED_AT_ONCE) == DELETED_AT_ONCE:
                pass
            asyncio.run(_settle_all(redis_url, store))
        except HistoryUnavailable:
            return


async def _settle_all(redis_url: str, store: ResponseStore) -> None:
    async with AsyncExitStack() as stack:
        clients: dict[str, AsyncProducer] = {}
        after = ""
        while page := store.open_after(after, PAGE):
            after = page[-1].info.id
            for name, of_queue in groupby(sorted(page, key=lambda one: one.queue), key=lambda one: one.queue):
                if name not in clients:
                    client = AsyncProducer(redis_url, queue=name, patience_s=PATIENCE_S)
                    clients[name] = await stack.enter_async_context(client)
                await _settle_each(clients[name], store, list(of_queue))


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
