"""The files of a batch, downloaded from its page, and what pages say if nobody makes them."""

import json
import re
from pathlib import Path

import openai

from tests.gateway.batches.processes import begun, lines_of, numbered, place_in, until
from tests.gateway.gateway_process import GatewayProcess
from tests.servers import RedisServer


def with_one_too_long(count: int) -> bytes:
    """Lines of a file, and one whose prompt no model of ours can read."""
    line = json.loads(numbered(1))
    line["custom_id"] = "too-long"
    line["body"]["messages"] = [{"role": "user", "content": "x" * 100_000}]
    return numbered(count) + json.dumps(line).encode() + b"\n"


class TestGivenABatchWithResultsAndErrors:
    def test_when_its_page_is_opened_then_its_links_lead_to_both_files(
        self, client: openai.OpenAI, batch_gateway: GatewayProcess
    ) -> None:
        batch = until(client, begun(client, with_one_too_long(3)))

        page = batch_gateway.get(f"/ui/batches/default/{batch.id}")
        links = re.findall(r'href="([^"]+\.jsonl)"', page.text)
        answers = [batch_gateway.get(link) for link in links]

        found = [[json.loads(line) for line in answer.text.splitlines()] for answer in answers]
        assert found == [lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)]
        assert [len(lines) for lines in found] == [3, 1]
        names = [answer.headers["content-disposition"] for answer in answers]
        assert names == [f'attachment; filename="{one}.jsonl"' for one in (batch.output_file_id, batch.error_file_id)]

    def test_when_a_callbacks_process_has_served_the_queue_then_its_marker_says_so(
        self, client: openai.OpenAI, batch_server: RedisServer
    ) -> None:
        until(client, begun(client, numbered(1)))

        with batch_server.client() as redis:
            assert redis.exists("{default:0}:2:storages:callbacks")


class TestGivenNoCallbacksProcess:
    def test_when_a_batch_is_created_then_pages_say_that_it_waits(self, valkey: RedisServer, tmp_path: Path) -> None:
        place = place_in(tmp_path, valkey.url)
        with place.gateway() as gateway, gateway.client() as client:
            quiet = gateway.get("/ui/").text

            batch = begun(client, numbered(1))
            page = gateway.get(f"/ui/batches/default/{batch.id}").text
        with place.gateway() as gateway:  # another one, which has not looked yet
            overview = gateway.get("/ui/").text

        assert "No alerts." in quiet
        assert "worker callbacks --queue default" in page
        assert "Batches of queue default have stopped." in overview
