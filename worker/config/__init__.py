"""The worker's configuration: `schema` declares the settings, `loader` reads them."""

from sluice.protocol.settings import CONFIG_FILE_NAME, PREFIX, Setting
from sluice.worker.config.loader import READ_ELSEWHERE, SETTINGS, load_config
from sluice.worker.config.schema import (
    DEFAULT_BLOCK_SIZE,
    MAX_STREAM_INTERVAL_S,
    BatchingConfig,
    BeatConfig,
    CallbacksConfig,
    DrainConfig,
    HistoryConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    QueueConfig,
    RedisConfig,
    WorkerConfig,
)

__all__ = [
    "CONFIG_FILE_NAME",
    "DEFAULT_BLOCK_SIZE",
    "MAX_STREAM_INTERVAL_S",
    "PREFIX",
    "READ_ELSEWHERE",
    "SETTINGS",
    "BatchingConfig",
    "BeatConfig",
    "CallbacksConfig",
    "DrainConfig",
    "HistoryConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "QueueConfig",
    "RedisConfig",
    "Setting",
    "WorkerConfig",
    "load_config",
]
