"""The command `worker callbacks`: a mover of each queue in this process, and rq workers in child processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from sluice.history.database import HistoryError, HistoryUnreachable
from sluice.protocol.redis.urls import is_cluster, redacted
from sluice.worker.callbacks.gateway_tasks import is_installed
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.rq_workers import WorkerPool
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.callbacks.webhooks import parse_networks
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import connect
from sluice.worker.connection.server_checks import wait_for_redis
from sluice.worker.endpoints import database_url_of, files_url_of, find_redis
from sluice.worker.errors import ConfigError, ExitCode
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.recorder.migrate import prepare_at
from sluice.worker.stopping import stop_at_eof, stopped_by_signals


def run_callbacks(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool = False) -> ExitCode:
    """Run `worker callbacks`.

    Raises:
        ConfigError: no URL is given and no server can be started on this host, a network is malformed, or rq's Redis is
            a Cluster.
    """
    configure_logs(config.log)
    redis_url, settings = find_redis(config, environ).url, config.callbacks
    if is_cluster(rq_url := settings.redis_url or redis_url):
        raise ConfigError(["SLUICE_CALLBACKS_REDIS_URL: rq needs a single server, and cannot use a Cluster"])
    try:
        networks = parse_networks(settings.networks or "")
    except ValueError as error:
        raise ConfigError([f"SLUICE_CALLBACKS_NETWORKS: {error}"]) from error
    of_all = CallbackSettings(
        redis_url=redis_url,
        rq_url=rq_url,
        redis_patience_s=config.redis.patience_s,
        database_url=database_url_of(config, environ),
        partitions=config.queue.num_partitions,
        secret=settings.secret,
        networks=networks,
        webhook_workers=settings.senders,
        retention_days=settings.retention_days or None,
        file_retention_days=settings.file_retention_days or None,
        prompt_retention_days=settings.prompt_retention_days,
        export_folder=settings.export_folder,
        files_url=files_url_of(config, environ),
        log=config.log,
    )
    return main(*(replace(of_all, queue=name) for name in config.queue.names), until_eof=until_eof)


def main(*of_queues: CallbackSettings, until_eof: bool = False) -> ExitCode:
    """Run `worker callbacks` until SIGTERM, SIGINT or, with `until_eof`, the end of standard input.

    The settings of several queues differ in the name of the queue alone.

    Raises:
        ConfigError: a server refuses this user.
        NotReady: the queues' Redis or rq's did not answer in time.
    """
    settings, log = of_queues[0], get_log(queue=" ".join(own.queue for own in of_queues))
    try:
        prepare_at(settings.database_url)
    except HistoryUnreachable as error:
        log.warning("history database unreachable; exports and retention wait", error=str(error))
    except HistoryError as error:
        log.error("callbacks cannot run", error=str(error))  # noqa: TRY400  # a sentence, no traceback
        return ExitCode.MISUSED
    client, rq_client = (connect(url, timeout_s=5) for url in (settings.redis_url, settings.rq_url))
    wait_for_redis(client, settings.redis_url, patience_s=settings.redis_patience_s, log=log)
    wait_for_redis(rq_client, settings.rq_url, patience_s=settings.redis_patience_s, log=log)
    if settings.secret is None:
        log.warning("no secret configured; webhooks are refused, and never sent later")
    parts = [_Part(Mover(client, rq_client, own), _pool(own)) for own in of_queues]
    where = {"redis": redacted(settings.redis_url), "rq": redacted(settings.rq_url)}
    return _serve(parts, log, where, until_eof=until_eof)


def _pool(settings: CallbackSettings) -> WorkerPool:
    names = settings.rq_names
    webhooks = [names.webhooks] * (settings.webhook_workers if settings.secret else 0)
    return WorkerPool([names.chores, *[names.gateway] * is_installed(), *webhooks], settings)


class _Part(NamedTuple):
    """What serves one queue."""

    mover: Mover
    pool: WorkerPool


def _serve(parts: Sequence[_Part], log: Log, where: Mapping[str, str], *, until_eof: bool) -> ExitCode:
    def stop() -> None:
        for part in parts:
            part.pool.close()
            part.mover.stop()

    with ended_by_threads(log), stopped_by_signals(stop), ThreadPoolExecutor(len(parts), "mover") as threads:
        if until_eof:
            stop_at_eof(stop)
        for part in parts:
            part.pool.start()
        log.info("callbacks started", **where)
        ends = [threads.submit(_run, part, log, stop) for part in parts]
        code = max(end.result() for end in ends)
    if code == ExitCode.DONE:
        log.info("callbacks stopped")
    return code


def _run(part: _Part, log: Log, stop: Callable[[], None]) -> ExitCode:
    """Run the mover of one queue. If it fails, the others stop too, and the process is restarted."""
    try:
        part.mover.run()
    except Exception:
        log.exception("callbacks failed")
        stop()
        return ExitCode.BROKEN
    finally:
        # Python would wait for the processes, which work as long as this one runs.
        part.pool.stop()
    return ExitCode.DONE
