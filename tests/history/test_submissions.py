"""A job id that is used again after the queue has forgotten it: each submission has its own row, everywhere."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.export import BatchJobs, export_batch
from sluice.history.queries import Forgotten, History
from sluice.history.retention import forget_before
from sluice.history.tables import attempts, jobs, results
from sluice.producer.cli.main import main
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobSpec, encode_spec
from sluice.worker.callbacks.events import job_event
from tests.history import events as e
from tests.protocol.driving import Queue, ending
from tests.worker.audit.audits import Scene

HOOK = encode_spec(JobSpec(callback_url="https://example.org/hook", batch="b"))
DAY_MS = 86_400_000


def expire(queue: Queue) -> None:
    """Let the queue forget the job `one` and its outcome, as it does after a day."""
    for name in queue.names("*:one") | queue.names("*:one:*"):
        queue.client.delete(queue.keys.key(name))
    queue.pass_time(DAY_MS)


def run_twice(scene: Scene) -> JobId:
    """The job `one` is done; its id is used again, by a job that fails in its first attempt."""
    for text, state in (("first", JobState.DONE), ("second", JobState.FAILED)):
        job_id = scene.queue.add("one", spec=HOOK, batch="b", wants_callback=True, digest=text.encode())
        worker = scene.queue.worker(text)
        worker.advance(ending(worker.take(), 0, 1, state=state, result=e.result(text)))
        if state is JobState.DONE:
            expire(scene.queue)
    return job_id


def rows(history: Engine, table: sa.Table) -> Sequence[sa.RowMapping]:
    """All rows, in the order of their submissions."""
    with history.connect() as connection:
        return connection.execute(sa.select(table).order_by(table.c.submitted_ms)).mappings().all()


class TestGivenAnIdThatIsUsedAgain:
    """Both submissions have ended."""

    def test_when_recorded_then_each_submission_has_its_rows(self, scene: Scene) -> None:
        run_twice(scene)

        scene.record()

        found = rows(scene.history, jobs)
        assert [row["state"] for row in found] == ["done", "failed"]
        assert found[1]["submitted_ms"] - found[0]["submitted_ms"] == DAY_MS
        assert [(row["epoch"], row["outcome"]) for row in rows(scene.history, attempts)] == [(1, "done"), (1, "failed")]
        assert [row["choices"][0]["text"] for row in rows(scene.history, results)] == ["first", "second"]

    def test_when_it_is_looked_up_then_the_newest_is_there_and_the_others_are_counted(self, scene: Scene) -> None:
        job_id = run_twice(scene)
        scene.record()

        with History(scene.history.url.render_as_string(hide_password=False)) as history:
            job, timeline = history.job("q", job_id), history.timeline("q", job_id)
            claims, result = history.attempts("q", job_id), history.result("q", job_id)
            number = history.num_submissions("q", job_id)

        assert job is not None
        assert (job.state, number) == ("failed", 2)
        assert sorted(event.event for event in timeline) == ["failed", "pulled", "submitted"]
        assert [claim.outcome for claim in claims] == ["failed"]
        assert "second" in str(result)

    def test_when_it_is_shown_then_the_command_says_how_many_there_are(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job_id = run_twice(scene)
        scene.record()
        monkeypatch.setenv("SLUICE_REDIS_URL", scene.server.url)
        url = scene.history.url.render_as_string(hide_password=False)

        with pytest.raises(SystemExit):
            main(("jobs", "show", job_id, "--queue", "q", "--database-url", url))

        captured = capsys.readouterr()
        assert "submitted 2 times; this is the newest submission" in captured.err
        assert "state\tfailed" in captured.out

    def test_when_its_batch_is_exported_then_the_newest_is_written(self, scene: Scene, tmp_path: Path) -> None:
        job_id = run_twice(scene)
        scene.record()

        written = export_batch(scene.history, BatchJobs("q", "b"), tmp_path)

        (line,) = [json.loads(line) for line in written.error_path.read_text().splitlines()]
        assert (line["custom_id"], written.num_done, written.num_failed) == (job_id, 0, 1)

    def test_when_the_queue_is_audited_then_all_agree(self, scene: Scene) -> None:
        run_twice(scene)
        scene.record()

        assert scene.found() == {}

    def test_when_the_first_one_lacks_its_end_then_the_audit_names_it_and_leaves_it(self, scene: Scene) -> None:
        job_id = run_twice(scene)
        scene.record()
        with scene.history.begin() as connection:
            connection.execute(jobs.update().where(jobs.c.state == "done").values(state="running"))

        found, done = scene.found(), scene.repair()

        assert found == {("replaced", job_id): 1}
        assert done == {("replaced", job_id): "left: another submission has its id"}

    def test_when_the_second_one_is_not_recorded_then_repair_writes_its_row(self, scene: Scene) -> None:
        job_id = run_twice(scene)
        scene.record()
        with scene.history.begin() as connection:
            connection.execute(jobs.delete().where(jobs.c.state == "failed"))

        assert scene.found() == {("not_in_history", job_id): 1}
        scene.repair()
        scene.record()

        assert [row["state"] for row in rows(scene.history, jobs)] == ["done", "failed"]
        assert scene.found() == {}

    def test_when_callbacks_are_made_then_each_end_is_an_event_of_its_own(self, scene: Scene) -> None:
        run_twice(scene)
        entries = [fields for _, fields in scene.queue.entries(scene.queue.keys.callbacks)]

        found = [job_event(scene.queue.keys, _texts(fields), fields[b"spec"]) for fields in entries]

        assert len({event.id for event in found if event is not None}) == 2

    def test_when_the_older_one_is_forgotten_then_the_newer_keeps_all_its_rows(self, scene: Scene) -> None:
        run_twice(scene)
        scene.record()
        newest = rows(scene.history, jobs)[1]["submitted_ms"]

        assert forget_before(scene.history, "q", newest, pause=lambda _: None) == 1

        for table in (jobs, attempts, results):
            assert [row["submitted_ms"] for row in rows(scene.history, table)] == [newest]

    def test_when_its_data_is_deleted_then_no_submission_keeps_any(self, scene: Scene) -> None:
        job_id = run_twice(scene)
        scene.record()
        view = scene.queue.view(job_id)
        gone = Forgotten(id=job_id, queue="q", state=view.state, submitted_ms=view.submitted_ms)

        with History(scene.history.url.render_as_string(hide_password=False), is_writer=True) as history:
            assert history.forget([gone]) == {job_id}

        assert rows(scene.history, results) == []
        assert all(row["deleted_ms"] is not None for row in rows(scene.history, jobs))


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items() if name != b"spec"}
