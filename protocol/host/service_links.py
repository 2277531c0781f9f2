"""Distinguish variables that Kubernetes sets for services from settings.

A kubelet gives each pod variables for every service of its namespace, unless its spec says `enableServiceLinks: false`.
Those of a service named `sluice-gateway` begin with `SLUICE_GATEWAY_`, as a setting could.
"""

import re

_HOST = r"[0-9a-fA-F.:]+"
_PROTOCOL = r"(tcp|udp|sctp)"
_URL = rf"{_PROTOCOL}://(\[{_HOST}\]|{_HOST}):\d+"
_LINKS = tuple(
    re.compile(rf"\w+_{name}={value}", re.ASCII)
    for name, value in (
        ("SERVICE_HOST", _HOST),
        (r"SERVICE_PORT(_\w+)?", r"\d+"),
        ("PORT", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", _PROTOCOL),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", _HOST),
    )
)


def is_service_link(name: str, value: str) -> bool:
    """Return whether a kubelet could have set this variable to this value for a service."""
    return any(link.fullmatch(f"{name}={value}") for link in _LINKS)
