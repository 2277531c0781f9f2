"""The files of a bulk run: lines are appended as jobs end, and a later run continues the same files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from sluice.producer.bulk.output import Object, encoded


class LineFile:
    """A file of output lines, each with the name of its job. A context manager: entering it opens it for appending.

    Args:
        path: Path of the file; None writes nothing.
        is_new: Whether to delete what earlier runs wrote.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None, *, is_new: bool = False) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path is not None and is_new:
            path.unlink(missing_ok=True)
        self._before = {name: hash(line) for line in _whole_lines(path) if (name := _name_in(line))}
        """Of earlier runs: the name and the hash of each line."""

    def __enter__(self) -> Self:
        if self._path is not None:
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, name: str) -> bool:
        """Return whether an earlier run wrote a line of this name."""
        return name in self._before

    def append(self, line: Mapping[str, object]) -> None:
        """Write a line."""
        if self._file is not None:
            self._file.write(encoded(line))


class ErrorsFile(LineFile):
    """The lines that are bad and the jobs that failed.

    Mutable: a line of an earlier run is stale until `report` or `keep` confirms it.
    """

    def __init__(self, path: Path | None, *, is_new: bool = False) -> None:
        super().__init__(path, is_new=is_new)
        self._stale = dict(self._before)
        self._bytes_before = path.stat().st_size if path is not None and path.is_file() else 0

    def report(self, name: str, line: Mapping[str, object]) -> None:
        """Write a line, unless an earlier run wrote the same."""
        if self._stale.get(name) == hash(encoded(line).encode()):
            self.keep(name)
        else:
            self.append(line)

    def keep(self, name: str) -> None:
        """Keep the line that an earlier run wrote, because nothing newer is known."""
        self._stale.pop(name, None)

    def remove_stale(self, is_ours: Callable[[str, Object], bool]) -> None:
        """Replace the closed file by one without those stale lines that are ours, by name and content."""
        if self._path is None or not self._stale:
            return
        path = self._path.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with path.open("rb") as file, part.open("wb") as kept:
                kept.writelines(self._current_lines(file, is_ours))
            shutil.copymode(path, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _current_lines(self, file: IO[bytes], is_ours: Callable[[str, Object], bool]) -> Iterator[bytes]:
        at = 0
        for line in file:
            is_new = at >= self._bytes_before
            at += len(line)
            name = _name_in(line)
            if is_new or name not in self._stale or not is_ours(name, json.loads(line)):
                yield line


def _whole_lines(path: Path | None) -> Iterator[bytes]:
    """Yield the lines of a file, and truncate a last line that is incomplete."""
    if path is None or not path.is_file():
        return
    whole = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                return
            whole += len(line)
            yield line


def _name_in(line: bytes) -> str:
    try:
        return str(json.loads(line)["id"]).removeprefix("batch_req_")
    except (ValueError, KeyError, TypeError):
        return ""
