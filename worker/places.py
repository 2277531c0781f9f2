"""Which servers and which keys a configuration means; the embedded servers where no URL is given."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from producer import config as producer_config
from producer.contract.keys import QueueKeys
from worker.config import WorkerConfig
from worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Places:
    """The servers behind a configuration; the embedded ones where none are given."""

    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)


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
