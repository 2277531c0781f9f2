"""Structured logs to stderr: an event is a constant sentence, facts are fields. Plain on a terminal, else JSON."""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from worker.config import LogConfig

Log = FilteringBoundLogger


def configure_logs(config: LogConfig, *, stream: TextIO = sys.stderr) -> None:
    """Set up logging once, for this process."""
    is_plain = config.format == "plain" or (config.format == "auto" and stream.isatty())
    shown: list[Processor] = (
        [structlog.processors.TimeStamper(fmt="%H:%M:%S"), structlog.dev.ConsoleRenderer(colors=stream.isatty())]
        if is_plain
        else [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *([_naming(config.name)] if config.name else []),
            *shown,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )


def get_log(**facts: object) -> Log:
    """A logger with facts bound to each of its lines."""
    return structlog.get_logger(**facts)


def _naming(name: str) -> Processor:
    """Add who speaks to each line that does not speak of somebody by name."""

    def add_name(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        return {"name": name, **line}

    return add_name
