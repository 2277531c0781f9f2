"""`worker fleet FILE`: the parent of workers with different models, each with its queue and its share of the machine.

The file has the sections of a worker's configuration for all of them, and a table for each: `[workers.NAME]`, with the
settings by the names of their flags, and `cores` on a CPU. Those with the same `turns` have their device by turns.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

from sluice.worker.config import FLEET_SECTION, SETTINGS, TURNS_SECTION, load_config
from sluice.worker.devices import devices_of
from sluice.worker.endpoints import partitions_of
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.model.folders import model_name
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.cores import own_cores, share_cores
from sluice.worker.processes.division import (
    Member,
    asked_cores,
    first_ports,
    memory_fractions,
    memory_problems,
    port_problems,
)
from sluice.worker.processes.parent import Parent, Report, build_kernels_ahead, server_of_children
from sluice.worker.processes.specs import fleet_specs, sidecar_specs
from sluice.worker.processes.turns.parent import Group, TurnsParent
from sluice.worker.processes.turns.policy import TurnRules
from sluice.worker.processes.turns.settings import read_rules
from sluice.worker.processes.turns.watch import Watch, Watched

_CORES, _PORT, _TURNS = "cores", "metrics.port", "turns"
_BY_FLAG = {setting.flag.removeprefix("--"): setting for setting in SETTINGS}


def start_members(file: Path, environ: Mapping[str, str], flags: Mapping[str, object]) -> int:
    """Run the workers of a file until all have ended; return the exit code.

    Args:
        file: The fleet.
        environ: This process's environment, whose settings are for all workers.
        flags: Those of the command by `section.name`, for all workers, too.

    Raises:
        ConfigError: the file or a setting is wrong, or no server can be started on this host.
    """
    members = read_members(file, environ, flags)
    rules = read_turns(file, members)
    common = members[0].config
    configure_logs(common.log)
    log = get_log()
    by_member, sidecars = specs_by_member(members, environ), sidecars_of(members, environ)
    workers = [spec for specs in by_member.values() for spec in specs]
    redis = server_of_children(common, environ, log)
    for member in members:
        build_kernels_ahead(member.config)
    partitions = [keys for member in members for keys in partitions_of(member.config)]

    def make_report() -> Report:
        from sluice.worker.processes.death_report import DeathReports

        return DeathReports(redis.url, list(dict.fromkeys(partitions)), log).send

    with ended_by_threads(log):
        if not rules:
            return Parent(workers, sidecars, log, make_report).run()
        groups = [_group(name, own, members, by_member, redis.url, log) for name, own in rules.items()]
        return TurnsParent(workers, sidecars, log, make_report, groups).run()


def _group(
    name: str,
    rules: TurnRules,
    members: Sequence[Member],
    by_member: Mapping[str, Sequence[ChildSpec]],
    url: str,
    log: Log,
) -> Group:
    own = [member for member in members if member.turns == name]
    watched = {member.name: Watched(model=model_name(member.config.model), config=member.config) for member in own}
    watch = Watch(url, watched, log.bind(turns=name))
    return Group(name=name, rules=rules, workers={member.name: by_member[member.name] for member in own}, watch=watch)


def read_members(file: Path, environ: Mapping[str, str], flags: Mapping[str, object]) -> list[Member]:
    """Read the workers of a file.

    Raises:
        ConfigError: it cannot be read, a setting is wrong, two workers cannot be beside each other, or a device is
            `cuda:all` and there is no GPU.
    """
    tables = _read(file).get(FLEET_SECTION)
    if not isinstance(tables, dict) or not tables:
        raise ConfigError([f"{file}: no worker: expected a table [{FLEET_SECTION}.NAME] for each model"])
    named = cast("Mapping[str, object]", tables)
    members = [_member(file, name, table, environ, flags) for name, table in named.items()]
    if problems := list(_problems(file, members)):
        raise ConfigError(problems)
    return members


def read_turns(file: Path, members: Sequence[Member]) -> dict[str, TurnRules]:
    """Read the groups of members that have their device by turns.

    Raises:
        ConfigError: a setting is wrong, or a group has fewer than two members.
    """
    tables = _read(file).get(TURNS_SECTION, {})
    if not isinstance(tables, dict):
        raise ConfigError([f"{file}: {TURNS_SECTION}: expected a table for each group"])
    stated = cast("Mapping[str, object]", tables)
    sizes = Counter(member.turns for member in members if member.turns is not None)
    if problems := [
        f"{file}: {TURNS_SECTION}.{name}: expected at least two workers with {_TURNS} = {name!r}, got {sizes[name]}"
        for name in dict.fromkeys([*sizes, *stated])
        if sizes[name] < 2
    ]:
        raise ConfigError(problems)
    return {name: read_rules(f"{file}: {TURNS_SECTION}.{name}", stated.get(name, {})) for name in sizes}


def _read(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from error


def _member(file: Path, name: str, table: object, environ: Mapping[str, str], flags: Mapping[str, object]) -> Member:
    place = f"{file}: {FLEET_SECTION}.{name}"
    if not isinstance(table, dict):
        raise ConfigError([f"{place}: expected a table"])
    stated = dict(cast("dict[str, object]", table))
    num_cores, turns = stated.pop(_CORES, None), stated.pop(_TURNS, None)
    problems = [f"{place}.{flag}: unknown setting" for flag in stated if flag not in _BY_FLAG]
    if num_cores is not None and (not isinstance(num_cores, int) or num_cores < 1):
        problems.append(f"{place}.{_CORES}: expected a whole number over 0, got {num_cores!r}")
    if turns is not None and (not isinstance(turns, str) or not turns):
        problems.append(f"{place}.{_TURNS}: expected the name of a group, got {turns!r}")
    if problems:
        raise ConfigError(problems)
    own = {_BY_FLAG[flag].key: value for flag, value in stated.items()}
    config = load_config(
        environ,
        file=file,
        flags={"log.name": name, **flags, **own},
        named=lambda setting: f"{place}.{setting.flag[2:]}",
    )
    if turns is not None:
        # A model that waits for the device waits for these jobs, which lose nothing.
        config = replace(config, drain=replace(config.drain, mode="hand-over"))
    return Member(
        name=name,
        config=config,
        num_cores=cast("int | None", num_cores),
        devices=tuple(devices_of(config.model.device) * config.model.processes),
        has_own_port=_PORT in own,
        turns=cast("str | None", turns),
    )


def _problems(file: Path, members: Sequence[Member]) -> Iterator[str]:
    """Yield why these workers cannot be beside each other."""
    yield from _member_problems(file, members)
    for member, problem in port_problems(members):
        yield f"{file}: {FLEET_SECTION}.{member.name}.metrics-port: {problem}"
    for member, problem in memory_problems(members):
        yield f"{file}: {FLEET_SECTION}.{member.name}.memory-fraction: {problem}"
    of_holders = list(asked_cores(members).values())
    asked, rest = sum(cores or 0 for cores in of_holders), of_holders.count(None)
    if asked + rest > len(own_cores()) and asked:
        yield f"{file}: {asked} cores and those of {rest} more workers, of {len(own_cores())}"


def _member_problems(file: Path, members: Sequence[Member]) -> Iterator[str]:
    """Yield what is wrong with single members: a queue, a server or cores."""
    first = members[0]
    models: dict[str, Member] = {}
    for member in members:
        place, queues = f"{file}: {FLEET_SECTION}.{member.name}", member.config.queue.names
        for queue in queues:
            beside = models.setdefault(queue, member)
            if beside.config.model.path != member.config.model.path:
                # The head of a lane that this worker cannot run would wait for the other one.
                yield f"{place}.queue: {beside.name} has another model on the queue {queue}: give each model a queue"
            if beside is not member and member.turns is not None and beside.turns == member.turns:
                yield f"{place}.queue: {beside.name} takes turns with it, and has the same queue"
        if member.turns is not None and len(queues) > 1:
            yield f"{place}.queue: expected one queue of a worker with {_TURNS}, got {', '.join(queues)}"
        if member.config.redis != first.config.redis:
            yield f"{place}: it has another server than {first.name}: state the server in [redis]"
        if member.num_cores is not None and not member.is_on_cpu:
            yield f"{place}.{_CORES}: only for a CPU"


def specs_by_member(members: Sequence[Member], environ: Mapping[str, str]) -> dict[str, list[ChildSpec]]:
    """Specify the processes of all workers, by the names of the members.

    Raises:
        ConfigError: a device is `cuda:all` and there is no GPU.
    """
    specs: dict[str, list[ChildSpec]] = {}
    cores, ports, fractions = _shares(members), first_ports(members), memory_fractions(members)
    for member in members:
        metrics, model = member.config.metrics, member.config.model
        config = replace(
            member.config,
            metrics=replace(metrics, port=ports[member.name]),
            model=replace(model, memory_fraction=fractions.get(member.name, model.memory_fraction)),
        )
        own = sorted(cores[member.holder]) if member.is_on_cpu else None
        specs[member.name] = fleet_specs(config, environ, cores=own)
    return specs


def _shares(members: Sequence[Member]) -> dict[tuple[str, str], frozenset[int]]:
    """Divide the cores among the holders of shares on the CPU, in their order."""
    left, by_holder = iter(own_cores()), asked_cores(members)
    asked = [None if num_cores is None else frozenset(islice(left, num_cores)) for num_cores in by_holder.values()]
    equal = iter(share_cores(list(left), max(1, asked.count(None))))
    return dict(zip(by_holder, (next(equal) if own is None else own for own in asked), strict=True))


def sidecars_of(members: Sequence[Member], environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify recorders and callbacks, so that each queue has one of them."""
    specs, served = list[ChildSpec](), set[str]()
    for member in members:
        own = member.config.queue
        if names := tuple(name for name in own.names if name not in served):
            served.update(names)
            specs += sidecar_specs(replace(member.config, queue=replace(own, name=names)), environ)
    return specs
