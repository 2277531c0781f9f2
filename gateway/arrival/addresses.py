"""The connections of each address, and which addresses are those of proxies."""

from collections import Counter
from collections.abc import Sequence
from ipaddress import ip_address, ip_network


class Addresses:
    """The open connections by their address. Changes as they come and go.

    Args:
        most: Most connections of one address.
        proxies: Addresses and networks of proxies, whose connections are those of many clients.
    """

    def __init__(self, most: int, proxies: Sequence[str]) -> None:
        self._most = most
        self._proxies = [ip_network(one, strict=False) for one in proxies]
        self._num_open: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection; return whether there are too many of its address."""
        counted = _counted(address)
        self._num_open[counted] += 1
        return self._num_open[counted] > self._most and not self._is_proxy(address)

    def remove(self, address: str) -> None:
        """Count a connection that is closed."""
        counted = _counted(address)
        self._num_open[counted] -= 1
        if not self._num_open[counted]:
            del self._num_open[counted]

    def _is_proxy(self, address: str) -> bool:
        found = ip_address(address.partition("%")[0])
        return any(found in network for network in self._proxies)


def _counted(address: str) -> str:
    """Return what an address counts as: of IPv6, a client has the 64 bits that follow the network's."""
    return str(ip_network((address.partition("%")[0], 64), strict=False)) if ":" in address else address
