"""A pytest plugin that writes how long tests took: a sum for each folder, and the slowest tests.

    python -m pytest -p tests.durations --record-durations FILE

A duration is that of set-up, call and tear-down. With several processes, their sum is a multiple of the suite's time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

NUM_SLOWEST = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--record-durations", metavar="FILE", help="write a sum per folder and the slowest tests to FILE")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that has all reports."""
    file = config.getoption("--record-durations")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(Path(file)))


class Durations:
    """The durations of the tests so far. Changes with each report."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a phase of a test."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._file.write_text("\n".join(lines_of(self._seconds)) + "\n")


def lines_of(seconds: Mapping[str, float]) -> Iterable[str]:
    """Format the durations of tests by id: a line for all, for each folder, and for each of the slowest tests."""
    folders: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for test, duration in seconds.items():
        # A folder counts what is below it, too.
        for folder in Path(test.partition("::")[0]).parents[:-1]:
            folders[str(folder)] += duration
            counts[str(folder)] += 1
    yield f"{sum(seconds.values()):9.1f} s  {len(seconds):6} tests"
    yield from (f"{folders[name]:9.1f} s  {counts[name]:6} tests  {name}" for name in sorted(folders))
    slowest = sorted(seconds.items(), key=lambda one: one[1], reverse=True)[:NUM_SLOWEST]
    yield ""
    yield from (f"{duration:9.1f} s  {test}" for test, duration in slowest)
