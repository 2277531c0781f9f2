"""The task of a batch, run here step by step, on both databases and a real queue whose worker is moved by hand."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.gateway.batches.batch import StoredBatch
from sluice.gateway.batches.collecting import Part
from sluice.gateway.batches.lines import FileCheck
from sluice.gateway.batches.store import BatchLost
from sluice.gateway.batches.taken import Workshop
from sluice.gateway.files.leftovers import remove_leftovers
from sluice.gateway.tables.pages import PageRequest
from sluice.producer.client import Producer
from sluice.protocol.calls import QueueSettings
from sluice.protocol.clock import wall_ms
from sluice.protocol.keys import QueueKeys
from sluice.protocol.openai_format.requests import RequestRefused
from sluice.protocol.states import JobState
from tests.gateway.batches.processes import chat_line, encoded, numbered
from tests.gateway.batches.steps import added, current, custom_ids, go_on, let_window_pass, lines_of, names, until
from tests.producer.worker_side import HandWorker


class TestGivenABatchOfManyLines:
    def test_when_its_jobs_end_then_it_is_completed_with_what_each_became(
        self, workshop: Workshop, worker: HandWorker
    ) -> None:
        batch = added(workshop, numbered(5))

        begun = go_on(workshop, batch)
        jobs = worker.pull()
        for job in jobs[:4]:
            worker.generate(job)
        between = go_on(workshop, batch)
        worker.say(jobs[4], [1], "half", end=JobState.FAILED, error="it broke", code="broke")
        ended = go_on(workshop, batch)

        assert (begun.status, begun.total, begun.submitted, begun.model) == ("in_progress", 5, 5, "null")
        assert {job.id.split(".")[1] for job in jobs} == {"acme"}
        assert (between.status, between.completed, between.num_collected) == ("in_progress", 4, 0)
        assert (ended.status, ended.completed, ended.failed) == ("completed", 4, 1)
        output, error = lines_of(workshop, ended.output_file), lines_of(workshop, ended.error_file)
        assert custom_ids(output) + custom_ids(error) == names(0, 1, 2, 3, 4)
        assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1 w2 "
        assert error[0]["error"] == {"code": "broke", "message": "it broke"}
        assert {*ended.times} == {"in_progress", "finalizing", "completed"}

    def test_when_the_queue_has_two_partitions_then_both_have_jobs_of_it(
        self, workshop: Workshop, worker: HandWorker, redis_client: Any
    ) -> None:
        other = HandWorker(redis_client, QueueKeys("default", 1), "other")
        # Ids choose the partition: of few jobs, one may get none.
        batch = go_on(workshop, added(workshop, numbered(32), partitions=2))
        jobs = {hand.incarnation: hand.pull() for hand in (worker, other)}
        for hand in (worker, other):
            for job in jobs[hand.incarnation]:
                hand.generate(job)

        ended = go_on(workshop, batch)

        assert all(jobs.values())
        assert ended.status == "completed"
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(*range(32))

    def test_when_its_first_worker_serves_more_partitions_then_it_goes_on(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(3)))
        producer.configure(QueueSettings(partitions=2))
        for job in worker.pull():
            worker.generate(job)

        ended = go_on(workshop, batch)

        assert ended.status == "completed"
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0, 1, 2)

    @pytest.mark.parametrize("number", [1, 3])
    def test_when_the_workers_number_changes_then_all_jobs_are_collected(
        self, workshop: Workshop, worker: HandWorker, producer: Producer, redis_client: Any, number: int
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(8), partitions=2))
        for hand in (worker, HandWorker(redis_client, QueueKeys("default", 1), "other")):
            for job in hand.pull():
                hand.generate(job)
        producer.configure(QueueSettings(partitions=number))

        ended = go_on(workshop, batch)

        assert ended.status == "completed"
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(*range(8))

    def test_when_the_workers_number_changes_then_it_can_be_cancelled(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(8), partitions=2))
        producer.configure(QueueSettings(partitions=3))
        workshop.batches.cancel(batch.id, "acme")

        ended = until(workshop, batch, lambda found: found.status == "cancelled")

        assert worker.pull() == []
        assert custom_ids(lines_of(workshop, ended.error_file)) == names(*range(8))

    def test_when_no_worker_states_a_number_then_all_jobs_are_cancelled(
        self, workshop: Workshop, redis_client: Any
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(8), partitions=2))
        workshop.batches.cancel(batch.id, "acme")

        ended = until(workshop, batch, lambda found: found.status == "cancelled")

        assert HandWorker(redis_client, QueueKeys("default", 1), "other").pull() == []
        assert custom_ids(lines_of(workshop, ended.error_file)) == names(*range(8))

    @pytest.mark.parametrize("is_shared", [False, True])
    def test_when_the_queue_is_full_or_its_tenants_share_is_then_it_goes_on_where_it_was(
        self, workshop: Workshop, worker: HandWorker, producer: Producer, is_shared: bool
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=6 if is_shared else 3))
        if is_shared:
            producer.cancel(producer.submit("of another", tenant="other"))
        batch = added(workshop, numbered(8))
        seen: list[int] = []

        def is_over(found: StoredBatch) -> bool:
            seen.append(found.submitted)
            for job in worker.pull():
                worker.generate(job)
            return found.status == "completed"

        ended = until(workshop, batch, is_over)

        assert seen[:3] == [3, 6, 8]
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(*range(8))

    def test_when_the_queue_refuses_a_line_then_that_is_its_outcome(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        producer.configure(QueueSettings(max_job_tokens=20))
        url = "/v1/completions"
        content = encoded(
            {"custom_id": f"c-{number}", "method": "POST", "url": url, "body": {"prompt": [1], "max_tokens": most}}
            for number, most in enumerate((5, 500, 5))
        )
        batch = added(workshop, content, endpoint=url, model=None)

        go_on(workshop, batch)
        for job in worker.pull():
            worker.generate(job)
        ended = go_on(workshop, batch)

        [refused] = lines_of(workshop, ended.error_file)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("c-1", 400)
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0, 2)
        assert (ended.status, ended.completed, ended.failed) == ("completed", 2, 1)


class TestGivenACheckedFileOfWhichThisReleaseRefusesALine:
    """As if the release that checked it had accepted the line."""

    @pytest.mark.parametrize("most", [100, 2])
    @pytest.mark.parametrize("place", [0, 2, 4])
    def test_when_it_is_submitted_then_the_line_is_refused_and_the_others_run(
        self, workshop: Workshop, worker: HandWorker, producer: Producer, place: int, most: int
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=most))
        batch = checked_then_replaced(workshop, place, chat_line(f"c-{place}", no_such_option=1))

        def is_over(found: StoredBatch) -> bool:
            for job in worker.pull():
                worker.generate(job)
            return found.status == "completed"

        ended = until(workshop, batch, is_over)

        [refused] = lines_of(workshop, ended.error_file)
        error = refused["response"]["body"]["error"]
        assert (refused["custom_id"], error["code"], error["line"]) == (f"c-{place}", "unknown_parameter", place + 1)
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(*({*range(5)} - {place}))
        assert (ended.completed, ended.failed) == (4, 1)

    def test_when_its_values_are_the_reason_then_that_is_the_lines_outcome(
        self, workshop: Workshop, worker: HandWorker
    ) -> None:
        batch = checked_then_replaced(workshop, 1, chat_line("c-1", temperature=-1))

        go_on(workshop, batch)
        for job in worker.pull():
            worker.generate(job)
        ended = go_on(workshop, batch)

        [refused] = lines_of(workshop, ended.error_file)
        assert refused["response"]["body"]["error"]["param"] == "temperature"
        assert (ended.status, ended.completed, ended.failed) == ("completed", 4, 1)


def checked_then_replaced(workshop: Workshop, place: int, line: dict[str, Any]) -> StoredBatch:  # Any: JSON
    """A batch of five lines whose file was checked before one of them was replaced."""
    lines = [chat_line(f"c-{number}") for number in range(5)]
    batch = added(workshop, encoded(lines))
    check = FileCheck(batch)
    with workshop.storage.reading(f"files/{batch.input_file.removeprefix('file-')}") as file:
        assert check.run(file, lambda: None)
    workshop.storage.put("names", check.names.encoded())
    times = {"in_progress": wall_ms()}
    workshop.batches.change(batch, status="in_progress", total=5, names="names", times=times)
    lines[place] = line
    workshop.storage.put(f"files/{batch.input_file.removeprefix('file-')}", encoded(lines))
    return current(workshop, batch)


class TestGivenATaskThatWasTakenForDead:
    def test_when_another_has_its_batch_then_it_writes_nothing(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(2))
        first = workshop.batches.take(batch.id, 0)
        assert first is not None
        assert workshop.batches.take(batch.id, 1) is None
        workshop.batches.release(first, 0)
        second = workshop.batches.take(batch.id, 1)

        with pytest.raises(BatchLost):
            workshop.batches.move(first, "in_progress", total=7)

        assert second is not None
        assert workshop.batches.renew(first) is None
        assert workshop.batches.renew(second) == "validating"
        assert current(workshop, batch).total == 0

    def test_when_it_left_a_part_then_that_is_collected_again_and_swept(
        self, workshop: Workshop, worker: HandWorker
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(2)))
        part = Part()
        part.add(0, {"custom_id": "c-0", "error": None}, is_done=True)
        part.write(workshop.storage, batch)
        for job in worker.pull():
            worker.generate(job)

        ended = go_on(workshop, batch)
        # Of this test's folder only; other tests share the database.
        num_deleted = remove_leftovers(workshop.storage, workshop.files, workshop.batches, min_age_s=-10).num_deleted

        assert num_deleted == 1
        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0, 1)
        assert remove_leftovers(workshop.storage, workshop.files, workshop.batches, min_age_s=-10).num_deleted == 0


class TestGivenABatchThatIsCancelled:
    def test_when_its_file_was_not_checked_then_it_ends_without_jobs(
        self, workshop: Workshop, producer: Producer
    ) -> None:
        batch = added(workshop, numbered(2))
        workshop.batches.cancel(batch.id, "acme")

        ended = go_on(workshop, batch)

        assert (ended.status, ended.total, ended.output_file) == ("cancelled", 0, None)
        assert producer.batch(batch.id).total == 0

    def test_when_some_lines_ended_and_some_wait_then_each_has_its_outcome(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=3))
        batch = go_on(workshop, added(workshop, numbered(5)))
        worker.generate(worker.pull(1)[0])
        workshop.batches.cancel(batch.id, "acme")

        ended = until(workshop, batch, lambda found: found.status == "cancelled")

        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0)
        error = lines_of(workshop, ended.error_file)
        assert custom_ids(error) == names(1, 2, 3, 4)
        assert {line["error"]["code"] for line in error} == {"batch_cancelled"}


class TestGivenABatchWhoseWindowPasses:
    def test_when_lines_wait_then_they_expire_and_what_ended_is_kept(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=3))
        batch = go_on(workshop, added(workshop, numbered(5)))
        worker.generate(worker.pull(1)[0])
        let_window_pass(workshop, producer, batch)

        ended = until(workshop, batch, lambda found: found.status == "expired")

        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0)
        error = lines_of(workshop, ended.error_file)
        assert custom_ids(error) == names(1, 2, 3, 4)
        assert {line["error"]["code"] for line in error} == {"batch_expired"}
        assert producer.batch(batch.id).expired > 0

    def test_when_no_worker_fires_timers_then_its_task_does(self, workshop: Workshop, producer: Producer) -> None:
        batch = go_on(workshop, added(workshop, numbered(300)))
        let_window_pass(workshop, producer, batch)

        ended = until(workshop, batch, lambda found: found.status == "expired")

        assert (ended.completed, ended.failed, ended.expired) == (0, 300, 300)
        assert len(lines_of(workshop, ended.error_file)) == 300

    def test_when_its_file_was_not_checked_by_then_it_expires_without_jobs(self, workshop: Workshop) -> None:
        ended = go_on(workshop, added(workshop, numbered(2), expires_ms=wall_ms() - 1))

        assert (ended.status, ended.total) == ("expired", 0)


class TestGivenAnOutcomeThatNobodyHas:
    def test_when_it_is_collected_then_the_line_says_so(
        self, workshop: Workshop, worker: HandWorker, redis_client: Any
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(2)))
        jobs = worker.pull()
        for job in jobs:
            worker.generate(job)
        redis_client.delete(QueueKeys("default").result(jobs[0].id))

        ended = go_on(workshop, batch)

        assert custom_ids(lines_of(workshop, ended.output_file)) == names(1)
        [lost] = lines_of(workshop, ended.error_file)
        assert (lost["custom_id"], lost["error"]["code"]) == ("c-0", "result_lost")


class TestGivenTextThatPostgresqlRefuses:
    def test_when_a_bad_line_has_it_then_the_batch_fails_and_lists_the_line(self, workshop: Workshop) -> None:
        line = chat_line("c-0", model="a\0b", **{"max\0tokens": 1})

        ended = go_on(workshop, added(workshop, encoded([line])))

        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors[0]["param"] == "max\ufffdtokens"

    def test_when_an_id_has_it_then_there_is_nothing(self, workshop: Workshop) -> None:
        wanted = PageRequest(tenant="acme", after="file-\0", limit=1)

        assert workshop.files.get("file-\0", "acme") is None
        assert workshop.files.delete("file-\0", "acme") is None
        assert workshop.batches.get("batch_\0", "acme") is None
        assert workshop.batches.cancel("batch_\0", "acme") is None
        with pytest.raises(RequestRefused, match="after"):
            workshop.files.page(wanted)


class TestGivenAnInputFileWhoseContentIsGone:
    def test_when_it_is_checked_then_its_batch_fails(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(2))
        workshop.storage.delete([f"files/{batch.input_file.removeprefix('file-')}"])

        ended = go_on(workshop, batch)

        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors[0]["code"] == "file_not_found"
        assert replace(ended, errors=None).body["errors"] is None
