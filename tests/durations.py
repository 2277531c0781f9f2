"""A pytest plugin that writes what tests took: seconds and processor seconds of each folder, and the slowest tests.

    python -m pytest -p tests.durations --record-durations FILE

A duration is that of set-up, call and tear-down. With several processes, their sum is a multiple of the suite's time.
Processor seconds are those of the test's process and of the processes that it waited for. They depend on the machine
but hardly on what else runs there, so that a folder has a budget of them.
"""

import math
import resource
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

NUM_SLOWEST = 50
PROCESSOR_S = "processor_s"
"""The property of a report."""


BUDGETS_S = {
    "tests/benchmarks": 30,
    "tests/chaos": 40,
    "tests/clients": 5,
    "tests/end_to_end": 110,
    "tests/engine": 80,
    "tests/fuzz": 10,
    "tests/gateway": 120,
    "tests/history": 80,
    "tests/integration": 70,
    "tests/kernels": 70,
    "tests/kernels_triton": 70,
    "tests/kubernetes": 5,
    "tests/migration": 25,
    "tests/oracles": 70,
    "tests/producer": 70,
    "tests/properties": 40,
    "tests/protocol": 60,
    "tests/rules": 60,
    "tests/security": 50,
    "tests/small_model": 40,
    "tests/topologies": 20,
    "tests/worker": 150,
}
"""Processor seconds of a folder. One over its budget is marked, and fails nothing: processors differ."""


@dataclass(slots=True, eq=False)
class Cost:
    """What a test or a folder took. Changes as reports come."""

    seconds: float = 0.0
    processor_s: float = 0.0
    num_tests: int = 0

    def add(self, other: "Cost") -> None:
        """Add what another took."""
        self.seconds += other.seconds
        self.processor_s += other.processor_s
        self.num_tests += other.num_tests

    def __str__(self) -> str:
        return f"{self.seconds:9.1f} s {self.processor_s:9.1f} processor-s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--record-durations", metavar="FILE", help="write a sum per folder and the slowest tests to FILE")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure in the processes that run tests, and record in the one that has all reports."""
    file = config.getoption("--record-durations")
    if not file:
        return
    config.pluginmanager.register(ProcessorTimes())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(Path(file)))


class ProcessorTimes:
    """Adds to each report the processor seconds since the one before. Changes with each report."""

    def __init__(self) -> None:
        self._before_s = 0.0

    def pytest_collection_finish(self) -> None:
        """Begin after the collection."""
        self._before_s = _processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Measure a phase of a test."""
        report = yield
        now_s = _processor_s()
        report.user_properties.append((PROCESSOR_S, now_s - self._before_s))
        self._before_s = now_s
        return report


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    # It waits for forks, and nothing waits for it.
    pid = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009  # no public name
    forks_s = 0.0 if pid is None else sum(psutil.Process(pid).cpu_times()[:4])
    return sum(one.ru_utime + one.ru_stime for one in used) + forks_s


class Durations:
    """What the tests so far took. Changes with each report."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        cost = self._tests.setdefault(report.nodeid, Cost(num_tests=1))
        used = [value for name, value in report.user_properties if name == PROCESSOR_S and isinstance(value, float)]
        cost.add(Cost(report.duration, sum(used)))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._file.write_text("\n".join(lines_of(self._tests)) + "\n")


def lines_of(tests: Mapping[str, Cost]) -> Iterable[str]:
    """Format what tests took, by id: a line for each folder, the first for all, and for each of the slowest tests."""
    folders: dict[str, Cost] = {}
    for test, cost in tests.items():
        # A folder counts what is below it, too.
        for folder in Path(test.partition("::")[0]).parents[:-1]:
            folders.setdefault(str(folder), Cost()).add(cost)
    for name, cost in sorted(folders.items()):
        is_over = cost.processor_s > BUDGETS_S.get(name, math.inf)
        mark = f"  OVER ITS BUDGET of {BUDGETS_S[name]} processor-s" if is_over else ""
        yield f"{cost}  {cost.num_tests:6} tests  {name}{mark}"
    slowest = sorted(tests.items(), key=lambda one: one[1].seconds, reverse=True)[:NUM_SLOWEST]
    yield ""
    yield from (f"{cost}  {test}" for test, cost in slowest)
