"""Send one signed webhook, protected against server-side request forgery. Knows no queue.

Callback URLs come from producers, so they must not reach services that only this host can. All addresses of the URL's
host are checked, and the connection uses the checked addresses, because a second lookup could return others (DNS
rebinding). Redirects are not followed.

WebhookError
├── WebhookRefused     the webhook cannot be sent; do not retry
└── WebhookFailed      the receiver did not accept it; retry later
"""

import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import SplitResult, quote

from sluice.protocol.callback_urls import read_callback_url
from sluice.protocol.webhooks import sign, tenant_secrets
from sluice.worker.clock import monotonic_s

if TYPE_CHECKING:
    from typing_extensions import Buffer

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ANSWER_BYTES = 4096
_URL_CHARACTERS = "%/?:@!$&'()*+,;=-._~"
"""Characters of a path and query that are sent as they are; others are sent as the bytes of their UTF-8."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
"""All publicly assigned networks; `is_global` also includes addresses of tunnels and routers."""

_NEVER_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # services of Azure for its own machines
        "192.0.0.0/24",  # IETF protocols; .192 has the metadata of Oracle's machines
        "192.88.99.0/24",  # relays of 6to4
    )
)
"""Networks that reach services of the host's own provider or network, though `is_global` may hold."""


class WebhookError(Exception):
    """A webhook was not delivered."""


class WebhookRefused(WebhookError):
    """The URL is invalid or forbidden, or the receiver answered 410 Gone."""


class WebhookFailed(WebhookError):
    """The receiver is unreachable or did not answer with 2xx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """A sender of webhooks."""

    secrets: str
    """Signing keys; see `sluice.protocol.webhooks.sign`. `of_tenant` derives those of a tenant."""

    timeout_s: float = 10.0
    """Time limit for one delivery, from connecting to the end of the answer."""

    networks: tuple[IpNetwork, ...] = ()
    """Private networks that may be reached."""

    def __repr__(self) -> str:
        return f"Sender(timeout_s={self.timeout_s:g}, networks={self.networks})"

    def of_tenant(self, tenant: str) -> "Sender":
        """Return the sender that signs with the keys of a tenant."""
        return replace(self, secrets=tenant_secrets(self.secrets, tenant))

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
        connection = _connection(target, addresses, monotonic_s() + self.timeout_s)
        path = quote((target.path or "/") + (f"?{target.query}" if target.query else ""), safe=_URL_CHARACTERS)
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
            infos = socket.getaddrinfo(target.hostname, _port(target), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise WebhookFailed(f"{target.hostname} has no address: {error}") from error
        addresses = [str(place[0]) for *_, place in infos]
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
    return any(ip in network for network in networks) or _is_public(ip)


def _is_public(ip: IpAddress) -> bool:
    if ip.is_multicast or any(ip in network for network in _NEVER_PUBLIC):
        return False
    return ip.is_global and (isinstance(ip, ipaddress.IPv4Address) or ip in _PUBLIC_IPV6)


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
        return read_callback_url(url)
    except ValueError as error:
        raise WebhookRefused(f"a callback URL {error}") from error


def _port(target: SplitResult) -> int:
    return target.port or (443 if target.scheme == "https" else 80)


def _connection(target: SplitResult, addresses: Sequence[str], until_s: float) -> http.client.HTTPConnection:
    """Make a connection for the URL's host that uses only the checked addresses, until a time."""
    assert target.hostname is not None
    if target.scheme == "https":
        return _PinnedHttps(target.hostname, _port(target), addresses, until_s)
    return _PinnedHttp(target.hostname, _port(target), addresses, until_s)


class _PinnedHttp(http.client.HTTPConnection):
    """A connection to one of the checked addresses, until a time."""

    def __init__(self, host: str, port: int, addresses: Sequence[str], until_s: float) -> None:
        super().__init__(host, port)
        self._addresses, self._until_s = addresses, until_s

    def connect(self) -> None:
        self.sock = cast("socket.socket", _TimedSocket(self._connected(), self._until_s))

    def _connected(self) -> socket.socket:
        refusals: list[OSError] = []
        for address in self._addresses:
            try:
                return socket.create_connection((address, self.port), _rest_s(self._until_s))
            except OSError as error:
                refusals.append(error)
        raise refusals[0]


class _PinnedHttps(_PinnedHttp):
    """The same with TLS."""

    default_port = 443

    def _connected(self) -> socket.socket:
        plain = super()._connected()
        plain.settimeout(_rest_s(self._until_s))
        # The certificate must match the host name, not the address.
        return ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)


@dataclass(frozen=True, slots=True)
class _TimedSocket:
    """The methods of a socket that `http.client` uses. All calls end at one time, however slow the other end is."""

    sock: socket.socket
    until_s: float

    def sendall(self, data: bytes) -> None:
        self.sock.settimeout(_rest_s(self.until_s))
        self.sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_TimedReader(self))

    def close(self) -> None:
        self.sock.close()


class _TimedReader(io.RawIOBase):
    """The bytes that a `_TimedSocket` receives."""

    def __init__(self, timed: _TimedSocket) -> None:
        self._timed = timed
        # It keeps the socket open, which `http.client` closes before it has read the answer.
        self._raw = timed.sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer", /) -> int | None:
        self._timed.sock.settimeout(_rest_s(self._timed.until_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _rest_s(until_s: float) -> float:
    """Return the time until then.

    Raises:
        TimeoutError: it has passed.
    """
    rest_s = until_s - monotonic_s()
    if rest_s <= 0:
        raise TimeoutError("timed out")
    return rest_s
