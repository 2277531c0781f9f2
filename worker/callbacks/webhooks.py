"""Send one signed webhook, protected against server-side request forgery. Knows no queue.

Callback URLs come from producers, so they must not reach services that only this host can. All addresses of the URL's
host are checked, and the connection uses the checked addresses, because a second lookup could return others (DNS
rebinding). Redirects are not followed.

WebhookError
├── WebhookRefused     the webhook cannot be sent; do not retry
└── WebhookFailed      the receiver did not accept it; retry later
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from sluice.producer.contract.webhooks import sign

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ANSWER_BYTES = 4096
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class WebhookError(Exception):
    """A webhook was not delivered."""


class WebhookRefused(WebhookError):
    """The URL is invalid or forbidden, or the receiver answered 410 Gone."""


class WebhookFailed(WebhookError):
    """The receiver is unreachable or did not answer with 2xx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends webhooks."""

    secrets: str
    """Signing keys; see `sluice.producer.contract.webhooks.sign`."""

    timeout_s: float = 10.0
    """Time limit for connecting, and for each wait for the receiver."""

    networks: tuple[IpNetwork, ...] = ()
    """Private networks that may be reached."""

    def __repr__(self) -> str:
        return f"Sender(timeout_s={self.timeout_s:g}, networks={self.networks})"

    def send(self, url: str, event_id: str, body: bytes) -> int:
        """Post `body` and return the receiver's status, 200 to 299.

        Raises:
            WebhookRefused: no retry can help.
            WebhookFailed: a retry may help.
        """
        target = _split(url)
        addresses = self._addresses(target)
        headers = {
            "content-type": "application/json",
            "user-agent": "sluice-webhooks/1",
            **sign(self.secrets, event_id=event_id, timestamp_s=int(time.time()), body=body),
        }
        status = self._post(target, addresses, body, headers)
        if status == http.client.GONE:
            raise WebhookRefused("the receiver answered 410 (Gone)")
        if not 200 <= status < 300:
            raise WebhookFailed(f"the receiver answered {status}")
        return status

    def _post(self, target: SplitResult, addresses: Sequence[str], body: bytes, headers: dict[str, str]) -> int:
        connection = _connection(target, addresses, self.timeout_s)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        try:
            connection.request("POST", path, body=body, headers=headers)
            answer = connection.getresponse()
            answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise WebhookFailed(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return answer.status

    def _addresses(self, target: SplitResult) -> list[str]:
        """Return the addresses of the host, after checking that all are allowed."""
        assert target.hostname is not None
        try:
            found = socket.getaddrinfo(target.hostname, _port(target), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise WebhookFailed(f"{target.hostname} has no address: {error}") from error
        addresses = [str(place[0]) for *_, place in found]
        for address in addresses:
            if not is_allowed(address, self.networks):
                raise WebhookRefused(
                    f"{target.hostname} is {address}, which is not public. To allow it, name its "
                    "network in SLUICE_CALLBACKS_NETWORKS"
                )
        return addresses


def is_allowed(address: str, networks: Sequence[IpNetwork] = ()) -> bool:
    """Return whether an address is public or in one of `networks`."""
    ip = _innermost(ipaddress.ip_address(address.partition("%")[0]))
    return any(ip in network for network in networks) or (ip.is_global and not ip.is_multicast)


def parse_networks(text: str) -> tuple[IpNetwork, ...]:
    """Parse networks separated by commas, such as `10.0.0.0/8,127.0.0.1`.

    Raises:
        ValueError: one is not a network.
    """
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def _innermost(ip: IpAddress) -> IpAddress:
    """Return the IPv4 address that an IPv6 address embeds for a translator or tunnel, or the address itself."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)


def _split(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        port = target.port
    except ValueError as error:
        raise WebhookRefused(f"not a URL: {error}") from error
    if target.scheme not in ("http", "https") or not target.hostname or port == 0:
        raise WebhookRefused("a callback URL must begin with http:// or https:// and name a host")
    if target.username is not None:
        raise WebhookRefused("a callback URL must not contain a user name or password; webhooks are signed instead")
    return target


def _port(target: SplitResult) -> int:
    return target.port or (443 if target.scheme == "https" else 80)


def _connection(target: SplitResult, addresses: Sequence[str], timeout_s: float) -> http.client.HTTPConnection:
    """Make a connection for the URL's host that uses only the checked addresses."""
    assert target.hostname is not None
    if target.scheme == "https":
        return _PinnedHttps(target.hostname, _port(target), addresses, timeout_s)
    return _PinnedHttp(target.hostname, _port(target), addresses, timeout_s)


class _PinnedHttp(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, addresses: Sequence[str], timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._addresses, self._timeout_s = addresses, timeout_s

    def connect(self) -> None:
        refusals: list[OSError] = []
        for address in self._addresses:
            try:
                self.sock = socket.create_connection((address, self.port), self._timeout_s)
            except OSError as error:
                refusals.append(error)
            else:
                return
        raise refusals[0]


class _PinnedHttps(_PinnedHttp):
    default_port = 443

    def connect(self) -> None:
        super().connect()
        # The certificate must match the host name, not the address.
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
