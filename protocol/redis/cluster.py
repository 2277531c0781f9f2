"""The driver of a Cluster's router: it makes the requests of each step. Without I/O: used by producers and workers."""

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from sluice.protocol.redis.drivers import RunAll
from sluice.protocol.redis.error_kinds import NODE_ERRORS
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import Outcome, Router, Routing, ShardRequest
from sluice.protocol.redis.urls import Address, ClusterUrl

Node = TypeVar("Node")
Action = TypeVar("Action")
Result = TypeVar("Result")

Exchange: TypeAlias = Callable[[Node, tuple[Command, ...]], Generator[Action, Any, list[Reply]]]  # Any: as in `drivers`
"""Makes a round trip to one node; an error reply is an exception in its place."""


class ClusterDriver(Generic[Node]):
    """The nodes of one Cluster, each made at first use, and their router. Changes as nodes fail and slots move.

    Args:
        url: The Cluster's.
        make: Makes a node from its URL.
    """

    def __init__(self, url: ClusterUrl, make: Callable[[str], Node]) -> None:
        self.router = Router(url.seeds)
        self._url = url
        self._make = make
        self._nodes: dict[Address, Node] = {}

    @property
    def nodes(self) -> list[Node]:
        """The nodes made so far."""
        return list(self._nodes.values())

    def node(self, address: Address) -> Node:
        """Return the node at an address."""
        if address not in self._nodes:
            self._nodes[address] = self._make(self._url.url_of(address))
        return self._nodes[address]

    def run(
        self, routing: Routing[Result], exchange: Exchange[Node, Action]
    ) -> Generator[Action | RunAll, Any, Result]:  # Any: as in `drivers`
        """Run one of the router's routines. The requests of a step are made at the same time where the driver can.

        Raises:
            NotACluster, RedisError, OSError: from the router.
        """
        try:
            requests = next(routing)
            while True:
                outcomes = yield RunAll([self._outcome(request, exchange) for request in requests])
                requests = routing.send(outcomes)
        except StopIteration as stop:
            return stop.value

    def _outcome(
        self, request: ShardRequest, exchange: Exchange[Node, Action]
    ) -> Generator[Action, Any, Outcome]:  # Any: as in `drivers`
        try:
            return (yield from exchange(self.node(request.address), request.commands))
        except NODE_ERRORS as error:
            return error
