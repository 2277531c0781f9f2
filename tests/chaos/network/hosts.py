"""Hosts on one machine: network namespaces on a bridge, whose rules cut and worsen links between them. Needs root."""

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.network.delay_line import DelayLine

NETWORK = "10.93.0"
"""The first three numbers of each address; only hosts know them."""

MAX_TRACKED = Path("/proc/sys/net/netfilter/nf_conntrack_max")
TRACKED_S = 2.0
_CLONE_NEWNET = 0x40000000
_RULES = """
table bridge links {
  set cut { type ipv4_addr . ipv4_addr; }
  set lossy { type ipv4_addr . ipv4_addr; }
  set silent { type ipv4_addr . inet_service . ipv4_addr . inet_service; }
  counter dropped {}
  chain forward {
    type filter hook forward priority 0; policy accept;
    ip saddr . ip daddr @cut counter name dropped drop
    ip saddr . ip daddr @lossy numgen random mod 100 < 5 counter name dropped drop
    ip saddr . tcp sport . ip daddr . tcp dport @silent counter name dropped drop
  }
}
"""
_TRACKING = "table inet tracking { chain input { type filter hook input priority 0; ct state new counter accept; }; }"

Direction = tuple["Host", "Host"]
"""Packets from the first to the second."""


def why_not() -> str | None:
    """Why this machine cannot have hosts, as a sentence for a skipped test; None if it can."""
    if missing := [tool for tool in ("ip", "nft", "ss") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}: apt-get install iproute2 nftables"
    name = f"sl{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "needs root, and a kernel that allows network namespaces"
    try:
        rules = subprocess.run(
            ["ip", "netns", "exec", name, "nft", "-f", "-"], input=_RULES.encode(), capture_output=True, check=False
        )
    finally:
        _run("ip", "netns", "delete", name)
    return "needs a kernel with nftables for bridges" if rules.returncode else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace by its name."""

    name: str

    def run(self, *command: str) -> str:
        """Run a command in it; return its output."""
        return _run("ip", "netns", "exec", self.name, *command)

    @contextmanager
    def inside(self) -> Generator[None]:
        """Let this thread, the processes that it starts and the sockets that it opens be in the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        here = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            assert libc.setns(here, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            os.close(here)
            os.close(before)


@dataclass(frozen=True, slots=True)
class Host:
    """One host: a namespace with an address."""

    name: str
    address: str
    port: str
    """Its interface on the bridge."""

    namespace: Namespace

    def connections(self) -> list[tuple[str, str, str, str]]:
        """Its established connections: address and port of this side, then of the other."""
        lines = self.namespace.run("ss", "-Htn", "state", "established").splitlines()
        found = [re.findall(r"(\d+\.\d+\.\d+\.\d+):(\d+)", line) for line in lines]
        return [(*ends[0], *ends[1]) for ends in found if len(ends) == 2]


class Network:
    """A bridge with hosts. Changes: links are cut and worsened."""

    def __init__(self, names: Sequence[str], stack: ExitStack) -> None:
        prefix = f"sl{os.getpid()}"
        self._switch = _namespace(f"{prefix}-switch", stack)
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.run("ip", "link", "set", "bridge", "up")
        self._load(_RULES)
        self.hosts = {
            name: self._host(name, f"port{number}", f"{NETWORK}.{number}", _namespace(f"{prefix}-{name}", stack))
            for number, name in enumerate(names, start=1)
        }

    def _host(self, name: str, port: str, address: str, namespace: Namespace) -> Host:
        _run("ip", "link", "add", "eth0", "netns", namespace.name, "type", "veth", "peer", "name", port,
             "netns", self._switch.name)  # fmt: skip
        namespace.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            namespace.run("ip", "link", "set", link, "up")
        self._join(port)
        return Host(name, address, port, namespace)

    def _join(self, port: str) -> None:
        self._switch.run("ip", "link", "set", port, "master", "bridge")
        self._switch.run("ip", "link", "set", port, "up")

    def _load(self, rules: str) -> None:
        with self._switch.inside():
            subprocess.run(["nft", "-f", "-"], input=rules.encode(), check=True)

    # ------------------------------------------------------------ faults

    @property
    def num_dropped(self) -> int:
        """Packets that the rules have dropped."""
        found = re.search(r"packets (\d+)", self._switch.run("nft", "list", "counter", "bridge", "links", "dropped"))
        assert found is not None
        return int(found[1])

    @contextmanager
    def cut(self, directions: Iterable[Direction]) -> Generator[None]:
        """Drop each packet in these directions: no host learns of it."""
        with self._in_set("cut", directions):
            yield

    @contextmanager
    def lossy(self, directions: Iterable[Direction]) -> Generator[None]:
        """Drop one packet of twenty in these directions."""
        with self._in_set("lossy", directions):
            yield

    @contextmanager
    def _in_set(self, name: str, directions: Iterable[Direction]) -> Generator[None]:
        elements = ", ".join(f"{one.address} . {other.address}" for one, other in directions)
        self._load(f"add element bridge links {name} {{ {elements} }}\n")
        try:
            yield
        finally:
            self._load(f"delete element bridge links {name} {{ {elements} }}\n")

    @contextmanager
    def silent(self, host: Host) -> Generator[None]:
        """Drop the packets of all connections that a host has now; new ones work. A lost table of a router does so."""
        both = ((f"{a} . {b} . {c} . {d}", f"{c} . {d} . {a} . {b}") for a, b, c, d in host.connections())
        elements = ", ".join(sorted({element for pair in both for element in pair}))
        self._load(f"add element bridge links silent {{ {elements} }}\n" if elements else "")
        try:
            yield
        finally:
            self._load("flush set bridge links silent\n")

    @contextmanager
    def delayed(self, hosts: Sequence[Host], delay_s: float, reordered_share: float = 0.0) -> Generator[None]:
        """Delay what each host sends and receives; frames of a share overtake the others."""
        with ExitStack() as stack:
            for host in hosts:
                stack.enter_context(self._delayed(host, delay_s, reordered_share))
            yield

    @contextmanager
    def _delayed(self, host: Host, delay_s: float, reordered_share: float) -> Generator[None]:
        near, far = f"{host.port}-near", f"{host.port}-far"
        self._switch.run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        self._switch.run("ip", "link", "set", host.port, "nomaster")
        self._switch.run("ip", "link", "set", near, "up")
        self._join(far)
        with self._switch.inside():
            line = DelayLine(host.port, near, delay_s, reordered_share)
        try:
            yield
        finally:
            line.close()
            self._switch.run("ip", "link", "delete", near)
            self._join(host.port)

    @contextmanager
    def full_connection_table(self, host: Host) -> Generator[None]:
        """Let a host's kernel track connections, and have no room for a new one: it drops their first packets."""
        usual = MAX_TRACKED.read_text()
        host.namespace.run("nft", _TRACKING)
        try:
            # Until then, those that are open have sent a packet, and keep their place.
            time.sleep(TRACKED_S)
            MAX_TRACKED.write_text("1")
            yield
        finally:
            MAX_TRACKED.write_text(usual)
            host.namespace.run("nft", "delete", "table", "inet", "tracking")


def _namespace(name: str, stack: ExitStack) -> Namespace:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    return Namespace(name)


@contextmanager
def network(names: Sequence[str]) -> Generator[Network]:
    """A network for the time of a test; its processes must have ended before it does."""
    with ExitStack() as stack:
        yield Network(names, stack)
