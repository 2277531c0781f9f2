"""What a bulk run writes when results expire, and when lines are mended: real servers, real workers."""

import json
import time
from array import array
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.history.database import open_database
from sluice.history.writer import HistoryWriter
from sluice.producer import Producer
from sluice.producer.bulk import run as bulk_run
from sluice.producer.bulk.run import BulkRun, BulkSettings
from sluice.producer.operations import submission
from sluice.protocol.calls import QueueSettings
from sluice.protocol.states import JobState
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.history.test_recorder import client_of
from tests.integration.workers import running_worker
from tests.producer.commands import run_producer
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


def write_prompts(folder: Path, *prompts: str) -> None:
    """Write `in.jsonl`."""
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def rows(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def custom_ids(path: Path) -> list[str]:
    """The custom id of every line."""
    return [row["custom_id"] for row in rows(path)]


def wait_until(is_true: Callable[[], bool]) -> None:
    """Poll for at most 10 s."""
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Bulk:
    """Runs of `in.jsonl` in one folder."""

    def __init__(self, producer: Producer, folder: Path) -> None:
        self.producer, self.folder = producer, folder

    def settings(self, **changes: Any) -> BulkSettings:  # Any: as the fields are
        """Settings of a run that waits and writes `output.jsonl`."""
        files = {name: self.folder / f"{name}.jsonl" for name in ("output", "errors", "journal")}
        usual: dict[str, Any] = {"path": str(self.folder / "in.jsonl"), "batch": "b", "is_waiting": True, **files}
        return BulkSettings(**(usual | changes))

    def run(self, **changes: Any) -> BulkRun:  # Any: as above
        """Submit, and wait."""
        with BulkRun.opened(self.producer, self.settings(**changes), lambda _counts: None) as run:
            run.submit()
            if changes.get("is_waiting", True):
                run.wait()
            return run


@pytest.fixture
def bulk(producer: Producer, tmp_path: Path) -> Bulk:
    """Runs of one file."""
    return Bulk(producer, tmp_path)


class TestGivenResultsThatExpireWhileLinesAreSubmitted:
    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_when_the_queue_is_full_then_outputs_are_written_before_the_last_line(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
    ) -> None:
        monkeypatch.setattr(submission, "UNKNOWN_WAIT_S", 0.2)
        # On a busy machine a slow first ask would postpone the next one past the last line.
        monkeypatch.setattr(bulk_run, "IDLE_SHARE", 0)
        bulk.producer.configure(QueueSettings(max_waiting_jobs=5))
        write_prompts(tmp_path, *(f"p{i}" for i in range(25)))

        # The worker pulls a line only when an earlier one has ended.
        with (
            BulkRun.opened(bulk.producer, bulk.settings(is_ordered=is_ordered), lambda _counts: None) as run,
            running_worker(valkey.url, batching__max_num_seqs=5),
        ):
            run.submit()
            early = custom_ids(tmp_path / "output.jsonl")
            run.wait()

        assert early
        assert (run.summary.done, run.summary.failed, run.summary.missing) == (25, 0, 0)
        written = custom_ids(tmp_path / "output.jsonl")
        expected = [f"line-{i}" for i in range(1, 26)]
        assert (written if is_ordered else sorted(written)) == (expected if is_ordered else sorted(expected))

    @pytest.mark.long
    def test_when_150_lines_meet_a_bound_of_20_then_every_output_is_written(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        run_producer(valkey, tmp_path, "queues", "set", "--max-waiting-jobs", "20", "--result-ttl", "3")
        write_prompts(tmp_path, *(f"p{i}" for i in range(150)))

        with running_worker(valkey.url):
            done = run_producer(valkey, tmp_path, "submit", "in.jsonl", "--wait", "-o", "output.jsonl")

        assert len(rows(tmp_path / "output.jsonl")) == 150
        assert done.returncode == 0


class TestGivenResultsThatExpiredBeforeTheyWereRead:
    """Submitted without waiting; ended, and expired."""

    @pytest.fixture(autouse=True)
    def _expired(self, bulk: Bulk, valkey: RedisServer, worker: HandWorker, tmp_path: Path, sqlite_url: str) -> None:
        bulk.producer.configure(QueueSettings(result_ttl_ms=50))
        write_prompts(tmp_path, "good", "bad")
        bulk.run(is_waiting=False)
        good, bad = worker.pull()
        worker.generate(good)
        worker.say(bad, [], "", end=JobState.FAILED, error="it broke", code="broken")
        bulk.producer.delete([bad.id])  # failed jobs are kept longer
        wait_until(lambda: bulk.producer.views([good.id, bad.id]) == [None, None])
        engine = open_database(sqlite_url, is_writer=True)
        settings = RecorderSettings(queues=("default",), name="r1")
        Recorder(client_of(valkey), HistoryWriter(engine), settings).drain()
        engine.dispose()

    def test_when_the_history_has_them_then_they_are_written(self, bulk: Bulk, tmp_path: Path, sqlite_url: str) -> None:
        run = bulk.run(database_url=sqlite_url)

        [output], [error] = rows(tmp_path / "output.jsonl"), rows(tmp_path / "errors.jsonl")
        assert output["response"]["body"]["choices"][0]["text"] == "w0 w1 w2 "
        assert output["response"]["body"]["usage"]["completion_tokens"] == 3
        assert error["error"] == {"code": "broken", "message": "it broke"}
        assert (run.summary.done, run.summary.failed, run.summary.missing) == (1, 1, 0)

    def test_when_there_is_no_history_then_they_are_missing_and_no_errors(self, bulk: Bulk, tmp_path: Path) -> None:
        first, second = (bulk.run(database_url=f"sqlite:///{tmp_path}/none.db") for _ in range(2))

        for run in (first, second):
            assert (run.summary.done, run.summary.failed, run.summary.missing) == (0, 0, 2)
            assert run.history_problem is not None
        assert rows(tmp_path / "output.jsonl") == rows(tmp_path / "errors.jsonl") == []

    def test_when_the_command_misses_them_then_it_says_what_to_do_each_time(
        self, bulk: Bulk, valkey: RedisServer, worker: HandWorker, tmp_path: Path
    ) -> None:
        command = ("submit", "in.jsonl", "--batch", "c")
        run_producer(valkey, tmp_path, *command)
        taken = worker.pull()
        for job in taken:
            worker.generate(job)
        wait_until(lambda: not any(bulk.producer.views([job.id for job in taken])))

        first, second = (run_producer(valkey, tmp_path, *command, "--wait", "-o", "c.jsonl") for _ in range(2))

        for done in (first, second):
            assert done.returncode == 1
            assert "2 results are missing, for example line 1, job 0.default." in done.stderr
            assert "--database-url" in done.stderr
            assert "--again" in done.stderr


class TestGivenLinesThatAskForMoreTokensThanTheContextHas:
    def test_when_a_worker_has_counted_them_then_their_errors_are_those_of_the_routes(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}
        lines = [
            {"custom_id": "plain", "prompt": "hi", "max_tokens": 100_000},
            {"custom_id": "ids", "token_ids": [1, 2], "max_tokens": 100_000},
            {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "good", "prompt": "hi", "max_tokens": 4},
        ]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        with running_worker(valkey.url):
            files = ("-o", "out.jsonl", "--errors", "e.jsonl")
            done = run_producer(valkey, tmp_path, "submit", "in.jsonl", "--wait", *files)

        assert done.returncode == 1
        assert custom_ids(tmp_path / "out.jsonl") == ["good"]
        refused = {row["custom_id"]: row["response"]["body"]["error"] for row in rows(tmp_path / "e.jsonl")}
        assert {error["code"] for error in refused.values()} == {"context_length_exceeded"}
        assert {name: error["param"] for name, error in refused.items()} == {
            "plain": "prompt", "ids": "prompt", "chat": "messages",
        }  # fmt: skip


class TestGivenLinesThatFail:
    """A bad line, a job that failed, and one that is done."""

    @pytest.fixture(autouse=True)
    def _failed(self, bulk: Bulk, worker: HandWorker, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "good"}\n{"prompt": "bad"}\n{nonsense\n{"prompt": 3}\n')
        bulk.run(is_waiting=False)
        good, bad = worker.pull()
        worker.generate(good)
        worker.say(bad, [], "", end=JobState.FAILED, error="it broke", code="broken")
        run = bulk.run()
        assert (run.summary.done, run.summary.failed, run.summary.bad_lines) == (1, 1, 2)

    def test_when_some_are_mended_then_only_the_others_stay_in_the_errors(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path
    ) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "good"}\n{"prompt": "mended"}\n{nonsense\n{"prompt": "3"}\n')

        with running_worker(valkey.url):
            run = bulk.run()

        assert sorted(custom_ids(tmp_path / "output.jsonl")) == ["line-1", "line-2", "line-4"]
        [error] = rows(tmp_path / "errors.jsonl")
        assert error["response"]["body"]["error"]["line"] == 3
        assert (run.counts.written_before, run.counts.bad, run.summary.failed) == (1, 1, 0)

    def test_when_nothing_is_mended_then_the_errors_stay_as_they_are(self, bulk: Bulk, tmp_path: Path) -> None:
        before = (tmp_path / "errors.jsonl").read_text()

        run = bulk.run()
        bulk.run(is_waiting=False)

        assert (tmp_path / "errors.jsonl").read_text() == before
        assert (run.summary.failed, run.summary.bad_lines) == (1, 2)

    def test_when_the_failed_job_is_requeued_then_its_output_replaces_its_error(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path
    ) -> None:
        bulk.producer.requeue([view.id for view in bulk.producer.dead()])

        with running_worker(valkey.url):
            bulk.run()

        assert sorted(custom_ids(tmp_path / "output.jsonl")) == ["line-1", "line-2"]
        assert len(rows(tmp_path / "errors.jsonl")) == 2

    def test_when_the_failed_job_expires_then_its_error_line_stays(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path
    ) -> None:
        before = (tmp_path / "errors.jsonl").read_text()
        bulk.producer.delete([view.id for view in bulk.producer.dead()])

        run = bulk.run()

        assert (tmp_path / "errors.jsonl").read_text() == before
        assert (run.summary.failed, run.summary.missing) == (1, 0)

    def test_when_another_batch_shares_the_file_then_its_lines_stay(self, bulk: Bulk, tmp_path: Path) -> None:
        before = (tmp_path / "errors.jsonl").read_text()
        (tmp_path / "in.jsonl").write_text("{other\n")

        bulk.run(batch="other", journal=tmp_path / "other", output=tmp_path / "other.jsonl")

        assert (tmp_path / "errors.jsonl").read_text().startswith(before)
        assert len(rows(tmp_path / "errors.jsonl")) == 4


class TestGivenLinesOfSeveralInputs:
    """Each input is a job; a line has one answer."""

    BODIES = ({"input": ["one", "two words", "one"]}, {"input": "one"}, {"input": [[3, 4], [5]], "dimensions": 2})

    def write(self, folder: Path, *bodies: dict[str, Any], url: str = "/v1/embeddings") -> None:
        made = (
            {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
            for number, body in enumerate(bodies)
        )
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_when_a_worker_embeds_them_then_each_line_has_the_vectors_in_order(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path, is_ordered: bool
    ) -> None:
        bodies = [*self.BODIES, {**self.BODIES[0], "encoding_format": "base64"}]
        self.write(tmp_path, *bodies)

        with running_worker(valkey.url):
            run = bulk.run(is_ordered=is_ordered)

        written = {row["custom_id"]: row["response"]["body"] for row in rows(tmp_path / "output.jsonl")}
        found = [[entry["embedding"] for entry in written[f"c{number}"]["data"]] for number in range(4)]
        assert [len(vectors) for vectors in found] == [3, 1, 2, 3]
        assert found[0][0] == found[0][2] == found[1][0] != found[0][1]
        assert len(found[2][0]) == 2
        assert [array("f", b64decode(vector)).tolist() for vector in found[3]] == found[0]
        assert (run.counts.lines, run.counts.accepted, run.counts.ended) == (4, 4, 4)
        if is_ordered:
            assert list(written) == ["c0", "c1", "c2", "c3"]

    def test_when_documents_are_to_be_ranked_then_each_line_has_them_by_relevance(
        self, bulk: Bulk, valkey: RedisServer, tmp_path: Path
    ) -> None:
        bodies = [
            {"query": "tea", "documents": ["one", "two words", "three more words"]},
            {"query": "tea", "documents": ["one"], "return_documents": False},
            {"query": "größer ☃", "documents": [{"text": "one"}, "two"], "top_n": 1},
        ]
        self.write(tmp_path, *bodies, url="/v1/rerank")

        with running_worker(valkey.url):
            run = bulk.run()

        written = {row["custom_id"]: row["response"]["body"]["results"] for row in rows(tmp_path / "output.jsonl")}
        assert [len(written[f"c{number}"]) for number in range(3)] == [3, 1, 1]
        scores = [entry["relevance_score"] for entry in written["c0"]]
        assert scores == sorted(scores, reverse=True)
        assert len(set(scores)) > 1
        assert {entry["index"] for entry in written["c0"]} == {0, 1, 2}
        assert (run.counts.accepted, run.summary.done) == (3, 6)

    def test_when_it_is_interrupted_and_run_again_then_no_job_is_made_twice(
        self, bulk: Bulk, worker: HandWorker, valkey: RedisServer, tmp_path: Path
    ) -> None:
        self.write(tmp_path, *self.BODIES)
        bulk.run(is_waiting=False)

        with running_worker(valkey.url):
            run = bulk.run()
            again = bulk.run()

        assert (run.counts.before, run.counts.accepted, len(rows(tmp_path / "output.jsonl"))) == (3, 0, 3)
        assert again.counts.written_before == 3
        assert run.summary.done == 6

    def test_when_one_input_fails_then_its_line_does(self, bulk: Bulk, worker: HandWorker, tmp_path: Path) -> None:
        self.write(tmp_path, {"input": ["one", "two"]})
        bulk.run(is_waiting=False)
        first, second = worker.pull()
        worker.say(second, [], "", end=JobState.FAILED, error="it broke", code="broken")
        worker.say(first, [], "", end=JobState.CANCELLED)

        run = bulk.run()

        assert rows(tmp_path / "output.jsonl") == []
        [error] = rows(tmp_path / "errors.jsonl")
        assert error["custom_id"] == "c0"
        assert (run.summary.failed, run.counts.ended) == (1, 1)

    def test_when_the_queue_refuses_one_then_the_line_is_bad_once(
        self, bulk: Bulk, worker: HandWorker, tmp_path: Path
    ) -> None:
        bulk.producer.configure(QueueSettings(max_job_tokens=20))
        self.write(tmp_path, {"input": [[1], [2] * 30, [3] * 30, [4]]}, {"input": [[1], [2]]})

        run = bulk.run(is_waiting=False)

        assert (run.counts.bad, run.counts.accepted) == (1, 2)
        assert [row["custom_id"] for row in rows(tmp_path / "errors.jsonl")] == ["c0"]
