"""The files of a batch, downloaded from its page."""

import json
import re

import openai

from tests.producer.gateway.batches.processes import begun, lines_of, numbered, until
from tests.producer.gateway.gateway_process import GatewayProcess


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
