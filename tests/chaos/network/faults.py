"""The faults of a hostile network: what is cut or worsened between which hosts, and for how long."""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import combinations, product

from tests.chaos.network.hosts import Direction, Host
from tests.chaos.network.site import HOSTS, ROLES, SENTINELS, SERVERS, WORKERS, Site

CLIENTS = ("producer", "gateway", *WORKERS)
SILENT = "pairs without traffic"
WAYS = ("both ways", "one way", "other way")
CUT_S = (1, 1, 1, 2, 2, 4, 4, 8, 15, 30)
"""How long a pair is cut, drawn from these."""

SPLIT_S = (8, 15, 30)
BAD_S = 15.0
STEP_S = 4.0
FAILOVER_S = 12.0
STEPS_S = (90.0, 0.0, -90.0, 0.0)
"""How far ahead a clock is, step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: str
    what: str
    seconds: float
    inject: Callable[[Site], AbstractContextManager[object]]


# ---------------------------------------------------------------- cuts


def _kind_of(one: str, other: str) -> str:
    """What a pair of roles says to each other."""
    kinds = {
        ("client", "primary"): "client, primary", ("client", "Sentinel"): "client, Sentinel",
        ("client", "postgres"): "client, PostgreSQL", ("primary", "replica"): "primary, replica",
        ("primary", "Sentinel"): "Redis, Sentinel", ("replica", "Sentinel"): "Redis, Sentinel",
        ("Sentinel", "Sentinel"): "Sentinel, Sentinel",
    }  # fmt: skip
    if (one, other) == ("producer", "gateway"):
        return "producer, gateway"
    if one in ("producer", *SENTINELS) and other == "postgres":
        return SILENT
    return kinds.get((_group_of(one), _group_of(other)), SILENT)


def _group_of(role: str) -> str:
    return "client" if role in CLIENTS else "Sentinel" if role in SENTINELS else role


def _cut(ones: Sequence[str], others: Sequence[str], way: str) -> Callable[[Site], AbstractContextManager[object]]:
    def directions(site: Site) -> list[Direction]:
        there = site.directions(ones, others) if way != "other way" else []
        return there + (site.directions(others, ones) if way != "one way" else [])

    return lambda site: site.network.cut(directions(site))


def pairs(dice: random.Random) -> Iterator[Fault]:
    """Each pair of hosts, both ways and each way; those that say nothing to each other once, for a second."""
    cuts = list(product(combinations(ROLES, 2), WAYS))
    dice.shuffle(cuts)
    for (one, other), way in cuts:
        is_silent = _kind_of(one, other) == SILENT
        if is_silent and way != WAYS[0]:
            continue
        arrow = {"both ways": "⇹", "one way": "↛", "other way": "↚"}[way]
        yield Fault(
            kind=_kind_of(one, other),
            what=f"{one} {arrow} {other}",
            seconds=1 if is_silent else dice.choice(CUT_S),
            inject=_cut((one,), (other,), way),
        )


SPLITS: dict[str, tuple[str, ...]] = {
    "the primary": ("primary",),
    "the replica": ("replica",),
    "the primary, a Sentinel": ("primary", "sentinel-1"),
    "the primary, two Sentinels": ("primary", "sentinel-1", "sentinel-2"),
    "the primary, all clients": ("primary", *CLIENTS),
    "the primary, a Sentinel, half of the clients": ("primary", "sentinel-3", "producer", "worker-1"),
    "the replica, a Sentinel": ("replica", "sentinel-2"),
    "the replica, two Sentinels, a worker": ("replica", "sentinel-1", "sentinel-3", "worker-2"),
    "two Sentinels": ("sentinel-1", "sentinel-2"),
    "three Sentinels": SENTINELS,
    "all workers": WORKERS,
    "two workers": WORKERS[:2],
    "producer and gateway": ("producer", "gateway"),
    "PostgreSQL": ("postgres",),
}
"""One side of each split; the other hosts are the other side."""


def splits(dice: random.Random) -> Iterator[Fault]:
    """Each split of the hosts into two sides, both ways and each way."""
    cuts = list(product(SPLITS.items(), WAYS))
    dice.shuffle(cuts)
    for (name, side), way in cuts:
        others = [role for role in ROLES if role not in side]
        arrow = {"both ways": "⇹", "one way": "↛", "other way": "↚"}[way]
        yield Fault(
            kind=f"{name} ⇹ the others",
            what=f"{name} {arrow} the others",
            seconds=dice.choice(SPLIT_S),
            inject=_cut(side, others, way),
        )


# ---------------------------------------------------------------- bad links and hosts


def bad_links() -> Iterator[Fault]:
    """Loss, delay, reordering, connections that fall silent, hosts that lose power, full connection tables."""
    everywhere = [(one, other) for one, other in product(ROLES, ROLES) if one != other]
    yield _bad("5 % loss on each link", lambda site: site.network.lossy(_all(site, everywhere)))
    for role in ("primary", "replica", "worker-1", "gateway"):
        links = [pair for pair in everywhere if role in pair]
        yield _bad(f"5 % loss: {role}", lambda site, links=links: site.network.lossy(_all(site, links)))
    yield _bad("200 ms on each link", lambda site: site.network.delayed(_hosts(site, ROLES), 0.1))
    yield _bad("200 ms, 25 % reordered", lambda site: site.network.delayed(_hosts(site, ROLES), 0.1, 0.25))
    for role in ("primary", "replica", "worker-1", "gateway", "postgres"):
        yield _bad(f"200 ms: {role}", lambda site, role=role: site.network.delayed(_hosts(site, (role,)), 0.2, 0.1))
    for role in ROLES:
        what = f"connections fall silent: {role}"
        yield _bad(what, lambda site, role=role: site.network.silent(site.host(role)))
    for role, seconds in product(("primary", "replica"), (1.0, 4.0, 15.0)):
        yield Fault(
            kind=f"power failure: {role}",
            what=f"power failure: {role}",
            seconds=seconds,
            inject=lambda site, role=role: _without_power(site, role),
        )
    for role in ("primary", "gateway", "postgres"):
        yield _bad(f"full connection table: {role}", lambda site, role=role: _full_table(site, role))


def _bad(what: str, inject: Callable[[Site], AbstractContextManager[object]]) -> Fault:
    kind = "connections fall silent" if what.startswith("connections") else what
    return Fault(kind=kind, what=what, seconds=BAD_S, inject=inject)


def _all(site: Site, links: Sequence[tuple[str, str]]) -> list[Direction]:
    return [(site.host(one), site.host(other)) for one, other in links]


def _hosts(site: Site, roles: Sequence[str]) -> list[Host]:
    return [site.host(role) for role in roles]


@contextmanager
def _without_power(site: Site, role: str) -> Generator[None]:
    """Cut a host off, kill its server, and start it again: its peers' connections stay half-open."""
    host = site.host(role)
    others = [one for one in site.network.hosts.values() if one is not host]
    with site.network.cut([pair for other in others for pair in ((host, other), (other, host))]):
        site.redis[host.name].kill()
        yield
        site.start_redis(host.name)


@contextmanager
def _full_table(site: Site, role: str) -> Generator[None]:
    """Fill a host's table, and break the connections that it has, so that new ones are needed."""
    host = site.host(role)
    with site.network.full_connection_table(host):
        host.namespace.run("ss", "-K", "state", "established")
        yield


# ---------------------------------------------------------------- clocks


def clocks(dice: random.Random) -> Iterator[Fault]:
    """Step each host's clock forth and back; fail over while the clocks of the servers differ."""
    hosts = dice.sample(HOSTS, len(HOSTS))
    for name in hosts:
        for ahead_s in STEPS_S:
            yield Fault(
                kind="a clock steps",
                what=f"clock of {name} at {ahead_s:+g} s",
                seconds=STEP_S,
                inject=lambda site, name=name, ahead_s=ahead_s: _step(site, name, ahead_s),
            )
            if name in SERVERS:
                yield Fault(
                    kind="a clock steps, then a failover",
                    what=f"the primary ⇹ the others, {name} at {ahead_s:+g} s",
                    seconds=FAILOVER_S,
                    inject=_cut(("primary",), [role for role in ROLES if role != "primary"], "both ways"),
                )


@contextmanager
def _step(site: Site, name: str, ahead_s: float) -> Generator[None]:
    site.clocks.set_ahead(name, ahead_s)
    yield


def drawn(group: str, seed: int, count: int | None = None) -> list[Fault]:
    """The faults of a group, or so many of them, in their order."""
    dice = random.Random(seed)
    faults = list(GROUPS[group](dice))
    places = range(len(faults)) if count is None else sorted(dice.sample(range(len(faults)), min(count, len(faults))))
    return [faults[place] for place in places]


GROUPS: dict[str, Callable[[random.Random], Iterator[Fault]]] = {
    "pairs": pairs, "splits": splits, "bad links": lambda _dice: bad_links(), "clocks": clocks,
}  # fmt: skip
