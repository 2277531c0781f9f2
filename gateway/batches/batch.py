"""A batch, as it is stored and as clients read it. No I/O."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.engine import RowMapping

from sluice.gateway.files.store import OVER, Stored, stored_of
from sluice.protocol.bulk_files.input import BadLine
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.requests import Endpoint

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
OPEN = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
assert not {*OPEN} & {*OVER}

TIMES = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
"""Statuses that clients read the time of, as `<status>_at`."""

WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
HOURS = {"h": 1, "d": 24}
MAX_WINDOW_H = 24 * 366
MAX_TEXT_CHARS = 500


def window_of(text: str) -> timedelta | None:
    """Read a completion window, such as 24h or 7d; None if the text is not one, or it is longer than a year."""
    match = WINDOW.fullmatch(text)
    hours = int(match[1]) * HOURS[match[2]] if match else 0
    return timedelta(hours=hours) if 0 < hours <= MAX_WINDOW_H else None


@dataclass(frozen=True, slots=True)
class BatchParts:
    """Stored objects with the lines of ended requests, in the order in which they were written."""

    output: tuple[Stored, ...] = ()
    error: tuple[Stored, ...] = ()
    checked: tuple[Stored, ...] = ()
    """Objects with the results of the slices of the file's check, until the check is over."""

    @property
    def num_done(self) -> int:
        """Number of requests that are done."""
        return sum(part.num_lines for part in self.output)

    @property
    def num_failed(self) -> int:
        """Number of requests that ended otherwise."""
        return sum(part.num_lines for part in self.error)

    def as_json(self) -> Object:
        """Return the parts as they are stored."""
        kinds = {"output": self.output, "error": self.error, "checked": self.checked}
        return {kind: [part.as_json() for part in parts] for kind, parts in kinds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch of a tenant. The fields are described in `contract/tables.py`."""

    id: str
    tenant: str
    queue: str
    partitions: int
    endpoint: Endpoint
    model: str | None = None
    input_file: str
    window: str
    metadata: Mapping[str, str] | None = None
    status: str = VALIDATING
    created_ms: int
    expires_ms: int
    times: Mapping[str, int] = field(default_factory=dict[str, int])
    errors: Sequence[Object] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    names: str | None = None
    submitted: int = 0
    file_offset: int = 0
    refused: int = 0
    expired: int = 0
    collected: bytes | None = None
    looked_at: int = 0
    parts: BatchParts = field(default_factory=BatchParts)
    written_ms: int | None = None
    epoch: int = 0
    due_ms: int = 0

    @property
    def deadline(self) -> datetime:
        """The time at which the batch expires."""
        return datetime.fromtimestamp(self.expires_ms / 1000, UTC)

    @property
    def num_collected(self) -> int:
        """Number of lines whose outcome is in a part."""
        return self.parts.num_done + self.parts.num_failed

    @property
    def folder(self) -> str:
        """The folder of the batch's objects in the storage."""
        return f"{FOLDER}/{self.id.removeprefix('batch_')}"

    @property
    def body(self) -> Object:
        """The batch as OpenAI's clients read it."""
        times = {f"{name}_at": at_ms // 1000 if (at_ms := self.times.get(name)) else None for name in TIMES}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if self.errors is None else {"object": "list", "data": list(self.errors)},
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


FOLDER = "batches"


def batch_of(row: RowMapping) -> StoredBatch:
    """Return the batch of a row."""
    values: dict[str, Any] = {str(name): value for name, value in row.items()}  # Any: as the columns say
    written = values["parts"]
    values["parts"] = BatchParts(*(tuple(map(stored_of, written[kind])) for kind in ("output", "error", "checked")))
    return StoredBatch(**values)


def error_of_line(bad: BadLine) -> Object:
    """Format a bad line as OpenAI does."""
    message, param = printable(bad.message), None if bad.param is None else printable(bad.param)
    return {"code": bad.code, "line": bad.number, "message": message, "param": param}


def printable(text: str) -> str:
    """Return the beginning of a user's text, with characters that every database can store."""
    return text[:MAX_TEXT_CHARS].replace("\0", "\ufffd")
