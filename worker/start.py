"""`worker start`: from a configuration to a daemon. The only place that knows every part."""

import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from redis.exceptions import RedisError, ResponseError

from producer import config as producer_config
from producer.contract.calls import QueueSettings, QueueView, configure, fire_timers, inspect
from producer.contract.keys import QueueKeys
from producer.contract.running import run
from worker import intake
from worker.bell import Bell
from worker.clock import ServerClock, monotonic_s
from worker.common import Common
from worker.companion import Companion
from worker.config import WorkerConfig
from worker.connections import Client, Connections, connect, redacted
from worker.daemon import Daemon, Part
from worker.errors import ConfigError, ExitCode
from worker.exchange import Exchange
from worker.health import RedisHealth
from worker.leases import Leases
from worker.life import Hearing, Life
from worker.log import Log, configure_logs, get_log
from worker.mailbox import Mailbox
from worker.metrics import Meters, MetricsServer, Rates, Readiness, Snapshot, WorkerCollector
from worker.results import Origin
from worker.server import wait_until_usable
from worker.serving import Served, engine_config, load
from worker.translate import Translator

SWITCH_INTERVAL_S = 0.001
"""The exchange gets the interpreter back from a busy loop after this long: its tokens wait no longer than that."""

FEATURES = ("logprobs", "choices", "logit_bias", "penalties")
QUEUE_VIEW_AGE_S = 1.0
"""A scrape asks Redis for the queue's depth at most this often."""


@dataclass(frozen=True, slots=True)
class Places:
    """The servers behind a configuration; the embedded ones where none are given."""

    redis_url: str
    database_url: str


def find_places(config: WorkerConfig, environ: Mapping[str, str]) -> Places:
    """Find, or start, the servers.

    Raises:
        ConfigError: no URL is given and no server can be started here.
    """
    return Places(redis_url_of(config, environ), database_url_of(config, environ))


def redis_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """The queue's server: the one given, else the embedded one, which is started if need be.

    Raises:
        ConfigError: no URL is given and no server can be started here.
    """
    return config.redis.url or _embedded_url(environ)


def database_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """The history's database: the one given, else a SQLite file in the state folder, which is made if need be."""
    if config.history.database_url is not None:
        return config.history.database_url
    path = producer_config.history_path(environ)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"sqlite:///{path}"


def _embedded_url(environ: Mapping[str, str]) -> str:
    # Only where it is needed.
    from producer.embedded import ensure
    from producer.errors import EmbeddedServerError

    try:
        return ensure(producer_config.state_dir(environ)).url
    except EmbeddedServerError as error:
        raise ConfigError([f"SLUICE_REDIS_URL: {error}"]) from error


def partitions_of(config: WorkerConfig) -> tuple[QueueKeys, ...]:
    """Every partition of the queue."""
    return tuple(QueueKeys(config.queue.name, number) for number in range(config.queue.partitions))


def start(config: WorkerConfig, environ: Mapping[str, str]) -> ExitCode:
    """Run a worker until it is asked to stop.

    Raises:
        ConfigError: settings are wrong.
        NotReady: Redis did not answer in time.
    """
    configure_logs(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    incarnation = uuid.uuid4().hex
    log = get_log(worker_id=incarnation[:8])
    engine_config(config)
    places = find_places(config, environ)
    client = connect(places.redis_url, timeout_s=config.redis.timeout_s)
    wait_until_usable(client, places.redis_url, patience_s=config.redis.patience_s, log=log)
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
    agree_on_queue(client, config, served)
    client.connection_pool.disconnect()
    return build(config, places, served, environ, incarnation, log).run()


def agree_on_queue(client: Client, config: WorkerConfig, served: Served) -> None:
    """State what this queue's workers can take, unless living workers have promised more than this one can.

    Raises:
        ConfigError: they have.
    """
    for keys in partitions_of(config):
        view = _look_at(client, keys)
        stated = int(view.settings.get("max_job_tokens") or 0)
        if view.workers and stated > served.max_job_tokens:
            raise ConfigError(
                [
                    f"SLUICE_QUEUE: the workers of {config.queue.name!r} take jobs of {stated} tokens, this one only "
                    f"{served.max_job_tokens}: give it more memory or a longer context, or another queue"
                ]
            )
        if not view.workers or not stated:
            settings = QueueSettings(
                max_job_tokens=served.max_job_tokens,
                features=FEATURES,
                keep_prompts=config.history.keep_prompts,
                keep_results=config.history.keep_results,
            )
            run(client, configure(keys, settings))


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
    config: WorkerConfig, places: Places, served: Served, environ: Mapping[str, str], incarnation: str, log: Log
) -> Daemon:
    """Put a daemon together; nothing runs yet."""
    connections = Connections(places.redis_url, timeout_s=config.redis.timeout_s)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    common = Common(
        incarnation=incarnation,
        partitions=partitions_of(config),
        config=config,
        origin=Origin(model=served.name, fingerprint=served.executor.fingerprint, worker=worker),
        leases=Leases(),
        mailbox=Mailbox(max_buffered_bytes=config.redis.buffer_mib * 2**20),
        clock=ServerClock(),
        health=RedisHealth(log, redacted(places.redis_url)),
        meters=Meters(),
        log=log,
    )

    life = Life(connections.open(), incarnation, common.partitions, config.beat, common.leases)
    bell = Bell(connections.open(), common.mailbox.ring, common.mailbox.fail)
    translator = Translator(
        encode=served.encode, template=served.template, validate=served.engine.validate, model=served.name
    )
    exchange = Exchange(connections, bell, common, life.watch)
    heard = intake.Hearing(ended=exchange.ended, waits=exchange.wait_for_model)
    preparation = intake.Preparation(connections.open(), common, translator, heard)
    exchange.connect(preparation.put, cache_tokens=served.engine.stats.kv_tokens_total)
    about = About(common, served, life, exchange, connections.open())
    hearing = Hearing(flagged=exchange.flagged, lost=exchange.drop, died=common.mailbox.fail)
    life.connect(hearing, about.say, common)
    readiness = Readiness(sick=about.sick, unready=about.unready)
    metrics = MetricsServer(config.metrics, WorkerCollector(about.snapshot, common.meters), readiness, log)
    parts: list[Part] = [connections, metrics]
    if config.history.recorder:
        parts.append(_recorder(config, places, environ, log))
    around: list[Part] = [preparation, life, bell, exchange]
    return Daemon(served.engine, exchange, common.mailbox, parts + around, config.drain, log)


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


class About:
    """What this worker says of itself: to the queue in each beat, to scrapes, to probes."""

    def __init__(self, common: Common, served: Served, life: Life, exchange: Exchange, client: Client) -> None:
        self._common = common
        self._served = served
        self._life = life
        self._exchange = exchange
        self._client = client
        self._rates = Rates()
        self._started_ms = common.clock.ms(monotonic_s())
        self._view: QueueView | None = None
        self._viewed_s = float("-inf")

    def say(self) -> dict[str, str]:
        """Facts for `worker status`, and the rate from which starts are estimated."""
        stats = self._served.engine.stats
        self._rates.sample(tokens=stats.num_output_tokens, busy_s=self._life.watch.busy_s)
        return {
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "device": self._common.config.model.device,
            "model": self._common.origin.model,
            "fingerprint": self._common.origin.fingerprint,
            "started_ms": str(self._started_ms),
            "held": str(len(self._common.leases)),
            "running": str(stats.num_running),
            "waiting": str(stats.num_waiting),
            "kv_tokens_total": str(stats.kv_tokens_total),
            "kv_tokens_used": str(stats.kv_tokens_used),
            "tokens_per_s": f"{self._rates.tokens_per_s:.1f}",
            "utilisation": f"{self._rates.utilisation:.3f}",
            "state": "quiet" if self._exchange.is_quiet else "pulling",
        }

    def snapshot(self) -> Snapshot:
        """What a scrape shows."""
        stats, view = self._served.engine.stats, self._queue_view()
        return Snapshot(
            running_requests=stats.num_running,
            waiting_requests=stats.num_waiting,
            utilisation=self._rates.utilisation,
            tokens_per_second=self._rates.tokens_per_s,
            kv_tokens_total=stats.kv_tokens_total,
            kv_tokens_used=stats.kv_tokens_used,
            preemptions=stats.num_preemptions,
            steps=stats.num_steps,
            prompt_tokens=stats.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens,
            output_tokens=stats.num_output_tokens,
            queue_jobs=view.waiting_jobs if view else None,
            queue_tokens=view.waiting_tokens if view else None,
            queue_oldest_s=(view.server_ms - view.oldest_ms) / 1000 if view and view.oldest_ms is not None else None,
        )

    def _queue_view(self) -> QueueView | None:
        """The first partition's depth, at most a second old; None while Redis is away."""
        if monotonic_s() - self._viewed_s > QUEUE_VIEW_AGE_S:
            self._viewed_s = monotonic_s()
            try:
                self._view = run(self._client, inspect(self._common.partitions[0]))
            except (RedisError, OSError):
                self._view = None
        return self._view

    def sick(self) -> str | None:
        """Why the process should be replaced, if it should."""
        return "a step has outlasted its deadline" if self._life.watch.is_overdue else None

    def unready(self) -> str | None:
        """Why the worker takes no jobs now, if it takes none."""
        if self._exchange.is_quiet:
            return "draining"
        return None if self._common.health.is_well else "redis is unreachable"


# ---------------------------------------------------------------- the other processes


def run_recorder(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool) -> ExitCode:
    """`worker record`.

    Raises:
        ConfigError: no URL is given and no server can be started here.
    """
    # SQLAlchemy takes a moment to import, and a worker does without.
    from worker.recorder import RecorderSettings
    from worker.recorder import main as record

    configure_logs(config.log)
    places = find_places(config, environ)
    settings = RecorderSettings(
        queue=config.queue.name,
        partitions=config.queue.partitions,
        keep_prompts=config.history.keep_prompts or "full",
    )
    return record(redis_url=places.redis_url, database_url=places.database_url, settings=settings, until_eof=until_eof)


def run_callbacks(config: WorkerConfig, environ: Mapping[str, str]) -> ExitCode:
    """`worker callbacks`.

    Raises:
        ConfigError: no URL is given and no server can be started here, or a network is not one.
    """
    # rq and SQLAlchemy take a moment to import, and a worker does without.
    from worker.callbacks import CallbackSettings
    from worker.callbacks import main as serve_callbacks
    from worker.webhooks import parse_networks

    configure_logs(config.log)
    places, asked = find_places(config, environ), config.callbacks
    try:
        networks = parse_networks(asked.networks or "")
    except ValueError as error:
        raise ConfigError([f"SLUICE_CALLBACKS_NETWORKS: {error}"]) from error
    return serve_callbacks(
        CallbackSettings(
            redis_url=places.redis_url,
            rq_url=asked.redis_url or places.redis_url,
            database_url=places.database_url,
            queue=config.queue.name,
            partitions=config.queue.partitions,
            secret=asked.secret,
            networks=networks,
            webhook_workers=asked.senders,
            retention_days=asked.retention_days,
            prompt_retention_days=asked.prompt_retention_days,
            export_folder=asked.export_folder,
            log=config.log,
        )
    )
