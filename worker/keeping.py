"""What the queue's server keeps of what it accepts, for `worker doctor`: its files, and each level of durability."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from producer.contract.durability import Durability, Keeping, Level, keeping_of, read_durability
from producer.contract.errors import InvalidJob
from producer.contract.keys import QueueKeys
from worker.connections import Client, shards_of
from worker.finding import Finding

LEVELS = (
    *(Durability(level) for level in (Level.MEMORY, Level.AOF, Level.FSYNC)),
    *(Durability(Level.REPLICA, replicas) for replicas in (1, 2)),
)
"""What is looked at; more replicas are asked for seldom."""


def keeping_findings(client: Client, keys: QueueKeys) -> Iterator[Finding]:
    """Say what each server keeps, and which levels of durability all of them can promise.

    Raises:
        RedisError: a server does not answer.
    """
    found = [_look(shard) for shard in shards_of(client)]
    for info, keeping in found:
        yield _appending(keeping)
        yield _snapshot(info)
    servers = [keeping for _, keeping in found]
    for level in LEVELS:
        objection = _objection(servers, level)
        shown = "possible" if objection is None else f"not possible: {objection}"
        yield Finding(what=f"durability {level}", found=shown)
    yield from _default(client, keys, servers)


def _look(client: Client) -> tuple[Mapping[str, Any], Keeping]:  # Any: redis-py's replies are untyped
    info: dict[str, Any] = client.info()
    try:
        config = {_text(name): _text(value) for name, value in client.config_get("*appendfsync*").items()}
    except ResponseError:
        config = None  # this user may not ask
    return info, keeping_of(info, config)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _appending(keeping: Keeping) -> Finding:
    what = "redis persistence"
    if not keeping.is_appending:
        advice = "A restart of the server loses all jobs. Set `appendonly yes` (and `appendfsync everysec`)."
        return Finding(what=what, found="no append-only file", is_well=False, advice=advice)
    if keeping.is_append_failing:
        advice = "What is accepted now is lost with the server. Look at its log, and at the space on its disk."
        return Finding(what=what, found="the append-only file cannot be written", is_well=False, advice=advice)
    fsync = keeping.appendfsync or "not known (this user may not ask)"
    waits = "has WAITAOF" if keeping.has_waitaof else "no WAITAOF"
    return Finding(what=what, found=f"append-only file is on, appendfsync {fsync}, {waits}")


def _snapshot(info: Mapping[str, Any]) -> Finding:
    age_s = time.time() - int(info.get("rdb_last_save_time", 0))
    found = f"last one {age_s:.0f} s ago, {info.get('rdb_changes_since_last_save', '?')} changes since"
    is_well = info.get("rdb_last_bgsave_status", "ok") == "ok"
    advice = None if is_well else "The last snapshot failed. Look at the server's log, and at the space on its disk."
    return Finding(what="redis snapshot", found=found, is_well=is_well, advice=advice)


def _objection(servers: Sequence[Keeping], asked: Durability) -> str | None:
    return next((objection for one in servers if (objection := one.objection(asked)) is not None), None)


def _default(client: Client, keys: QueueKeys, servers: Sequence[Keeping]) -> Iterator[Finding]:
    given = client.hget(keys.key("config"), "durability")
    if given is None:
        return
    what, found = "queue durability", given.decode(errors="replace")
    try:
        objection = _objection(servers, read_durability(found))
    except InvalidJob as error:
        objection = f"{error}. Set another: producer queues set --durability."
    if objection is None:
        yield Finding(what=what, found=found)
    else:
        yield Finding(
            what=what, found=f"{found} is not possible, and submits are refused", is_well=False, advice=objection
        )
