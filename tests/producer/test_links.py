"""What a client gets when the server is not there, is not ours, refuses, or goes away and comes back."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.producer.errors import (
    AccessDenied,
    NotAQueue,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
    ResultTimeout,
)
from sluice.producer.transport.links import MAX_ASKS
from sluice.protocol.states import JobState
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer, binary_of, free_port, how_to_get, redis_server

SECRET = "opensesame"


def admin_of(server: RedisServer) -> Any:  # redis-py types no reply
    """A plain connection."""
    return server.client()


class TestGivenNoServer:
    @pytest.mark.parametrize(
        "url",
        [
            "redis://:opensesame@127.0.0.1:{port}/0",
            "unix:///nowhere/redis.sock?password=opensesame",
            "redis+sentinel://:opensesame@127.0.0.1:{port}/service",
        ],
    )
    def test_when_any_call_is_made_then_the_error_has_the_address_and_not_the_secret(self, url: str) -> None:
        with Producer(url.format(port=free_port())) as producer, pytest.raises(QueueUnreachable) as caught:
            producer.submit("hello")

        assert SECRET not in str(caught.value) + repr(producer)
        assert "***" in str(caught.value)


class TestGivenSomethingElseAtTheAddress:
    @pytest.fixture
    def port(self) -> Iterator[int]:
        """A server that speaks HTTP."""
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection:
                            connection.recv(1000)
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            yield listener.getsockname()[1]
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()

    def test_when_anything_is_asked_then_it_says_that_it_is_not_redis(self, port: int) -> None:
        with Producer(f"redis://127.0.0.1:{port}") as producer, pytest.raises(NotAQueue, match="not Redis"):
            producer.submit("hello")


class TestGivenAServerWithAPassword:
    def test_when_it_is_wrong_then_access_is_denied_and_nothing_secret_is_said(self, valkey: RedisServer) -> None:
        with admin_of(valkey) as admin:
            admin.acl_setuser("bob", enabled=True, passwords=["+s3cret"], keys=["*"], categories=["+@all"])
        try:
            with (
                Producer(f"{valkey.url}?username=bob&password=opensesame") as producer,
                pytest.raises(AccessDenied) as caught,
            ):
                producer.submit("hello")
            with Producer(f"{valkey.url}?username=bob&password=s3cret") as producer:
                assert producer.submit("hello").id
        finally:
            with admin_of(valkey) as admin:
                admin.acl_deluser("bob")

        assert SECRET not in str(caught.value)

    def test_when_a_right_is_missing_then_access_is_denied(self, valkey: RedisServer) -> None:
        with admin_of(valkey) as admin:
            admin.acl_setuser("eve", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+ping"])
        try:
            with Producer(f"{valkey.url}?username=eve&password=s3cret") as producer, pytest.raises(AccessDenied):
                producer.submit("hello")
        finally:
            with admin_of(valkey) as admin:
                admin.acl_deluser("eve")


class TestGivenAServerWithoutMemory:
    def test_when_jobs_are_submitted_then_each_hears_that_it_is_full(self, valkey: RedisServer) -> None:
        with admin_of(valkey) as admin, Producer(valkey.url) as producer:
            producer.submit("hello")
            admin.config_set("maxmemory", 1)
            try:
                answers = list(producer.submit_many(["hello"] * 3))
                with pytest.raises(QueueFull, match="maxmemory"):
                    producer.submit("hello")
                # Only submit may be refused: a cancel frees what it can.
                assert producer.cancel_many(["0.default.nobody"]) == ["unknown"]
            finally:
                admin.config_set("maxmemory", 0)

        assert [type(answer) for answer in answers] == [QueueFull] * 3


class TestGivenAnotherProgramsKey:
    def test_when_a_key_of_the_queue_is_foreign_then_it_is_refused_with_the_reason(
        self, valkey: RedisServer, redis_client: Any
    ) -> None:
        redis_client.set("{default:0}:2:outbox", "not ours")

        with Producer(valkey.url) as producer, pytest.raises(QueueRefused, match="outbox is a string"):
            producer.submit("hello")


class TestGivenConnectionsThatBreak:
    def test_when_they_break_amid_many_submits_then_every_job_is_taken_once(
        self, producer: Producer, redis_client: Any
    ) -> None:
        def prompts() -> Iterator[str]:
            for i in range(5000):
                if i % 700 == 699:
                    redis_client.client_kill_filter(_type="normal", skipme=True)
                yield f"prompt {i}"

        answers = list(producer.submit_many(prompts()))

        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        assert len(receipts) == 5000
        assert not [receipt for receipt in receipts if receipt.is_duplicate]
        assert producer.queue()[0].waiting_jobs == 5000

    def test_when_it_breaks_between_events_then_the_stream_continues(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        receipt = producer.submit("hello")
        [leased] = worker.pull()
        events = producer.stream(receipt)
        tokens: list[int] = []
        for token in range(10):
            worker.say(leased, [token], "x", end=JobState.DONE if token == 9 else None)
            redis_client.client_kill_filter(_type="normal", skipme=True)
            tokens += next(events).token_ids

        assert tokens == list(range(10))

    def test_when_scripts_are_forgotten_then_they_are_sent_again(self, producer: Producer, redis_client: Any) -> None:
        producer.submit("hello")
        redis_client.script_flush()
        producer.submit("hello")
        redis_client.script_flush()

        answers = list(producer.submit_many(["hello"] * 2000))

        assert [type(answer) for answer in answers] == [Receipt] * 2000
        assert producer.queue()[0].waiting_jobs == 2002

    async def test_when_scripts_are_forgotten_then_an_asyncio_client_sends_them_again(
        self, valkey: RedisServer, redis_client: Any
    ) -> None:
        async with AsyncProducer(valkey.url) as producer:
            await producer.submit("hello")
            redis_client.script_flush()
            await producer.submit("hello")
            redis_client.script_flush()

            answers = [answer async for answer in producer.submit_many(["hello"] * 2000)]

            assert [type(answer) for answer in answers] == [Receipt] * 2000
            assert (await producer.queue())[0].waiting_jobs == 2002


class TestGivenAServerThatCrashesAndComesBack:
    def test_when_a_stream_and_a_submit_are_under_way_then_both_continue(self, durable_valkey: RedisServer) -> None:
        with admin_of(durable_valkey) as client, Producer(durable_valkey.url) as producer:
            worker = HandWorker(client)
            receipt = producer.submit("hello")
            [leased] = worker.pull()
            worker.say(leased, [1], "a")
            events = producer.stream(receipt)
            first = next(events)
            client.execute_command("WAITAOF", 1, 0, 5000)

            durable_valkey.kill()
            restart = threading.Timer(0.3, durable_valkey.start)
            restart.start()
            second_receipt = producer.submit("during")
            restart.join()
            worker.say(leased, [2], "b", end=JobState.DONE)
            rest = list(events)

            assert first.token_ids + rest[0].token_ids == (1, 2)
            assert producer.status(second_receipt).state is JobState.QUEUED

    def test_when_it_stays_away_then_the_client_gives_up_in_time_and_says_so(self, durable_valkey: RedisServer) -> None:
        with Producer(durable_valkey.url, patience_s=0.3) as producer:
            producer.submit("hello")
            durable_valkey.kill()
            begin_s = time.monotonic()

            with pytest.raises(QueueUnreachable, match="does not answer"):
                producer.submit("hello")
            with pytest.raises(ProducerError, match="It is not known whether the command was carried out"):
                producer.requeue(["0.default.nobody"])

            assert 0.3 <= time.monotonic() - begin_s < 3

    def test_when_it_is_away_then_a_timeout_ends_the_wait_before_the_patience(
        self, durable_valkey: RedisServer
    ) -> None:
        with Producer(durable_valkey.url) as producer:
            job = producer.submit("hello")
            durable_valkey.kill()
            begin_s = time.monotonic()

            with pytest.raises(ResultTimeout, match="did not answer in time"):
                producer.result(job, timeout_s=0.4)
            with pytest.raises(ResultTimeout, match="did not answer in time"):
                list(producer.stream(job, timeout_s=0.4))

            assert 0.8 <= time.monotonic() - begin_s < 3

    async def test_when_it_goes_away_amid_a_shared_read_then_a_timeout_ends_the_wait(
        self, durable_valkey: RedisServer
    ) -> None:
        with admin_of(durable_valkey) as client:
            worker = HandWorker(client)
            async with AsyncProducer(durable_valkey.url) as producer:
                job = await producer.submit("hello")
                [leased] = worker.pull()
                worker.say(leased, [1], "a")
                events = producer.stream(job, timeout_s=1.0)
                await anext(events)
                reading = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                durable_valkey.kill()
                begin_s = time.monotonic()

                with pytest.raises(ResultTimeout, match="not ended after 1 s"):
                    await reading
                with pytest.raises(ResultTimeout, match="did not answer in time"):
                    await producer.result(job, timeout_s=0.4)

                assert time.monotonic() - begin_s < 4


class TestGivenAServerThatHangs:
    """It keeps its connections and accepts new ones, but does not reply."""

    @pytest.mark.parametrize("is_new", [False, True], ids=["connected", "new"])
    @pytest.mark.parametrize("call", ["result", "stream"])
    def test_when_a_client_waits_for_a_job_then_its_timeout_holds(
        self, valkey: RedisServer, call: str, *, is_new: bool
    ) -> None:
        with Producer(valkey.url) as submitting, Producer(valkey.url) as other:
            job = submitting.submit("hello")
            producer = other if is_new else submitting
            with frozen(valkey):
                begin_s = time.monotonic()

                with pytest.raises(ResultTimeout, match="did not answer in time"):
                    list(producer.stream(job, timeout_s=0.3)) if call == "stream" else producer.result(job, 0.3)

                took_s = time.monotonic() - begin_s
            state = producer.status(job).state

        assert 0.3 <= took_s < 3
        assert state is JobState.QUEUED

    def test_when_it_replies_again_then_a_wait_may_last_longer_than_the_one_that_failed(
        self, valkey: RedisServer
    ) -> None:
        with Producer(valkey.url) as submitting, Producer(valkey.url, patience_s=0) as producer:
            job = submitting.submit("hello")
            with pytest.raises(ResultTimeout, match="is still queued"):
                producer.result(job, timeout_s=0)  # connects within a second
            thaw = threading.Timer(2.0, valkey.thaw)
            with frozen(valkey):
                thaw.start()

                state = producer.status(job).state
            thaw.join()

        assert state is JobState.QUEUED

    @pytest.mark.parametrize("call", ["result", "stream"])
    async def test_when_asks_of_an_asyncio_client_fill_its_turns_then_a_timeout_holds(
        self, valkey: RedisServer, call: str
    ) -> None:
        async with AsyncProducer(valkey.url) as producer:
            job = await producer.submit("hello")
            with frozen(valkey):
                others = [asyncio.ensure_future(producer.status(job)) for _ in range(2 * MAX_ASKS)]
                begin_s = time.monotonic()

                waiting = producer.result(job, 0.3) if call == "result" else anext(producer.stream(job, timeout_s=0.3))
                with pytest.raises(ResultTimeout, match="did not answer in time"):
                    await waiting

                took_s = time.monotonic() - begin_s
            states = {status.state for status in await asyncio.gather(*others)}

        assert 0.3 <= took_s < 3
        assert states == {JobState.QUEUED}

    def test_when_it_hangs_after_the_last_event_then_the_look_at_the_end_is_bounded_too(
        self, valkey: RedisServer, producer: Producer, worker: HandWorker
    ) -> None:
        job = producer.submit("hello")
        [leased] = worker.pull()
        worker.say(leased, [1], "a", end=JobState.FAILED)
        events = producer.stream(job, timeout_s=0.5)
        while next(events).end is None:
            pass
        with frozen(valkey):
            begin_s = time.monotonic()

            with pytest.raises(ResultTimeout, match="did not answer in time"):
                next(events)

            assert time.monotonic() - begin_s < 3


@contextlib.contextmanager
def frozen(server: RedisServer) -> Generator[None]:
    """The server does not reply meanwhile."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


class TestGivenASentinel:
    @pytest.fixture
    def sentinel_url(self, tmp_path: Path) -> Iterator[str]:
        """It watches one master with a password-less service `queue`."""
        binary = binary_of("redis-7.0")
        if binary is None:
            pytest.skip(how_to_get("redis-7.0"))
        port = free_port()
        with redis_server("redis-7.0", with_tcp=True) as master:
            settings = tmp_path / "sentinel.conf"
            settings.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor queue 127.0.0.1 {master.port} 1\n")
            with subprocess.Popen([binary, settings, "--sentinel"], stdout=subprocess.DEVNULL) as sentinel:
                yield f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/queue/0"
                sentinel.kill()

    async def test_when_a_client_asks_by_its_service_then_it_finds_the_master(self, sentinel_url: str) -> None:
        with Producer(sentinel_url) as producer:
            receipt = _until_it_is_up(lambda: producer.submit("hello"))
            assert producer.status(receipt).state is JobState.QUEUED
        async with AsyncProducer(sentinel_url) as aproducer:
            assert (await aproducer.status(receipt)).state is JobState.QUEUED

    def test_when_the_service_is_unknown_then_it_says_so(self, sentinel_url: str) -> None:
        with Producer(sentinel_url.replace("/queue/", "/other/")) as producer, pytest.raises(QueueUnreachable):
            producer.submit("hello")


def _until_it_is_up(submit: Callable[[], Receipt]) -> Receipt:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return submit()
        except QueueUnreachable:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


class TestGivenAServerWithTls:
    @pytest.fixture
    def tls_port(self, tmp_path: Path) -> Iterator[int]:
        """Its certificate is signed by itself."""
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl: apt-get install openssl")
        if binary_of("redis-7.0") is None:
            pytest.skip(how_to_get("redis-7.0"))
        make = (
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        )
        command = [*make.split(), "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
        subprocess.run(command, check=True, capture_output=True)
        port = free_port()
        settings = {"tls-port": port, "tls-cert-file": tmp_path / "cert.pem", "tls-key-file": tmp_path / "key.pem",
                    "tls-ca-cert-file": tmp_path / "cert.pem", "tls-auth-clients": "no"}  # fmt: skip
        extra = tuple(str(word) for name, value in settings.items() for word in (f"--{name}", value))
        with redis_server("redis-7.0", extra=extra):
            yield port

    async def test_when_its_certificate_is_trusted_then_jobs_go_through(self, tls_port: int, tmp_path: Path) -> None:
        url = f"rediss://localhost:{tls_port}/0?ssl_ca_certs={tmp_path / 'cert.pem'}"

        with Producer(url) as producer:
            receipt = producer.submit("hello")
        async with AsyncProducer(url) as aproducer:
            status = await aproducer.status(receipt)

        assert status.state is JobState.QUEUED

    def test_when_its_certificate_is_not_trusted_then_nothing_is_sent(self, tls_port: int) -> None:
        url = f"rediss://localhost:{tls_port}/0"

        with Producer(url) as producer, pytest.raises(QueueUnreachable, match=r"(?i)certificate"):
            producer.submit("hello")
