"""`worker start`: from a configuration to a daemon. The only module that knows every component."""

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from redis.exceptions import RedisError, ResponseError

from sluice.producer.contract.calls import QueueSettings, QueueView, configure, fire_timers, inspect
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport.execution import run
from sluice.worker.clock import ServerClock, monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.announcement import announced
from sluice.worker.connection.availability import RedisHealth, is_away
from sluice.worker.connection.clients import Client, Connections
from sluice.worker.connection.embedded_keeper import EmbeddedKeeper
from sluice.worker.connection.listeners import make_listener
from sluice.worker.connection.server_checks import wait_until_usable
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.endpoints import find_endpoints, partitions_of
from sluice.worker.errors import ConfigError, ExitCode
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.results import Origin
from sluice.worker.log import Log, configure_logs, get_log
from sluice.worker.model.load import LoadedModel, engine_config, load
from sluice.worker.model.translate import Translator
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.daemon import Component, Daemon
from sluice.worker.serve.exchange import Exchange
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.heartbeat import Heartbeat
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters, MetricsServer, Readiness, WorkerCollector
from sluice.worker.serve.preparation import Preparation
from sluice.worker.serve.pull import Pulling
from sluice.worker.serve.status_reporter import StatusReporter
from sluice.worker.serve.watchdog import Watchdog
from sluice.worker.signals import Quiet, install_startup_handlers
from sluice.worker.stopping import stop_at_eof

SWITCH_INTERVAL_S = 0.001
"""Longest time that a busy loop keeps the interpreter from the exchange thread, which sends its tokens."""

FEATURES = ("logprobs", "choices", "logit_bias", "penalties")


def start(
    config: WorkerConfig, environ: Mapping[str, str], *, incarnation: str | None = None, until_eof: bool = False
) -> ExitCode:
    """Run a worker in this process until it is asked to stop, or with `until_eof` until standard input ends.

    `incarnation` is a fresh random id that the parent process knows; by default the worker makes one.

    Raises:
        ConfigError: Settings are wrong.
        NotReady: Redis did not answer in time.
        WorkerBroken: The model cannot be loaded now.
    """
    quiet = Quiet()
    install_startup_handlers(quiet)
    if until_eof:
        # The parent process is gone: shut down gracefully.
        stop_at_eof(lambda: os.kill(os.getpid(), signal.SIGTERM))
    configure_logs(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    incarnation = incarnation or uuid.uuid4().hex
    log = _log_of(incarnation)
    engine_config(config)
    endpoints = find_endpoints(config, environ)
    connections = Connections(endpoints.redis_url, timeout_s=config.redis.timeout_s)
    # Connect before the model is loaded, so that the worker may reclaim jobs of dead workers as soon as it is ready.
    client = connections.uplink.client
    wait_until_usable(client, endpoints.redis_url, patience_s=config.redis.patience_s, log=log)
    with ThreadPoolExecutor(1, thread_name_prefix="history") as background:
        # Both take seconds of imports and reading.
        history = background.submit(_check_history, config, endpoints.database_url, log)
        with announced(client, partitions_of(config)):
            served = _load(config, log)
        history.result()
    _agree_patiently(client, endpoints.redis_url, config, served, log)
    if until_eof:
        _tell_parent()
    # All objects so far stay for the process. Freezing them spares full collections of 200,000 objects, which
    # stop every stream for 0.2 s.
    gc.collect()
    gc.freeze()
    try:
        keeper = [] if endpoints.embedded is None else [EmbeddedKeeper(endpoints.embedded, log)]
        return build(config, connections, served, incarnation, sidecars=keeper, quiet=quiet).run()
    finally:
        connections.stop()


def _log_of(incarnation: str) -> Log:
    return get_log(worker_id=incarnation[:8])


def _tell_parent() -> None:
    """Tell the parent process, if standard input is its socket, that the model and all settings are right."""
    stdin = sys.stdin.fileno()
    if stat.S_ISSOCK(os.fstat(stdin).st_mode):
        with contextlib.suppress(OSError):
            os.write(stdin, b"+")


def _load(config: WorkerConfig, log: Log) -> LoadedModel:
    began_s = monotonic_s()
    served = load(config)
    limits = served.executor.limits
    log.info(
        "model loaded",
        model=served.name,
        device=config.model.device,
        load_s=round(monotonic_s() - began_s, 3),
        max_model_len=limits.max_model_len,
        kv_tokens=limits.num_blocks * limits.block_size,
        max_num_seqs=config.batching.max_num_seqs,
    )
    return served


def _check_history(config: WorkerConfig, url: str, log: Log) -> None:
    """Prepare the history if this worker runs a recorder. An unreachable database is no error.

    Raises:
        ConfigError: The schema is not of this release.
    """
    if not config.history.recorder:
        return
    # Imported here because a worker without recorder does not need it.
    from sluice.producer.contract.database import HistoryError, HistoryUnreachable, open_database
    from sluice.worker.history.migrate import prepare

    try:
        engine = open_database(url, is_writer=True)
        prepare(engine)
        engine.dispose()
    except HistoryUnreachable as error:
        log.warning("history unreachable; the outbox keeps its rows", error=str(error))
    except HistoryError as error:
        raise ConfigError([f"SLUICE_DATABASE_URL: {error}"]) from error


def _agree_patiently(client: Client, url: str, config: WorkerConfig, served: LoadedModel, log: Log) -> None:
    """Call `agree_on_queue`, and wait for Redis if it went away while the model was loaded.

    Raises:
        ConfigError: Living workers have promised otherwise.
        NotReady: Redis did not return in time.
    """
    while True:
        try:
            return agree_on_queue(client, config, served)
        except (RedisError, OSError) as error:
            if not is_away(error):
                raise
            wait_until_usable(client, url, patience_s=config.redis.patience_s, log=log)


def agree_on_queue(client: Client, config: WorkerConfig, served: LoadedModel) -> None:
    """Configure what the workers of this queue take, unless living workers have promised otherwise.

    Raises:
        ConfigError: They have.
    """
    for keys in partitions_of(config):
        view = _look_at(client, keys)
        _check_promises(view, config, served)
        is_first = not view.workers or not view.settings.get("max_job_tokens")
        settings = QueueSettings(
            max_job_tokens=served.max_job_tokens if is_first else None,
            features=FEATURES if is_first else None,
            partitions=config.queue.partitions,
            # The operator's retention settings apply whether or not other workers are alive.
            keep_prompts=config.history.keep_prompts,
            keep_results=config.history.keep_results,
        )
        run(client, configure(keys, settings))
    _check_left_out(client, config)


def _check_promises(view: QueueView, config: WorkerConfig, served: LoadedModel) -> None:
    """Raise ConfigError if this worker would break what living workers have promised."""
    name, stated = config.queue.name, int(view.settings.get("max_job_tokens") or 0)
    if view.workers and stated > served.max_job_tokens:
        raise ConfigError(
            [
                f"SLUICE_QUEUE: the workers of {name!r} take jobs of {stated} tokens, this one only "
                f"{served.max_job_tokens}: give it more memory or a longer context, or another queue"
            ]
        )
    partitions = int(view.settings.get("partitions") or 0)
    if view.workers and partitions not in (0, config.queue.partitions):
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: the workers of {name!r} serve {partitions} partitions, this one would serve "
                f"{config.queue.partitions}: give it the same, or stop the others first"
            ]
        )


def _check_left_out(client: Client, config: WorkerConfig) -> None:
    """Raise ConfigError if the partition after the last has jobs: the queue had more partitions before."""
    left_out = QueueKeys(config.queue.name, config.queue.partitions)
    view = _look_at(client, left_out)
    if view.waiting_jobs or view.running_jobs:
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: partition {left_out.partition} of {config.queue.name!r} has jobs that no worker "
                f"would serve: give its former number of partitions until it is empty"
            ]
        )


def _look_at(client: Client, keys: QueueKeys) -> QueueView:
    try:
        # It checks the type of every key of the queue, and changes no more than a heartbeat does.
        run(client, fire_timers(keys))
        return run(client, inspect(keys))
    except ResponseError as error:
        message = (
            f"SLUICE_QUEUE: {keys.prefix} cannot be used: {error}. Remove or rename what another program left there."
        )
        raise ConfigError([message]) from error


def build(
    config: WorkerConfig,
    connections: Connections,
    served: LoadedModel,
    incarnation: str,
    *,
    sidecars: Sequence[Component] = (),
    quiet: Quiet | None = None,
) -> Daemon:
    """Build a daemon, each component before those that it is given to; nothing runs yet.

    Args:
        config: The settings.
        connections: The connections to Redis, not opened yet. The caller closes them after the run.
        served: The loaded model.
        incarnation: A fresh random id.
        sidecars: Further components, started before the worker's own.
        quiet: Whether to pull; signal handlers may write it already.
    """
    context = _context(config, connections, served, incarnation, quiet or Quiet())
    mailbox = context.mailbox
    translator = Translator(
        encode=served.encode, template=served.template, validate=served.engine.validate, model=served.name
    )
    returns = ReturnQueue(connections.uplink.puller, context)
    preparation = Preparation(connections.open(), context, translator)
    listener = make_listener(connections, context.partitions, mailbox.wake, mailbox.fail)
    pulling = Pulling(connections.uplink, listener, context, returns, preparation.put)
    exchange = Exchange(connections.uplink.client, context, pulling)
    status = StatusReporter(context, served, connections.open())
    heartbeat = Heartbeat(connections.open(timeout_s=config.beat.answer_within_s), context, status.report)
    readiness = Readiness(sick=status.sick, unready=status.unready)
    collector = WorkerCollector(status.snapshot, context.meters)
    metrics = MetricsServer(config.metrics, collector, readiness, context.log)
    components = [metrics, *sidecars, preparation, heartbeat, listener, exchange]
    return Daemon(served.engine, exchange, context, components, returns, heartbeat.mark_broken)


def _context(
    config: WorkerConfig, connections: Connections, served: LoadedModel, incarnation: str, quiet: Quiet
) -> WorkerContext:
    log = _log_of(incarnation)
    mailbox = Mailbox(max_buffered_bytes=config.redis.buffer_mib * 2**20)
    health = RedisHealth(log, connections.name)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return WorkerContext(
        incarnation=incarnation,
        partitions=partitions_of(config),
        config=config,
        origin=Origin(model=served.name, fingerprint=served.executor.fingerprint, worker=worker),
        cache_tokens=served.engine.stats.kv_tokens_total,
        leases=Leases(),
        mailbox=mailbox,
        clock=ServerClock(),
        health=health,
        unavailable=UnavailablePartitions(connections.open, health, mailbox.wake),
        meters=Meters(),
        watchdog=Watchdog(config.beat.step_deadline_s),
        log=log,
        quiet=quiet,
    )
