"""Files by the stock client and by plain HTTP: what is kept, listed and refused, and who sees what."""

import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import openai
import pytest

from sluice.gateway import tasks
from sluice.gateway.errors import HttpError
from sluice.gateway.files.hosts import LIFE_MS, StorageMarks, lacks_callbacks, mark, mark_callbacks
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import INPUT, File, insert_file, new_file_id
from sluice.gateway.listing import FILES_LIMIT
from sluice.gateway.queues import Queues
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.tables.database import Database
from tests.gateway.batches.processes import ENDPOINT, Place, begun, kept_objects, numbered, place_in, until
from tests.gateway.gateway_process import GatewayProcess, new_key
from tests.servers import RedisServer

BOUNDARY = "xyz"


def form(*parts: tuple[str, str, str]) -> bytes:
    """A form of (name, what follows the name, value)."""
    pieces = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{rest}\r\n\r\n{value}\r\n'
        for name, rest, value in parts
    ]
    return ("".join(pieces) + f"--{BOUNDARY}--\r\n").encode()


def file_of(tenant: str, file_id: str, created_ms: int) -> File:
    """A row of a file."""
    return File(id=file_id, tenant=tenant, purpose=INPUT, filename="a", objects=(), created_ms=created_ms)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # between two looks


FILE_PART = ("file", '; filename="a.jsonl"', "{}")
PURPOSE = ("purpose", "", "batch")


@pytest.fixture(scope="module")
def keyed(batch_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place whose requests need keys, with nobody to run batches."""
    return place_in(tmp_path_factory.mktemp("keyed"), batch_server.url)


@pytest.fixture(scope="module")
def keys(keyed: Place) -> dict[str, str]:
    """Keys of two tenants, and some with one scope."""
    everything = ("submit", "read", "control")
    tenants = ("acme", "other", "lists", "pages", "deletes", "many")
    made = {tenant: new_key(keyed.database_url, tenant, scopes=everything) for tenant in tenants}
    return made | {scope: new_key(keyed.database_url, "acme", scopes=(scope,)) for scope in everything}


@pytest.fixture(scope="module")
def keyed_gateway(keyed: Place, keys: dict[str, str]) -> Generator[GatewayProcess]:
    """Its gateway, for files up to 1 MiB."""
    assert keys
    with keyed.gateway("--max-file-mib", "1") as made:
        yield made


@pytest.fixture
def acme(keyed_gateway: GatewayProcess, keys: dict[str, str]) -> Generator[openai.OpenAI]:
    """A client of the first tenant."""
    with keyed_gateway.client(keys["acme"]) as client:
        yield client


class TestGivenAnUploadedFile:
    def test_when_it_is_read_then_it_is_as_it_was_until_it_is_deleted(self, acme: openai.OpenAI, keyed: Place) -> None:
        content = b"any bytes \x00\xff\r\n--xyz\r\n" * 20_000

        file = acme.files.create(file=("../../etc/passwd\r\nx-evil: 1", content), purpose="batch")

        assert (file.bytes, file.purpose, file.status) == (len(content), "batch", "processed")
        assert acme.files.retrieve(file.id) == file
        assert acme.files.content(file.id).content == content
        assert acme.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            acme.files.content(file.id)
        assert not [key for key in kept_objects(keyed) if file.id.removeprefix("file-") in key]

    def test_when_it_is_empty_then_it_is_kept(self, acme: openai.OpenAI) -> None:
        file = acme.files.create(file=("empty", b""), purpose="batch")

        assert acme.files.content(file.id).content == b""

    def test_when_a_batch_reads_it_then_it_is_not_deleted(self, acme: openai.OpenAI) -> None:
        batch = begun(acme, numbered(1))

        with pytest.raises(openai.ConflictError, match="reads the file"):
            acme.files.delete(batch.input_file_id)


class TestGivenTheFilesOfATenant:
    def test_when_they_are_listed_in_pages_then_each_is_there_once(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str]
    ) -> None:
        with keyed_gateway.client(keys["lists"]) as client:
            made = [client.files.create(file=(f"{number}", b"x"), purpose="batch").id for number in range(5)]

            newest_first = [file.id for file in client.files.list(limit=2)]
            oldest_first = [file.id for file in client.files.list(limit=2, order="asc")]
            outputs = list(client.files.list(purpose="batch_output"))

        assert newest_first == made[::-1]
        assert oldest_first == made
        assert outputs == []

    @pytest.mark.parametrize("order", ["asc", "desc"])
    def test_when_each_is_deleted_as_it_comes_then_none_is_left(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str], order: Literal["asc", "desc"]
    ) -> None:
        with keyed_gateway.client(keys["deletes"]) as client:
            made = {client.files.create(file=(f"{number}", b"x"), purpose="batch").id for number in range(7)}

            deleted = [client.files.delete(file.id).id for file in client.files.list(limit=3, order=order)]

            assert sorted(deleted) == sorted(made)
            assert list(client.files.list()) == []

    def test_when_no_limit_is_given_then_a_page_is_bounded(
        self, keyed: Place, keyed_gateway: GatewayProcess, keys: dict[str, str]
    ) -> None:
        with Database(keyed.database_url) as database, database.transaction() as connection:
            for created_ms in range(FILES_LIMIT.default + 1):
                insert_file(connection, file_of("many", new_file_id(created_ms), created_ms))

        with keyed_gateway.client(keys["many"]) as client:
            first = client.files.list()
            all_of_them = list(first)

        assert (len(first.data), first.has_more, len(all_of_them)) == (
            FILES_LIMIT.default,
            True,
            FILES_LIMIT.default + 1,
        )

    @pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
    @pytest.mark.parametrize("after", ["nothing", f"file-{'0' * 24}", "file-%00", f"file-{'g' * 32}", ""])
    def test_when_a_cursor_has_no_place_then_it_is_refused(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str], path: str, after: str
    ) -> None:
        answer = keyed_gateway.get(f"{path}?after={after}", keys["acme"])

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")

    def test_when_batches_are_listed_in_pages_then_each_is_there_once(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str]
    ) -> None:
        with keyed_gateway.client(keys["pages"]) as client:
            made = [begun(client, numbered(1)).id for _ in range(3)]

            listed = [batch.id for batch in client.batches.list(limit=2)]

        assert listed == made[::-1]

    def test_when_another_tenant_asks_then_it_finds_nothing(
        self, acme: openai.OpenAI, keyed_gateway: GatewayProcess, keys: dict[str, str]
    ) -> None:
        batch = begun(acme, numbered(1))
        file_id = batch.input_file_id
        asked: dict[str, str] = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}

        with keyed_gateway.http(keys["other"]) as other:
            answers = [
                other.get(f"/v1/files/{file_id}"),
                other.get(f"/v1/files/{file_id}/content"),
                other.delete(f"/v1/files/{file_id}"),
                other.get(f"/v1/batches/{batch.id}"),
                other.post(f"/v1/batches/{batch.id}/cancel"),
                other.post("/v1/batches", json=asked),
            ]
            lists = [
                other.get(path).json()["data"] for path in ("/v1/files", f"/v1/files?after={file_id}", "/v1/batches")
            ]

        assert [answer.status_code for answer in answers] == [404] * 5 + [400]
        assert lists == [[], [], []]


class TestGivenAKeyWithOneScope:
    @pytest.mark.parametrize(
        ("method", "path", "scope"),
        [
            ("POST", "/v1/files", "submit"),
            ("GET", "/v1/files", "read"),
            ("GET", "/v1/files/file-1", "read"),
            ("GET", "/v1/files/file-1/content", "read"),
            ("DELETE", "/v1/files/file-1", "control"),
            ("POST", "/v1/batches", "submit"),
            ("GET", "/v1/batches", "read"),
            ("GET", "/v1/batches/batch_1", "read"),
            ("POST", "/v1/batches/batch_1/cancel", "control"),
        ],
    )
    def test_when_it_asks_then_only_its_own_routes_answer(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str], method: str, path: str, scope: str
    ) -> None:
        answers: dict[str, int] = {}
        for held in ("submit", "read", "control"):
            with keyed_gateway.http(keys[held]) as http:
                answers[held] = http.request(method, path).status_code

        assert {held for held, status in answers.items() if status != 403} == {scope}


class TestGivenAnUploadWithoutAPlainName:
    @pytest.mark.parametrize("name", ["", "; filename*=UTF-8''na%C3%AFve.jsonl", '; filename=""'])
    def test_when_it_is_sent_then_the_file_has_the_usual_name(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str], name: str
    ) -> None:
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

        with keyed_gateway.http(keys["acme"]) as http:
            answer = http.post("/v1/files", content=form(PURPOSE, ("file", name, "{}")), headers=headers)

        assert (answer.status_code, answer.json()["filename"], answer.json()["bytes"]) == (200, "upload.jsonl", 2)


class TestGivenAnUploadThatIsNoUpload:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (form(FILE_PART), "purpose must be"),
            (form(("purpose", "", "fine-tune"), FILE_PART), "purpose must be"),
            (form(PURPOSE), "has no file"),
            (form(PURPOSE, FILE_PART, FILE_PART), "one file"),
            (form(PURPOSE, ("other", '; filename="a"', "{}")), "one file"),
            (form(PURPOSE, FILE_PART, ("expires_after[anchor]", "", "created_at")), "not supported"),
            (form(("purpose", "", "x" * 5000)), "larger than"),
            (form(*[PURPOSE] * 17), "more than 16 parts"),
            (form(PURPOSE, FILE_PART)[:-20], "ends early"),
            (form(PURPOSE, ("file", f'; filename="{"y" * 20_000}"', "")), "header size"),
            (b"nothing like a form", "not a form"),
        ],
    )
    def test_when_it_is_sent_then_it_is_refused_and_nothing_is_kept(
        self, keyed_gateway: GatewayProcess, keyed: Place, keys: dict[str, str], body: bytes, words: str
    ) -> None:
        before = kept_objects(keyed)
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

        with keyed_gateway.http(keys["acme"]) as http:
            answer = http.post("/v1/files", content=body, headers=headers)

        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert kept_objects(keyed) == before

    def test_when_it_is_too_large_then_it_is_413_and_nothing_is_kept(
        self, keyed_gateway: GatewayProcess, keyed: Place, keys: dict[str, str]
    ) -> None:
        before = kept_objects(keyed)
        body = form(PURPOSE, ("file", '; filename="a"', "z" * (1024 * 1024 + 1)))
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

        with keyed_gateway.http(keys["acme"]) as http:
            declared = http.post("/v1/files", content=body + b" " * 100_000, headers=headers)
            streamed = http.post("/v1/files", content=iter([body]), headers=headers)

        assert [declared.status_code, streamed.status_code] == [413, 413]
        assert streamed.json()["error"]["code"] == "file_too_large"
        assert kept_objects(keyed) == before

    def test_when_its_boundary_is_long_then_it_is_400(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str]
    ) -> None:
        headers = {"content-type": f"multipart/form-data; boundary={'b' * 300}"}

        with keyed_gateway.http(keys["acme"]) as http:
            answer = http.post("/v1/files", content=b"", headers=headers)

        assert answer.status_code == 400
        assert "boundary" in answer.json()["error"]["message"]

    def test_when_its_body_goes_on_after_its_end_then_it_is_400(
        self, keyed_gateway: GatewayProcess, keyed: Place, keys: dict[str, str]
    ) -> None:
        before = kept_objects(keyed)
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        body = [form(PURPOSE, FILE_PART), *[b" " * 64 * 1024] * 20]

        with keyed_gateway.http(keys["acme"]) as http:
            answer = http.post("/v1/files", content=iter(body), headers=headers)

        assert (answer.status_code, kept_objects(keyed)) == (400, before)


class TestGivenABatchThatIsAskedForWrongly:
    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"endpoint": "/v1/images/generations"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": None}, "completion_window"),
            ({"input_file_id": "file-../../x"}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ],
    )
    def test_when_it_is_created_then_it_is_refused(
        self,
        acme: openai.OpenAI,
        keyed_gateway: GatewayProcess,
        keys: dict[str, str],
        changes: dict[str, object],
        param: str,
    ) -> None:
        file = acme.files.create(file=("in.jsonl", numbered(1)), purpose="batch")
        asked: dict[str, object] = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}

        with keyed_gateway.http(keys["acme"]) as http:
            answer = http.post("/v1/batches", json=asked | changes)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    @pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "order=up", "limit=" + "9" * 5000])
    def test_when_a_page_is_asked_for_wrongly_then_it_is_refused(
        self, keyed_gateway: GatewayProcess, keys: dict[str, str], query: str
    ) -> None:
        assert keyed_gateway.get(f"/v1/batches?{query}", keys["acme"]).status_code == 400


class TestGivenADatabaseOrFilesThatAreAway:
    def test_when_files_are_asked_for_then_it_is_503(self, batch_server: RedisServer, tmp_path: Path) -> None:
        (tmp_path / "files").write_text("not a folder")
        place = place_in(tmp_path, batch_server.url)
        with place.gateway() as gateway, gateway.client() as client:
            with pytest.raises(openai.InternalServerError, match="storage of files does not answer") as no_files:
                client.files.create(file=("a", b"x"), purpose="batch")
            (tmp_path / "history.db").unlink()
            with pytest.raises(openai.InternalServerError) as no_database:
                client.files.list()
            is_live = gateway.get("/livez").status_code

        assert (no_files.value.status_code, no_files.value.code) == (503, "storage_unavailable")
        assert (no_database.value.status_code, no_database.value.code) == (503, "history_missing")
        assert is_live == 200


class TestGivenTwoHostsWithAFolderEach:
    async def test_when_they_serve_one_queue_then_neither_is_ready(self, valkey: RedisServer, tmp_path: Path) -> None:
        settings = GatewaySettings(redis_url=valkey.url, database_url="sqlite:////nowhere/history.db")
        storages = [Storage((tmp_path / name).as_uri()) for name in ("a", "a", "b")]
        async with Queues(settings) as queues:
            first, same, other = (StorageMarks(queues, storage) for storage in storages)
            await first.check()
            await same.check()

            with pytest.raises(HttpError, match="SLUICE_FILES_URL"):
                await other.check()
            with pytest.raises(HttpError, match="SLUICE_FILES_URL"):
                await first.check()

    async def test_when_a_callbacks_process_marks_the_queue_then_it_is_no_other_storage(
        self, valkey: RedisServer
    ) -> None:
        async with Queues(
            GatewaySettings(redis_url=valkey.url, database_url="sqlite:////nowhere/history.db")
        ) as queues:
            queue = queues.first
            await queue.submitting.run(mark(queue.name, "a"))
            lacked = await lacks_callbacks(queue)

            await queue.submitting.run(mark_callbacks(queue.name))

            assert await queue.submitting.run(mark(queue.name, "a")) == {"a"}
            assert (lacked, await lacks_callbacks(queue)) == (True, False)
        with valkey.client() as redis:
            assert redis.zrange("{default:0}:2:storages", 0, -1) == [b"a"]
            assert 0 < redis.pttl("{default:0}:2:storages:callbacks") <= LIFE_MS

    def test_when_files_are_away_then_a_sweep_marks_its_process_all_the_same(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        (tmp_path / "files").write_text("not a folder")
        files_url = (tmp_path / "files").as_uri()
        tasks.bind(
            redis_url=valkey.url, queue="default", database_url="sqlite:////nonexistent/x.db", files_url=files_url
        )

        with suppress(ExceptionGroup):
            tasks.sweep()

        with valkey.client() as redis:
            assert redis.exists("{default:0}:2:storages:callbacks")

    @pytest.mark.long
    def test_when_two_gateways_serve_one_queue_then_both_say_so(self, valkey: RedisServer, tmp_path: Path) -> None:
        places: list[Place] = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            places.append(place_in(tmp_path / name, valkey.url))
        with places[0].gateway() as first:
            alone = first.get("/readyz")
            with places[1].gateway() as second:
                both = [gateway.get("/readyz") for gateway in (second, first)]

        assert alone.status_code == 200
        assert [answer.status_code for answer in both] == [503, 503]


class TestGivenAClientThatLeavesAmidAnUpload:
    def test_when_it_has_left_then_nothing_is_kept(
        self, keyed_gateway: GatewayProcess, keyed: Place, keys: dict[str, str]
    ) -> None:
        before = kept_objects(keyed)
        host, port = keyed_gateway.url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
                + f"authorization: Bearer {keys['acme']}\r\n".encode()
                + b"content-type: multipart/form-data; boundary=xyz\r\n\r\n"
                + form(PURPOSE, FILE_PART)[:-20]
            )
            wait_until(lambda: kept_objects(keyed) != before)

        wait_until(lambda: kept_objects(keyed) == before)


class TestGivenAnEndedBatch:
    def test_when_it_is_cancelled_then_that_is_refused(self, client: openai.OpenAI) -> None:
        batch = until(client, begun(client, b"no JSON\n"))

        with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)
