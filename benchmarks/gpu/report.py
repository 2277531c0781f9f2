"""Results of `benchmarks gpu`, as lines, as a table and as JSON. Knows no tensors."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One result: a name and its figures."""

    name: str
    figures: dict[str, float | str]
    is_right: bool = True
    """False: a kernel or a model is wrong. Speed is never wrong."""


@dataclass(slots=True, eq=False)
class Report:
    """The lines of every section that ran, and its errors."""

    lines: dict[str, list[Line]] = field(default_factory=dict[str, list[Line]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    broken: dict[str, str] = field(default_factory=dict[str, str])

    def run(self, section: str, measure: Callable[[], Iterable[Line]], until_s: float) -> None:
        """Collect the lines of one section, printing each; an error is recorded, and the next section runs.

        Nothing starts after `until_s` (of the monotonic clock).
        """
        began_s = time.monotonic()
        lines = self.lines.setdefault(section, [])
        self.seconds[section] = 0.0
        print(f"\n{section}", flush=True)
        if began_s > until_s:
            self.broken[section] = "out of time: not begun"
            return
        try:
            for line in measure():
                lines.append(line)
                print(_as_text(line, len(line.name)), flush=True)
                if time.monotonic() > until_s:
                    self.broken[section] = "out of time: what is missing was not measured"
                    break
        except Exception as error:  # noqa: BLE001 - one section must not cost the others
            traceback.print_exc()
            self.broken[section] = f"{type(error).__name__}: {error}"
        self.seconds[section] = round(time.monotonic() - began_s, 1)

    def add(self, section: str, lines: Iterable[Line]) -> None:
        """Return lines that are not measured."""
        self.lines[section] = list(lines)
        self.seconds[section] = 0.0

    @property
    def is_right(self) -> bool:
        """Whether every section completed and no result is wrong."""
        return not self.broken and all(line.is_right for lines in self.lines.values() for line in lines)

    def table(self) -> Iterator[str]:
        """Return the lines again, in columns."""
        for section, lines in self.lines.items():
            yield f"{section} ({self.seconds[section]:.0f} s)"
            width = max((len(line.name) for line in lines), default=0)
            yield from (_as_text(line, width) for line in lines)
            if section in self.broken:
                yield f"  BROKEN: {self.broken[section]}"

    def as_json(self) -> str:
        """Return everything as plain values."""
        lines = {section: [asdict(line) for line in found] for section, found in self.lines.items()}
        return json.dumps({"lines": lines, "seconds": self.seconds, "broken": self.broken}, indent=1)


def _as_text(line: Line, width: int) -> str:
    figures = "  ".join(f"{name} {_as_figure(value)}" for name, value in line.figures.items())
    return f"  {line.name:<{width}}  {figures}{'' if line.is_right else '  WRONG'}"


def _as_figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
