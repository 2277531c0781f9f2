"""Divide what workers of several models share on one machine: ports, cores, and the memory of the CPU and of each GPU.

Of cores and memory, those that take turns have one share together, since only one of them runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.protocol.checks import MAX_PORT
from sluice.worker.config import WorkerConfig

_CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The workers of one model."""

    name: str
    config: WorkerConfig
    num_cores: int | None
    """Cores that it asks for; None: an equal share of those that are left."""

    devices: tuple[str, ...]
    """That of each worker."""

    has_own_port: bool
    """Whether its table states the port of its metrics."""

    turns: str | None = None
    """The group whose members have their device by turns, if it is in one."""

    @property
    def is_on_cpu(self) -> bool:
        """Whether its workers share the host's cores with others."""
        return self.config.model.device == _CPU

    @property
    def places(self) -> frozenset[str]:
        """The memories that it uses: of the CPU, or of GPUs."""
        return frozenset("cuda:0" if device == "cuda" else device for device in self.devices)

    @property
    def holder(self) -> tuple[str, str]:
        """Who has its share of cores and memory: its group, or it alone."""
        return ("turns", self.turns) if self.turns is not None else ("workers", self.name)

    def ports(self, first: int) -> range:
        """Return the ports of its workers' metrics, from the first one on; none if they are any."""
        metrics = self.config.metrics
        return range(first, first + len(self.devices)) if metrics.enabled and metrics.port else range(0)


def asked_cores(members: Sequence[Member]) -> dict[tuple[str, str], int | None]:
    """Return the cores that each holder on the CPU asks for, in order; of a group, the most of a member."""
    asked: dict[tuple[str, str], int | None] = {}
    for one in members:
        if one.is_on_cpu:
            most = max(one.num_cores or 0, asked.get(one.holder) or 0)
            asked[one.holder] = most or None
    return asked


def first_ports(members: Sequence[Member]) -> Mapping[str, int]:
    """Return the first port of each member: that of its table, or the next one that no other has."""
    stated = {one.name: one.config.metrics.port for one in members if one.has_own_port}
    taken = {port for one in members if one.has_own_port for port in one.ports(stated[one.name])}
    others: dict[str, int] = {}
    for one in members:
        if not one.has_own_port:
            first = one.config.metrics.port
            while not taken.isdisjoint(one.ports(first)):
                first += 1
            taken.update(one.ports(first))
            others[one.name] = min(first, MAX_PORT)
    return {**stated, **others}


def port_problems(members: Sequence[Member]) -> Iterator[tuple[Member, str]]:
    """Yield the members whose stated ports another one states, too."""
    owners: dict[tuple[str, int], Member] = {}
    for one in members:
        if one.has_own_port:
            metrics = one.config.metrics
            for port in one.ports(metrics.port):
                if (owner := owners.setdefault((metrics.host, port), one)) is not one:
                    yield one, f"{port} is a port of {owner.name}: state another"
                    break


def memory_fractions(members: Sequence[Member]) -> Mapping[str, float]:
    """Return the memory fraction of each member that states none and shares a memory: an equal part.

    Of the CPU it is a part of the default, of a GPU one of what the others that state theirs leave of the default.
    """
    return {
        one.name: min(_part(one, place, members) for place in one.places)
        for one in members
        if one.config.model.memory_fraction is None
        and any(one.places & other.places for other in members if other.holder != one.holder)
    }


def _part(one: Member, place: str, members: Sequence[Member]) -> float:
    others = [own for holder, own in _by_holder(place, members).items() if holder != one.holder]
    default = one.config.model.memory_share
    if place == _CPU:
        return default / (len(others) + 1)
    unstated = [own for own in others if not _stated(own)]
    return (default - sum(map(_stated, others))) / (len(unstated) + 1)


def _by_holder(place: str, members: Sequence[Member]) -> Mapping[tuple[str, str], Sequence[Member]]:
    """Return the members that use a memory, by the holders of its shares."""
    beside = [one for one in members if place in one.places]
    return {one.holder: [other for other in beside if other.holder == one.holder] for one in beside}


def _stated(members: Sequence[Member]) -> float:
    """Return the memory fraction that a holder states; 0 if it states none."""
    return max(one.config.model.memory_fraction or 0 for one in members)


def memory_problems(members: Sequence[Member]) -> Iterator[tuple[Member, str]]:
    """Yield the members for which a GPU has no memory."""
    for place in sorted(frozenset[str]().union(*(one.places for one in members)) - {_CPU}):
        beside = _by_holder(place, members)
        stated = sum(map(_stated, beside.values()))
        if len(beside) > 1 and stated > 1:
            using = [one for one in members if place in one.places]
            names = ", ".join(one.name for one in using)
            yield using[-1], f"{names} state {stated:g} of the memory of {place} together: at most 1"
    for name, fraction in memory_fractions(members).items():
        if fraction <= 0:
            one = next(each for each in members if each.name == name)
            yield one, "the others on its GPU leave it no memory: state a part for each"
