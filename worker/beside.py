"""`worker record` and `worker callbacks`: from a configuration to the processes that run beside workers."""

from collections.abc import Mapping

from producer.contract.cluster import is_cluster
from worker.config import WorkerConfig
from worker.errors import ConfigError, ExitCode
from worker.log import configure_logs
from worker.places import find_places


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
        ConfigError: no URL is given and no server can be started here, a network is not one, or rq's is a Cluster.
    """
    # rq and SQLAlchemy take a moment to import, and a worker does without.
    from worker.callbacks import CallbackSettings
    from worker.callbacks import main as serve_callbacks
    from worker.webhooks import parse_networks

    configure_logs(config.log)
    places, asked = find_places(config, environ), config.callbacks
    if is_cluster(rq_url := asked.redis_url or places.redis_url):
        raise ConfigError(["SLUICE_CALLBACKS_REDIS_URL: rq needs a single server, and cannot use a Cluster"])
    try:
        networks = parse_networks(asked.networks or "")
    except ValueError as error:
        raise ConfigError([f"SLUICE_CALLBACKS_NETWORKS: {error}"]) from error
    return serve_callbacks(
        CallbackSettings(
            redis_url=places.redis_url,
            rq_url=rq_url,
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
