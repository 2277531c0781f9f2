"""Check that a Redis server is safe for jobs, and wait for one that is away. Changes nothing."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from sluice.protocol.redis import tls
from sluice.protocol.redis.error_kinds import ErrorKind, classify
from sluice.protocol.redis.urls import redacted
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client, shards_of
from sluice.worker.errors import ConfigError, NotReady
from sluice.worker.log import Log

OLDEST_VERSION = (6, 2)
POLL_S = 0.2

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The fields of INFO that matter here."""

    name: str
    version: str
    maxmemory: int
    maxmemory_policy: str
    is_replica: bool

    def problems(self) -> list[str]:
        """List why jobs are not safe on this server, each with what to do."""
        problems: list[str] = []
        parts = tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())
        if parts < OLDEST_VERSION:
            problems.append(f"{self.name} {self.version} is too old: Redis 6.2, Valkey 7.2 or later is needed")
        if self.maxmemory_policy not in ("noeviction", "unknown"):
            problems.append(
                f"maxmemory-policy is {self.maxmemory_policy}: the server may evict jobs when it is full; "
                f"set it to noeviction"
            )
        return problems


def read_facts(client: Client) -> ServerFacts:
    """Read the facts of a server.

    Raises:
        RedisError: the server does not answer.
    """
    # A server that is loading its data answers INFO but refuses PING.
    client.ping()
    info: dict[str, Any] = client.info()  # redis-py's replies are untyped
    return ServerFacts(
        name="Valkey" if "valkey_version" in info else "Redis",
        version=str(info.get("valkey_version") or info.get("redis_version", "0")),
        maxmemory=int(info.get("maxmemory", 0)),
        maxmemory_policy=str(info.get("maxmemory_policy", "unknown")),
        is_replica=info.get("role") == "slave",
    )


def wait_until_usable(client: Client, url: str, *, patience_s: float, log: Log) -> ServerFacts:
    """Wait until the server is a primary, and check that it is safe for jobs.

    Raises:
        ConfigError: the server refuses this user, or it could lose jobs.
        NotReady: the server did not answer in time, or remained a replica.
    """
    facts = when_answered(
        lambda: [_facts_of_primary(shard) for shard in shards_of(client)], url, patience_s=patience_s, log=log
    )
    if problems := [problem for shard in facts for problem in shard.problems()]:
        raise ConfigError([f"redis at {redacted(url)}: {problem}" for problem in problems])
    return facts[0]


def _facts_of_primary(client: Client) -> ServerFacts:
    """Read the facts of a server that takes writes.

    Raises:
        RedisError: the server does not answer, or is a replica. In a failover that passes.
    """
    facts = read_facts(client)
    if facts.is_replica:
        # The address may lead to the new primary by now.
        client.connection_pool.disconnect()
        raise ReadOnlyError("the server is a read-only replica: give the primary's URL, or its Sentinels'")
    return facts


def wait_for_redis(client: Client, url: str, *, patience_s: float, log: Log) -> list[ServerFacts]:
    """Wait for the server, and return the facts of each of its shards.

    Raises:
        ConfigError: the server refuses this user.
        NotReady: the server did not answer in time.
    """
    return when_answered(
        lambda: [read_facts(shard) for shard in shards_of(client)], url, patience_s=patience_s, log=log
    )


def when_answered(
    ask: Callable[[], Answer],
    url: str,
    *,
    patience_s: float,
    log: Log,
    is_passing: Callable[[BaseException], bool] = lambda _error: True,
) -> Answer:
    """Return what `ask` returns; repeat it while the server cannot be reached or cannot serve.

    Raises:
        ConfigError: the server refuses this user.
        NotReady: the server did not serve in time.
        RedisError: `is_passing` does not hold for an error.
    """
    deadline_s = monotonic_s() + patience_s
    has_complained = False
    while True:
        try:
            return ask()
        except (RedisError, OSError) as error:
            raise_if_refused(error, url)
            if not is_passing(error):
                raise
            if monotonic_s() >= deadline_s:
                raise _not_ready(error, url, patience_s) from error
            if not has_complained:
                log.warning("waiting for redis", url=redacted(url), error=str(error), patience_s=patience_s)
            has_complained = True
            time.sleep(POLL_S)


def _not_ready(error: BaseException, url: str, patience_s: float) -> NotReady:
    why = str(error).rstrip(".")
    if isinstance(error, ResponseError):
        found = f"refused requests for {patience_s:g} s" if patience_s else "refuses requests"
        return NotReady(f"redis at {redacted(url)} {found}: {why}. Start again when the server serves them.")
    found = f"did not answer within {patience_s:g} s" if patience_s else "does not answer"
    how = tls.HOW if tls.may_be_refused(error, url) else "Check the URL and that the server runs."
    return NotReady(f"redis at {redacted(url)} {found}: {why}. {how}")


@contextmanager
def expecting_answers(url: str) -> Generator[None]:
    """Translate the errors of a command that reads a queue once, and waits for nothing.

    Raises:
        ConfigError: the server refuses this user.
        NotReady: it does not answer.
    """
    try:
        yield
    except (RedisError, OSError) as error:
        raise_if_refused(error, url)
        raise NotReady(f"redis at {redacted(url)} does not answer: {error}") from error


def raise_if_refused(error: BaseException, url: str) -> None:
    """Raise ConfigError for wrong credentials or missing rights; return for an unreachable server.

    Raises:
        ConfigError: the server refuses this user, or one side refuses the other's certificate.
    """
    kind = classify(error)
    if kind is ErrorKind.DENIED:
        raise ConfigError(
            [f"redis at {redacted(url)} refuses this user: check the name and password in the URL"]
        ) from error
    if kind is ErrorKind.DENIED_IN_SCRIPT:
        raise ConfigError(
            [f"redis at {redacted(url)}: this user lacks a right that a worker needs: {str(error).rstrip('.')}"]
        ) from error
    if tls.is_refused(error):
        raise ConfigError(
            [f"redis at {redacted(url)}: TLS was refused: {str(error).rstrip('.')}. {tls.HOW}"]
        ) from error
