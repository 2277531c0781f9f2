"""A gateway that is killed amid streams, and clients that leave, through the stock client."""

from collections.abc import Generator

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.responses import ResponseStreamEvent

from sluice.producer import Producer
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.responses.reading import text_of, wait_for, wait_until_ended
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


@pytest.fixture
def killable(queue_server: RedisServer, responses_url: str) -> Generator[GatewayProcess]:
    """A gateway of the test's own."""
    with gateway_process(queue_server.url, database_url=responses_url) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(queue_server: RedisServer, responses_url: str) -> Generator[GatewayProcess]:
    """A gateway that waits a second for answers."""
    with gateway_process(queue_server.url, "--request-limit", "1", database_url=responses_url) as made:
        yield made


def read_until_killed(
    stream: openai.Stream[ResponseStreamEvent], gateway: GatewayProcess, seen: list[ResponseStreamEvent]
) -> None:
    """Read a stream, and kill the gateway amid it."""
    for event in stream:
        seen.append(event)
        if len(seen) == 6:
            gateway.process.kill()


class TestGivenAGatewayThatIsKilled:
    def test_when_it_streamed_then_chats_raise_and_responses_are_rejoined_at_another(
        self, killable: GatewayProcess, client: openai.OpenAI
    ) -> None:
        left, seen = killable.client(), list[ResponseStreamEvent]()
        messages = [ChatCompletionUserMessageParam(role="user", content="hello")]
        with (
            left.chat.completions.create(model="null", messages=messages, max_tokens=2000, stream=True) as chat,
            left.responses.create(
                model="null", input="hello", max_output_tokens=300, background=True, stream=True
            ) as stream,
        ):
            next(iter(chat))

            with pytest.raises(openai.APIError):
                read_until_killed(stream, killable, seen)
            with pytest.raises(openai.APIError):
                list(chat)
        first = seen[0]
        assert first.type == "response.created"
        after = client.responses.retrieve(first.response.id, stream=True, starting_after=seen[-1].sequence_number)
        rest = list(after)

        last = rest[-1]
        assert last.type == "response.incomplete"
        assert text_of(seen) + text_of(rest) == last.response.output_text
        assert text_of(rest)


class TestGivenARequestLimit:
    def test_when_an_answer_takes_longer_then_it_is_504(self, hasty: GatewayProcess) -> None:
        with pytest.raises(openai.InternalServerError) as raised:
            hasty.client().completions.create(model="null", prompt="once", max_tokens=4000)

        assert (raised.value.status_code, raised.value.code) == (504, "timeout")

    def test_when_a_stream_takes_longer_then_it_raises(self, hasty: GatewayProcess) -> None:
        with (
            hasty.client().completions.create(model="null", prompt="once", max_tokens=4000, stream=True) as stream,
            pytest.raises(openai.APIError, match="within the time limit"),
        ):
            list(stream)

    def test_when_a_response_is_in_the_background_then_it_goes_on(self, hasty: GatewayProcess) -> None:
        client = hasty.client()

        made = client.responses.create(model="null", input="hello", max_output_tokens=150, background=True)

        assert wait_until_ended(client, made.id).status == "incomplete"


class TestGivenAClientThatLeavesAResponse:
    def test_when_it_is_stored_then_it_goes_on(self, client: openai.OpenAI) -> None:
        with client.responses.create(model="null", input="hello", max_output_tokens=60, stream=True) as stream:
            first = next(iter(stream))

        assert first.type == "response.created"
        assert wait_until_ended(client, first.response.id).status == "incomplete"

    def test_when_it_is_not_stored_then_its_job_is_cancelled(
        self, client: openai.OpenAI, queue_server: RedisServer
    ) -> None:
        with client.responses.create(
            model="null", input="hello", max_output_tokens=4000, stream=True, store=False
        ) as stream:
            first = next(iter(stream))
        assert first.type == "response.created"
        job_id = f"0.default.{first.response.id.removeprefix('resp_')}"

        with Producer(queue_server.url) as producer:
            wait_for(lambda: producer.status(job_id).state == "cancelled")
