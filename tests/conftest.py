"""What all tests share. Needs pytest and hypothesis alone, for the tests that run where there is a GPU."""

import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.examples import LONG

# No deadline: a shared machine is slow at times, and a hanging test ends by its timeout.
settings.register_profile("fast", deadline=None)
settings.register_profile(LONG, deadline=None)
settings.load_profile("fast")

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 4 << 30


def _use_memory() -> None:
    """Put temporary files into memory where there is room: a disk that stalls makes databases and servers time out."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(MEMORY).free >= NEEDED_BYTES:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None  # what was found before


def _keep_bytecode() -> None:
    """Compile each source once, also where the environment says otherwise: a test's processes would do it each time."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures of servers and histories where there are clients for them."""
    _use_memory()
    _keep_bytecode()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started by a shell in the background. Tests interrupt themselves and their processes.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for needed, plugin in (("redis", "tests.server_fixtures"), ("alembic", "tests.history_fixtures")):
        if find_spec(needed) is not None:
            config.pluginmanager.import_plugin(plugin)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Make no tests of the cases marked `long` where `-m` leaves them out: a quarter of all there are."""
    result = yield
    if "not long" in metafunc.config.option.markexpr:
        calls = metafunc._calls  # pyright: ignore[reportPrivateUsage]  # no hook is between cases and tests
        # Without any case, pytest would call the function without its arguments.
        calls[:] = [case for case in calls if all(mark.name != "long" for mark in case.marks)] or calls
    return result


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one process at a time import a module of tests: the first one compiles it for all."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections: nearly all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of the garbage collections of tests, which take up to a second otherwise."""
    gc.freeze()
