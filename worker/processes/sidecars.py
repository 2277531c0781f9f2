"""The commands `worker record` and `worker callbacks`, from a configuration to their main functions."""

from collections.abc import Mapping

from sluice.protocol.redis.urls import is_cluster
from sluice.worker.config import WorkerConfig
from sluice.worker.endpoints import database_url_of, files_url_of, redis_url_of, traces_endpoint_of
from sluice.worker.errors import ConfigError, ExitCode
from sluice.worker.log import configure_logs


def run_recorder(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool) -> ExitCode:
    """Run `worker record`.

    Raises:
        ConfigError: no URL is given and no server can be started on this host.
    """
    # Imported here because SQLAlchemy is slow to import and workers do not need it.
    from sluice.worker.recorder.recorder import RecorderSettings
    from sluice.worker.recorder.recorder import main as record

    configure_logs(config.log)
    settings = RecorderSettings(
        queue=config.queue.name,
        partitions=config.queue.num_partitions,
        keep_prompts=config.history.keep_prompts or "full",
        otlp_traces_endpoint=traces_endpoint_of(config),
    )
    return record(
        redis_url=redis_url_of(config, environ),
        database_url=database_url_of(config, environ),
        settings=settings,
        until_eof=until_eof,
    )


def run_callbacks(config: WorkerConfig, environ: Mapping[str, str], *, until_eof: bool = False) -> ExitCode:
    """Run `worker callbacks`.

    Raises:
        ConfigError: no URL is given and no server can be started on this host, a network is malformed, or rq's Redis is
            a Cluster.
    """
    # Imported here because rq and SQLAlchemy are slow to import and workers do not need them.
    from sluice.worker.callbacks.command import main as serve_callbacks
    from sluice.worker.callbacks.settings import CallbackSettings
    from sluice.worker.callbacks.webhooks import parse_networks

    configure_logs(config.log)
    redis_url, settings = redis_url_of(config, environ), config.callbacks
    if is_cluster(rq_url := settings.redis_url or redis_url):
        raise ConfigError(["SLUICE_CALLBACKS_REDIS_URL: rq needs a single server, and cannot use a Cluster"])
    try:
        networks = parse_networks(settings.networks or "")
    except ValueError as error:
        raise ConfigError([f"SLUICE_CALLBACKS_NETWORKS: {error}"]) from error
    return serve_callbacks(
        CallbackSettings(
            redis_url=redis_url,
            rq_url=rq_url,
            redis_patience_s=config.redis.patience_s,
            database_url=database_url_of(config, environ),
            queue=config.queue.name,
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
        ),
        until_eof=until_eof,
    )
