"""The parent's side of the process that forks workers, over small programs in that process's place."""

import sys
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from sluice.worker.log import get_log
from sluice.worker.processes.prepared import PreparedProcess

SAYS_READY = "import os, time; os.write(0, b'+'); time.sleep(60)"
ENDED = "process that forks workers ended; they are started without it"
DIES_OF_A_REQUEST = "import os, select; os.write(0, b'+'); select.select([0], [], []); os._exit(1)"


def prepared(program: str) -> PreparedProcess:
    """Such a process, started."""
    made = PreparedProcess((sys.executable, "-c", program), {}, get_log())
    made.start_if_due()
    return made


def look_until(made: PreparedProcess, holds: Callable[[], bool]) -> None:
    """Look as the parent does."""
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        made.look()
        time.sleep(0.01)


class TestGivenAProcessThatForksWorkers:
    def test_when_it_says_so_then_workers_wait_no_longer(self) -> None:
        made = prepared(SAYS_READY)
        assert made.is_awaited

        look_until(made, lambda: not made.is_awaited)

        assert made.pid is not None
        made.stop()
        assert made.pid is None

    def test_when_it_dies_of_a_request_then_that_is_an_os_error_and_it_is_gone(self) -> None:
        made = prepared(DIES_OF_A_REQUEST)
        look_until(made, lambda: not made.is_awaited)

        with pytest.raises(OSError, match=r"fork|reset|pipe"):
            made.fork(("start",), {}, (), 0)
        with capture_logs() as lines:
            made.look()

        assert [line["event"] for line in lines] in (
            [],
            [ENDED],
        )
        assert made.pid is None

    def test_when_it_ends_before_it_was_ready_then_workers_wait_no_longer(self) -> None:
        made = prepared("")

        with capture_logs() as lines:
            look_until(made, lambda: not made.is_awaited)

        assert [line["event"] for line in lines] == [ENDED]
