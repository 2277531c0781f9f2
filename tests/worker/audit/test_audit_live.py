"""The audit alongside real producers, workers and recorders; and after a Redis that came back older than it was."""

import shutil
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from sluice.history.database import open_database
from sluice.history.tables import jobs
from sluice.history.writer import HistoryWriter
from sluice.producer import Producer
from sluice.protocol.wire import JobId
from sluice.worker.connection.clients import connect
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.end_to_end.processes import worker_pool
from tests.integration.workers import running_worker
from tests.protocol.driving import Queue, ending
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene


@contextmanager
def running_recorder(scene: Scene) -> Generator[None]:
    """A recorder on a thread, stopped when all is written."""
    client = connect(scene.server.url, timeout_s=5)
    settings = RecorderSettings(queues=("q",), name="r1", block_s=0.05)
    recorder = Recorder(client, HistoryWriter(scene.history), settings)
    thread = threading.Thread(target=recorder.run)
    thread.start()
    try:
        yield
    finally:
        recorder.stop()
        thread.join(20)


@contextmanager
def submitting(url: str, tenant: str) -> Generator[list[JobId]]:
    """A producer on a thread that submits, and cancels now and then, until it is left."""
    ids: list[JobId] = []
    is_over = threading.Event()

    def submit() -> None:
        with Producer(url, queue="q") as producer:
            while not is_over.is_set():
                accepted = producer.submit("tell me more", max_tokens=8, tenant=tenant, priority=len(ids) % 3)
                ids.append(accepted.id)
                if len(ids) % 7 == 0:
                    producer.cancel(accepted.id)

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        yield ids
    finally:
        is_over.set()
        thread.join(20)


def wait_until_done(scene: Scene, ids: list[JobId]) -> None:
    """Until each has come to its end."""
    with Producer(scene.server.url, queue="q") as producer:
        assert sum(1 for _ in producer.results(ids)) == len(ids)


@pytest.fixture
def scene(durable_valkey: RedisServer, sqlite_url: str) -> Iterator[Scene]:
    """A queue on a server of the test's own."""
    with durable_valkey.client() as client:
        queue = Queue(client)
        queue.configure(keep_prompts="full")
        history = open_database(sqlite_url, is_writer=True)
        yield Scene(durable_valkey, queue, history)
        history.dispose()


class TestGivenTwoProducersAndAWorkerThatGoOn:
    def test_when_audited_again_and_again_then_nothing_is_found(self, scene: Scene) -> None:
        url = scene.server.url
        with ExitStack() as stack:
            stack.enter_context(running_worker(url, queue__name="q", log__level="error"))
            stack.enter_context(running_recorder(scene))
            first = stack.enter_context(submitting(url, "a"))
            second = stack.enter_context(submitting(url, "b"))
            before = len(first) + len(second)
            reports = [scene.audit(pause_s=0.1, history_s=10.0) for _ in range(8)]
            submitted = len(first) + len(second) - before

        assert [report.findings for report in reports] == [[]] * 8
        assert submitted > 100
        assert len({report.counters["submitted"] for report in reports}) == 8


class TestGivenWorkersThatAreKilled:
    @pytest.mark.long
    def test_when_audited_meanwhile_then_nothing_is_found_and_the_sum_comes_out(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        with worker_pool(scene.server.url, tmp_path) as workers, running_recorder(scene):
            alive = workers.start_all(2, QUEUE="q")
            with submitting(scene.server.url, "a") as first, submitting(scene.server.url, "b") as second:
                reports = [scene.audit(pause_s=0.1, history_s=30.0)]
                for _ in range(10):
                    alive.append(workers.start(QUEUE="q"))
                    alive[-1].wait_until_started()
                    alive.pop(0).kill()
                    reports.append(scene.audit(pause_s=0.1, history_s=30.0))
            wait_until_done(scene, [*first, *second])
            reports.append(scene.audit(pause_s=0.1, history_s=30.0))

        assert [report.findings for report in reports] == [[]] * 12
        counters = reports[-1].counters
        assert counters["submitted"] == len(first) + len(second) == counters["done"] + counters["cancelled"]
        assert reports[-1].history == {name: counters[name] for name in ("done", "cancelled") if counters[name]}


class TestGivenARedisThatIsPutBackToAnOldCopy:
    def old_copy(self, server: RedisServer, folder: Path) -> None:
        server.stop()
        shutil.copytree(server.folder / "appendonlydir", folder)
        server.start()

    def put_back(self, server: RedisServer, folder: Path) -> None:
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        shutil.copytree(folder, server.folder / "appendonlydir")
        server.start()

    def test_when_repaired_from_the_history_then_every_acknowledged_job_runs_to_its_end(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        server = scene.server
        with Producer(server.url, queue="q") as producer:
            kept = [producer.submit(f"kept {n}", max_tokens=6).id for n in range(20)]
            scene.record()
            self.old_copy(server, tmp_path / "old")
            lost = [producer.submit(f"lost {n}", max_tokens=6).id for n in range(30)]
        # Of those that the old copy has, some ran since and some ended; of the lost, some ran.
        worker = scene.queue.worker("W")
        pulled = worker.pull(sequences=25).jobs
        worker.advance(*(ending(one, 0, 1) for one in pulled[:3]))
        scene.record()
        self.put_back(server, tmp_path / "old")

        found = set(scene.found())
        assert {subject for kind, subject in found if kind == "forgotten"} == {*lost}
        assert {subject for kind, subject in found if kind == "queue_went_back"} == {one.id for one in pulled[:20]}
        done = scene.repair()
        assert {done[key] for key in found if key[0] == "forgotten"} == {"re-added"}
        with running_worker(server.url, queue__name="q", log__level="error"):
            wait_until_done(scene, [*kept, *lost])
        scene.record()

        assert scene.found() == {}
        with scene.history.connect() as connection:
            states = connection.execute(sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)).all()
        assert [tuple(one) for one in states] == [("done", 50)]
