"""The journal of a bulk file: the jobs that the queue has acknowledged. A rerun skips them.

The file has one record per line: `run <n>` begins a run (`--again` begins the next one), `asked <JSON>` states how
lines became jobs, `line <n>` is the number of the next job's line, and any other line is the id of an acknowledged job.
This is enough for an audit. A last line that was truncated by a crash is removed.
"""

import json
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sluice.protocol.bulk_files.locks import lock_file, private
from sluice.protocol.wire import JobId

RUN = "run "
ASKED = "asked "
LINE = "line "

_PLAIN = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_.:-]{0,159}")
"""Names that are used unchanged. Replacements of other names begin with `_`, so that they differ from all of these."""

_OTHERS = re.compile(r"[^A-Za-z0-9_-]")


def name_of(job_id: JobId) -> str:
    """Return the last part of a job id."""
    return job_id.rpartition(".")[2]


def journal_path(server: str, queue: str, batch: str) -> Path:
    """Return the relative path of a batch's journal: `<server>/<queue>/<batch>.journal`, whatever the names are.

    The first folder is the id of the server (`server_id`), because servers do not share their acknowledged jobs.
    """
    return Path(_plain(server), _plain(queue), f"{_plain(batch)}.journal")


def _plain(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    # The hash distinguishes names that differ only in replaced characters.
    return f"_{_OTHERS.sub('_', name)[:100]}-{blake2b(name.encode(), digest_size=8).hexdigest()}"


def _partitions(parameters: str) -> int | None:
    try:
        return int(json.loads(parameters)["partitions"])
    except (KeyError, TypeError, ValueError):
        return None  # truncated by a crash


class Journal:
    """The acknowledged jobs of one batch. Entering the context locks and reads the file; leaving it writes the rest.

    Args:
        path: Path of the journal; None: in memory only.
        is_new_run: Whether to create new jobs (`--again`). The run begins with its first job.
        asked: The parameters of jobs, as JSON; written once per invocation, before its first job, with the number of
            partitions that the run began with.

    Raises:
        FileInUse: another process uses it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        is_new_run: bool = False,
        asked: Mapping[str, Any] | None = None,  # Any: JSON
    ) -> None:
        self.run = 0
        self.partitions: int | None = None
        """The number of partitions for the ids of the run's jobs; None before the first job."""

        self._numbers: dict[str, int | None] = {}
        """Line numbers of acknowledged jobs, by name; None if the record of the number was lost."""

        self._path = path
        self._is_new_run = is_new_run
        self._lock: IO[str] | None = None
        self._asked = asked
        self._header: list[str] = []
        self._new: list[str] = []

    def __enter__(self) -> Self:
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_file(self._path.with_suffix(".lock"), f"the journal {self._path}")
        is_first = self._path is None or not self._path.exists()
        if self._path is not None and not is_first:
            self._load(self._path)
        if self._is_new_run:
            self._begin(self.run + 1)
        if self._is_new_run or is_first:
            self._header.append(f"{RUN}{self.run}")
        if self._asked is not None:
            kept = {} if self.partitions is None else {"partitions": self.partitions}
            self._header.append(f"{ASKED}{json.dumps({**self._asked, **kept})}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            if self._lock is not None:
                self._lock.close()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, name: str) -> int | None:
        """Return the line number that a job had when it was submitted; None if unknown."""
        return self._numbers.get(name)

    def add(self, job_id: JobId, number: int) -> None:
        """Record that the queue has acknowledged a line's job. The first record of an invocation is synced at once."""
        self._numbers[name_of(job_id)] = number
        self._new += [*self._header, f"{LINE}{number}", job_id]
        if self._header or len(self._new) >= 2000:
            self._header = []
            self.flush()

    def flush(self) -> None:
        """Write new records and sync them to disk."""
        if self._path is not None and self._new:
            with open(self._path, "a", opener=private) as file:  # Path.open takes no opener
                file.write("".join(f"{line}\n" for line in self._new))
                file.flush()
                os.fsync(file.fileno())
        self._new = []

    def _begin(self, run: int) -> None:
        self.run, self.partitions = run, None
        self._numbers.clear()

    def _load(self, path: Path) -> None:
        written = path.read_bytes()
        num_whole_bytes = written.rfind(b"\n") + 1
        if num_whole_bytes < len(written):
            # Truncated, not ended with a newline: an audit would take a part of an id for another job.
            os.truncate(path, num_whole_bytes)
        number = None
        for line in written[:num_whole_bytes].decode().splitlines():
            if line.startswith(RUN) and line[len(RUN) :].isdigit():
                self._begin(int(line[len(RUN) :]))
            elif line.startswith(LINE) and line[len(LINE) :].isdigit():
                number = int(line[len(LINE) :])
            elif line.startswith(ASKED):
                self.partitions = _partitions(line[len(ASKED) :]) or self.partitions
            else:
                self._numbers[name_of(JobId(line))], number = number, None
