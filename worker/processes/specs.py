"""The child processes of a configuration: workers, each for one device, and their sidecars."""

import sys
from collections.abc import Container, Mapping, Sequence
from importlib.util import find_spec
from typing import cast

from sluice.engine.execution.cgroups import num_usable_cores
from sluice.protocol.checks import MAX_PORT
from sluice.protocol.settings import CONFIG_FILE_NAME, PREFIX
from sluice.worker.config import READ_ELSEWHERE, SETTINGS, WorkerConfig
from sluice.worker.devices import devices_of, is_several
from sluice.worker.endpoints import traces_endpoint_of
from sluice.worker.log import Log
from sluice.worker.processes.child_process import ChildSpec
from sluice.worker.processes.cores import own_cores, share_cores
from sluice.worker.processes.prepared import PreparedProcess

_PROGRAM = (sys.executable, "-P", "-m", "sluice.worker")
_START = ("start", "--until-eof")
WORKER = (*_PROGRAM, *_START)
PREPARED = (*_PROGRAM, "start", "--forks")
RECORDER = (*_PROGRAM, "record", "--until-eof")
CALLBACKS = (*_PROGRAM, "callbacks", "--until-eof")
CALLBACKS_NEED = ("fsspec", "rq", "starlette")
"""Packages of `worker callbacks`, and of the gateway whose batches it runs."""

_OF_WORKERS = frozenset(leaf.section for leaf in SETTINGS) - {"callbacks"}
_KEPT = READ_ELSEWHERE - {CONFIG_FILE_NAME}


def is_fleet(config: WorkerConfig) -> bool:
    """Return whether the configuration asks for several worker processes, which their parent restarts."""
    return config.model.processes > 1 or is_several(config.model.device)


def worker_specs(config: WorkerConfig, environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify the only worker, or one per device, or several on the CPU that share its cores and memory.

    Raises:
        ConfigError: the device is `cuda:all` and there is no GPU.
    """
    if is_fleet(config):
        return fleet_specs(config, environ)
    # Its supervisor restarts it.
    return [ChildSpec(kind="worker", command=WORKER, environ=_base(config, environ), restart="no")]


def fleet_specs(
    config: WorkerConfig, environ: Mapping[str, str], *, cores: Sequence[int] | None = None
) -> list[ChildSpec]:
    """Specify the workers of a fleet, each with a name of its own, which their parent restarts.

    On the CPU they share `cores`, or all of this process's.

    Raises:
        ConfigError: as `worker_specs`.
    """
    base = _base(config, environ)
    devices = devices_of(config.model.device) * config.model.processes
    is_on_cpu = config.model.device == "cpu"
    shared = own_cores() if cores is None else cores
    of_each = share_cores(shared, len(devices)) if is_on_cpu else [frozenset[int]()] * len(devices)
    base["SLUICE_PROCESSES"] = "1"
    if is_on_cpu:
        base["SLUICE_MEMORY_FRACTION"] = repr(config.model.memory_share / len(devices))
        _share_quota(base, len(devices))
    return [_fleet_spec(config, base, index, device, of_each[index]) for index, device in enumerate(devices)]


def _share_quota(base: dict[str, str], num_workers: int) -> None:
    """Bound the threads of each worker, if a cgroup has a quota: each reads the whole of it."""
    num_cores = num_usable_cores()
    if num_cores < len(own_cores()):
        base.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_workers)))


def prepared_process(config: WorkerConfig, environ: Mapping[str, str], log: Log) -> PreparedProcess | None:
    """Return the process that forks the workers of a fleet on the CPU; CUDA does not survive a fork."""
    if not is_fleet(config) or config.model.device != "cpu":
        return None
    return PreparedProcess(PREPARED, _base(config, environ), log)


def recorder_specs(config: WorkerConfig, environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify the recorder, if the configuration wants one.

    Raises:
        ConfigError: it is to export traces, and OpenTelemetry is not installed.
    """
    if not config.history.recorder:
        return []
    traces_endpoint_of(config)
    environ = _base(config, environ)
    return [ChildSpec(kind="recorder", command=RECORDER, environ=environ, restart="always")]


def sidecar_specs(config: WorkerConfig, environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify the processes beside the workers: the recorder and callbacks.

    Raises:
        ConfigError: as `recorder_specs`.
    """
    return [*recorder_specs(config, environ), *callbacks_specs(config, environ)]


def callbacks_specs(config: WorkerConfig, environ: Mapping[str, str]) -> list[ChildSpec]:
    """Specify `worker callbacks`, if the configuration wants it. Else the gateway's batches would wait for ever."""
    is_enabled = config.history.callbacks
    if is_enabled is None:
        # A deployment with its own server decides where to run it.
        is_enabled = config.redis.url is None and all(map(find_spec, CALLBACKS_NEED))
    if not is_enabled:
        return []
    environ = _base(config, environ) | environment_of(config, sections=("callbacks",))
    return [ChildSpec(kind="callbacks", command=CALLBACKS, environ=environ, restart="always")]


def _fleet_spec(
    config: WorkerConfig, base: Mapping[str, str], index: int, device: str, cores: frozenset[int]
) -> ChildSpec:
    device_name = f"gpu{device.partition(':')[2]}" if device != "cpu" else f"cpu{index}"
    name = f"{config.log.name}-{device_name}" if config.log.name else device_name
    own = {"SLUICE_DEVICE": device, "SLUICE_NAME": name}
    if config.metrics.port:
        own["SLUICE_METRICS_PORT"] = str(min(config.metrics.port + index, MAX_PORT))
    environ = {**base, **own}
    return ChildSpec(kind="worker", command=WORKER, arguments=_START, name=name, environ=environ, cores=cores)


def _base(config: WorkerConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: this one, with the configuration in place of its sources."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in _KEPT}
    return kept | environment_of(config)


def environment_of(config: WorkerConfig, *, sections: Container[str] = _OF_WORKERS) -> dict[str, str]:
    """Return the environment from which `load_config` builds `config` again, without settings of other sections."""
    stated = [leaf for leaf in SETTINGS if leaf.section in sections]
    values = {leaf.env_name: getattr(getattr(config, leaf.section), leaf.name) for leaf in stated}
    return {name: _as_text(value) for name, value in values.items() if value not in (None, ())}


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[object, ...]", value)))
    return str(value).lower() if isinstance(value, bool) else str(value)
