"""Child processes of `benchmarks gpu`, which print their lines as JSON."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.gpu.report import Line


class ChildFailed(RuntimeError):
    """The child timed out or failed."""


class Child:
    """A program whose output is kept; it is ended when its context exits."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._output, self._complaints = (Path(self._folder.name) / name for name in ("output", "complaints"))
        environment = {**os.environ, **(environment or {})}
        # Files: the output is not read while it runs, and a full pipe would block it.
        with self._output.open("wb") as output, self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(program, stdout=output, stderr=complaints, env=environment)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_ended:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began_s

    def wait(self, limit_s: float) -> int | None:
        """Wait for its exit code; None after a timeout."""
        try:
            return self._process.wait(max(0.0, limit_s - self.age_s))
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> list[str]:
        """Return the lines of its output so far."""
        return self._output.read_text(errors="replace").splitlines()

    def last_complaint(self) -> str:
        """Return the last line of its stderr."""
        return (self._complaints.read_text(errors="replace").strip().splitlines() or ["nothing was said"])[-1]

    def lines(self, limit_s: float) -> Iterator[Line]:
        """Yield what it printed with `print_lines`, once it has ended, within a time limit.

        Raises:
            ChildFailed: after the lines that it printed all the same.
        """
        code = self.wait(limit_s)
        for text in self.output():
            if text.startswith("{"):
                yield Line(**json.loads(text))
        if code is None:
            raise ChildFailed(f"not over after {limit_s:g} s")
        if code != 0:
            raise ChildFailed(f"exit code {code}: {self.last_complaint()}")


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines for `Child`, each as it comes."""
    for line in lines:
        print(json.dumps(asdict(line)), flush=True)
