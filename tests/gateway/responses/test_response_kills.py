"""Gateways that are killed, a server that stops answering, and channels that are written anew."""

import json
import signal
from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
import sqlalchemy as sa
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.responses import Response, ResponseStreamEvent

from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.responses.streams import ResponseStream
from sluice.gateway.tables.database import Database
from sluice.history.tables import responses
from sluice.producer import Producer
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.responses.reading import text_of, wait_for, wait_until_ended
from tests.histories import opened_history
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


class TestGivenAGatewayThatIsKilledAmidStreams:
    """Its worker says more only then."""

    def test_when_a_client_rejoins_a_background_response_at_another_then_each_character_comes_once(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        with (
            gateway_process(valkey.url, database_url=sqlite_url) as killed,
            gateway_process(valkey.url, database_url=sqlite_url) as other,
            valkey.client() as redis,
        ):
            stream = killed.client().responses.create(model="toy", input="hello", background=True, stream=True)
            worker = HandWorker(redis)
            [leased] = worker.pull()
            worker.say(leased, [0, 1], "Hell")
            seen = until(stream, "Hell")

            killed.process.kill()
            with pytest.raises(openai.APIError):
                list(stream)
            worker.say(leased, [2, 3], "o world")
            worker.say(leased, [], "", end=JobState.DONE)
            created, client = seen[0], other.client()
            assert created.type == "response.created"
            rest = list(
                client.responses.retrieve(created.response.id, stream=True, starting_after=seen[-1].sequence_number)
            )
            retrieved = client.responses.retrieve(created.response.id)

        last = rest[-1]
        assert text_of(rest) == "o world"
        assert last.type == "response.completed"
        assert last.response == retrieved
        assert retrieved.output_text == "Hello world"

    def test_when_it_streamed_a_chat_then_its_client_raises(self, valkey: RedisServer) -> None:
        with gateway_process(valkey.url) as killed, valkey.client() as redis:
            messages = [ChatCompletionUserMessageParam(role="user", content="hello")]
            stream = killed.client().chat.completions.create(model="toy", messages=messages, stream=True)
            worker = HandWorker(redis)
            [leased] = worker.pull()
            worker.say(leased, [0], "Hello")
            next(iter(stream))

            killed.process.kill()

            with pytest.raises(openai.APIError):
                list(stream)


class TestGivenAGatewayThatIsKilledBetweenTheRowAndTheSubmit:
    @pytest.mark.long
    def test_when_its_client_sends_the_same_key_again_then_the_job_runs_once(
        self, valkey: RedisServer, tmp_path: Path, sqlite_url: str
    ) -> None:
        key = {"Idempotency-Key": uuid4().hex}
        body: dict[str, Any] = {"model": "null", "input": "hello", "max_output_tokens": 8}
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url, database_url=sqlite_url) as other:
            pool.start_all(1)
            with gateway_process(valkey.url, database_url=sqlite_url) as killed, killed.http() as http:
                assert http.get("/v1/models").json()["data"]  # it knows the model, and asks Redis no more for it
                valkey.freeze()
                asking = Thread(target=post_quietly, args=(killed, body, key))
                asking.start()
                wait_for(lambda: num_rows(sqlite_url) == 1)
                killed.process.send_signal(signal.SIGKILL)
                asking.join()
            valkey.thaw()

            with other.client() as client:
                wait_for(lambda: bool(list(client.models.list())))
                again: list[Response] = [client.responses.create(**body, extra_headers=key) for _ in range(2)]

            with Producer(valkey.url) as producer:
                assert producer.queue()[0].totals["submitted"] == 1
        assert again[0] == again[1]
        assert again[0].status == "incomplete"
        assert num_rows(sqlite_url) == 1

    def test_when_the_same_key_asks_for_something_else_then_it_is_422(self, client: openai.OpenAI) -> None:
        key = {"Idempotency-Key": uuid4().hex}
        client.responses.create(model="null", input="hello", max_output_tokens=8, extra_headers=key)

        with pytest.raises(openai.UnprocessableEntityError) as raised:
            client.responses.create(model="null", input="other", max_output_tokens=8, extra_headers=key)

        assert raised.value.code == "idempotency_conflict"


def post_quietly(gateway: GatewayProcess, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Send a request that gets no answer."""
    with gateway.http() as http, pytest.raises(httpx.HTTPError):
        http.post("/v1/responses", json=body, headers=headers)


def num_rows(url: str) -> int:
    """The rows of the table of responses."""
    with opened_history(url) as engine, engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(responses)).scalar_one()


class TestGivenAClientThatLeaves:
    def test_when_the_response_is_stored_then_it_goes_on(self, client: openai.OpenAI) -> None:
        with client.responses.create(model="null", input="hello", max_output_tokens=60, stream=True) as stream:
            created = next(iter(stream))
        assert created.type == "response.created"

        ended = wait_until_ended(client, created.response.id)

        assert ended.status == "incomplete"
        assert ended.usage is not None
        assert ended.usage.output_tokens == 60

    def test_when_it_is_not_stored_then_its_job_is_cancelled(
        self, client: openai.OpenAI, queue_server: RedisServer
    ) -> None:
        with client.responses.create(
            model="null", input="hello", max_output_tokens=4000, stream=True, store=False
        ) as stream:
            created = next(iter(stream))
        assert created.type == "response.created"

        job = f"0.default.{created.response.id.removeprefix('resp_')}"
        with Producer(queue_server.url) as producer:
            wait_for(lambda: producer.status(job).state is JobState.CANCELLED)


class TestGivenAQueueThatHasForgottenTheJob:
    def test_when_the_response_is_asked_for_then_the_table_answers(
        self, client: openai.OpenAI, queue_server: RedisServer
    ) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8)
        with Producer(queue_server.url) as producer:
            assert producer.delete([f"0.default.{made.id.removeprefix('resp_')}"]) == [True]

        streamed = list(client.responses.retrieve(made.id, stream=True))

        assert client.responses.retrieve(made.id) == made
        assert text_of(streamed) == made.output_text

    def test_when_a_reader_is_ahead_of_the_end_then_it_is_told(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8)

        with pytest.raises(openai.BadRequestError, match="starting_after is 99999") as refused:
            client.responses.retrieve(made.id, stream=True, starting_after=99_999)

        assert refused.value.param == "starting_after"

    def test_when_a_reader_has_the_last_event_then_there_are_no_more(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8)
        last = list(client.responses.retrieve(made.id, stream=True))[-1].sequence_number

        assert list(client.responses.retrieve(made.id, stream=True, starting_after=last)) == []
        with pytest.raises(openai.BadRequestError):
            client.responses.retrieve(made.id, stream=True, starting_after=last + 1)

    async def test_when_it_is_ahead_of_one_that_runs_then_its_last_event_says_so(self, responses_url: str) -> None:
        info = ResponseInfo(job_id=JobId("0.acme.a"), created_ms=0, model="null", options={})
        end = ResponseEnd(status="completed", text="it has ended meanwhile")
        response = StoredResponse(info=info, tenant="acme", queue="default", expires_ms=1, end=end)
        with Database(responses_url) as database:
            stream = ResponseStream(response, None, ResponseStore(database), after=99_999)
            [sent] = [data async for data in stream.events()]

        name, data = sent.decode().strip().splitlines()
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: error"
        assert (event["type"], event["sequence_number"], event["param"]) == ("error", 99_999, "starting_after")
        assert event["error"]["type"] == "invalid_request_error"


class TestGivenAServerThatLostItsLastSecond:
    """Its worker writes the same tokens again, in other entries."""

    def test_when_readers_stay_or_rejoin_then_each_character_comes_once(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        with gateway_process(valkey.url, database_url=sqlite_url) as gateway, gateway.client() as client:
            made = client.responses.create(model="toy", input="hello", background=True)
            with valkey.client() as redis:
                worker = HandWorker(redis)
                [leased] = worker.pull()
                redis.save()
                for token, text in enumerate(("He", "ll")):
                    worker.say(leased, [token], text)
            stream = client.responses.retrieve(made.id, stream=True)
            seen = until(stream, "Hell")

            valkey.restart(crash=True)
            with valkey.client() as redis:
                worker = HandWorker(redis)
                worker.say(leased, [0, 1, 2], "Hello ")
                worker.say(leased, [3], "world")
                worker.say(leased, [], "", end=JobState.DONE)
            stayed = list(stream)
            rejoined = list(client.responses.retrieve(made.id, stream=True, starting_after=seen[-1].sequence_number))

        assert text_of(stayed) == text_of(rejoined) == "o world"
        assert stayed[-1] == rejoined[-1]
        assert stayed[-1].sequence_number == 32 * len("Hello world") + 31


def until(stream: Iterable[ResponseStreamEvent], text: str) -> list[ResponseStreamEvent]:
    """The events until all of this text has come."""
    seen: list[ResponseStreamEvent] = []
    for event in stream:
        seen.append(event)
        if text_of(seen) == text:
            break
    return seen
