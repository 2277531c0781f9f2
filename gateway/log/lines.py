"""Lines of the log: constant events with fields, plain on a terminal and JSON elsewhere."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from sluice.protocol.host.terminal import printable


def configure_log(log_format: str, level: str, *, stream: TextIO | None = None) -> bool:
    """Configure logging for this process, to stderr: our records from `level` on, and warnings of libraries.

    Returns:
        Whether the lines are plain; otherwise each is a JSON object, and nothing else may be written to stderr.
    """
    target: TextIO = stream or sys.stderr
    is_plain = log_format == "plain" or (log_format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(PlainLines() if is_plain else JsonLines())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("sluice").setLevel(level.upper())
    return is_plain


def log_event(log: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """Log a constant event with its facts."""
    log.info(event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A formatter that writes each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        failure = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        line = {"event": record.getMessage(), **_fields_of(record), **failure}
        return json.dumps({**line, "level": record.levelname.lower(), "timestamp": when}, default=str)


class PlainLines(logging.Formatter):
    """A formatter that writes time, level, event and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and below it the traceback of its exception."""
        # As JSON, because values of clients must not look like another line or field.
        fields = "".join(f" {name}={json.dumps(value, default=str)}" for name, value in _fields_of(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():8}{record.getMessage()}{fields}"
        return printable("\n".join([line, *([self.formatException(record.exc_info)] if record.exc_info else [])]))


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, "fields", {})
