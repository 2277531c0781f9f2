"""Surveys of the queues, read once a second for all pages of a gateway."""

from collections.abc import Sequence

from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.ui.latest import Latest
from sluice.protocol.calls import QueueView

READ_EVERY_S = 1.0


class Surveys:
    """The surveys of a gateway's queues, one view per partition."""

    def __init__(self, queues: Queues) -> None:
        self._latest = {queue.name: Latest(queue.submitting.queue, READ_EVERY_S) for queue in queues}

    async def of(self, queue: QueueClients) -> Sequence[QueueView]:
        """Return the survey of a queue.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        return await self._latest[queue.name].get()

    def forget(self, queue: QueueClients) -> None:
        """Read the survey of a queue again next time, because it was changed."""
        self._latest[queue.name].forget()

    async def of_partition(self, queue: QueueClients, partition: int) -> QueueView | None:
        """Return the survey of one partition; None if the workers do not serve it, because an id may name any.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        views = await self.of(queue)
        return views[partition] if partition < len(views) else None
