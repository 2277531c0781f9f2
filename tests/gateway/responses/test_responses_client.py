"""/v1/responses through the stock `openai` client, unmodified."""

from uuid import uuid4

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo
from sluice.gateway.responses.ends import GRACE_MS
from sluice.gateway.responses.store import LOST, MAX_DEPTH, ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.producer import Producer
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId
from tests.gateway.gateway_process import GatewayProcess, line_of, spec_of
from tests.gateway.responses.reading import text_of, wait_for, wait_until_ended
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

SEED = {"seed": 7}


class TestGivenAResponse:
    def test_when_it_is_asked_for_whole_then_it_has_the_output_of_the_queue(
        self, client: openai.OpenAI, queue_server: RedisServer
    ) -> None:
        made = client.responses.create(
            model="null", input="hello", instructions="be kind", max_output_tokens=20, metadata={"a": "b"},
            extra_body=SEED,
        )  # fmt: skip

        with Producer(queue_server.url) as producer:
            messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
            expected = producer.result(producer.submit(messages=messages, max_tokens=20, seed=7))
        assert made.output_text == expected.text
        assert (made.status, made.instructions, made.metadata) == ("incomplete", "be kind", {"a": "b"})
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert made.usage.output_tokens == 20

    def test_when_its_request_is_of_a_trace_then_its_job_is_too(
        self, client: openai.OpenAI, keeping: GatewayProcess, queue_server: RedisServer
    ) -> None:
        trace, own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", uuid4().hex

        client.responses.create(
            model="null", input="once", max_output_tokens=16, extra_headers={"traceparent": trace, "x-request-id": own}
        )

        job_id = line_of(keeping, own)["job_id"]
        assert spec_of(queue_server, job_id).traceparent == trace

    def test_when_it_is_retrieved_then_it_is_the_same(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8)

        assert client.responses.retrieve(made.id) == made

    def test_when_it_is_streamed_then_the_last_event_has_what_the_events_had(self, client: openai.OpenAI) -> None:
        events = list(client.responses.create(model="null", input="hello", max_output_tokens=20, stream=True))

        first, last = events[0], events[-1]
        assert first.type == "response.created"
        assert last.type == "response.incomplete"
        assert last.response.output_text == text_of(events)
        assert client.responses.retrieve(last.response.id) == last.response

    def test_when_the_clients_own_stream_helper_reads_it_then_it_is_complete(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model="null", input="hello", max_output_tokens=20) as stream:
            seen = [event.delta for event in stream if event.type == "response.output_text.delta"]

        assert len("".join(seen)) > 0

    def test_when_it_is_streamed_again_after_any_event_then_the_rest_comes(self, client: openai.OpenAI) -> None:
        events = list(client.responses.create(model="null", input="hello", max_output_tokens=20, stream=True))
        made = events[-1]
        assert made.type == "response.incomplete"

        for place, event in enumerate(events[:-1]):
            after = client.responses.retrieve(made.response.id, stream=True, starting_after=event.sequence_number)
            again = list(after)
            assert text_of(events[: place + 1]) + text_of(again) == made.response.output_text
            assert again[-1] == made

    @pytest.mark.parametrize(("name", "value"), [("stream", "yes"), ("stream", "True"), ("starting_after", "-1")])
    def test_when_how_to_stream_it_is_no_such_value_then_it_is_400(
        self, client: openai.OpenAI, name: str, value: str
    ) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=16)

        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.retrieve(made.id, extra_query={"stream": "true", name: value})
        assert raised.value.param == name


class TestGivenMoreTokensAskedForThanTheContextHas:
    def test_when_it_is_created_then_it_is_400(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model="null", input="hello", max_output_tokens=100_000)

        assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")

    def test_when_it_is_streamed_then_it_fails(self, client: openai.OpenAI) -> None:
        *_, last = client.responses.create(model="null", input="hello", max_output_tokens=100_000, stream=True)

        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "invalid_prompt"
        assert "context is" in last.response.error.message

    def test_when_it_runs_in_the_background_then_it_fails(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=100_000, background=True)

        ended = wait_until_ended(client, made.id)

        assert ended.status == "failed"
        assert ended.error is not None
        assert ended.error.code == "invalid_prompt"


class TestGivenAResponseInTheBackground:
    def test_when_it_is_created_then_it_goes_on_without_a_client(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=30, background=True)
        assert made.status == "queued"

        assert wait_until_ended(client, made.id).status == "incomplete"

    def test_when_its_stream_is_left_then_it_is_rejoined_after_the_last_event(self, client: openai.OpenAI) -> None:
        seen: list[ResponseStreamEvent] = []
        with client.responses.create(
            model="null", input="hello", max_output_tokens=100, background=True, stream=True
        ) as stream:
            for event in stream:
                seen.append(event)
                if len(seen) == 20:
                    break
        created = seen[0]
        assert created.type == "response.created"

        after = client.responses.retrieve(created.response.id, stream=True, starting_after=seen[-1].sequence_number)
        rest = list(after)

        last = rest[-1]
        assert last.type == "response.incomplete"
        assert text_of(seen) + text_of(rest) == last.response.output_text

    def test_when_it_is_cancelled_then_it_says_so(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8_000, background=True)

        cancelled = client.responses.cancel(made.id)

        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        assert client.responses.cancel(made.id).status == "cancelled"

    def test_when_another_is_cancelled_then_it_is_400(self, client: openai.OpenAI) -> None:
        made = create(client, "hello")

        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.cancel(made.id)

        assert raised.value.code == "not_cancellable"


class TestGivenRowsInTheTable:
    def row(self, store: ResponseStore, before: StoredResponse | None = None, *, age_ms: int = 0) -> StoredResponse:
        """Add a response."""
        info = ResponseInfo(
            job_id=JobId(f"0.default.{uuid4().hex}"), created_ms=wall_ms() - age_ms, model="null", options={},
            previous_id=None if before is None else before.info.id, is_background=True,
        )  # fmt: skip
        depth = 0 if before is None else before.depth + 1
        made = StoredResponse(
            info=info, tenant="default", queue="default", expires_ms=wall_ms() + 60_000, depth=depth,
            input=({"role": "user", "content": "a"},),
        )  # fmt: skip
        store.add(made)
        return made

    def test_when_a_conversation_is_long_then_it_has_a_bound(self, client: openai.OpenAI, responses_url: str) -> None:
        with Database(responses_url) as database:
            store, rows = ResponseStore(database), list[StoredResponse]()
            for _ in range(MAX_DEPTH + 1):
                rows.append(self.row(store, rows[-1] if rows else None))
            store.finish({one.info.id: ResponseEnd(status="completed", text="b") for one in rows})

        longest = create(client, "more", previous_response_id=rows[-2].info.id)

        assert longest.status == "incomplete"
        for too_long in (longest.id, rows[-1].info.id):
            with pytest.raises(openai.BadRequestError) as raised:
                create(client, "more", previous_response_id=too_long)
            assert raised.value.code == "previous_response_too_deep"

    def test_when_a_lost_job_turns_up_then_its_response_has_its_output(
        self, client: openai.OpenAI, responses_url: str, queue_server: RedisServer
    ) -> None:
        with Database(responses_url) as database:
            store = ResponseStore(database)
            lost, found = (self.row(store, age_ms=GRACE_MS + 1) for _ in range(2))
            store.finish({one.info.id: LOST for one in (lost, found)})
        with Producer(queue_server.url) as producer:
            result = producer.result(producer.submit("once", job_id=found.info.job_id, max_tokens=8))

        assert client.responses.retrieve(found.info.id).output_text == result.text
        assert text_of(client.responses.retrieve(found.info.id, stream=True)) == result.text
        assert client.responses.retrieve(lost.info.id).status == "failed"

    def test_when_a_failed_one_has_no_output_then_readers_amid_it_get_its_failure(
        self, client: openai.OpenAI, responses_url: str
    ) -> None:
        with Database(responses_url) as database:
            failed = self.row(ResponseStore(database))
            ResponseStore(database).finish(
                {failed.info.id: ResponseEnd(status="failed", error={"code": "server_error"})}
            )

        [last] = client.responses.retrieve(failed.info.id, stream=True, starting_after=3200)

        assert (last.type, last.sequence_number) == ("response.failed", 3231)

    def test_when_a_lost_one_is_asked_for_again_with_its_key_then_its_job_runs(
        self, client: openai.OpenAI, responses_url: str, queue_server: RedisServer
    ) -> None:
        key = {"Idempotency-Key": uuid4().hex}
        made = client.responses.create(model="null", input="a", background=True, extra_headers=key)
        with Producer(queue_server.url) as producer, Database(responses_url) as database:
            job = f"0.default.{made.id.removeprefix('resp_')}"
            producer.cancel(job)
            wait_for(lambda: producer.delete([job]) == [True])
            ResponseStore(database).finish({made.id: LOST})

        again = client.responses.create(model="null", input="a", background=True, extra_headers=key)

        assert (again.id, again.status) == (made.id, "queued")
        assert wait_until_ended(client, made.id).status == "incomplete"


class TestGivenAConversation:
    def test_when_it_is_continued_then_the_prompt_has_all_of_it_but_the_instructions(
        self, client: openai.OpenAI, queue_server: RedisServer
    ) -> None:
        first = create(client, "one", instructions="be kind")
        second = create(client, "two", previous_response_id=first.id)
        third = create(client, "three", previous_response_id=second.id)

        messages = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "three"},
        ]
        with Producer(queue_server.url) as producer:
            expected = producer.result(producer.submit(messages=messages, max_tokens=8, seed=7))
        assert third.output_text == expected.text
        assert third.previous_response_id == second.id

    def test_when_the_previous_one_is_unfinished_then_it_is_400(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8_000, background=True)

        with pytest.raises(openai.BadRequestError) as raised:
            create(client, "more", previous_response_id=made.id)

        client.responses.delete(made.id)
        assert raised.value.code == "previous_response_unfinished"

    def test_when_the_previous_one_was_cancelled_then_it_is_400(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8_000, background=True)
        client.responses.cancel(made.id)

        with pytest.raises(openai.BadRequestError) as raised:
            create(client, "more", previous_response_id=made.id)

        assert raised.value.code == "previous_response_failed"

    def test_when_one_before_it_was_deleted_then_it_is_404(self, client: openai.OpenAI) -> None:
        first = create(client, "one")
        second = create(client, "two", previous_response_id=first.id)
        client.responses.delete(first.id)

        with pytest.raises(openai.NotFoundError) as raised:
            create(client, "three", previous_response_id=second.id)

        assert raised.value.code == "previous_response_not_found"


def create(client: openai.OpenAI, text: str, **fields: str) -> Response:
    """A short response."""
    body = {**SEED, **fields}
    return client.responses.create(model="null", input=text, max_output_tokens=8, extra_body=body)


class TestGivenAnInvalidRequest:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"max_output_tokens": "a"},
            {"max_output_tokens": 0},
            {"temperature": -1},
            {"metadata": {"a": [1]}},
            {"user": 5},
        ],
    )
    def test_when_there_is_no_database_then_it_is_400_as_with_one(
        self, gateway: GatewayProcess, wrong: dict[str, object]
    ) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/responses", json={"model": "null", "input": "hello", **wrong})

        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == next(iter(wrong))


class TestGivenInputItems:
    def test_when_they_are_listed_then_pages_follow_each_other(self, client: openai.OpenAI) -> None:
        texts = [f"message {i}" for i in range(5)]
        made = client.responses.create(
            model="null", input=[{"role": "user", "content": text} for text in texts], max_output_tokens=4
        )

        backwards = list(client.responses.input_items.list(made.id, limit=2))
        forwards = list(client.responses.input_items.list(made.id, limit=2, order="asc"))

        assert [item.to_dict()["content"] for item in forwards] == [[part(text)] for text in texts]
        assert [item.id for item in backwards] == [item.id for item in reversed(forwards)]

    @pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_1"}])
    def test_when_the_page_is_wrong_then_it_is_400(self, client: openai.OpenAI, query: dict[str, str]) -> None:
        made = create(client, "hello")

        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, extra_query=dict(query))


def part(text: str) -> dict[str, str]:
    """The content of a message of the input."""
    return {"type": "input_text", "text": text}


class TestGivenAResponseThatIsNotKept:
    def test_when_it_is_created_then_nobody_can_retrieve_it(self, client: openai.OpenAI) -> None:
        made = client.responses.create(model="null", input="hello", max_output_tokens=8, store=False)

        assert made.output_text
        with pytest.raises(openai.NotFoundError) as raised:
            client.responses.retrieve(made.id)
        assert raised.value.code == "response_not_found"

    def test_when_it_would_run_in_the_background_then_it_is_400(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="background: true needs store: true"):
            client.responses.create(model="null", input="hello", store=False, background=True)

    def test_when_there_is_no_database_then_it_is_served_all_the_same(self, gateway: GatewayProcess) -> None:
        client = gateway.client()

        made = client.responses.create(model="null", input="hello", max_output_tokens=8, store=False)

        assert made.output_text
        with pytest.raises(openai.InternalServerError) as raised:
            client.responses.create(model="null", input="hello", max_output_tokens=8)
        assert (raised.value.status_code, raised.value.code) == (503, "history_missing")
        assert "retry-after" not in raised.value.response.headers
        assert "cannot be kept: there is no database at /nowhere/keys.db" in gateway.log.read_text()


class TestGivenADeletedResponse:
    def test_when_it_is_asked_for_then_it_is_404(self, client: openai.OpenAI, queue_server: RedisServer) -> None:
        made = create(client, "hello")

        client.responses.delete(made.id)

        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with Producer(queue_server.url) as producer:
            assert producer.views([f"0.default.{made.id.removeprefix('resp_')}"]) == [None]
