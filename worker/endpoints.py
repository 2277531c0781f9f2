"""The servers and keys of a configuration; embedded servers where no URL is given."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sluice.protocol.errors import EmbeddedServerError, InvalidSetting
from sluice.protocol.host.state_folder import files_url, history_path, state_dir
from sluice.protocol.keys import QueueKeys, served_partitions
from sluice.worker.config import WorkerConfig
from sluice.worker.errors import ConfigError

if TYPE_CHECKING:
    from sluice.protocol.redis.embedded import Use


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """The server of a configuration's queue."""

    url: str = field(repr=False)
    embedded: "Use | None" = None
    """The use of the embedded server; None if a URL is given."""


def find_redis(config: WorkerConfig, environ: Mapping[str, str]) -> RedisEndpoint:
    """Return the configured server, or the embedded one, which is started if necessary.

    Raises:
        ConfigError: no URL is given and no server can be started on this host.
    """
    if config.redis.url:
        return RedisEndpoint(config.redis.url)
    use = _embedded_use(environ)
    return RedisEndpoint(use.url, use)


def database_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """Return the configured database URL, or that of a SQLite file in the state folder, which is created.

    Raises:
        ConfigError: no URL is given, and there is no folder for it.
    """
    if config.history.database_url is not None:
        return config.history.database_url
    try:
        path = history_path(environ)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except InvalidSetting as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        raise ConfigError([f"SLUICE_STATE_DIR: the state folder cannot be created: {error}"]) from error
    return f"sqlite:///{path}"


def traces_endpoint_of(config: WorkerConfig) -> str | None:
    """Return the URL that takes traces; None if none are wanted.

    Raises:
        ConfigError: OpenTelemetry's exporter is not installed.
    """
    endpoint = config.history.otlp_traces_endpoint
    if endpoint is not None and find_spec("opentelemetry") is None:
        raise ConfigError(["SLUICE_OTLP_TRACES_ENDPOINT: traces need the extra: pip install 'sluice-llm[otel]'"])
    return endpoint


def files_url_of(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """Return the configured URL of the HTTP gateway's files, or that of a folder in the state folder.

    Raises:
        ConfigError: no URL is given, and there is no folder for it.
    """
    try:
        return files_url(config.callbacks.files_url, environ)
    except InvalidSetting as error:
        raise ConfigError([str(error)]) from error


def _embedded_use(environ: Mapping[str, str]) -> "Use":
    # Imported only where no URL is given.
    from sluice.protocol.redis.embedded import use

    try:
        return use(state_dir(environ))
    except (EmbeddedServerError, InvalidSetting) as error:
        raise ConfigError([f"SLUICE_REDIS_URL: {error}"]) from error


def partitions_of(config: WorkerConfig) -> tuple[QueueKeys, ...]:
    """List the keys of every partition that a worker serves."""
    return tuple(key for name in config.queue.names for key in _keys(name, config.queue.num_partitions))


def stated_partitions_of(client: Any, config: WorkerConfig) -> tuple[QueueKeys, ...]:  # noqa: ANN401 - untyped
    """List the keys of every partition that the queues' workers have stated they serve.

    Raises:
        ConfigError: the settings name another number.
    """
    asked, partitions = config.queue.partitions, list[QueueKeys]()
    for name in config.queue.names:
        stated = client.hget(QueueKeys(name).key("config"), "partitions")
        try:
            partitions += _keys(name, served_partitions(name, stated, asked) or 1)
        except InvalidSetting as error:
            raise ConfigError([str(error)]) from error
    return tuple(partitions)


def _keys(queue: str, number: int) -> Iterator[QueueKeys]:
    return (QueueKeys(queue, partition) for partition in range(number))
