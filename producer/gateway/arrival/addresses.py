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
        self._num_open[address] += 1
        return self._num_open[address] > self._most and not self._is_proxy(address)

    def remove(self, address: str) -> None:
        """Count a connection that is closed."""
        self._num_open[address] -= 1
        if not self._num_open[address]:
            del self._num_open[address]

    def _is_proxy(self, address: str) -> bool:
        found = ip_address(address.partition("%")[0])
        return any(found in network for network in self._proxies)
