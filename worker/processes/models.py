"""`worker fleet FILE`: the parent of workers with different models, each with its queue and its share of the machine.

The file has the sections of a worker's configuration for all of them, and a table for each: `[workers.NAME]`, with the
settings by the names of their flags, and `cores` on a CPU.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

from sluice.worker.config import FLEET_SECTION, SETTINGS, load_config
from sluice.worker.devices import devices_of
from sluice.worker.endpoints import partitions_of
from sluice.worker.errors import ConfigError
from sluice.worker.log import configure_logs, ended_by_threads, get_log
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.cores import own_cores, share_cores
from sluice.worker.processes.division import (
    Member,
    first_ports,
    memory_fractions,
    memory_problems,
    port_problems,
)
from sluice.worker.processes.parent import Parent, Report, build_kernels_ahead, server_of_children
from sluice.worker.processes.specs import fleet_specs, sidecar_specs

_CORES, _PORT = "cores", "metrics.port"
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
    common = members[0].config
    configure_logs(common.log)
    log = get_log()
    workers, sidecars = specs_of(members, environ), _sidecars(members, environ)
    redis = server_of_children(common, environ, log)
    for member in members:
        build_kernels_ahead(member.config)
    partitions = [keys for member in members for keys in partitions_of(member.config)]

    def make_report() -> Report:
        from sluice.worker.processes.death_report import DeathReports

        return DeathReports(redis.url, list(dict.fromkeys(partitions)), log).send

    with ended_by_threads(log):
        return Parent(workers, sidecars, log, make_report).run()


def read_members(file: Path, environ: Mapping[str, str], flags: Mapping[str, object]) -> list[Member]:
    """Read the workers of a file.

    Raises:
        ConfigError: it cannot be read, a setting is wrong, two workers cannot be beside each other, or a device is
            `cuda:all` and there is no GPU.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")).get(FLEET_SECTION)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from error
    if not isinstance(tables, dict) or not tables:
        raise ConfigError([f"{file}: no worker: expected a table [{FLEET_SECTION}.NAME] for each model"])
    named = cast("Mapping[str, object]", tables)
    members = [_member(file, name, table, environ, flags) for name, table in named.items()]
    if problems := list(_problems(file, members)):
        raise ConfigError(problems)
    return members


def _member(file: Path, name: str, table: object, environ: Mapping[str, str], flags: Mapping[str, object]) -> Member:
    place = f"{file}: {FLEET_SECTION}.{name}"
    if not isinstance(table, dict):
        raise ConfigError([f"{place}: expected a table"])
    stated = dict(cast("dict[str, object]", table))
    num_cores = stated.pop(_CORES, None)
    problems = [f"{place}.{flag}: unknown setting" for flag in stated if flag not in _BY_FLAG]
    if num_cores is not None and (not isinstance(num_cores, int) or num_cores < 1):
        problems.append(f"{place}.{_CORES}: expected a whole number over 0, got {num_cores!r}")
    if problems:
        raise ConfigError(problems)
    own = {_BY_FLAG[flag].key: value for flag, value in stated.items()}
    config = load_config(
        environ,
        file=file,
        flags={"log.name": name, **flags, **own},
        named=lambda setting: f"{place}.{setting.flag[2:]}",
    )
    return Member(
        name=name,
        config=config,
        num_cores=cast("int | None", num_cores),
        devices=tuple(devices_of(config.model.device) * config.model.processes),
        has_own_port=_PORT in own,
    )


def _problems(file: Path, members: Sequence[Member]) -> Iterator[str]:
    """Yield why these workers cannot be beside each other."""
    first = members[0]
    models: dict[str, Member] = {}
    for member in members:
        place, queue = f"{file}: {FLEET_SECTION}.{member.name}", member.config.queue.name
        beside = models.setdefault(queue, member)
        if beside.config.model.path != member.config.model.path:
            # The head of a lane that this worker cannot run would wait for the other one.
            yield f"{place}.queue: {beside.name} has another model on the queue {queue}: give each model a queue"
        if member.config.redis != first.config.redis:
            yield f"{place}: it has another server than {first.name}: state the server in [redis]"
        if member.num_cores is not None and not member.is_on_cpu:
            yield f"{place}.{_CORES}: only for a CPU"
    for member, problem in port_problems(members):
        yield f"{file}: {FLEET_SECTION}.{member.name}.metrics-port: {problem}"
    for member, problem in memory_problems(members):
        yield f"{file}: {FLEET_SECTION}.{member.name}.memory-fraction: {problem}"
    on_cpu = [member for member in members if member.is_on_cpu]
    asked, rest = sum(member.num_cores or 0 for member in on_cpu), [m for m in on_cpu if m.num_cores is None]
    if asked + len(rest) > len(own_cores()) and asked:
        yield f"{file}: {asked} cores and those of {len(rest)} more workers, of {len(own_cores())}"


def specs_of(members: Sequence[Member], environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify the processes of all workers.

    Raises:
        ConfigError: a device is `cuda:all` and there is no GPU.
    """
    specs: list[ChildSpec] = []
    cores = dict(zip([m.name for m in members if m.is_on_cpu], _shares(members), strict=True))
    ports, fractions = first_ports(members), memory_fractions(members)
    for member in members:
        metrics, model = member.config.metrics, member.config.model
        config = replace(
            member.config,
            metrics=replace(metrics, port=ports[member.name]),
            model=replace(model, memory_fraction=fractions.get(member.name, model.memory_fraction)),
        )
        specs += fleet_specs(config, environ, cores=sorted(cores[member.name]) if member.is_on_cpu else None)
    return specs


def _shares(members: Sequence[Member]) -> list[frozenset[int]]:
    """Divide the cores among the members on the CPU, in their order."""
    left, on_cpu = iter(own_cores()), [member for member in members if member.is_on_cpu]
    asked = [None if member.num_cores is None else frozenset(islice(left, member.num_cores)) for member in on_cpu]
    equal = iter(share_cores(list(left), max(1, asked.count(None))))
    return [next(equal) if own is None else own for own in asked]


def _sidecars(members: Sequence[Member], environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify the recorder and the callbacks of each queue."""
    by_queue = {member.config.queue.name: member.config for member in reversed(members)}
    return [spec for config in by_queue.values() for spec in sidecar_specs(config, environ)]
