"""The inputs of startup checks, opened once and shared with the worker, and their results.

A reason to refuse `worker start` is not a result: the check raises `ConfigError`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from sluice.worker.config import WorkerConfig
from sluice.worker.connection.availability import is_away
from sluice.worker.connection.clients import Client, Connections
from sluice.worker.connection.server_checks import ServerFacts, wait_until_usable, when_answered
from sluice.worker.devices import devices_of
from sluice.worker.endpoints import RedisEndpoint, find_redis
from sluice.worker.engines.registry import prepare
from sluice.worker.log import Log
from sluice.worker.model.loaded_model import LoadedModel, PreparedModel

T = TypeVar("T")


class CheckLevel(StrEnum):
    """The meaning of a result; the value is what `worker doctor` prints."""

    OK = "ok"
    NOTE = "note"
    """A fact that is right or wrong only for some uses."""

    WARNING = "warn"
    """A worker starts, but someone should look at it."""

    WRONG = "WRONG"
    """`worker start` ends with this sentence."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result of a check, with advice if something should be done."""

    what: str
    found: str
    level: CheckLevel = CheckLevel.OK
    advice: str | None = None


def warning(what: str, found: str, advice: str | None = None) -> CheckResult:
    """Return a result that warns."""
    return CheckResult(what, found, CheckLevel.WARNING, advice)


class Site:
    """A configuration on this host. What is opened for it is opened at its first use, and kept for the worker too."""

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str], log: Log, *, patience_s: float) -> None:
        """Open nothing yet.

        Args:
            config: The settings.
            environ: The environment, which may name the state folder.
            log: Where to log that Redis is waited for.
            patience_s: How long to wait for Redis.
        """
        self.config = config
        self.environ = environ
        self._log = log
        self._patience_s = patience_s

    @cached_property
    def redis(self) -> RedisEndpoint:
        """The server of the queue. The embedded one is started if necessary.

        Raises:
            ConfigError: no URL is given and no server can be started on this host.
        """
        return find_redis(self.config, self.environ)

    @cached_property
    def connections(self) -> Connections:
        """The connections of a worker. Read it only to connect at once: it notes the time."""
        return Connections(self.redis.url, timeout_s=self.config.redis.timeout_s)

    @cached_property
    def client(self) -> Client:
        """A client for the checks. The connections of the uplink are counted, so nothing else uses it."""
        return self.connections.open()

    @cached_property
    def devices(self) -> list[str]:
        """The single devices that the configuration names.

        Raises:
            ConfigError: it names all GPUs, and there is none.
        """
        return devices_of(self.config.model.device)

    @cached_property
    def model(self) -> PreparedModel[LoadedModel]:
        """The model, all but its weights.

        Raises:
            ConfigError: the settings or the model's files are wrong.
        """
        return prepare(replace(self.config, model=replace(self.config.model, device=self.devices[0])))

    def reach_redis(self) -> ServerFacts:
        """Wait until Redis is usable.

        Raises:
            ConfigError: it refuses this user, or it could lose jobs.
            NotReady: it did not answer in time.
        """
        client = self.connections.uplink.client
        return wait_until_usable(client, self.redis.url, patience_s=self._patience_s, log=self._log)

    def ask_redis(self, ask: Callable[[Client], T]) -> T:
        """Return what `ask` returns; wait while Redis is unreachable or cannot serve, as in a failover.

        Raises:
            ConfigError: Redis refuses this user.
            NotReady: it did not return in time.
        """
        return when_answered(
            lambda: ask(self.client),
            self.redis.url,
            patience_s=self._patience_s,
            log=self._log,
            is_passing=is_away,
        )
