"""`producer result` and `producer stream` of a job whose output has expired from the queue but not from the history."""

import json
import re
import shlex

import pytest

from sluice.history.database import open_database
from sluice.history.writer import HistoryWriter
from sluice.producer import Producer
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.history.test_recorder import client_of
from tests.producer.commands import Run
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

QUEUE = "r1"


@pytest.fixture
def ended(run: Run, valkey: RedisServer, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[JobId, JobId]:
    """The ids of a done job and of a failed one, which the history has."""
    monkeypatch.setenv("SLUICE_DATABASE_URL", sqlite_url)
    with Producer(valkey.url, queue=QUEUE) as producer, valkey.client() as client:
        receipts = [producer.submit(prompt).id for prompt in ("good", "bad")]
        worker = HandWorker(client, QueueKeys(QUEUE))
        good, bad = worker.pull()
        worker.generate(good)
        worker.say(bad, [], "", end=JobState.FAILED, error="it broke", code="broken")
    engine = open_database(sqlite_url, is_writer=True)
    Recorder(client_of(valkey), HistoryWriter(engine), RecorderSettings(queues=(QUEUE,))).drain()
    engine.dispose()
    return receipts[0], receipts[1]


class TestGivenAJobThatTheQueueHasForgotten:
    @pytest.fixture
    def job_ids(self, ended: tuple[JobId, JobId], valkey: RedisServer) -> tuple[JobId, JobId]:
        """Both, of which the queue knows neither."""
        with valkey.client() as client:
            client.flushall()
        return ended

    def test_when_its_result_is_asked_for_then_it_is_that_of_the_history(
        self, run: Run, job_ids: tuple[JobId, JobId]
    ) -> None:
        asked = ("result", job_ids[0], "--queue", QUEUE)

        assert run(*asked).output() == "w0 w1 w2 \n"
        assert json.loads(run(*asked, "--json").output())["usage"]["output_tokens"] == 3

    def test_when_it_had_failed_then_the_reason_is_told(self, run: Run, job_ids: tuple[JobId, JobId]) -> None:
        failed = run("result", job_ids[1], "--queue", QUEUE)

        assert (failed.code, "failed: it broke" in failed.err) == (1, True), failed

    def test_when_it_is_streamed_then_the_suggested_command_prints_its_output(
        self, run: Run, job_ids: tuple[JobId, JobId]
    ) -> None:
        streamed = run("stream", job_ids[0], "--queue", QUEUE)

        assert streamed.code == 1
        found = re.search(r"Look in the history: producer (.*)\n", streamed.err)
        assert found, streamed.err
        assert run(*shlex.split(found[1])).output() == "w0 w1 w2 \n"

    def test_when_the_history_cannot_be_read_then_that_is_told(self, run: Run, job_ids: tuple[JobId, JobId]) -> None:
        lost = run("result", job_ids[0], "--queue", QUEUE, "--database-url", "sqlite:////nowhere/none.db")

        assert (lost.code, "The history was not searched: " in lost.err) == (1, True), lost


class TestGivenADoneJobWhoseOutputAloneHasExpired:
    def test_when_its_result_is_asked_for_then_it_is_that_of_the_history(
        self, run: Run, valkey: RedisServer, ended: tuple[JobId, JobId]
    ) -> None:
        keys = QueueKeys(QUEUE)
        with valkey.client() as client:
            client.delete(keys.result(ended[0]), keys.channel(ended[0]))

        streamed = run("stream", ended[0], "--queue", QUEUE)
        result = run("result", ended[0], "--queue", QUEUE)

        assert f"producer result {ended[0]} --queue {QUEUE}" in streamed.err
        assert result.output() == "w0 w1 w2 \n"
