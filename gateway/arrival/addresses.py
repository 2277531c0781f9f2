"""Count of the open connections of each client address, except those of trusted proxies."""

from collections import Counter
from collections.abc import Sequence
from ipaddress import ip_address, ip_network


class Addresses:
    """The number of open connections by address. Changes as connections are opened and closed.

    Args:
        most: Most connections of one address.
        proxies: Addresses and networks of trusted proxies, which have no bound: their connections serve many clients.
    """

    def __init__(self, most: int, proxies: Sequence[str]) -> None:
        self._most = most
        self._proxies = [ip_network(proxy, strict=False) for proxy in proxies]
        self._num_open: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection; return whether its address now has too many."""
        counted = _counted(address)
        self._num_open[counted] += 1
        return self._num_open[counted] > self._most and not self._is_proxy(address)

    def remove(self, address: str) -> None:
        """Remove a closed connection from the count."""
        counted = _counted(address)
        self._num_open[counted] -= 1
        if not self._num_open[counted]:
            del self._num_open[counted]

    def _is_proxy(self, address: str) -> bool:
        ip = ip_address(address.partition("%")[0])
        return any(ip in network for network in self._proxies)


def _counted(address: str) -> str:
    """Return the key under which an address is counted: for IPv6, its /64 network, because a client has all of it."""
    return str(ip_network((address.partition("%")[0], 64), strict=False)) if ":" in address else address
