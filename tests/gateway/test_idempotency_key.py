"""Requests with an Idempotency-Key, through the stock client."""

import time
from collections.abc import Callable, Generator
from uuid import uuid4

import openai
import pytest
from openai.types import Completion

from sluice.producer import Producer
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patient(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway that waits long for clients to come back."""
    with gateway_process(queue_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def impatient(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway that hardly waits."""
    with gateway_process(queue_server.url, "--return-limit", "0.3") as made:
        yield made


def whole(gateway: GatewayProcess, key: str, prompt: str = "once", api_key: str = "none") -> Completion:
    """Ask for a whole answer."""
    client = gateway.client(api_key)
    return client.completions.create(
        model="null", prompt=prompt, max_tokens=150, extra_headers={"Idempotency-Key": key}
    )


def streamed(gateway: GatewayProcess, key: str, max_tokens: int = 150) -> openai.Stream[Completion]:
    """Ask for a stream."""
    return gateway.client().completions.create(
        model="null", prompt="once", max_tokens=max_tokens, stream=True, extra_headers={"Idempotency-Key": key}
    )


def job_of(completion_id: str) -> str:
    """The job that a client's id names."""
    return completion_id.removeprefix("cmpl-")


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class TestGivenASecondRequestWithTheSameKey:
    def test_when_both_ask_for_the_same_then_both_read_one_job(self, patient: GatewayProcess) -> None:
        key = uuid4().hex

        first = whole(patient, key)
        chunks = list(streamed(patient, key))

        assert {chunk.id for chunk in chunks} == {first.id}
        assert "".join(chunk.choices[0].text for chunk in chunks) == first.choices[0].text

    def test_when_it_asks_for_something_else_then_it_is_422(self, patient: GatewayProcess) -> None:
        key = uuid4().hex
        whole(patient, key)

        with pytest.raises(openai.UnprocessableEntityError) as raised:
            whole(patient, key, "twice")

        assert raised.value.code == "idempotency_conflict"

    @pytest.mark.long
    def test_when_it_is_another_tenants_then_it_has_a_job_of_its_own(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        tenants, key = [new_key(sqlite_url, tenant) for tenant in ("acme", "initech")], uuid4().hex

        with gateway_process(queue_server.url, database_url=sqlite_url) as gateway:
            first, second = (whole(gateway, key, api_key=api_key) for api_key in tenants)

        assert first.id != second.id

    def test_when_the_key_is_too_long_then_it_is_400(self, patient: GatewayProcess) -> None:
        with pytest.raises(openai.BadRequestError, match="idempotency_key must be 1 to 256 characters"):
            whole(patient, "k" * 257)


class TestGivenAReaderThatLeaves:
    def test_when_it_comes_back_to_any_gateway_then_it_reads_the_whole_answer(
        self, patient: GatewayProcess, impatient: GatewayProcess, queue_server: RedisServer
    ) -> None:
        key = uuid4().hex
        with streamed(patient, key) as stream:
            left = next(iter(stream)).id

        chunks = list(streamed(impatient, key))

        assert {chunk.id for chunk in chunks} == {left}
        with Producer(queue_server.url) as producer:
            assert "".join(chunk.choices[0].text for chunk in chunks) == producer.result(job_of(left)).text

    def test_when_nobody_comes_back_then_the_job_is_cancelled(
        self, impatient: GatewayProcess, queue_server: RedisServer
    ) -> None:
        with streamed(impatient, uuid4().hex, max_tokens=4000) as stream:
            left = next(iter(stream)).id

        with Producer(queue_server.url) as producer:
            wait_for(lambda: producer.status(job_of(left)).state == "cancelled")

    def test_when_another_client_submitted_the_job_then_it_goes_on(
        self, impatient: GatewayProcess, queue_server: RedisServer
    ) -> None:
        key = uuid4().hex
        with Producer(queue_server.url) as producer:
            submitted = producer.submit("once", model="null", max_tokens=150, idempotency_key=key)
            with streamed(impatient, key, max_tokens=150) as stream:
                assert job_of(next(iter(stream)).id) == submitted.id

            assert producer.result(submitted).choices[0].finish_reason == "length"

    def test_when_another_reader_stays_then_the_job_goes_on(self, impatient: GatewayProcess) -> None:
        key = uuid4().hex
        with streamed(impatient, key, max_tokens=200) as staying, streamed(impatient, key, max_tokens=200) as leaving:
            assert next(iter(leaving)).id == next(iter(staying)).id
            leaving.close()

            *_, last = staying

        assert last.choices[0].finish_reason == "length"
