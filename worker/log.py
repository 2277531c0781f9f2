"""Structured logs on stderr: constant events with fields, plain on a terminal and JSON elsewhere."""

import logging
import sys
from contextlib import AbstractContextManager
from typing import TextIO

from sluice.protocol.host.optional_packages import without
from sluice.protocol.host.terminal import printable
from sluice.protocol.host.thread_errors import ended_by_thread_errors
from sluice.worker.config import LogConfig

# structlog imports rich for tracebacks, which are plain here: a tenth of a worker's own imports.
with without("rich"):
    import structlog
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

Log = FilteringBoundLogger


def configure_logs(config: LogConfig, *, stream: TextIO = sys.stderr) -> None:
    """Configure logging for this process."""
    is_plain = config.format == "plain" or (config.format == "auto" and stream.isatty())
    shown: list[Processor] = (
        [
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.processors.format_exc_info,
            _without_controls,
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ]
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
    logging.getLogger().addHandler(_LIBRARIES)


def get_log(**facts: object) -> Log:
    """Return a logger that adds `facts` to each line."""
    return structlog.get_logger(**facts)


def ended_by_threads(log: Log) -> AbstractContextManager[None]:
    """Log an error that ends a thread inside the context, and end the process with code 1."""

    def report(thread: str, error: BaseException) -> None:
        log.critical("thread failed; ending the process", thread=thread, exc_info=error)

    return ended_by_thread_errors(report)


class _LibraryHandler(logging.Handler):
    """A handler that writes what libraries log (rq's tracebacks, the kernels' warnings) as lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line. The message may have several; JSON escapes them."""
        get_log(library=record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


_LIBRARIES = _LibraryHandler()


def _without_controls(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Replace control characters in text, which may come from a job; other values are shown as in Python."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in line.items()}


def _naming(name: str) -> Processor:
    """Return a processor that adds the worker's name to each line without a name."""

    def add_name(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        return {"name": name, **line}

    return add_name
