"""Results of `benchmarks gpu`: records in a JSONL file, and the same as a table. Knows no tensors.

A record is a line of a section (`name`, `figures`, `is_right`), a fault (`broken`), or a section's `seconds`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One result: a name and its figures."""

    name: str
    figures: dict[str, float | str]
    is_right: bool = True
    """False: a kernel or a model is wrong. Speed is never wrong."""


@dataclass(slots=True, eq=False)
class Report:
    """The records of every section that ran. Mutable: each is written to the file, if there is one, as it comes."""

    file: Path | None = None
    lines: dict[str, list[Line]] = field(default_factory=dict[str, list[Line]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    broken: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def read(cls, file: Path) -> "Report":
        """Return what a file holds."""
        report = cls()
        for text in file.read_text().splitlines():
            report._take(json.loads(text))
        return report

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record to the file, and print it. Threads may."""
        with self._lock:
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            self._take(record)
            if "name" in record:
                print(f"{record['section']}: {_as_text(_line_of(record)).lstrip()}", flush=True)
            elif "broken" in record:
                print(f"{record['section']}: BROKEN: {record['broken']}", flush=True)

    def _take(self, record: Mapping[str, Any]) -> None:
        section = record["section"]
        found = self.lines.setdefault(section, [])
        if "name" in record:
            found.append(_line_of(record))
        elif "broken" in record:
            self.broken.setdefault(section, []).append(record["broken"])
        else:
            self.seconds[section] = record["seconds"]

    @property
    def is_right(self) -> bool:
        """Whether every section completed and no result is wrong."""
        return not self.broken and all(line.is_right for lines in self.lines.values() for line in lines)

    def table(self) -> Iterator[str]:
        """Return the lines again, in columns."""
        for section, lines in self.lines.items():
            yield f"{section} ({self.seconds.get(section, 0):.0f} s)"
            width = max((len(line.name) for line in lines), default=0)
            yield from (_as_text(line, width) for line in lines)
            yield from (f"  BROKEN: {problem}" for problem in self.broken.get(section, ()))


def _line_of(record: Mapping[str, Any]) -> Line:
    return Line(record["name"], record["figures"], record["is_right"])


def _as_text(line: Line, width: int = 0) -> str:
    figures = "  ".join(f"{name} {_as_figure(value)}" for name, value in line.figures.items())
    return f"  {line.name:<{width}}  {figures}{'' if line.is_right else '  WRONG'}"


def _as_figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
