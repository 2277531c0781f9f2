"""Files and batches in a bucket: s3fs against moto's server, an emulator of S3, both installed by themselves."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from tests.clients.environments import python_in
from tests.end_to_end.processes import ROOT, worker_pool
from tests.gateway.batches.processes import (
    PATIENCE_S,
    Place,
    begun,
    ids_of,
    kill_all,
    numbered,
    place_in,
    until,
    until_it,
)
from tests.servers import RedisServer, redis_server

pytestmark = [pytest.mark.long, pytest.mark.clients]

BUCKET = "batches"
LEFTOVER = "import s3fs; print(*s3fs.S3FileSystem().find('batches/kept'))"

WRITE = """
from sluice.gateway.files.storage import Storage
Storage("s3://batches/kept").put("batches/new", b"hello")
"""
STALE = f"""
import subprocess, sys, time
from sluice.gateway.files.storage import Storage
storage = Storage("s3://batches/kept")
storage.put("batches/old", b"1")
assert "batches/old" in list(storage.old_keys("batches", time.time() + 60))
subprocess.run([sys.executable, "-c", {WRITE!r}], check=True)
with storage.reading("batches/new") as file:
    print(file.read().decode())
"""


@pytest.fixture(scope="module")
def emulator() -> Generator[dict[str, str]]:
    """An empty bucket, and the environment of programs that use it."""
    python = python_in("s3")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
    }  # fmt: skip
    command = [python, "-m", "moto.server", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            make = f"import boto3; boto3.client('s3').create_bucket(Bucket={BUCKET!r})"
            subprocess.run([python, "-c", make], env=os.environ | environ, check=True)
            yield environ
        finally:
            process.kill()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)  # between two tries
    raise TimeoutError("the emulator did not start")


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """A server of its own: gateways of the others mark their folders in its queue, and then no gateway is ready."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("s3")) as pool:
        pool.start_all(1)
        yield server


@pytest.fixture
def place(
    queue_server: RedisServer, emulator: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """A place whose files are in the bucket."""
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    return replace(place_in(tmp_path, queue_server.url), files_url=f"s3://{BUCKET}/kept")


class TestGivenFilesInABucket:
    def test_when_a_batch_runs_and_callbacks_are_killed_then_each_line_has_one_outcome(self, place: Place) -> None:
        with place.gateway() as gateway, gateway.client() as client:
            with place.callbacks() as callbacks:
                batch = begun(client, numbered(2000))
                until_it(client, batch, lambda found: found.status != "validating")
                kill_all(callbacks)
            with place.callbacks():
                found = until(client, batch)

            assert found.status == "completed"
            assert ids_of(client, found) == sorted(f"c-{number}" for number in range(2000))

    def test_when_a_file_of_several_blocks_is_uploaded_and_deleted_then_nothing_is_left(
        self, place: Place, emulator: dict[str, str]
    ) -> None:
        content = os.urandom(20 * 1024 * 1024)
        with place.gateway() as gateway, gateway.client() as client:
            file = client.files.create(file=("large", content), purpose="batch")
            read = client.files.content(file.id).content
            is_ready = gateway.get("/readyz").status_code
            client.files.delete(file.id)

        command = [python_in("s3"), "-c", LEFTOVER]
        left = subprocess.run(command, env=os.environ | emulator, capture_output=True, text=True, check=True).stdout
        assert read == content
        assert is_ready == 200
        assert file.id.removeprefix("file-") not in left

    def test_when_another_writes_behind_a_sweep_then_the_object_is_found(self, emulator: dict[str, str]) -> None:
        read = subprocess.run(
            [sys.executable, "-c", STALE], env=os.environ | emulator, capture_output=True, text=True, check=True
        ).stdout

        assert read == "hello\n"

    def test_when_the_bucket_is_away_then_it_is_503(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with (
            place.gateway() as gateway,
            gateway.client() as client,
            pytest.raises(openai.InternalServerError) as refusal,
        ):
            client.files.create(file=("a", b"x"), purpose="batch")

        assert (refusal.value.status_code, refusal.value.code) == (503, "storage_unavailable")
