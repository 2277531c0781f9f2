"""The servers and keys of a configuration; embedded servers where no URL is given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.producer.contract.errors import EmbeddedServerError, InvalidSetting
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.state_folder import history_path, state_dir
from sluice.worker.config import WorkerConfig
from sluice.worker.errors import ConfigError

if TYPE_CHECKING:
    from sluice.producer.contract.transport.embedded import Use


@dataclass(frozen=True, slots=True)
class Endpoints:
    """URLs of the servers of a configuration."""

    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)
    embedded: "Use | None" = None
    """The use of the embedded server; None if a URL is given."""


def find_endpoints(config: WorkerConfig, environ: Mapping[str, str]) -> Endpoints:
    """Find the servers, or start embedded ones.

    Raises:
        ConfigError: no URL is given and no server can be started on this host.
    """
    use = None if config.redis.url else _embedded_use(environ)
    redis_url = config.redis.url if use is None else use.url
    return Endpoints(redis_url or "", database_url_of(config, environ), use)


def redis_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """Return the configured Redis URL, or that of the embedded server, which is started if necessary.

    Raises:
        ConfigError: no URL is given and no server can be started on this host.
    """
    return config.redis.url or _embedded_use(environ).url


def database_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """Return the configured database URL, or that of a SQLite file in the state folder, which is created.

    Raises:
        ConfigError: no URL is given, and there is no folder for it.
    """
    if config.history.database_url is not None:
        return config.history.database_url
    try:
        path = history_path(environ)
    except InvalidSetting as error:
        raise ConfigError([str(error)]) from error
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"sqlite:///{path}"


def _embedded_use(environ: Mapping[str, str]) -> "Use":
    # Imported only where no URL is given.
    from sluice.producer.contract.transport.embedded import use

    try:
        return use(state_dir(environ))
    except (EmbeddedServerError, InvalidSetting) as error:
        raise ConfigError([f"SLUICE_REDIS_URL: {error}"]) from error


def partitions_of(config: WorkerConfig) -> tuple[QueueKeys, ...]:
    """List the keys of every partition of the queue."""
    return tuple(QueueKeys(config.queue.name, number) for number in range(config.queue.partitions))
