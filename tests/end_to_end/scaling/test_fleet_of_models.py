"""`worker fleet FILE` with real workers: two models on one host, each on its queue."""

import signal
from collections.abc import Generator
from pathlib import Path
from typing import ClassVar

import pytest

from sluice.producer import Producer
from sluice.worker.errors import ExitCode
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import WorkerProcess
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

FLEET = f"""
[workers.small]
model = "{SMALL_MODEL}"
queue = "small"
[workers.other]
model = "null"
queue = "other"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The shipped model, and the null model."""
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    return file


@pytest.fixture
def fleet(valkey: RedisServer, tmp_path: Path, file: Path) -> Generator[WorkerProcess]:
    """Their workers."""

    class Fleet(WorkerProcess):
        COMMAND: ClassVar[tuple[str, ...]] = ("fleet", str(file))

    made = Fleet(valkey.url, tmp_path / "log")
    yield made
    made.kill()


class TestGivenTwoModelsOnOneHost:
    @pytest.mark.long
    def test_when_jobs_come_to_both_queues_then_each_is_answered_by_its_model(
        self, fleet: WorkerProcess, valkey: RedisServer
    ) -> None:
        with Producer(valkey.url, queue="small") as small, Producer(valkey.url, queue="other") as other:
            wait_until(lambda: small.queue()[0].workers and other.queue()[0].workers, "both workers are there")

            answers = [one.result(one.submit("Hello", max_tokens=4), timeout_s=60) for one in (small, other)]

            assert [answer.model for answer in answers] == [SMALL_MODEL.name, "null"]
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == ExitCode.DONE
