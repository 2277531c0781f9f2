"""The events that the real scripts write, in the history: the whole way from submit to a row."""

from collections.abc import Generator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import attempts, jobs, results
from sluice.history.views import timeline
from sluice.history.writer import HistoryWriter
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, JobSpec, encode_prompt, encode_record, encode_spec
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.history import events as e
from tests.history.test_recorder import client_of
from tests.protocol.driving import Queue, ending, tokens
from tests.servers import RedisServer


@pytest.fixture
def queue(valkey: RedisServer) -> Generator[Queue]:
    """A queue whose clock says that the server has been up for an hour."""
    with valkey.client() as client:
        queue = Queue(client)
        queue.pass_time(3_600_000)
        yield queue


def record_all(valkey: RedisServer, history: Engine) -> None:
    """Write what the outbox holds."""
    settings = RecorderSettings(queues=("q",), name="r1")
    Recorder(client_of(valkey), HistoryWriter(history), settings).drain()


def row(history: Engine, job_id: JobId) -> Any:  # Any: columns of several types
    """The job's row."""
    with history.connect() as connection:
        return connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()


def outcomes(history: Engine, job_id: JobId) -> list[tuple[int, str | None, str | None]]:
    """(attempt, outcome, why) of each claim."""
    columns = (attempts.c.attempt, attempts.c.outcome, attempts.c.why)
    with history.connect() as connection:
        found = connection.execute(sa.select(*columns).where(attempts.c.job_id == job_id).order_by(attempts.c.epoch))
        return [(one.attempt, one.outcome, one.why) for one in found]


class TestGivenAJobThatRuns:
    """Submitted, pulled, ended by its worker."""

    def test_when_recorded_then_the_row_has_what_was_asked_and_what_was_measured(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        spec = encode_spec(JobSpec(options=JobOptions(max_tokens=20, n=1), metadata={"team": "search"}, batch="b1"))
        job_id = queue.add("one", tenant="acme", spec=spec, batch="b1", priority=4)
        worker = queue.worker("w1")
        queue.pass_time(1000)
        job = worker.take()
        measured = e.record(first_scheduled_ms=job.pulled_ms + 5, first_token_ms=job.pulled_ms + 25, output_tokens=3)
        result = e.result("three rivers")
        worker.advance(ending(job, 0, 3, record=encode_record(measured), result=result))

        record_all(valkey, history)

        found = row(history, job_id)
        assert (found.state, found.reason, found.tenant, found.priority, found.batch) == (
            "done",
            "stop",
            "acme",
            4,
            "b1",
        )
        assert (found.seed, found.metadata, found.options["max_tokens"]) == (str(2**64 - 1), {"team": "search"}, 20)
        assert found.record_error is None
        assert found.queue_s == pytest.approx((job.pulled_ms + 5 - job.submitted_ms) / 1000)
        assert found.ttft_s == pytest.approx(found.queue_s + 0.02)
        assert found.pulled_ms >= found.submitted_ms + 1000
        assert found.finished_ms >= found.pulled_ms
        assert outcomes(history, job_id) == [(1, "done", "stop")]
        with history.connect() as connection:
            assert connection.execute(sa.select(results.c.choices)).scalar_one()[0]["text"] == "three rivers"

    def test_when_it_is_given_back_and_taken_again_then_both_attempts_are_recorded(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one")
        first, second = queue.worker("w1"), queue.worker("w2")
        queue.pass_time(1)
        job = first.take()
        first.advance(tokens(job, 0, 2))
        queue.pass_time(1)
        first.give_back(job)
        record_all(valkey, history)
        assert (row(history, job_id).state, row(history, job_id).worker) == ("queued", None)

        queue.pass_time(1)
        job = second.take()
        queue.pass_time(1)
        second.advance(ending(job, 2, 1))
        record_all(valkey, history)

        assert (row(history, job_id).state, row(history, job_id).attempts) == ("done", 2)
        assert [outcome for _, outcome, _ in outcomes(history, job_id)] == ["returned", "done"]
        with history.connect() as connection:
            kinds = connection.execute(
                sa.select(timeline.c.event).order_by(timeline.c.at_ms, timeline.c.epoch)
            ).scalars()
            assert list(kinds) == ["submitted", "pulled", "returned", "pulled", "done"]

    def test_when_an_attempt_had_a_long_gap_then_its_row_has_it_whatever_ended_it(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one")
        first, second, third = (queue.worker(f"w{number}") for number in range(3))
        job = first.take()
        first.advance(tokens(job, 0, 2, first_token_ms=1, gap_ms=700))
        first.advance(tokens(job, 2, 2, first_token_ms=1, gap_ms=2500))
        first.give_back(job)
        job = second.take()
        second.advance(tokens(job, 4, 1))
        second.give_back(job)
        job = third.take()
        record = encode_record(e.record(gap_ms=3220.5))
        third.advance(ending(job, 5, 1, record=record)._replace(first_token_ms=1, gap_ms=3000))

        record_all(valkey, history)

        with history.connect() as connection:
            gaps = connection.execute(sa.select(attempts.c.gap_s).order_by(attempts.c.epoch)).scalars().all()
        assert gaps == [2.5, None, 3.2205]
        assert queue.fields("t", "one")["gap"] == "3000"
        assert row(history, job_id).state == "done"

    def test_when_it_fails_and_is_requeued_then_the_row_follows(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one")
        worker = queue.worker("w1")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED))
        record_all(valkey, history)
        assert (row(history, job_id).state, row(history, job_id).error) == ("failed", "it broke")

        queue.requeue(job_id)
        record_all(valkey, history)

        assert (row(history, job_id).state, row(history, job_id).error) == ("queued", None)
        assert outcomes(history, job_id) == [(1, "failed", "broke")]

    def test_when_it_waits_for_a_retry_then_its_row_has_the_attempt_and_the_last_error(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one")
        worker = queue.worker("w1")
        worker.advance(ending(worker.take(), 0, 2, state=JobState.FAILED, retry_in_ms=1000))
        record_all(valkey, history)

        found = row(history, job_id)
        assert (found.state, found.attempts, found.reason) == ("queued", 1, "retry")
        assert (found.error, found.error_code) == ("it broke", "broke")
        assert outcomes(history, job_id) == [(1, "returned", "broke")]

        queue.pass_time(1000)
        worker.advance(ending(worker.take(), 2, 1))
        record_all(valkey, history)
        found = row(history, job_id)
        assert (found.state, found.attempts, found.error) == ("done", 2, None)
        assert outcomes(history, job_id) == [(1, "returned", "broke"), (2, "done", "stop")]


class TestGivenAJobThatNeverRuns:
    """It ends while it waits."""

    def test_when_cancelled_then_its_row_says_so_and_it_has_no_attempt(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one")
        queue.cancel(job_id, reason="changed my mind")

        record_all(valkey, history)

        found = row(history, job_id)
        assert (found.state, found.scheduled_ms, found.queue_s) == ("cancelled", None, None)
        assert found.e2e_s >= 0
        assert outcomes(history, job_id) == []

    def test_when_its_time_runs_out_then_it_is_expired(
        self, valkey: RedisServer, queue: Queue, history: Engine
    ) -> None:
        job_id = queue.add("one", ttl_ms=1000)
        queue.pass_time(2000)
        queue.fire_timers()

        record_all(valkey, history)

        assert row(history, job_id).state == "expired"


class TestGivenHowMuchOfPromptsIsKept:
    """A setting of the queue."""

    @pytest.mark.parametrize(
        ("keep", "text", "has_hash"), [("none", None, False), ("hash", None, True), ("full", "secret", True)]
    )
    def test_when_submitted_then_no_more_than_that_reaches_the_history(
        self, valkey: RedisServer, queue: Queue, sqlite_history: Engine, keep: str, text: str | None, has_hash: bool
    ) -> None:
        queue.configure(keep_prompts=keep)
        job_id = queue.add("one", payload=encode_prompt("secret"))

        record_all(valkey, sqlite_history)

        found = row(sqlite_history, job_id)
        assert (found.prompt, found.prompt_sha256 is not None) == (text, has_hash)


class TestGivenJobsThatWantWebhooks:
    """The scripts write them to the callbacks stream."""

    def test_when_they_end_then_each_is_an_event(self, valkey: RedisServer, queue: Queue) -> None:
        spec = encode_spec(JobSpec(callback_url="https://example.org/hook"))
        waiting = queue.add("one", spec=spec, wants_callback=True)
        queue.add("two", spec=spec, wants_callback=True)
        queue.add("three")
        queue.cancel(waiting)
        worker = queue.worker("w1")
        for job in worker.pull().jobs:
            worker.advance(ending(job, 0))

        settings = CallbackSettings(
            redis_url=valkey.url,
            rq_url=valkey.url,
            database_url="sqlite:////nowhere/history.db",
            queue="q",
            secret="a secret of sixteen bytes or more",
        )
        Mover(client_of(valkey), client_of(valkey), settings).drain()

        enqueued = rq_queue(settings.rq_names.webhooks, client_of(valkey))
        webhooks: list[Any] = enqueued.get_jobs()  # Any: rq's types have holes
        kinds = sorted(str(job.args[2]).split('"type":"')[1].split('"')[0] for job in webhooks)
        assert kinds == ["job.cancelled", "job.done"]
