"""Read a partition with all its living workers, page by page, on a redis-py client. No retries."""

from collections.abc import Iterator, Sequence

from sluice.protocol.calls import QueueView, Workers, inspect, list_workers, whole_view
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import Client, run


def survey(client: Client, keys: QueueKeys, *, fields: Sequence[str] = ()) -> QueueView:
    """Read a partition with all its living workers, without its lanes.

    Args:
        client: A connection.
        keys: The partition.
        fields: The fields of heartbeats to read; all if empty.

    Raises:
        redis.exceptions.RedisError: from the server or the connection.
    """
    partition = run(client, inspect(keys))
    workers = {name: about for page in pages_of_workers(client, keys, fields=fields) for name, about in page.items()}
    return whole_view(partition, workers)


def pages_of_workers(client: Client, keys: QueueKeys, *, fields: Sequence[str] = ()) -> Iterator[Workers]:
    """Yield the living workers, a page at a time.

    Raises:
        redis.exceptions.RedisError: from the server or the connection.
    """
    cursor: int | None = 0
    while cursor is not None:
        page = run(client, list_workers(keys, cursor, fields=fields))
        yield page.workers
        cursor = page.cursor or None
