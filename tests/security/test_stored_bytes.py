"""What a tenant may store."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai.types import FileObject

from sluice.producer.gateway.files.faults import TooManyBytes
from sluice.producer.gateway.files.store import INPUT, MIN_BYTES, File, FileStore, Stored, new_file_id, now_ms
from sluice.producer.gateway.tables.database import Database
from tests.producer.gateway.batches.processes import ENDPOINT, kept_objects, place_in
from tests.security.test_batches import history_url
from tests.servers import RedisServer

__all__ = ["history_url"]
MIB = 2**20


def new_file(tenant: str, num_bytes: int) -> File:
    """A file whose content is not looked at."""
    created_ms = now_ms()
    objects = (Stored(key="files/x", num_bytes=num_bytes),)
    return File(
        id=new_file_id(created_ms), tenant=tenant, purpose=INPUT, filename="x", objects=objects, created_ms=created_ms
    )


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
        assert stores[0].stored_bytes("at-once") == 50_000

    def test_when_a_file_is_deleted_then_there_is_room_again(self, stores: tuple[FileStore, FileStore]) -> None:
        store, file = stores[0], new_file("deleting", 1)
        store.add(file, max_bytes=MIN_BYTES)
        with pytest.raises(TooManyBytes):
            store.add(new_file("deleting", 1), max_bytes=MIN_BYTES)
        store.add(new_file("other", 1), max_bytes=MIN_BYTES)

        store.delete(file.id, "deleting")

        store.add(new_file("deleting", 1), max_bytes=MIN_BYTES)


class TestGivenAGatewayWithASmallBound:
    def test_when_it_is_reached_then_uploads_and_batches_are_413_until_a_file_is_deleted(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        place = place_in(tmp_path, valkey.url)
        with place.gateway("--tenant-files-mib", "1") as gateway, gateway.client() as client:
            first, second = upload(client, MIB - MIN_BYTES), upload(client, 2)
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


def upload(client: openai.OpenAI, num_bytes: int) -> FileObject:
    """Store a file."""
    return client.files.create(file=("in.jsonl", b"x" * num_bytes), purpose="batch")


def refusal_of(call: Callable[[], object]) -> tuple[int, str | None]:
    """Status and code of the answer."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value.status_code, caught.value.code
