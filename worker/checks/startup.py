"""The list of startup checks. `worker start` runs them before it loads the model; `worker doctor` prints them.

A check yields its results, and raises `ConfigError` or `NotReady` for what `worker start` refuses with that sentence.
Cheap checks come first. Damage in the weights and lack of memory show only when they are loaded.
"""

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sluice.engine.execution.threads import default_num_threads
from sluice.kernels.compiler import COMPILERS
from sluice.worker.checks.estimate import check_estimate
from sluice.worker.checks.queue_check import check_queues
from sluice.worker.checks.redis_check import check_redis
from sluice.worker.checks.site import CheckLevel, CheckResult, Site, warning
from sluice.worker.connection.listening import listen, ports_of
from sluice.worker.device_driver import driver_of
from sluice.worker.endpoints import database_url_of
from sluice.worker.errors import ConfigError, WorkerError
from sluice.worker.log import Log
from sluice.worker.model.folders import check_name, is_null, must_download
from sluice.worker.model.load import check_device as check_one_device
from sluice.worker.model.load import engine_config


class StartupCheck(NamedTuple):
    """One check, and the checks that must succeed before."""

    what: str
    run: Callable[[Site], Iterator[CheckResult]]
    needs: frozenset[str] = frozenset()


def check_settings(site: Site) -> Iterator[CheckResult]:
    """Check the settings of the engine against each other."""
    engine_config(site.config)
    queue = site.config.queue
    yield CheckResult("settings", f"{queue.title}, {queue.num_partitions} partition(s)")
    if len(queue.shares) > 1:
        weights = ", ".join(f"{share.name} {share.weight}" for share in queue.shares)
        yield CheckResult("queue weights", weights)


def check_metrics(site: Site) -> Iterator[CheckResult]:
    """Check that metrics can be served: listen for a moment."""
    config = site.config.metrics
    if not config.enabled:
        yield CheckResult("metrics", "off")
        return
    listener = listen(config)
    if listener is None:
        ports = ports_of(config)
        found = f"ports {ports[0]} to {ports[-1]} of {config.host} are taken"
        yield warning("metrics", found, "The worker runs without /metrics and /healthz. Set a free port.")
        return
    with listener:
        yield CheckResult("metrics", f"port {listener.getsockname()[1]} of {config.host} is free")


def check_history(site: Site) -> Iterator[CheckResult]:
    """Check that the recorder can use the database. An unreachable one is not an error.

    Raises:
        ConfigError: it does not exist, refuses this user, cannot be written, or has another schema.
    """
    if not site.config.history.recorder:
        yield CheckResult("history", "this worker runs no recorder")
        return
    # Imported here because SQLAlchemy is slow to import, and a worker without recorder does not need it.
    from sluice.history.database import HistoryError, HistoryUnreachable, check_writable, is_pooled, opened_database

    try:
        with opened_database(database_url_of(site.config, site.environ), is_writer=True) as engine:
            schema = check_writable(engine)
            pooler = ", through a connection pooler" if schema is not None and is_pooled(engine) else ""
    except HistoryUnreachable as error:
        advice = "Jobs run without it. The outbox in Redis keeps their events until it answers."
        yield warning("history", f"does not answer: {error}", advice)
    except HistoryError as error:
        raise ConfigError([f"SLUICE_DATABASE_URL: {error}"]) from error
    else:
        shown = engine.url.render_as_string(hide_password=True)
        found = f"{shown}, schema {schema}{pooler}" if schema else f"{shown} will be created at the first start"
        yield CheckResult("history", found)


def check_device(site: Site) -> Iterator[CheckResult]:
    """Check that torch is installed and that it sees each configured device.

    Raises:
        ConfigError: it is not, or it does not.
    """
    if is_null(site.config.model):
        yield CheckResult("device", "the null model uses none")
        return
    if site.config.model.engine_python is not None:
        yield CheckResult("device", f"{site.config.model.device}, checked by the engine's process when it loads")
        return
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(["torch is not installed: pip install 'sluice-llm[worker]'"])
    for device in site.devices:
        check_one_device(device)
        yield CheckResult("device", _described(device))


def _described(device: str) -> str:
    import torch

    kind, _, index = device.partition(":")
    if kind == "cpu":
        return f"cpu, {default_num_threads()} threads, torch {torch.__version__}"
    driver, name = driver_of(device), torch.cuda.get_device_name(int(index or 0))
    memory = driver.memory_bytes() if driver is not None else None
    return name if memory is None else f"{name}, {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free"


def check_model(site: Site) -> Iterator[CheckResult]:
    """Check the model except its weights. A model that must be downloaded is checked after the download.

    Raises:
        ConfigError: there is none, its files are wrong, or they do not fit the settings.
    """
    path = site.config.model.path
    if path is not None and must_download(path):
        check_name(path)
        yield CheckResult("model", f"{path} is not a folder on this host; it will be downloaded at startup")
        return
    yield CheckResult("model", site.model.description)
    for option, reason in site.model.refused.items():
        yield CheckResult("model", f"{option} is refused: {reason}", CheckLevel.NOTE)


def check_kernels(site: Site) -> Iterator[CheckResult]:
    """Check the CPU kernels as a start loads them; for a GPU, the compiler that Triton's launchers need."""
    if is_null(site.config.model):
        return
    if site.config.model.device != "cpu":
        yield _compiler()
        return
    from sluice.kernels import native

    if native.library() is None:
        yield warning("kernels", "none, PyTorch's operators are used", f"{native.SLOWER} {native.ADVICE}")
        return
    packaged = native.packaged_library()
    yield CheckResult("kernels", f"for {packaged.stem}" if packaged else "compiled on this machine")


def _compiler() -> CheckResult:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is not None:
        return CheckResult("compiler", compiler)
    return warning("compiler", "none", "Triton compiles a launcher for each kernel at first use. Install gcc or clang.")


SERVER_CHECKS = (
    StartupCheck("settings", check_settings),
    StartupCheck("metrics", check_metrics),
    StartupCheck("history", check_history),
    StartupCheck("redis", check_redis),
)

MODEL_CHECKS = (
    StartupCheck("device", check_device),
    StartupCheck("model", check_model, needs=frozenset({"settings", "device"})),
    StartupCheck("kernels", check_kernels, needs=frozenset({"device"})),
    StartupCheck("queue", check_queues, needs=frozenset({"redis", "model"})),
)
"""Run after the others: they import torch, which takes seconds."""

ESTIMATES = (StartupCheck("memory", check_estimate, needs=frozenset({"model"})),)
"""For people, not for a start: they measure the device."""


def require(checks: Sequence[StartupCheck], site: Site, log: Log) -> None:
    """Run checks for a start, and log their warnings.

    Raises:
        ConfigError: a setting is wrong.
        NotReady: Redis does not answer.
    """
    for check in checks:
        for result in _results_of(check, site):
            if result.level is CheckLevel.WARNING:
                log.warning("startup check warns", what=result.what, found=result.found, advice=result.advice)


def examine(site: Site) -> Iterator[CheckResult]:
    """Run all checks for `worker doctor`: an error of one is its result."""
    failed: set[str] = set()
    for check in (*SERVER_CHECKS, *MODEL_CHECKS, *ESTIMATES):
        if check.needs & failed:
            failed.add(check.what)
            yield CheckResult(check.what, "not checked, because of the above", CheckLevel.NOTE)
            continue
        try:
            yield from _results_of(check, site)
        except WorkerError as error:
            failed.add(check.what)
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            yield from (CheckResult(check.what, problem, CheckLevel.WRONG) for problem in problems)


def _results_of(check: StartupCheck, site: Site) -> Iterator[CheckResult]:
    try:
        yield from check.run(site)
    except OSError as error:
        raise ConfigError([f"{check.what}: {error}"]) from error
