"""What a tenant may store."""

import socket
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import pytest
from openai.types import FileObject

from sluice.gateway.faults import TooManyBytes
from sluice.gateway.files.store import INPUT, File, FileStore, Stored, new_file_id
from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.gateway.tables.quota import MIN_FILE_BYTES, RESPONSE_BYTES, stored_bytes
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId
from tests.gateway.batches.processes import ENDPOINT, Place, kept_objects, place_in
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.security.test_batches import history_url
from tests.servers import RedisServer

__all__ = ["history_url"]
MIB = 2**20
FORM_END = b"\r\n--xyz--\r\n"


def new_file(tenant: str, num_bytes: int) -> File:
    """A file whose content is not looked at."""
    created_ms = wall_ms()
    objects = (Stored(key="files/x", num_bytes=num_bytes),)
    return File(
        id=new_file_id(created_ms), tenant=tenant, purpose=INPUT, filename="x", objects=objects, created_ms=created_ms
    )


def new_response(tenant: str, text: str = "", **changes: Any) -> StoredResponse:  # Any: fields of several types
    """A response that is not in the table."""
    info = ResponseInfo(job_id=JobId(f"0.{tenant}.{uuid4().hex}"), created_ms=wall_ms(), model="m", options={})
    messages = ({"role": "user", "content": text},)
    made = StoredResponse(info=info, tenant=tenant, queue="q", expires_ms=wall_ms() + 60_000, input=messages)
    return replace(made, **changes)


class TestGivenABoundOfStoredBytes:
    @pytest.fixture
    def stores(self, history_url: str) -> Generator[tuple[FileStore, FileStore]]:
        """Those of two gateways."""
        with Database(history_url) as one, Database(history_url) as other:
            yield FileStore(one), FileStore(other)

    def test_when_gateways_store_at_once_then_exactly_what_fits_is_kept(
        self, stores: tuple[FileStore, FileStore]
    ) -> None:
        def add(store: FileStore) -> bool:
            try:
                store.add(new_file("at-once", 10_000), max_bytes=50_000)
            except TooManyBytes:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            added = list(threads.map(add, stores * 8))

        assert sum(added) == 5
        with pytest.raises(TooManyBytes):
            stores[0].add(new_file("at-once", 1), max_bytes=50_000 + MIN_FILE_BYTES - 1)

    def test_when_a_file_is_deleted_then_there_is_room_again(self, stores: tuple[FileStore, FileStore]) -> None:
        store, file = stores[0], new_file("deleting", 1)
        store.add(file, max_bytes=MIN_FILE_BYTES)
        with pytest.raises(TooManyBytes):
            store.add(new_file("deleting", 1), max_bytes=MIN_FILE_BYTES)
        store.add(new_file("other", 1), max_bytes=MIN_FILE_BYTES)

        store.delete(file.id, "deleting")

        store.add(new_file("deleting", 1), max_bytes=MIN_FILE_BYTES)


class TestGivenResponsesOfATenant:
    """What they take counts with its files."""

    @pytest.fixture
    def database(self, history_url: str) -> Generator[Database]:
        """That of all gateways."""
        with Database(history_url) as made:
            yield made

    @pytest.fixture
    def store(self, database: Database) -> ResponseStore:
        """The table."""
        return ResponseStore(database)

    def test_when_they_take_all_then_neither_a_file_nor_a_response_is_stored(
        self, database: Database, store: ResponseStore
    ) -> None:
        tenant = new_tenant()
        store.add(new_response(tenant, "x" * 10_000))

        with pytest.raises(TooManyBytes):
            FileStore(database).add(new_file(tenant, 1), max_bytes=10_000)
        with pytest.raises(TooManyBytes):
            store.add(new_response(tenant), max_bytes=10_000)
        assert store.add(new_response(new_tenant()), max_bytes=10_000) is None

    def test_when_files_take_all_then_no_response_is_stored(self, database: Database, store: ResponseStore) -> None:
        tenant = new_tenant()
        FileStore(database).add(new_file(tenant, 1))

        with pytest.raises(TooManyBytes):
            store.add(new_response(tenant), max_bytes=MIN_FILE_BYTES)

    def test_when_one_is_small_then_its_row_counts_too(self, database: Database, store: ResponseStore) -> None:
        tenant = new_tenant()

        for _ in range(3):
            store.add(new_response(tenant))

        assert 3 * RESPONSE_BYTES < taken(database, tenant) < 3 * (RESPONSE_BYTES + 64)

    @pytest.mark.parametrize("text", ["x" * 1000, "\N{SNOWMAN}" * 1000])
    def test_when_its_output_is_stored_then_that_counts_in_bytes(
        self, database: Database, store: ResponseStore, text: str
    ) -> None:
        tenant, new = new_tenant(), new_response("unused")
        new = replace(new, tenant=tenant)
        store.add(new)
        before = taken(database, tenant)

        for _ in range(2):
            store.finish({new.info.id: ResponseEnd(status="completed", text=text)})

        assert taken(database, tenant) - before == len(f'"{text}"'.encode())

    def test_when_they_are_deleted_withdrawn_or_expire_then_nothing_counts(
        self, database: Database, store: ResponseStore
    ) -> None:
        tenant = new_tenant()
        deleted, refused, old = (new_response(tenant) for _ in range(3))
        old = replace(old, expires_ms=wall_ms() - 1)
        for one in (deleted, refused, old):
            store.add(one)

        store.delete(deleted.info.id)
        store.withdraw(refused)
        store.delete_expired(1000)

        assert taken(database, tenant) == 0

    def test_when_a_request_is_repeated_then_it_finds_its_response_though_all_is_taken(
        self, store: ResponseStore
    ) -> None:
        tenant, key = new_tenant(), uuid4().hex
        first, again = (new_response(tenant, idempotency_key=key) for _ in range(2))
        store.add(first)

        found = store.add(again, max_bytes=1)

        assert found is not None
        assert found.info.id == first.info.id

    def test_when_the_response_of_a_repeated_request_has_expired_then_it_is_a_new_one(
        self, store: ResponseStore
    ) -> None:
        tenant, key = new_tenant(), uuid4().hex
        store.add(new_response(tenant, idempotency_key=key, expires_ms=wall_ms() - 1))

        with pytest.raises(TooManyBytes):
            store.add(new_response(tenant, idempotency_key=key), max_bytes=1)


class TestGivenAGatewayWithASmallBound:
    """1 MiB for each tenant."""

    def test_when_responses_reach_it_then_one_is_413_unless_it_is_not_stored(
        self, valkey: RedisServer, history_url: str, tmp_path: Path
    ) -> None:
        settings = ("--tenant-files-mib", "1", "--model", "m=default", "--files-url", tmp_path.as_uri())
        with (
            gateway_process(valkey.url, *settings, database_url=history_url) as gateway,
            gateway.client() as client,
        ):
            first = stored(client, 700 * 1024, "first")
            refused = [refusal_of(lambda: stored(client, 700 * 1024)), refusal_of(lambda: upload(client, 700 * 1024))]
            metrics = gateway.get("/metrics").text
            again = stored(client, 700 * 1024, "first")
            with client.responses.create(model="m", input="x" * 700 * 1024, store=False, stream=True) as stream:
                unstored = next(iter(stream))
            client.responses.delete(first)
            client.responses.delete(stored(client, 700 * 1024))

        assert refused == [(413, "too_many_stored_bytes")] * 2
        assert 'sluice_gateway_refused_total{bound="tenant_files_mib"} 2\n' in metrics
        assert again == first
        assert unstored.type == "response.created"

    def test_when_it_is_reached_then_uploads_and_batches_are_413_until_a_file_is_deleted(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        place = place_in(tmp_path, valkey.url)
        with place.gateway("--tenant-files-mib", "1") as gateway, gateway.client() as client:
            first, second = upload(client, MIB - MIN_FILE_BYTES), upload(client, 2)
            refused = [refusal_of(lambda: upload(client, 1)), refusal_of(lambda: upload(client, 900 * 1024))]
            refused.append(
                refusal_of(
                    lambda: client.batches.create(input_file_id=second.id, endpoint=ENDPOINT, completion_window="24h")
                )
            )
            kept = len(kept_objects(place))
            client.files.delete(first.id)
            upload(client, 1)

        assert refused == [(413, "too_many_stored_bytes")] * 3
        assert kept == 2


class TestGivenATenantWhoseUploadIsNotOver:
    """Its tenant may store 3 MiB."""

    @pytest.fixture
    def place(self, valkey: RedisServer, tmp_path: Path) -> Place:
        """A place of its own."""
        return place_in(tmp_path, valkey.url)

    @pytest.fixture
    def gateway(self, place: Place) -> Generator[GatewayProcess]:
        """A gateway with the bound."""
        with place.gateway("--tenant-files-mib", "3") as made:
            yield made

    def test_when_another_announces_too_much_then_it_is_413_until_the_first_has_left(
        self, gateway: GatewayProcess, place: Place
    ) -> None:
        with gateway.client() as client:
            with begun_upload(gateway, b"x" * 1000, num_announced=2_000_000):
                until(lambda: kept_objects(place) != set(), "the upload has begun")
                refused = refusal_of(lambda: upload(client, 2 * MIB))
                small = upload(client, MIB)
            until(lambda: len(kept_objects(place)) == 1, "what it sent is deleted")
            again = upload(client, MIB)

        assert refused == (413, "too_many_stored_bytes")
        assert (small.bytes, again.bytes) == (MIB, MIB)

    def test_when_nothing_is_announced_then_what_has_arrived_counts(
        self, gateway: GatewayProcess, place: Place
    ) -> None:
        body = [form_with(b"x" * (2 * MIB))]
        headers = {"content-type": "multipart/form-data; boundary=xyz"}
        with begun_upload(gateway, b"x" * (2 * MIB + MIB // 2)):
            until(lambda: most_stored(place) >= 2 * MIB - 65_536, "two pieces are stored")
            with gateway.http() as http:
                refused = http.post("/v1/files", content=iter(body), headers=headers)
        until(lambda: kept_objects(place) == set(), "what was sent is deleted")
        with gateway.http() as http:
            again = http.post("/v1/files", content=iter(body), headers=headers)

        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_stored_bytes")
        assert again.status_code == 200


@contextmanager
def begun_upload(gateway: GatewayProcess, content: bytes, num_announced: int | None = None) -> Generator[None]:
    """An upload of a client that sends the beginning, and leaves at the end."""
    host, port = gateway.url.removeprefix("http://").removesuffix("/v1").split(":")
    body = form_with(content).removesuffix(FORM_END)
    length = f"content-length: {num_announced}"
    if num_announced is None:
        length, body = "transfer-encoding: chunked", b"%x\r\n" % (len(body) + 1) + body
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\n{length}\r\n".encode()
            + b"content-type: multipart/form-data; boundary=xyz\r\n\r\n"
            + body
        )
        yield


def form_with(content: bytes) -> bytes:
    """A form whose last part is a file."""
    purpose = b'--xyz\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return purpose + file + content + FORM_END


def most_stored(place: Place) -> int:
    """Bytes of the largest object."""
    folder = Path(place.files_url.removeprefix("file://"))
    return max(((folder / name).stat().st_size for name in kept_objects(place)), default=0)


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)  # between two looks


def new_tenant() -> str:
    """A tenant that has nothing."""
    return f"t{uuid4().hex}"


def taken(database: Database, tenant: str) -> int:
    """What counts for a tenant."""
    with database.reading() as connection:
        return stored_bytes(connection, tenant)


def stored(client: openai.OpenAI, num_bytes: int, key: str | None = None) -> str:
    """Ask for a response in the background and return its id."""
    headers = {} if key is None else {"idempotency-key": key}
    made = client.responses.create(model="m", input="x" * num_bytes, background=True, extra_headers=headers)
    return made.id


def upload(client: openai.OpenAI, num_bytes: int) -> FileObject:
    """Store a file."""
    return client.files.create(file=("in.jsonl", b"x" * num_bytes), purpose="batch")


def refusal_of(call: Callable[[], object]) -> tuple[int, str | None]:
    """Status and code of the answer."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value.status_code, caught.value.code
