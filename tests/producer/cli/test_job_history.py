"""`producer jobs show` and `producer delete`, where queue and history know different things."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from sluice.history.tables import jobs
from sluice.producer import JobView, Producer
from sluice.producer.cli.common import when
from sluice.protocol.calls import advance
from sluice.protocol.redis.execution import run as execute
from sluice.protocol.states import JobState
from tests.histories import opened_history
from tests.producer.commands import Run
from tests.producer.worker_side import HandWorker
from tests.protocol.driving import ending

NOBODY = "0.default.nobody"
AWAY = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def history(sqlite_url: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[sa.Engine]:
    """The history that the commands of `run` read."""
    monkeypatch.setenv("SLUICE_DATABASE_URL", sqlite_url)
    with opened_history(sqlite_url) as engine:
        yield engine


@pytest.fixture
def done(producer: Producer, worker: HandWorker) -> JobView:
    """A done job in the queue."""
    receipt = producer.submit("hello")
    [leased] = worker.pull()
    worker.generate(leased)
    return producer.status(receipt)


def record(engine: sa.Engine, view: JobView, **columns: object) -> None:
    """Write the row of a job."""
    usual = {"id": view.id, "queue": "default", "partition": 0, "tenant": "default", "version": view.version,
             "state": view.state, "prompt": "hello", "submitted_ms": view.submitted_ms}  # fmt: skip
    with engine.begin() as connection:
        connection.execute(jobs.insert().values({**usual, **columns}))


def facts(table: str) -> dict[str, str]:
    """Names and values of the first table that `jobs show` prints; no name comes twice."""
    rows = [line.split("\t") for line in table.partition("\nat\tevent")[0].splitlines()[1:]]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


class TestGivenADoneJobInQueueAndHistory:
    @pytest.fixture(autouse=True)
    def recorded(self, history: sa.Engine, done: JobView) -> None:
        record(history, done)

    def test_when_it_is_deleted_beside_an_unknown_one_then_only_it_is_deleted(self, run: Run, done: JobView) -> None:
        ended = run("delete", done.id, NOBODY)

        assert ended.out == f"{done.id}\tdeleted from queue and history\n{NOBODY}\tunknown\n"
        assert ended.code == 1

    def test_when_the_queue_has_forgotten_it_then_it_is_deleted_from_the_history(
        self, run: Run, producer: Producer, done: JobView
    ) -> None:
        producer.delete([done.id])

        assert run("delete", done.id).output() == f"{done.id}\tdeleted from history\n"

    def test_when_the_history_is_away_then_deleting_fails_and_says_what_was_deleted(
        self, run: Run, done: JobView
    ) -> None:
        ended = run("delete", done.id, NOBODY, "--database-url", AWAY)

        assert ended.out == f"{done.id}\tdeleted from queue\n{NOBODY}\tnot in the queue\n"
        assert "the history was not changed: " in ended.err
        assert ended.code == 1

    def test_when_it_is_requeued_meanwhile_then_it_is_not_deleted(
        self, run: Run, history: sa.Engine, done: JobView, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Producer, "delete", lambda _self, ids: [False for _ in ids])  # pyright: ignore  # a race

        ended = run("delete", done.id)

        assert (ended.code, ended.out) == (1, f"{done.id}\tnot ended\n")
        with history.connect() as connection:
            assert connection.execute(sa.select(jobs.c.prompt)).scalar() == "hello"

    def test_when_the_server_is_away_then_the_history_shows_it_and_that_is_said(self, run: Run, done: JobView) -> None:
        shown = run("jobs", "show", done.id, "--redis-url", "redis://127.0.0.1:1/0")

        assert facts(shown.output())["state"] == "done"
        assert "the queue was not searched, so this may be old: " in shown.err


class TestGivenADoneJobThatBothKnowTheTimesOf:
    def test_when_it_is_shown_then_each_moment_has_one_name_and_is_formatted(
        self, run: Run, history: sa.Engine, done: JobView
    ) -> None:
        record(history, done, pulled_ms=done.started_ms, scheduled_ms=done.first_scheduled_ms,
               finished_ms=done.ended_ms, attempts=1, worker="hand")  # fmt: skip

        found = facts(run("jobs", "show", done.id).output())

        assert {name: found[name] for name in ("submitted", "started", "ended")} == {
            "submitted": when(done.submitted_ms), "started": when(done.started_ms), "ended": when(done.ended_ms)
        }  # fmt: skip
        assert (found["attempts"], found["worker"]) == ("1", "hand")
        assert found["published"] == str(done.published[0])
        assert not [name for name in found if name.endswith("_ms") or name in ("attempt", "owner")]


class TestGivenADefaultHistoryThatCannotBeRead:
    def test_when_a_job_is_deleted_then_it_fails(self, run: Run, done: JobView, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state" / "history.db").write_text("no database" * 100)

        ended = run("delete", done.id)

        assert (ended.code, ended.out) == (1, f"{done.id}\tdeleted from queue\n")


class TestGivenAWaitingJobWithARow:
    @pytest.fixture
    def waiting(self, history: sa.Engine, producer: Producer) -> JobView:
        view = producer.status(producer.submit("hello"))
        record(history, view, state="running", metadata={"user": "7"},
               options={"max_tokens": 3, "stop": ["a b"], "model": "of one"})  # fmt: skip
        return view

    def test_when_it_is_shown_then_both_have_facts_and_the_queue_has_the_state(
        self, run: Run, waiting: JobView
    ) -> None:
        found = facts(run("jobs", "show", waiting.id).output())

        assert found["metadata"] == "user=7"
        assert found["options"] == 'max_tokens=3 stop=["a b"] model="of one"'
        assert "cost" not in found
        assert (found["state"], found["ahead_jobs"], found["failures"]) == ("queued", "0", "0")
        assert found["waits_for"].startswith("no worker serves queue 'default'")

    def test_when_the_row_is_of_an_earlier_submission_then_its_facts_are_not_shown(
        self, run: Run, history: sa.Engine, waiting: JobView
    ) -> None:
        with history.begin() as connection:
            connection.execute(jobs.update().values(submitted_ms=waiting.submitted_ms - 1, finished_ms=1))

        found = facts(run("jobs", "show", waiting.id).output())

        assert found["state"] == "queued"
        assert not {"metadata", "ended"} & found.keys()


class TestGivenAJobThatWaitsForARetry:
    def test_when_it_is_shown_then_its_error_and_number_of_failures_are_there(
        self, run: Run, history: sa.Engine, producer: Producer, worker: HandWorker
    ) -> None:
        receipt = producer.submit("hello")
        [leased] = worker.pull()
        failure = ending(leased, 0, state=JobState.FAILED, retry_in_ms=60_000)
        execute(worker.client, advance(worker.keys, worker.incarnation, [failure]))
        record(history, producer.status(receipt))

        found = facts(run("jobs", "show", receipt.id).output())

        assert (found["state"], found["failures"], found["error"]) == ("queued", "1", "it broke")


class TestGivenAnUnknownJob:
    def test_when_both_can_be_read_then_the_list_is_recommended(self, run: Run, history: sa.Engine) -> None:
        ended = run("jobs", "show", NOBODY)

        assert ended.code == 1
        assert "The history does not have it either. List the jobs that it has: producer jobs list" in ended.err

    def test_when_the_history_is_away_then_it_is_not_said_to_lack_the_job(self, run: Run) -> None:
        ended = run("jobs", "show", NOBODY, "--database-url", AWAY)

        assert ended.code == 1
        assert "is unknown to this queue" in ended.err
        assert "The history was not searched: " in ended.err
        assert "does not have it" not in ended.err

    def test_when_the_server_is_away_then_it_is_not_said_to_be_unknown(self, run: Run, history: sa.Engine) -> None:
        ended = run("jobs", "show", NOBODY, "--redis-url", "redis://127.0.0.1:1/0")

        assert ended.code == 1
        assert "The history does not have it. The queue was not searched: " in ended.err
        assert "unknown" not in ended.err
