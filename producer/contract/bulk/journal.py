"""The journal of a bulk file: which of its jobs the queue has acknowledged. A rerun skips those.

The file has one record per line: `run <n>` begins a run (`--again` begins the next one), `asked <JSON>` states how
lines became jobs, and any other line is the id of an acknowledged job. This is enough for an audit. Older releases
wrote only the last part of an id. A line cut short by a crash matches no job and is ignored.
"""

import json
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluice.producer.contract.wire import JobId

RUN = "run "
ASKED = "asked "

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,159}")
_OTHERS = re.compile(r"[^A-Za-z0-9_-]")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def name_of(job_id: JobId) -> str:
    """Return the last part of a job id."""
    return job_id.rpartition(".")[2]


def journal_path(server: str, queue: str, batch: str) -> Path:
    """Return the relative path of a batch's journal: short, and in no other folder, whatever the names are.

    The folder has the id of the server (`server_id`): what one has acknowledged, another does not know.
    """
    return Path(_plain(server)) / f"{_plain(f'{queue}-{batch}')}.journal"


def _plain(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    # A hash keeps names apart that differ only in what is replaced.
    return f"_{_OTHERS.sub('_', name)[:100]}-{blake2b(name.encode(), digest_size=8).hexdigest()}"


class Journal:
    """The acknowledged jobs of one batch. A context manager: leaving it writes what is new.

    Args:
        path: Path of the journal; None keeps it in memory.
        is_new_run: Whether this is a deliberate rerun, which creates new jobs.
        asked: How lines become jobs, as JSON; written once per invocation.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        is_new_run: bool = False,
        asked: Mapping[str, Any] | None = None,  # Any: JSON
    ) -> None:
        self.run = 0
        self._names: set[str] = set()
        self._path = path
        self._is_torn = False
        if path is not None and path.exists():
            self._load(path)
        if is_new_run:
            self.run += 1
            self._names.clear()
        self._new: list[str] = [f"{RUN}{self.run}"] if is_new_run or path is None or not path.exists() else []
        if asked is not None:
            self._new.append(f"{ASKED}{json.dumps(asked)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.flush()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, job_id: JobId) -> None:
        """Record that the queue has acknowledged a job."""
        self._names.add(name_of(job_id))
        self._new.append(job_id)
        if len(self._new) >= 1000:
            self.flush()

    def flush(self) -> None:
        """Write new records and sync them to disk."""
        if self._path is not None and self._new:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._path, "a", opener=_private) as file:  # Path.open takes no opener
                # Terminate a line that a crash cut short.
                file.write("\n" if self._is_torn else "")
                self._is_torn = False
                file.write("".join(f"{line}\n" for line in self._new))
                file.flush()
                os.fsync(file.fileno())
        self._new = []

    def _load(self, path: Path) -> None:
        text = path.read_text()
        self._is_torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            if line.startswith(RUN) and line[len(RUN) :].isdigit():
                self.run = int(line[len(RUN) :])
                self._names.clear()
            elif not line.startswith(ASKED):
                self._names.add(line.rpartition(".")[2])
