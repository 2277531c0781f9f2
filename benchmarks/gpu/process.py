"""Child processes of `benchmarks gpu`: what one measures, and how another follows it. Knows no tensors.

A section is a list of groups of lines. A child measures them in turn and prints records as JSON: the group that begins,
and each line. A fault of any kind ends the child; the next one continues after the group that was being measured.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from benchmarks.gpu.report import Line

Groups = Mapping[str, Callable[[], Iterable[Line]]]
"""A section's lines, by the names of their groups."""

Record = dict[str, Any]


class ChildFailed(RuntimeError):
    """The child timed out or failed."""


class Child:
    """A program that prints records. It and all that it started are ended when its context exits."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the context
        environment = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, start_new_session=True
        )
        self._output = cast("IO[bytes]", self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.wait()
        for file in (self._output, self._stderr):
            file.close()

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def records(self, line_s: float, until_s: float) -> Iterator[Record]:
        """Yield its records as they come.

        Args:
            line_s: the longest time from one record to the next.
            until_s: when it has to be over, by the monotonic clock.

        Raises:
            ChildFailed: a limit was reached, or it ended with an error.
        """
        due_s, rest = time.monotonic() + line_s, b""
        while chunk := self._read(min(due_s, until_s)):
            *texts, rest = (rest + chunk).split(b"\n")
            for text in texts:
                yield json.loads(text)
                due_s = time.monotonic() + line_s
        if chunk is None:
            out_of = "out of time" if due_s > until_s else f"no line for {line_s:g} s"
            raise ChildFailed(out_of)
        self._check_end()

    def _read(self, until_s: float) -> bytes | None:
        """Return some output, nothing at its end, and None if there is none in time."""
        has_some, _, _ = select.select([self._output], [], [], max(0.0, until_s - time.monotonic()))
        return os.read(self._output.fileno(), 2**16) if has_some else None

    def _check_end(self) -> None:
        code = self._process.wait()
        if code == 0:
            return
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        print("\n".join(lines[-40:]), file=sys.stderr, flush=True)
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        raise ChildFailed(f"{how}: {lines[-1] if lines else 'no output on stderr'}")


def child_main(groups_of: Callable[[argparse.Namespace], Groups]) -> int:
    """Measure the groups that the command line asks for, and print records for `Child`; return the exit code.

    Whatever else is printed meanwhile goes to stderr.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--results", type=Path, required=True, help="Lines of earlier sections.")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--num-parts", type=int, default=1)
    parser.add_argument("--after", default="", help="The group behind which to begin.")
    arguments = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        groups = groups_of(arguments)
        for name in _dealt(groups, arguments):
            print(json.dumps({"begins": name}), file=output, flush=True)
            for line in groups[name]():
                print(json.dumps(asdict(line)), file=output, flush=True)
    except Exception as error:  # noqa: BLE001 - a group must not cost the others
        traceback.print_exc()
        # A device's error has further lines, the same for each.
        first_line, _, _ = str(error).partition("\n")
        print(f"{type(error).__name__}: {first_line}", file=sys.stderr)
        return 1
    return 0


def _dealt(groups: Groups, arguments: argparse.Namespace) -> list[str]:
    """Return the names of this process: every `num_parts`-th, and of these those that follow `after`, if given."""
    names = list(groups)[arguments.part :: arguments.num_parts]
    return names[names.index(arguments.after) + 1 :] if arguments.after else names
