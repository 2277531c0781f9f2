"""Which models living workers serve, from their heartbeats, read at most once a second."""

from time import monotonic

from sluice.producer.aio import AsyncProducer
from sluice.producer.gateway.errors import bad_request

MAX_AGE_S = 1.0


class Models:
    """The models of one queue. Changes as workers come and go."""

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self._names: tuple[str, ...] = ()
        self._read_s = float("-inf")

    async def names(self) -> tuple[str, ...]:
        """Return the models that living workers serve, in alphabetical order.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        if monotonic() - self._read_s > MAX_AGE_S:
            partitions = await self._producer.queue()
            workers = [about for partition in partitions for about in partition.workers.values()]
            self._names = tuple(sorted({about["model"] for about in workers if about.get("model")}))
            self._read_s = monotonic()
        return self._names

    async def check(self, name: str | None) -> None:
        """Check that a worker serves a model. Without any worker every name is accepted: its job waits.

        Raises:
            HttpError: 404; the message names the models that are served.
        """
        names = await self.names()
        if name is not None and names and name not in names:
            known = ", ".join(names)
            raise bad_request(
                f"the model {name!r} is not served; served: {known}", code="model_not_found", param="model", status=404
            )
