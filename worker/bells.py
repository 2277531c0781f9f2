"""The bells of a Cluster: one blocking read cannot span shards, so each partition has a listener of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from producer.contract.keys import QueueKeys
from worker.bell import Bell
from worker.connections import Connections, is_cluster
from worker.errors import PartDied


class Listener(Protocol):
    """What rings when something may have become ready."""

    def start(self) -> None: ...
    def quiet(self) -> None: ...
    def stop(self) -> None: ...
    def listen(self, after: Mapping[QueueKeys, str]) -> None: ...
    def rung(self) -> list[tuple[QueueKeys, str]]: ...


class Bells:
    """A bell for each partition. A part: start, quiet, stop."""

    def __init__(self, bells: Mapping[QueueKeys, Bell]) -> None:
        self._bells = dict(bells)

    def start(self) -> None:
        """Begin, without listening yet."""
        for bell in self._bells.values():
            bell.start()

    def quiet(self) -> None:
        """Nothing to do: the exchange asks no more."""

    def stop(self) -> None:
        """End the threads; blocks under way are broken off."""
        for bell in self._bells.values():
            bell.stop()

    def listen(self, after: Mapping[QueueKeys, str]) -> None:
        """As `Bell.listen`."""
        for keys, last in after.items():
            self._bells[keys].listen({keys: last})

    def rung(self) -> list[tuple[QueueKeys, str]]:
        """As `Bell.rung`."""
        return [one for bell in self._bells.values() for one in bell.rung()]


def make_bell(
    connections: Connections,
    partitions: Sequence[QueueKeys],
    ring: Callable[[], None],
    died: Callable[[PartDied], None],
) -> Listener:
    """One listener for all partitions, or one for each where they lie on several shards."""
    if is_cluster(connections.uplink.client) and len(partitions) > 1:
        return Bells({keys: Bell(connections.open(), ring, died) for keys in partitions})
    return Bell(connections.open(), ring, died)
