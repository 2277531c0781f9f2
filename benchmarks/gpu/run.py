"""GPU benchmark: are the kernels correct, how near are they to the memory's limit, how long is a step?

    python -m benchmarks gpu --call 1            # right, and the main answer; 2: choices; 3: under load
    python -m benchmarks gpu --sections roof,kernels,parity,timing,step,generate,split,deterministic,candidates
    python -m benchmarks gpu --sections memory,service,peers
    python -m benchmarks gpu --device cpu        # toy sizes, kernels interpreted: does it all run?
    python -m benchmarks gpu --wheels FOLDER     # downloads what a machine with a GPU may lack
    python -m benchmarks gpu --start             # seconds until an engine is ready, and drills with broken kernels
    python -m benchmarks gpu --tune              # looks for better configurations of kernels

Needs one CUDA device, torch, triton, transformers and this repository; no network. Optional components (a server and
the service's packages, flashinfer, compute-sanitizer) give a line if they are absent. A call is complete in itself and
takes 7 minutes, the machine's start included. A section that needs more than its share of them is cut.

Each section runs in a process of its own, some in several at once. A group of lines that raises, hangs, aborts or is
killed costs only itself. Each line is appended to `gpu.jsonl` when it is measured; the table at the end, with the
targets and the measured figures, is made of that file. `gpu-cache.tar.xz` holds the compiled kernels, for the option
`--cache` of a later call. Exit code 1 if something failed or a result is wrong; slow is not wrong.
"""

import argparse
import ctypes
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import cache
from benchmarks.gpu.process import Child, ChildFailed
from benchmarks.gpu.report import Report
from benchmarks.gpu.targets import verdicts
from benchmarks.gpu.wheels import gather

PROGRAM = (sys.executable, "-m", "benchmarks.gpu.child")


@dataclass(frozen=True, slots=True)
class Section:
    """What measures a section, and how long it may take."""

    module: str
    """In `benchmarks.gpu`: its `groups` returns the groups of lines."""

    budget_s: float
    """Time reserved for it while earlier ones run."""

    line_s: float = 90
    """A group without a line for this long is ended."""

    num_processes: int = 1
    """Groups that are measured at once. Compiling uses one core, and these measure no time."""


SECTIONS = {
    "roof": Section("speed.roof", 15),
    "kernels": Section("checks.accuracy", 45, num_processes=14),
    "parity": Section("checks.parity", 50, num_processes=12),
    "timing": Section("speed.kernels", 60),
    "step": Section("speed.steps", 45),
    "generate": Section("speed.generate", 90),
    "split": Section("speed.split", 60),
    "deterministic": Section("speed.deterministic", 40),
    "candidates": Section("speed.candidates", 120),
    "memory": Section("checks.memory", 35),
    "service": Section("service", 150, line_s=150),
    "peers": Section("peers", 55),
}
"""The sections in order."""

CALLS = {
    1: ("roof", "kernels", "parity", "timing", "step", "generate"),
    2: ("roof", "split", "timing", "step", "deterministic", "candidates"),
    3: ("roof", "kernels", "parity", "memory", "service", "peers"),
}
"""What is measured in one stay on a machine: right, and the main answer; choices; under load."""

INTERPRETED_LINE_S = 400
"""The same without a GPU, where a line is a test of the script, on a machine that may be busy."""

MINUTES = {None: 12.5, 1: 6.25, 2: 6.25, 3: 6}
"""By call, its time without the machine's start."""


@dataclass(slots=True, eq=False)
class Measurement:
    """Sections, measured by child processes. Mutable: knows which are alive, and ends them if it is interrupted."""

    report: Report
    program: Sequence[str]
    """Measures a section; see `benchmarks.gpu.child`."""

    environment: Mapping[str, str]
    _alive: set[Child] = field(default_factory=set[Child])
    _is_stopped: bool = False

    def run(self, name: str, section: Section, until_s: float) -> None:
        """Measure a section until a time of the monotonic clock."""
        began_s, parts = time.monotonic(), range(section.num_processes)
        if began_s > until_s:
            self._add(name, broken="out of time: not begun")
            return
        with ThreadPoolExecutor(len(parts)) as pool:
            try:
                list(pool.map(lambda part: self._part(name, section, part, until_s), parts))
            except BaseException:
                self._is_stopped = True
                for child in list(self._alive):
                    child.kill()
                raise
        self._add(name, seconds=round(time.monotonic() - began_s, 1))

    def _part(self, name: str, section: Section, part: int, until_s: float) -> None:
        """Measure every `num_processes`-th group. After a fault, another child continues behind that group."""
        after, is_over = "", False
        while not is_over and not self._is_stopped:
            place = ("--part", f"{part}", "--num-parts", f"{section.num_processes}", "--after", after)
            group, problem = self._follow(name, (*self.program, name, *place), section.line_s, until_s)
            if problem:
                self._add(name, broken=f"{group or 'at the start'}: {problem}")
            # A child that begins nothing would do so again.
            is_over = not problem or group in ("", after) or time.monotonic() > until_s
            after = group

    def _follow(self, name: str, program: Sequence[str], line_s: float, until_s: float) -> tuple[str, str]:
        """Add a child's lines; return the last group that it began, and the problem that ended it, if one did."""
        group = ""
        with Child(program, self.environment) as child:
            self._alive.add(child)
            try:
                for record in child.records(line_s, until_s):
                    if "begins" in record:
                        group = record["begins"]
                    else:
                        self._add(name, **record)
            except ChildFailed as error:
                return group, str(error)
            finally:
                self._alive.remove(child)
        return group, ""

    def _add(self, section: str, **record: object) -> None:
        self.report.add({"section": section, **record})


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: toy sizes, interpreted.")
    parser.add_argument("--call", type=int, choices=CALLS, help="Which group of sections to run.")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="Which to run, in order, without --call.")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="Where to write the results.")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="Compiled kernels of an earlier call.")
    parser.add_argument("--minutes", type=float, help="Begin nothing after this long.")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="Download packages, and do nothing else.")
    parser.add_argument("--start", action="store_true", help="First: measure starts; see --start --help.")
    parser.add_argument("--tune", action="store_true", help="First: tune kernels; see --tune --help.")
    arguments = parser.parse_args(argv)
    arguments.sections = CALLS.get(arguments.call) or arguments.sections.split(",")
    arguments.minutes = arguments.minutes or MINUTES[arguments.call]
    unknown = set(arguments.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return arguments


def deadlines_s(names: Sequence[str], total_s: float) -> list[float]:
    """Return each section's deadline in seconds from the start, which reserves the time of later sections.

    In less time than they need together, each has its share.
    """
    budgets_s = [SECTIONS[name].budget_s for name in names]
    share = min(1.0, total_s / sum(budgets_s))
    return [total_s - share * sum(budgets_s[at + 1 :]) for at in range(len(names))]


def main(argv: list[str] | None = None) -> int:
    """Run the selected sections; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["--start"], ["--tune"]):
        # With their own options.
        return import_module(f"benchmarks.gpu.{argv[0][2:]}").main(argv[1:])
    arguments, began_s = _arguments(argv), time.monotonic()
    if arguments.wheels is not None:
        return gather(arguments.wheels)
    device, names, results = arguments.device, arguments.sections, arguments.out / "gpu.jsonl"
    if device == "cuda" and not _has_card():
        raise SystemExit("no CUDA device is here; --device cpu runs the same at toy sizes, interpreted")
    # The children are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("")
    with cache.folder(arguments.cache) as compiled:
        program = (*PROGRAM, "--device", device, "--results", str(results))
        measurement = Measurement(Report(results), program, cache.environment(compiled, device))
        try:
            for name, until_s in zip(names, deadlines_s(names, 60 * arguments.minutes), strict=True):
                section = SECTIONS[name]
                if device == "cpu":
                    section = replace(section, num_processes=1, line_s=INTERPRETED_LINE_S)
                measurement.run(name, section, began_s + until_s)
        finally:
            cache.pack(compiled, arguments.out / "gpu-cache.tar.xz")
    report = Report.read(results)
    # A toy's figures are meaningless.
    report.lines["targets"] = list(verdicts(report if device == "cuda" else Report()))
    print("\n" + "\n".join(report.table()))
    print(f"\n{'all right' if report.is_right else 'NOT ALL RIGHT'}; everything is in {results}")
    return 0 if report.is_right else 1


def _has_card() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
