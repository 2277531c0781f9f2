"""`worker start`: from a configuration to a daemon. The only module that knows every component."""

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from sluice.protocol.limits import MAX_ADAPTERS
from sluice.worker.checks.queue_check import agree_on_queue
from sluice.worker.checks.site import Site
from sluice.worker.checks.startup import MODEL_CHECKS, SERVER_CHECKS, require
from sluice.worker.clock import ServerClock, monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.announcement import announced
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.clients import Connections
from sluice.worker.connection.embedded_keeper import EmbeddedKeeper
from sluice.worker.connection.listeners import make_listener
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.endpoints import database_url_of, partitions_of
from sluice.worker.engine_process.process import EngineProcess
from sluice.worker.engine_process.remote_engine import RemoteEngine, ReportedSteps
from sluice.worker.errors import ConfigError, ExitCode
from sluice.worker.iteration_feed import IterationFeed
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.results import Origin
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.model.loaded_model import LoadedModel
from sluice.worker.model.sampling_defaults import describe
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.daemon import Component, Daemon
from sluice.worker.serve.due_jobs import DueJobs
from sluice.worker.serve.exchange import Exchange
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.heartbeat import Heartbeat
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters, MetricsServer, Readiness, WorkerCollector
from sluice.worker.serve.preparation import Preparation
from sluice.worker.serve.pull import Pulling
from sluice.worker.serve.status_reporter import StatusReporter
from sluice.worker.signals import Quiet, install_startup_handlers
from sluice.worker.stopping import stop_at_eof
from sluice.worker.watchdog import Watchdog

SWITCH_INTERVAL_S = 0.001
"""Longest time that a busy loop keeps the interpreter from the exchange thread, which sends its tokens."""


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
        # The parent process has ended: shut down gracefully.
        stop_at_eof(lambda: os.kill(os.getpid(), signal.SIGTERM))
    configure_logs(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    incarnation = incarnation or uuid.uuid4().hex
    log = _log_of(incarnation)
    site = Site(config, environ, log, patience_s=config.redis.patience_s)
    with ended_by_threads(log), _engine_process(config, incarnation) as process:
        require(SERVER_CHECKS, site, log)
        with announced(site.connections.uplink.client, partitions_of(config)):
            served = _check_and_load(site, process, log)
        site.ask_redis(lambda client: agree_on_queue(client, config, served))
        if until_eof:
            _tell_parent()
        # All objects so far stay for the process. Freezing them spares full collections of 200,000 objects, which
        # stop every stream for 0.2 s.
        gc.collect()
        gc.freeze()
        try:
            keeper = [] if site.redis.embedded is None else [EmbeddedKeeper(site.redis.embedded, log)]
            return build(config, site.connections, served, incarnation, sidecars=keeper, quiet=quiet).run()
        finally:
            site.connections.stop()


def _log_of(incarnation: str) -> Log:
    # Bound now: structlog's proxy takes longer for each line than not to write it.
    return get_log(worker_id=_worker_id(incarnation)).bind()


def _worker_id(incarnation: str) -> str:
    return incarnation[:8]


def _tell_parent() -> None:
    """Tell the parent process, if standard input is its socket, that the model and all settings are right."""
    stdin = sys.stdin.fileno()
    if stat.S_ISSOCK(os.fstat(stdin).st_mode):
        with contextlib.suppress(OSError):
            os.write(stdin, b"+")


def _engine_process(config: WorkerConfig, incarnation: str) -> AbstractContextManager[EngineProcess | None]:
    """Start the process of the engine, if it has one: it imports its modules while the checks run."""
    return EngineProcess(config, _worker_id(incarnation)) if config.model.has_engine_process else nullcontext()


def _check_and_load(site: Site, process: EngineProcess | None, log: Log) -> LoadedModel:
    """Run the checks of the model, then load it while a new SQLite history is migrated.

    Raises:
        ConfigError: settings are wrong.
        WorkerBroken: the model cannot be loaded now.
    """
    require(MODEL_CHECKS, site, log)
    with ThreadPoolExecutor(1, thread_name_prefix="history") as background:
        # Both take seconds of imports and reading.
        history = background.submit(_prepare_history, site)
        served = _load(site, process, log)
        history.result()
    return served


def check_adapters(names: Collection[str]) -> None:
    """Check that a heartbeat can name the adapters of a model.

    Raises:
        ConfigError: they are too many.
    """
    if len(names) > MAX_ADAPTERS:
        raise ConfigError(
            [f"SLUICE_ADAPTERS: the folder has {len(names)} adapters; a worker serves at most {MAX_ADAPTERS}"]
        )


def _load(site: Site, process: EngineProcess | None, log: Log) -> LoadedModel:
    began_s, config = monotonic_s(), site.config
    served = site.model.load() if process is None else _load_remotely(site, process)
    limits = served.facts.limits
    check_adapters(limits.adapters)
    if config.model.host_cache_mib and not limits.num_host_blocks:
        log.warning("host cache unused", host_cache_mib=config.model.host_cache_mib, window=limits.sliding_window)
    for option, reason in served.facts.capabilities.refused.items():
        log.warning("option refused", option=option, reason=reason)
    log.info(
        "model loaded",
        model=served.name,
        description=site.model.description,
        device=config.model.device,
        load_s=round(monotonic_s() - began_s, 3),
        max_model_len=limits.max_model_len,
        **({"adapters": " ".join(limits.adapters)} if limits.adapters else {}),
        kv_tokens=limits.num_cache_tokens,
        kv_cache_mib=limits.num_blocks * limits.block_bytes // 2**20,
        max_num_seqs=config.step_limits.max_num_seqs,
        max_num_batched_tokens=config.step_limits.max_num_batched_tokens,
        end_tokens="; ".join(served.text.end_tokens),
        sampling_defaults=describe(served.text.defaults),
        **({} if config.model.device == "cpu" else {"kernels": served.facts.kernels}),
        **({} if process is None else {"engine_pid": process.pid}),
    )
    return served


def _load_remotely(site: Site, process: EngineProcess) -> LoadedModel:
    steps = ReportedSteps(site.config.beat.step_deadline_s)
    engine = RemoteEngine(process, steps, step_tokens=site.config.step_limits.max_num_batched_tokens)
    return LoadedModel(name=site.model.name, text=site.model.text, engine=engine, facts=engine.facts)


def _prepare_history(site: Site) -> None:
    """Migrate a SQLite history if this worker runs a recorder. An unreachable database is not an error.

    Raises:
        ConfigError: The schema is not of this release.
    """
    if not site.config.history.recorder:
        return
    # Imported here because a worker without recorder does not need it.
    from sluice.history.database import HistoryError, HistoryUnreachable
    from sluice.worker.recorder.migrate import prepare_at

    try:
        prepare_at(database_url_of(site.config, site.environ))
    except HistoryUnreachable:
        return  # the check has warned, and the recorder waits for it
    except HistoryError as error:
        raise ConfigError([f"SLUICE_DATABASE_URL: {error}"]) from error


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
    # Its own client: a second connection of the puller, which keeps its first, would count as a reconnection.
    returns = ReturnQueue(connections.open(), context)
    preparation = Preparation(connections.open(), context, served.translator)
    listener = make_listener(connections, context.partitions, mailbox.wake_puller, mailbox.fail)
    pulling = Pulling(connections.uplink, listener, context, returns, preparation.put)
    exchange = Exchange(connections.uplink.client, context, pulling)
    status = StatusReporter(context, served, connections.open())
    heartbeat = Heartbeat(connections.open(timeout_s=config.beat.answer_within_s), context, status.report)
    readiness = Readiness(sick=status.sick, unready=status.unready)
    collector = WorkerCollector(status.metrics, context.meters)
    feed = IterationFeed(served.engine.watch)
    metrics = MetricsServer(config.metrics, collector, readiness, feed, context.log)
    due_jobs = [DueJobs(connections.open(), context, queue) for queue in config.queue.names]
    components = [metrics, *sidecars, preparation, heartbeat, listener, exchange, *due_jobs]
    if isinstance(served.engine, RemoteEngine):
        served.engine.wake_with(mailbox.announce_report)
        components.insert(0, served.engine)
    return Daemon(served.engine, pulling, context, components, returns, heartbeat.mark_broken)


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
        origin=Origin(
            model=served.name,
            fingerprint=served.facts.fingerprint,
            worker=worker,
            adapters=served.facts.limits.adapters,
        ),
        cache_tokens=served.engine.most_offered_tokens,
        leases=Leases(),
        mailbox=mailbox,
        clock=ServerClock(),
        health=health,
        unavailable=UnavailablePartitions(connections.open, health, mailbox.wake),
        meters=Meters(
            jobs_pulled=Counter(dict.fromkeys(config.queue.names, 0)),
            tokens_pulled=Counter(dict.fromkeys(config.queue.names, 0)),
        ),
        watchdog=served.engine.watchdog
        if isinstance(served.engine, RemoteEngine)
        else Watchdog(config.beat.step_deadline_s),
        log=log,
        quiet=quiet,
    )
