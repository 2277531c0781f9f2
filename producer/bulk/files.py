"""The files of a bulk run: lines are appended as jobs end, and a later run continues the same files."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple, Self

from sluice.producer.bulk.output import encoded
from sluice.producer.errors import InvalidSetting
from sluice.protocol.bulk_files.locks import lock

_START = b'{"id":"batch_req_'
_RESULT = re.compile(rb'{"id": ?"batch_req_')
"""Beginning of a line, as we write it and as some tools reformat it."""


class WrittenLine(NamedTuple):
    """The part of an earlier run's line that is kept in memory. A named tuple, because there is one per line."""

    custom_id: str | None
    digest: int


class LineFile:
    """A file of output lines, each with the name of its job. Entering the context locks and reads it.

    Args:
        path: Path of the file; None: nothing is written.
        is_new: Whether `begin` deletes the lines of earlier runs.

    Raises:
        OSError: the file cannot be read or written.
        FileInUse: another process uses it.
        InvalidSetting: the file has content other than output lines.
    """

    def __init__(self, path: Path | None, *, is_new: bool = False) -> None:
        self._path = path
        self._is_new = is_new
        self._file: IO[str] | None = None
        self._before: dict[str, WrittenLine] = {}
        """The lines of earlier runs, by the names of their jobs."""

    def __enter__(self) -> Self:
        if self._path is not None:
            with ExitStack() as on_failure:
                # Line-buffered, so that a reader and the next run find whole lines.
                self._file = on_failure.enter_context(self._path.open("a", encoding="utf-8", buffering=1))
                lock(self._file, str(self._path))
                _check_content(self._path)
                if not self._is_new:
                    self._before = dict(filter(None, map(_written, _whole_lines(self._path))))
                on_failure.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, name: str) -> bool:
        """Return whether an earlier run wrote a line with this name."""
        return name in self._before

    def __len__(self) -> int:
        """Return the number of lines that earlier runs wrote."""
        return len(self._before)

    def custom_ids(self) -> dict[str, str]:
        """Return the name of the job by custom id, in the lines of earlier runs."""
        return {line.custom_id: name for name, line in self._before.items() if line.custom_id is not None}

    def custom_id_of(self, name: str) -> str | None:
        """Return the custom id of the line that an earlier run wrote for a job."""
        return self._before[name].custom_id if name in self._before else None

    def begin(self) -> None:
        """Delete the lines of earlier runs, if `is_new` and this is the first call."""
        if self._file is not None and self._is_new:
            self._file.truncate(0)
            self._is_new = False

    def append(self, line: Mapping[str, object]) -> None:
        """Begin, and write a line."""
        self.begin()
        if self._file is not None:
            self._file.write(encoded(line))


class ErrorsFile(LineFile):
    """The file of invalid lines and failed jobs.

    Mutable: a line of an earlier run is stale until `report` or `keep` confirms it.
    """

    def __init__(self, path: Path | None, *, is_new: bool = False) -> None:
        super().__init__(path, is_new=is_new)
        self._stale: dict[str, int] = {}
        self._bytes_before = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._stale = {name: line.digest for name, line in self._before.items()}
        self._bytes_before = 0 if self._path is None else self._path.stat().st_size
        return self

    def report(self, name: str, line: Mapping[str, object]) -> None:
        """Write a line, unless an earlier run wrote the same line."""
        if self._stale.get(name) == hash(encoded(line).encode()):
            self.keep(name)
        else:
            self.append(line)

    def keep(self, name: str) -> None:
        """Keep the line of an earlier run, because nothing newer is known."""
        self._stale.pop(name, None)

    def remove_stale(self, is_ours: Callable[[str], bool]) -> None:
        """Replace the file by one without our stale lines, chosen by name. Do not write after that."""
        stale = {*filter(is_ours, self._stale)}
        if self._path is None or not stale:
            return
        path = self._path.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with path.open("rb") as file, part.open("wb") as kept:
                kept.writelines(self._current_lines(file, stale))
            shutil.copymode(path, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _current_lines(self, file: IO[bytes], stale: Collection[str]) -> Iterator[bytes]:
        at = 0
        for line in file:
            is_new = at >= self._bytes_before
            at += len(line)
            name, _ = _written(line) or ("", None)
            if is_new or name not in stale:
                yield line


def _check_content(path: Path) -> None:
    """Check that a file is empty, or begins with an output line or a part of one.

    Raises:
        InvalidSetting: it does not, so writing would damage another program's file.
    """
    with path.open("rb") as file:
        begin = file.read(len(_START) + 1)
    if not _RESULT.match(begin) and not _START.startswith(begin):
        raise InvalidSetting(f"{str(path)!r} has something other than results of an earlier run. Name another file.")


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; truncate an incomplete last line."""
    whole = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                return
            whole += len(line)
            yield line


def _written(line: bytes) -> tuple[str, WrittenLine] | None:
    """Return the name of an output line's job and the part of the line to keep; None if it is not an output line."""
    try:
        written = json.loads(line)
        return str(written["id"]).removeprefix("batch_req_"), WrittenLine(written.get("custom_id"), hash(line))
    except (ValueError, KeyError, TypeError):
        return None
