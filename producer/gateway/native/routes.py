"""All native routes of a gateway, with what they share."""

from collections.abc import Iterator

from sluice.producer.gateway.native.events import EventRoute
from sluice.producer.gateway.native.jobs import JobRoutes
from sluice.producer.gateway.native.queues import QueueRoutes
from sluice.producer.gateway.native.records import Records
from sluice.producer.gateway.native.scale import ScaleRoutes
from sluice.producer.gateway.native.search import Search
from sluice.producer.gateway.native.submit import SubmitRoute
from sluice.producer.gateway.openapi.routes import ApiRoute
from sluice.producer.gateway.queues import Queues
from sluice.producer.gateway.rates import Rates
from sluice.producer.gateway.settings import GatewaySettings


def native_routes(queues: Queues, rates: Rates, records: Records, settings: GatewaySettings) -> Iterator[ApiRoute]:
    """Yield the routes.

    Args:
        queues: The queues of the gateway.
        rates: The limits of keys.
        records: The history.
        settings: The settings of the gateway.
    """
    search = Search(queues)
    yield SubmitRoute(queues, search, rates, settings).route()
    yield from JobRoutes(search, records).routes()
    yield EventRoute(search).route()
    yield from QueueRoutes(search).routes()
    yield from ScaleRoutes(search).routes()
