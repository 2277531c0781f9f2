"""The settings of a queue, as a worker remembers them.

Redis may lose them (FLUSHALL, a restart without its file). Each worker writes them again.
"""

from collections.abc import Mapping
from dataclasses import replace

from sluice.engine.request import NO_TARGETS, LatencyTargets
from sluice.protocol.calls import KnownSettings, restore_settings
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import SETTINGS_PER_CALL
from sluice.protocol.redis.execution import run
from sluice.worker.connection.clients import Client


class SettingsMemory:
    """The settings of each partition, as a worker last read them. One thread updates them; any thread may ask."""

    def __init__(self) -> None:
        self._known: dict[QueueKeys, KnownSettings] = {}
        self._targets: dict[QueueKeys, LatencyTargets] = {}

    def update(self, client: Client, keys: QueueKeys, stamp: str) -> tuple[str, ...]:
        """Read the settings if `stamp` is not that of the known ones; return the names of those written again.

        Raises:
            RedisError: Redis does not answer.
        """
        settings = self._known.get(keys, KnownSettings())
        if stamp and stamp == settings.stamp:
            return ()
        self._known[keys] = read = read_settings(client, keys, settings)
        self._targets[keys] = _targets_in(read.values)
        return read.restored

    def targets(self, keys: QueueKeys) -> LatencyTargets:
        """Return the latency that a partition's settings ask for, as last read."""
        return self._targets.get(keys, NO_TARGETS)


def read_settings(client: Client, keys: QueueKeys, known: KnownSettings) -> KnownSettings:
    """Restore what Redis has lost of the known settings, and read all, in calls that each read or restore some.

    The settings of the queue come first, because limits of tenants depend on them. The last call of the restoring ones
    writes the stamp: while it is missing, another worker restores, too.

    Raises:
        RedisError: Redis does not answer.
    """
    items = sorted(known.values.items(), key=lambda item: ":" in item[0])
    *parts, last = [dict(items[at : at + SETTINGS_PER_CALL]) for at in range(0, len(items) or 1, SETTINGS_PER_CALL)]
    restored: list[str] = []
    for part in parts:
        answer = run(client, restore_settings(keys, replace(known, values=part), has_more=True))
        if not answer.is_lost:
            break
        restored += answer.restored
    read = run(client, restore_settings(keys, replace(known, values=last)))
    values, page = dict(read.values), read.page
    while page:
        answer = run(client, restore_settings(keys, KnownSettings(), page=page))
        values, page = {**values, **answer.values}, answer.page
    return replace(read, values=values, restored=(*restored, *read.restored))


def _targets_in(values: Mapping[str, str]) -> LatencyTargets:
    return LatencyTargets(ttft_s=_seconds(values.get("ttft_target_ms")), tpot_s=_seconds(values.get("tpot_target_ms")))


def _seconds(milliseconds: str | None) -> float | None:
    """Return a setting in seconds; None if it is absent, 0, or not a number."""
    try:
        value = float(milliseconds or 0) / 1e3
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
