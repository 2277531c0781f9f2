"""Batches whose database, history, files or queue fail at a chosen moment."""

import io
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rq.timeouts import JobTimeoutException
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from sluice.gateway import tasks
from sluice.gateway.batches import taken
from sluice.gateway.batches.batch import COMPLETED, BatchParts, StoredBatch
from sluice.gateway.batches.collecting import Bits, Collector, EndedSearch, Part
from sluice.gateway.batches.lines import identity_of, names_of
from sluice.gateway.batches.submitting import Submission
from sluice.gateway.batches.taken import OVERDUE_MS, Workshop
from sluice.gateway.files import leftovers
from sluice.gateway.files.leftovers import remove_leftovers, remove_old_files
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import OUTPUT, File, new_file_id
from sluice.history.tables import gateway_batches
from sluice.producer.bulk.recorded import RecordedOutcomes
from sluice.producer.client import Producer
from sluice.producer.errors import HistoryUnavailable, QueueRefused
from sluice.protocol.calls import QueueSettings
from sluice.protocol.clock import wall_ms
from sluice.protocol.keys import QueueKeys
from tests.gateway.batches.processes import chat_line, encoded, numbered
from tests.gateway.batches.steps import added, current, custom_ids, go_on, lines_of, names, until
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


@contextmanager
def after_first_select(action: Callable[[], None], of: str = "") -> Generator[None]:
    """Run something once, behind the first SELECT that names something."""
    is_done = threading.Event()

    def run(_connection: object, _cursor: object, statement: str, *_rest: Any) -> None:  # Any: of SQLAlchemy's event
        if statement.startswith("SELECT") and of in statement and not is_done.is_set():
            is_done.set()
            action()

    listen(sa.Engine, "after_cursor_execute", run)
    try:
        yield
    finally:
        remove(sa.Engine, "after_cursor_execute", run)


@contextmanager
def failing(table: str) -> Generator[None]:
    """Fail each statement that reads a table, as a server does that is being replaced."""

    def run(_connection: object, _cursor: object, statement: str, *_rest: Any) -> None:  # Any: of SQLAlchemy's event
        if f"FROM {table}" in statement:
            raise OperationalError(statement, None, Exception("terminating connection"))

    listen(sa.Engine, "before_cursor_execute", run)
    try:
        yield
    finally:
        remove(sa.Engine, "before_cursor_execute", run)


class TestGivenABatchThatFinishesWhileObjectsAreSwept:
    def test_when_its_files_begin_between_two_reads_then_its_objects_stay(self, workshop: Workshop) -> None:
        batch = go_on(workshop, added(workshop, numbered(1)))
        part = Part()
        part.add(0, {"custom_id": "c-0", "error": None}, is_done=True)
        parts = part.write(workshop.storage, batch)
        kept = workshop.batches.change(batch, parts=parts)
        output = File(
            id=new_file_id(1), tenant="acme", purpose=OUTPUT, filename="out", objects=parts.output, created_ms=1
        )

        def finish() -> None:
            workshop.batches.move(kept, COMPLETED, new_files=[output], output_file=output.id)

        with after_first_select(finish):
            named = workshop.batches.named_objects()

        assert current(workshop, batch).status == COMPLETED
        assert parts.output[0].key in named


class TestGivenADatabaseThatIsBeingWritten:
    def test_when_a_file_is_read_then_it_does_not_wait(self, workshop: Workshop) -> None:
        batch: StoredBatch = added(workshop, numbered(1))

        with workshop.database.transaction():
            file = workshop.files.get(batch.input_file, "acme")

        assert file is not None


class TestGivenAHistoryThatCannotBeReadForAMoment:
    def test_when_an_outcome_may_be_in_it_then_it_is_collected_later(
        self, workshop: Workshop, worker: HandWorker, redis_client: Any
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(2)))
        jobs = worker.pull()
        for job in jobs:
            worker.generate(job)
        redis_client.delete(QueueKeys("default").result(jobs[0].id))

        with failing("jobs"), pytest.raises(HistoryUnavailable):
            go_on(workshop, batch)
        between = current(workshop, batch)
        ended = go_on(workshop, batch)

        assert between.num_collected == 0
        assert ended.status == COMPLETED
        assert len(lines_of(workshop, ended.output_file)) == 1


class TestGivenAServerThatCameBackWithoutItsLastJobs:
    def test_when_it_has_lost_all_then_they_are_submitted_again(
        self, workshop: Workshop, worker: HandWorker, redis_client: Any
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(5)))
        redis_client.flushall()
        worker.pulls = 0

        again = go_on(workshop, batch)
        for job in worker.pull():
            worker.generate(job)
        ended = go_on(workshop, batch)

        assert (again.status, again.submitted) == ("in_progress", 5)
        assert (ended.status, ended.completed, ended.failed) == ("completed", 5, 0)

    def test_when_it_has_lost_some_then_each_line_has_one_outcome(
        self, workshop: Workshop, worker: HandWorker, producer: Producer, redis_client: Any
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=3))
        batch = go_on(workshop, added(workshop, numbered(3) + encoded([chat_line("c-3"), chat_line("c-4")])))
        # As if two more had been accepted in the second that is lost.
        workshop.batches.change(current(workshop, batch), submitted=5, file_offset=0)
        producer.configure(QueueSettings(max_waiting_jobs=100))

        again = go_on(workshop, batch)
        jobs = worker.pull()
        for job in jobs:
            worker.generate(job)
        ended = go_on(workshop, batch)

        assert again.submitted == 5
        assert len(jobs) == 5
        assert (ended.status, custom_ids(lines_of(workshop, ended.output_file))) == ("completed", names(*range(5)))


class TestGivenABatchWhoseNamesAreGone:
    @pytest.mark.parametrize("rest", [None, b'{"custom_ids": ["c-'])
    def test_when_it_goes_on_then_they_are_read_from_the_file(
        self, workshop: Workshop, worker: HandWorker, rest: bytes | None
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(2)))
        assert batch.names is not None
        workshop.storage.delete([batch.names])
        if rest is not None:
            workshop.storage.put(batch.names, rest)
        for job in worker.pull():
            worker.generate(job)

        ended = go_on(workshop, batch)

        assert custom_ids(lines_of(workshop, ended.output_file)) == names(0, 1)

    def test_when_its_file_is_gone_too_then_it_ends_once_it_is_cancelled(self, workshop: Workshop) -> None:
        batch = go_on(workshop, added(workshop, numbered(2)))
        assert batch.names is not None
        workshop.storage.delete([batch.names, f"files/{batch.input_file.removeprefix('file-')}"])
        workshop.batches.cancel(batch.id, "acme")

        ended = go_on(workshop, batch)

        assert (ended.status, ended.failed) == ("cancelled", 2)
        assert ended.errors is not None
        assert ended.errors[0]["code"] == "file_not_found"


class TestGivenAStorageThatIsSlow:
    def test_when_time_is_up_before_the_first_line_then_some_are_submitted(
        self, workshop: Workshop, producer: Producer
    ) -> None:
        content = numbered(3)
        batch = go_on(workshop, added(workshop, content))
        assert batch.names is not None
        found = names_of(workshop.storage.get(batch.names))
        behind_one = len(content.splitlines(keepends=True)[0])
        # What is before the place is not read.
        file = io.BytesIO(b"?" * behind_one + content[behind_one:])

        sent = Submission(
            replace(batch, submitted=1, file_offset=behind_one),
            found,
            Bits(None, 3),
            lambda: None,
            time.monotonic() - 1,
        ).run(producer, file)

        assert (sent.end, sent.file_offset) == (3, len(content))
        assert batch.file_offset == len(content)


class TestGivenManyJobsOfWhichFewHaveEnded:
    def test_when_time_is_up_then_the_next_look_begins_behind(self, workshop: Workshop, producer: Producer) -> None:
        batch = go_on(workshop, added(workshop, numbered(600)))
        assert batch.names is not None
        found = names_of(workshop.storage.get(batch.names))
        collector = Collector(
            producer, batch, found, RecordedOutcomes(None, batch.queue), lambda: nullcontext(io.BytesIO())
        )
        look = EndedSearch(end=600, until_s=time.monotonic() - 1)

        places: list[int] = []
        for _ in range(3):
            collector.ended(Part(), lambda: None, look)
            places.append(collector.place)

        assert places == [256, 512, 168]


class TestGivenAWorkerThatDiedWithAJob:
    @pytest.mark.parametrize("status", ["expired", "cancelled"])
    def test_when_no_other_comes_then_the_batch_ends_without_it(
        self, workshop: Workshop, worker: HandWorker, producer: Producer, status: str
    ) -> None:
        batch = go_on(workshop, added(workshop, numbered(3)))
        [job] = worker.pull(1)
        past_ms = wall_ms() - OVERDUE_MS
        if status == "expired":
            workshop.batches.change(current(workshop, batch), expires_ms=past_ms)
        else:
            workshop.batches.cancel(batch.id, "acme")
            workshop.batches.change(current(workshop, batch), times={**batch.times, "cancelling": past_ms})

        ended = until(workshop, batch, lambda found: found.status == status)

        error = lines_of(workshop, ended.error_file)
        assert custom_ids(error) == names(0, 1, 2)
        assert {line["error"]["code"] for line in error} == {f"batch_{status}"}
        [view] = producer.views([job.id])
        assert view is not None
        assert producer.batch(batch.id).cancelled == 2


class TestGivenAFileWhoseModelIsNotThatOfItsBatch:
    def test_when_it_is_checked_then_the_batch_fails(self, workshop: Workshop) -> None:
        ended = go_on(workshop, added(workshop, numbered(1), model="other"))

        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors[0]["code"] == "mismatched_model"


@pytest.fixture
def one_line_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of each task is over after its first line."""
    monkeypatch.setattr(taken, "SLICE_S", 0.0)
    monkeypatch.setattr(taken, "WORK_PER_READ", 0.0)


class CountedStorage(Storage):
    """A storage that counts what it reads, and whose server answers late."""

    def __init__(self, url: str, delay_s: float = 0.0) -> None:
        super().__init__(url)
        self.num_read, self.delay_s = 0, delay_s

    def get(self, key: str) -> bytes:
        self.num_read += 1
        time.sleep(self.delay_s)
        return super().get(key)


@pytest.mark.usefixtures("one_line_slices")
class TestGivenAFileThatIsCheckedInSlices:
    def test_when_the_last_one_is_checked_then_the_batch_goes_on(self, workshop: Workshop, tmp_path: Path) -> None:
        batch = added(workshop, numbered(3))

        between = [go_on(workshop, batch) for _ in range(3)]
        after = go_on(workshop, batch)

        assert {found.status for found in between} == {"validating"}
        assert [sum(part.num_lines for part in found.parts.checked) for found in between] == [1, 2, 3]
        assert (after.status, after.total, after.parts.checked) == ("in_progress", 3, ())
        assert [path.name.partition("-")[0] for path in (tmp_path / "files" / batch.folder).iterdir()] == ["names"]

    def test_when_a_bad_line_is_in_a_later_one_then_it_fails_with_it(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(2) + b"{}")

        ended = until(workshop, batch, lambda found: found.status == "failed")

        assert ended.errors is not None
        assert [error["line"] for error in ended.errors] == [3]

    def test_when_what_one_found_is_lost_then_the_check_begins_again(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(3))
        go_on(workshop, batch)
        between = go_on(workshop, batch)
        workshop.storage.delete([between.parts.checked[0].key])

        again = go_on(workshop, batch)
        ended = until(workshop, batch, lambda found: found.status != "validating")

        assert len(again.parts.checked) == 1
        assert (ended.status, ended.total) == ("in_progress", 3)

    def test_when_objects_are_swept_then_those_of_its_slices_stay(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(2))
        between = go_on(workshop, batch)

        remove_leftovers(workshop.storage, workshop.files, workshop.batches, min_age_s=-1)

        assert workshop.storage.get(between.parts.checked[0].key)

    def test_when_there_are_many_then_few_objects_are_kept_and_read(self, workshop: Workshop, tmp_path: Path) -> None:
        storage = CountedStorage((tmp_path / "files").as_uri())
        counted = replace(workshop, storage=storage)
        batch, most = added(workshop, numbered(64)), 0

        while (found := go_on(counted, batch)).status == "validating":
            kept = [path for path in (tmp_path / "files" / batch.folder).iterdir() if path.name.startswith("checked")]
            most = max(most, len(kept))

        assert found.total == 64
        assert most <= 7
        assert storage.num_read <= 64 * 7

    def test_when_one_names_objects_of_an_earlier_release_then_they_become_one(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(3))
        between = go_on(workshop, batch)
        parts = tuple(replace(part, num_lines=0) for part in between.parts.checked)
        workshop.batches.change(between, parts=BatchParts(checked=parts))

        again = go_on(workshop, batch)
        ended = until(workshop, batch, lambda found: found.status != "validating")

        assert [part.num_lines for part in again.parts.checked] == [2]
        assert (ended.status, ended.total) == ("in_progress", 3)


class TestGivenAStorageThatTakesLongerThanASlice:
    def test_when_a_later_slice_is_checked_then_it_has_as_long_as_the_read_took(
        self, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(taken, "SLICE_S", 0.001)
        slow = replace(workshop, storage=CountedStorage((tmp_path / "files").as_uri(), delay_s=0.5))
        batch = added(workshop, numbered(20_000))
        first = go_on(slow, batch)

        second = go_on(slow, batch)

        assert first.status == "validating"
        num_lines = [sum(part.num_lines for part in found.parts.checked) for found in (first, second)]
        assert second.total or num_lines[1] - num_lines[0] > 100


class TestGivenFilesThatAreOld:
    def test_when_they_are_swept_then_those_that_no_open_batch_reads_are_gone(self, workshop: Workshop) -> None:
        old, read = added(workshop, numbered(1)), added(workshop, numbered(1))
        workshop.batches.move(old, "failed")
        before_ms = wall_ms() + 1
        new = added(workshop, numbered(1), created_ms=before_ms)

        remove_old_files(workshop.storage, workshop.files, before_ms=before_ms)

        kept = {batch.id for batch in (old, read, new) if workshop.files.get(batch.input_file, "acme") is not None}
        assert kept >= {read.id}
        assert old.id not in kept
        assert workshop.files.old(before_ms, 10) == []
        assert not list(workshop.storage.old_keys(f"files/{old.input_file.removeprefix('file-')}", wall_ms()))

    def test_when_time_is_up_then_more_is_left(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leftovers, "AT_ONCE", 1)
        made = [added(workshop, numbered(1), created_ms=number) for number in (1, 2)]
        for batch in made:
            workshop.batches.move(batch, "failed")
        before_ms = wall_ms() + 1

        found = remove_old_files(workshop.storage, workshop.files, before_ms=before_ms, for_s=0)
        rest = remove_old_files(workshop.storage, workshop.files, before_ms=before_ms)

        assert (found.num_deleted, found.is_over) == (1, False)
        assert rest.is_over
        assert [workshop.files.get(batch.input_file, "acme") for batch in made] == [None, None]


class TestGivenBatchesOfTwoQueues:
    def test_when_those_of_one_are_due_then_the_other_queues_are_not(self, workshop: Workshop) -> None:
        own, other = (added(workshop, numbered(1), queue=queue) for queue in ("own", "other"))

        due = {found.id for found in workshop.batches.due("own")}

        assert own.id in due
        assert other.id not in due


class TestGivenABatchWhoseTaskFailsInAWayNobodyExpected:
    """Its row says what no release writes."""

    def test_when_batches_are_continued_then_those_of_others_are_too(
        self,
        workshop: Workshop,
        valkey: RedisServer,
        history_url: str,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        queue = f"q-{tmp_path.name}"[:40]
        broken, other = (added(workshop, numbered(1), queue=queue, tenant=tenant) for tenant in ("broken", "acme"))
        tasks.bind(redis_url=valkey.url, queue=queue, database_url=history_url, files_url=(tmp_path / "files").as_uri())

        with damaged(workshop, broken) as make_due:
            for _ in range(2):
                make_due()
                tasks.continue_batches()

        assert current(workshop, other).status == "in_progress"
        assert [record.getMessage() for record in caplog.records if broken.id in record.getMessage()] == [
            f"The gateway's task {broken.id} failed; it is tried again"
        ]

    def test_when_rq_ends_the_run_then_it_ends(
        self, workshop: Workshop, valkey: RedisServer, history_url: str, tmp_path: Path
    ) -> None:
        queue = f"q-{tmp_path.name}"[:40]
        tasks.bind(redis_url=valkey.url, queue=queue, database_url=history_url, files_url=(tmp_path / "files").as_uri())

        def time_out() -> None:
            raise JobTimeoutException("it took too long")

        batch = added(workshop, numbered(1), queue=queue)

        with after_first_select(time_out, of="gateway_batches.names"), pytest.raises(JobTimeoutException):
            tasks.continue_batches()

        assert current(workshop, batch).status == "validating"


@contextmanager
def damaged(workshop: Workshop, batch: StoredBatch) -> Generator[Callable[[], None]]:
    """Write into a batch's row what no release writes, until the end; yield what lets the batch be due."""
    is_it = gateway_batches.c.id == batch.id

    def write(**values: object) -> None:
        with workshop.database.transaction() as connection:
            connection.execute(gateway_batches.update().where(is_it).values(**values))

    write(parts={"output": [["no size"]]})
    try:
        yield lambda: write(due_ms=0)
    finally:
        write(parts={}, status="cancelled")


class TestGivenAQueueThatRefusesAJobForNow:
    def test_when_the_reason_is_gone_then_the_batch_goes_on(self, workshop: Workshop, redis_client: Any) -> None:
        batch = added(workshop, numbered(2))
        key = QueueKeys("default").job(identity_of(batch, 2)[0])
        redis_client.set(key, "of another program")

        with pytest.raises(QueueRefused):
            go_on(workshop, batch)
        between = current(workshop, batch)
        redis_client.delete(key)
        after = go_on(workshop, batch)

        assert (between.status, between.submitted) == ("in_progress", 0)
        assert (after.status, after.submitted) == ("in_progress", 2)
