"""All native routes of a gateway, with what they share."""

from collections.abc import Iterator

from sluice.gateway.native.events import EventRoute
from sluice.gateway.native.jobs import JobRoutes
from sluice.gateway.native.queues import QueueRoutes
from sluice.gateway.native.records import Records
from sluice.gateway.native.scale import ScaleRoutes
from sluice.gateway.native.search import Search
from sluice.gateway.native.submit import SubmitRoute
from sluice.gateway.openapi.routes import ApiRoute
from sluice.gateway.queues import Queues
from sluice.gateway.rates import Rates
from sluice.gateway.settings import GatewaySettings


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
