"""OpenAI's clients for Python and Node, unmodified, against real processes."""

import pytest

from tests.clients.environments import Client
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]


class TestGivenOpenaisClient:
    def test_when_it_chats_then_streams_are_the_whole_answers(
        self, openai_client: Client, gateway: GatewayProcess
    ) -> None:
        [said] = openai_client.using(gateway.url).run("chat")

        assert said["texts"] == said["streamed"]
        assert said["in_parts"] == said["texts"][0]
        assert (said["models"], said["finish_reasons"]) == (["null"], ["length", "length"])
        assert said["usage"] == said["streamed_usage"] == 40
        assert said["has_request_id"]

    def test_when_it_completes_a_text_then_the_stream_is_the_whole_answer(
        self, openai_client: Client, gateway: GatewayProcess
    ) -> None:
        [said] = openai_client.using(gateway.url).run("completion")

        assert said["text"] == said["streamed"] != ""

    def test_when_it_asks_for_several_at_once_then_each_has_its_own_answer(
        self, openai_client: Client, gateway: GatewayProcess
    ) -> None:
        [said] = openai_client.using(gateway.url).run("several")

        assert said["equal"] == [True] * 8

    def test_when_it_uses_responses_then_each_way_to_read_one_is_the_same(
        self, openai_client: Client, keeping: GatewayProcess
    ) -> None:
        [said] = openai_client.using(keeping.url).run("responses")

        assert len(said.pop("text")) >= said["usage"] == 20
        assert said.pop("helped") > 0
        assert said == {
            "retrieved": True, "streamed": True, "previous": True, "items": ["go on"], "usage": 20,
            "cancelled": "cancelled", "deleted": 404,
        }  # fmt: skip

    def test_when_it_has_a_batch_then_files_and_outputs_are_there(
        self, openai_client: Client, keeping: GatewayProcess
    ) -> None:
        [said] = openai_client.using(keeping.url).run("batch")

        assert said == {
            "status": "completed", "completed": 5, "metadata": {"team": "search"},
            "ids": [f"c-{number}" for number in range(5)], "listed": True, "files": ["batch", "batch_output"],
            "content": True, "deleted": True,
        }  # fmt: skip

    def test_when_it_is_refused_then_it_raises_what_openais_api_would(
        self, openai_client: Client, gateway: GatewayProcess
    ) -> None:
        said = openai_client.using(gateway.url).run("refused")

        assert [tuple(line.values()) for line in said] == [
            ("NotFoundError", 404, "model_not_found", "model", True),
            ("BadRequestError", 400, "invalid_request", said[1]["param"], True),
            ("BadRequestError", 400, "unknown_parameter", "colour", True),
            ("BadRequestError", 400, "invalid_request", "messages", True),
        ]

    def test_when_it_has_a_key_then_only_that_is_accepted(
        self, openai_client: Client, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        key = new_key(sqlite_url, "acme")

        with gateway_process(queue_server.url, database_url=sqlite_url) as gateway:
            [accepted] = openai_client.using(gateway.url, OPENAI_API_KEY=key).run("completion")
            refused = openai_client.using(gateway.url, OPENAI_API_KEY="sk-wrong").run("refused")

        assert accepted["text"]
        assert {(line["kind"], line["status"]) for line in refused} == {("AuthenticationError", 401)}
