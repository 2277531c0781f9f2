"""The list of startup checks. `worker start` runs them before it loads the model; `worker doctor` prints them.

A check yields its results, and raises `ConfigError` or `NotReady` for what `worker start` refuses with that sentence.
Cheap checks come first. Damage in the weights and lack of memory show only when they are loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sluice.worker.checks.history_check import check_history
from sluice.worker.checks.model_checks import check_device, check_kernels, check_model
from sluice.worker.checks.queue_check import check_queue
from sluice.worker.checks.redis_check import check_redis
from sluice.worker.checks.result import CheckLevel, CheckResult, warning
from sluice.worker.checks.site import Site
from sluice.worker.connection.listening import listen, ports_of
from sluice.worker.errors import ConfigError, WorkerError
from sluice.worker.log import Log
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
    yield CheckResult(what="settings", found=f"queue {queue.name!r}, {queue.num_partitions} partition(s)")


def check_metrics(site: Site) -> Iterator[CheckResult]:
    """Check that metrics can be served: listen for a moment."""
    config = site.config.metrics
    if not config.enabled:
        yield CheckResult(what="metrics", found="off")
        return
    listener = listen(config)
    if listener is None:
        ports = ports_of(config)
        found = f"ports {ports[0]} to {ports[-1]} of {config.host} are taken"
        yield warning("metrics", found, "The worker runs without /metrics and /healthz. Set a free port.")
        return
    with listener:
        yield CheckResult(what="metrics", found=f"port {listener.getsockname()[1]} of {config.host} is free")


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
    StartupCheck("queue", check_queue, needs=frozenset({"redis", "model"})),
)
"""Run after the others: they import torch, which takes seconds."""


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
    for check in (*SERVER_CHECKS, *MODEL_CHECKS):
        if check.needs & failed:
            failed.add(check.what)
            yield CheckResult(what=check.what, found="not checked, because of the above", level=CheckLevel.NOTE)
            continue
        try:
            yield from _results_of(check, site)
        except WorkerError as error:
            failed.add(check.what)
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            yield from (CheckResult(what=check.what, found=problem, level=CheckLevel.WRONG) for problem in problems)


def _results_of(check: StartupCheck, site: Site) -> Iterator[CheckResult]:
    try:
        yield from check.run(site)
    except OSError as error:
        raise ConfigError([f"{check.what}: {error}"]) from error
