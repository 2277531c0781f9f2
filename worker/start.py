"""`worker start`: from a configuration to a daemon. The only place that knows every part."""

import gc
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from redis.exceptions import RedisError, ResponseError

from producer.contract.calls import QueueSettings, QueueView, configure, fire_timers, inspect
from producer.contract.keys import QueueKeys
from producer.contract.running import run
from worker import intake
from worker.about import About
from worker.absences import Absences
from worker.bells import make_bell
from worker.clock import ServerClock, monotonic_s
from worker.common import Common
from worker.companion import Companion
from worker.config import WorkerConfig
from worker.connections import Client, Connections
from worker.daemon import Daemon, Part
from worker.early import Quiet, hear_early
from worker.errors import ConfigError, ExitCode
from worker.exchange import Exchange
from worker.health import RedisHealth, is_away
from worker.leases import Leases
from worker.life import Hearing, Life
from worker.log import Log, configure_logs, get_log
from worker.mailbox import Mailbox
from worker.metrics import Meters, MetricsServer, Readiness, WorkerCollector
from worker.places import Places, find_places, partitions_of
from worker.results import Origin
from worker.server import wait_until_usable
from worker.serving import Served, engine_config, load
from worker.translate import Translator

SWITCH_INTERVAL_S = 0.001
"""The exchange gets the interpreter back from a busy loop after this long: its tokens wait no longer than that."""

FEATURES = ("logprobs", "choices", "logit_bias", "penalties")


def start(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool = False) -> ExitCode:
    """Run a worker until it is asked to stop, or with `until_eof` until standard input ends.

    Raises:
        ConfigError: settings are wrong.
        NotReady: Redis did not answer in time.
        WorkerBroken: the model cannot be loaded now.
    """
    quiet = Quiet()
    hear_early(quiet)
    if until_eof:
        threading.Thread(target=_stop_at_eof, name="eof", daemon=True).start()
    configure_logs(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    incarnation = uuid.uuid4().hex
    log = _log_of(incarnation)
    engine_config(config)
    places = find_places(config, environ)
    connections = Connections(places.redis_url, timeout_s=config.redis.timeout_s)
    # Connected at once, or at least before the model is loaded: it may take over from the dead as soon as it is ready.
    client = connections.uplink.client
    wait_until_usable(client, places.redis_url, patience_s=config.redis.patience_s, log=log)
    with ThreadPoolExecutor(1, thread_name_prefix="history") as beside:
        # Seconds of imports and reading, side by side.
        history = beside.submit(_check_history, config, places.database_url, log)
        served = _load(config, log)
        history.result()
    _agree_patiently(client, places.redis_url, config, served, log)
    recorder = [_recorder(config, places, environ, log)] if config.history.recorder else []
    # What is here now stays. A full collection would look at all of it, 200,000 objects, for a fifth of a second while
    # every stream waits. What loading left behind is not kept with it.
    gc.collect()
    gc.freeze()
    return build(config, connections, served, incarnation, beside=recorder, quiet=quiet).run()


def _log_of(incarnation: str) -> Log:
    return get_log(worker_id=incarnation[:8])


def _stop_at_eof() -> None:
    """Whoever started this process is gone: drain, as if asked to."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _load(config: WorkerConfig, log: Log) -> Served:
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
    """Make the history ready where this worker brings a recorder; one that is away stops nothing.

    Raises:
        ConfigError: its schema is not this release's.
    """
    if not config.history.recorder:
        return
    # A moment to import, and a worker without recorder does without.
    from producer.contract.database import HistoryError, HistoryUnreachable, open_database
    from worker.migrate import prepare

    try:
        engine = open_database(url, is_writer=True)
        prepare(engine)
        engine.dispose()
    except HistoryUnreachable as error:
        log.warning("history unreachable; the outbox keeps its rows", error=str(error))
    except HistoryError as error:
        raise ConfigError([f"SLUICE_DATABASE_URL: {error}"]) from error


def _agree_patiently(client: Client, url: str, config: WorkerConfig, served: Served, log: Log) -> None:
    """As `agree_on_queue`; while the model was loaded, Redis may have gone away.

    Raises:
        ConfigError, NotReady: as it does, and `wait_until_usable`.
    """
    while True:
        try:
            return agree_on_queue(client, config, served)
        except (RedisError, OSError) as error:
            if not is_away(error):
                raise
            wait_until_usable(client, url, patience_s=config.redis.patience_s, log=log)


def agree_on_queue(client: Client, config: WorkerConfig, served: Served) -> None:
    """State what this queue's workers can take, unless living workers have promised otherwise.

    Raises:
        ConfigError: they have.
    """
    for keys in partitions_of(config):
        view = _look_at(client, keys)
        _check_promises(view, config, served)
        is_first = not view.workers or not view.settings.get("max_job_tokens")
        settings = QueueSettings(
            max_job_tokens=served.max_job_tokens if is_first else None,
            features=FEATURES if is_first else None,
            partitions=config.queue.partitions,
            # What a person asks for counts, whoever else works here.
            keep_prompts=config.history.keep_prompts,
            keep_results=config.history.keep_results,
        )
        run(client, configure(keys, settings))
    _check_left_out(client, config)


def _check_promises(view: QueueView, config: WorkerConfig, served: Served) -> None:
    """Raise ConfigError where living workers have promised what this one would break."""
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
    """Raise ConfigError where the next partition, which nobody would serve, has jobs: the queue had more before."""
    left_out = QueueKeys(config.queue.name, config.queue.partitions)
    view = _look_at(client, left_out)
    if view.waiting_jobs or view.running_jobs:
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: partition {left_out.partition} of {config.queue.name!r} has jobs that nobody "
                f"would serve: give its former number of partitions until it is empty"
            ]
        )


def _look_at(client: Client, keys: QueueKeys) -> QueueView:
    try:
        # It checks the kind of every key of the queue, and does what any worker's beat would do.
        run(client, fire_timers(keys))
        return run(client, inspect(keys))
    except ResponseError as error:
        message = (
            f"SLUICE_QUEUE: {keys.prefix} cannot be used: {error}. Remove or rename what another program left there."
        )
        raise ConfigError([message]) from error


def build(  # the one place that knows every part
    config: WorkerConfig,
    connections: Connections,
    served: Served,
    incarnation: str,
    *,
    beside: Sequence[Part] = (),
    quiet: Quiet | None = None,
) -> Daemon:
    """Put a daemon together, with further parts `beside` it; nothing runs yet. `quiet`: signals write it already."""
    log = _log_of(incarnation)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    mailbox = Mailbox(max_buffered_bytes=config.redis.buffer_mib * 2**20)
    health = RedisHealth(log, connections.name)
    common = Common(
        incarnation=incarnation,
        partitions=partitions_of(config),
        config=config,
        origin=Origin(model=served.name, fingerprint=served.executor.fingerprint, worker=worker),
        leases=Leases(),
        mailbox=mailbox,
        clock=ServerClock(),
        health=health,
        absences=Absences(connections.open, health, mailbox.ring),
        meters=Meters(),
        log=log,
        quiet=quiet or Quiet(),
    )

    beats = connections.open(timeout_s=config.beat.answer_within_s)
    life = Life(beats, incarnation, common.partitions, config.beat, common.leases)
    bell = make_bell(connections, common.partitions, common.mailbox.ring, common.mailbox.fail)
    translator = Translator(
        encode=served.encode, template=served.template, validate=served.engine.validate, model=served.name
    )
    exchange = Exchange(connections, bell, common, life.watch)
    asides = intake.Asides(ended=exchange.ended, waits=exchange.wait_for_model)
    preparation = intake.Preparation(connections.open(), common, translator, asides)
    exchange.connect(preparation.put, cache_tokens=served.engine.stats.kv_tokens_total)
    about = About(common, served, life, exchange, connections.open())
    hearing = Hearing(flagged=exchange.flagged, lost=exchange.drop, died=common.mailbox.fail)
    life.connect(hearing, about.say, common)
    readiness = Readiness(sick=about.sick, unready=about.unready)
    metrics = MetricsServer(config.metrics, WorkerCollector(about.snapshot, common.meters), readiness, log)
    parts: list[Part] = [connections, metrics, *beside]
    around: list[Part] = [preparation, life, bell, exchange]
    return Daemon(served.engine, exchange, parts + around, config.drain, log, life.broke)


def _recorder(config: WorkerConfig, places: Places, environ: Mapping[str, str], log: Log) -> Companion:
    own = {
        "SLUICE_REDIS_URL": places.redis_url,
        "SLUICE_DATABASE_URL": places.database_url,
        "SLUICE_QUEUE": config.queue.name,
        "SLUICE_PARTITIONS": str(config.queue.partitions),
        "SLUICE_LOG_LEVEL": config.log.level,
        "SLUICE_LOG_FORMAT": config.log.format,
    }
    kept = {"SLUICE_KEEP_PROMPTS": config.history.keep_prompts} if config.history.keep_prompts else {}
    return Companion("recorder", ["record", "--until-eof"], {**environ, **own, **kept}, log)
