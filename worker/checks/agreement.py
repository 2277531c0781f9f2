"""The agreement of a queue's workers: which jobs they take, what the history keeps, and all other settings.

Redis may lose the settings (FLUSHALL, a restart without its file). Each worker remembers them and writes them again.
"""

from sluice.engine.request import LatencyTargets
from sluice.protocol.calls import KnownSettings, QueueSettings, configure, restore_settings
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.sampling import FEATURES
from sluice.worker.checks.queue_check import check_compatibility, check_left_out, look_at
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client
from sluice.worker.endpoints import partitions_of
from sluice.worker.model.loaded_model import LoadedModel


def agree_on_queue(client: Client, config: WorkerConfig, served: LoadedModel) -> None:
    """Configure which jobs the workers of this queue take, unless living workers have announced otherwise.

    Raises:
        ConfigError: They have.
    """
    for keys in partitions_of(config):
        # Notes when the settings of a new queue began, before the first one is written.
        run(client, restore_settings(keys, KnownSettings()))
        view = look_at(client, keys)
        check_compatibility(view, config, served.max_job_tokens)
        is_first = not view.num_workers or not view.settings.get("max_job_tokens")
        settings = QueueSettings(
            max_job_tokens=served.max_job_tokens if is_first else None,
            features=FEATURES if is_first else None,
            partitions=config.queue.num_partitions,
            # The operator's retention settings apply whether or not other workers are alive.
            keep_prompts=config.history.keep_prompts,
            keep_results=config.history.keep_results,
        )
        run(client, configure(keys, settings))
    check_left_out(client, config)


class SettingsMemory:
    """What a worker knows of the settings of each partition. Changes as one thread reads them; any may ask."""

    def __init__(self) -> None:
        self._known: dict[QueueKeys, KnownSettings] = {}

    def update(self, client: Client, keys: QueueKeys, stamp: str) -> tuple[str, ...]:
        """Read the settings if `stamp` is not that of the known ones; return the names of those written again.

        Raises:
            RedisError: Redis does not answer.
        """
        settings = self._known.get(keys, KnownSettings())
        if stamp and stamp == settings.stamp:
            return ()
        self._known[keys] = run(client, restore_settings(keys, settings))
        return self._known[keys].restored

    def targets(self, keys: QueueKeys) -> LatencyTargets:
        """Return the latency that a partition's settings ask for, as last read."""
        values = self._known.get(keys, KnownSettings()).values
        return LatencyTargets(
            ttft_s=_seconds(values.get("ttft_target_ms")), tpot_s=_seconds(values.get("tpot_target_ms"))
        )


def _seconds(milliseconds: str | None) -> float | None:
    """Return a setting in seconds; None if it is absent, 0, or not a number."""
    try:
        value = float(milliseconds or 0) / 1e3
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
