"""`worker callbacks` or a gateway is killed, rq forgets its jobs: nothing is missing, and nothing is twice."""

import random
import socket
import time
from collections.abc import Generator
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from sluice.history.tables import gateway_batches
from sluice.producer import Producer
from sluice.worker.connection.clients import connect
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.gateway.batches.processes import (
    Callbacks,
    Place,
    begun,
    ids_of,
    kept_objects,
    kill_all,
    numbered,
    place_in,
    until,
    until_it,
)
from tests.gateway.gateway_process import write
from tests.servers import RedisServer

NUM_LINES = 400


@pytest.fixture
def own(valkey: RedisServer, tmp_path: Path) -> Place:
    """A place that nobody shares."""
    return place_in(tmp_path, valkey.url)


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path) -> Generator[WorkerPool]:
    """Its workers."""
    with worker_pool(valkey.url, tmp_path) as pool:
        yield pool


def num_submitted(place: Place, batch: Batch) -> int:
    """Jobs of a batch that the queue has accepted, ever."""
    with Producer(place.redis_url) as producer:
        return producer.batch(batch.id).total


def forget(place: Place) -> None:
    """Let rq lose all that it has."""
    with connect(place.redis_url, timeout_s=5) as server:
        if keys := list(server.scan_iter("rq:*")):
            server.delete(*keys)


def let_time_pass(place: Place) -> None:
    """Let the time pass for which a killed task has its batch."""
    write(place.database_url, gateway_batches.update().values(due_ms=0))


def check_whole(client: openai.OpenAI, place: Place, batch: Batch, count: int = NUM_LINES) -> None:
    """Each line has one outcome, and was submitted once."""
    assert batch.status == "completed"
    assert ids_of(client, batch) == sorted(f"c-{number}" for number in range(count))
    assert num_submitted(place, batch) == count


class TestGivenCallbacksThatAreKilled:
    @pytest.mark.long
    def test_when_rq_has_forgotten_it_too_then_others_go_on(
        self, place: Place, callbacks: Callbacks, client: openai.OpenAI
    ) -> None:
        batch = begun(client, numbered(NUM_LINES))
        until_it(client, batch, lambda found: found.status != "validating")
        callbacks.kill()
        forget(place)
        let_time_pass(place)

        callbacks.start()

        check_whole(client, place, until(client, batch))

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(10))
    def test_when_it_happens_again_and_again_then_each_line_has_one_outcome(
        self, own: Place, workers: WorkerPool, seed: int
    ) -> None:
        rng = random.Random(seed)
        workers.start(MODEL="null?step_s=0.002", MAX_NUM_SEQS="16")
        with own.gateway() as gateway, gateway.client() as client:
            batch = begun(client, numbered(NUM_LINES * 10, max_tokens=16))
            for _ in range(6):
                with own.callbacks() as callbacks:
                    time.sleep(rng.uniform(1.5, 9.0))  # kills at random moments are the test
                    kill_all(callbacks)
                if rng.random() < 0.3:
                    forget(own)
                if rng.random() < 0.5:
                    let_time_pass(own)

            with own.callbacks(), own.callbacks():
                found = until(client, batch, patience_s=600)

            check_whole(client, own, found, NUM_LINES * 10)


class TestGivenAGatewayThatIsKilledAmidAnUpload:
    @pytest.mark.long
    def test_when_another_lists_then_there_is_no_file(self, own: Place) -> None:
        with own.gateway() as gateway:
            host, port = gateway.url.removeprefix("http://").removesuffix("/v1").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(
                    b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n"
                    b"content-type: multipart/form-data; boundary=x\r\n\r\n"
                    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 3_000_000
                )
                deadline_s = time.monotonic() + 20
                while not kept_objects(own):
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)  # until the upload has begun to be written
                gateway.process.kill()
                gateway.process.wait()

        with own.gateway() as other, other.client() as client:
            assert list(client.files.list()) == []
