"""The same requests through a gateway, `producer submit` and a batch, each with the verdict that the parsers have."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.protocol.openai_format.requests import ENDPOINTS, Endpoint, RequestRefused, read_request
from tests.gateway.batches.processes import begun, until
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.openai.ways_in import Asked, Verdict, asked, verdicts
from tests.producer.commands import run_producer
from tests.servers import RedisServer

pytestmark = pytest.mark.long

SEED = 7
REFUSED, ACCEPTED = 80, 12
"""For each endpoint. A batch lists up to 100 bad lines."""


@cache
def sample(endpoint: Endpoint) -> list[tuple[Asked, Verdict]]:
    """Requests that name no model, as a batch has one model, and what the parsers say."""
    lacking = {True: ACCEPTED, False: REFUSED}
    found: list[tuple[Asked, Verdict]] = []
    for number in count():
        one = asked(SEED, number)
        said = verdicts(one)["http"]
        is_accepted = said.code is None
        if one.endpoint == endpoint and lacking[is_accepted] and b'"model"' not in one.data and b"\n" not in one.data:
            if is_accepted and not is_short(one):
                continue
            lacking[is_accepted] -= 1
            found.append((one, said))
        if not any(lacking.values()):
            return found
    raise AssertionError("unreachable")


def is_short(one: Asked) -> bool:
    """Whether a request generates little."""
    try:
        options = read_request(one.endpoint, json.loads(one.data)).options
    except RequestRefused:
        return False
    return (options.get("max_tokens") or 256) <= 8 and (options.get("n") or 1) <= 2


def envelopes(requests: list[Asked]) -> bytes:
    """A file of OpenAI's batch format."""
    lines = (
        b'{"custom_id": "c-%d", "method": "POST", "url": "%s", "body": %s}' % (number, one.endpoint.encode(), one.data)
        for number, one in enumerate(requests, 1)
    )
    return b"\n".join(lines) + b"\n"


def found_in(errors: Path) -> Iterator[tuple[int, Verdict]]:
    """Line and verdict of each bad line that `producer submit` has reported."""
    for line in errors.read_text().splitlines():
        error = json.loads(line)["response"]["body"]["error"]
        yield error["line"], Verdict(None, error["code"], error["param"])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
class TestGivenRandomRequests:
    def test_when_a_gateway_gets_them_then_it_answers_as_its_parser_says(
        self, batch_gateway: GatewayProcess, endpoint: Endpoint
    ) -> None:
        differing: list[Any] = []
        with batch_gateway.http() as http:
            for one, expected in sample(endpoint):
                answer = http.post(endpoint, content=one.data, headers={"content-type": "application/json"})
                error = answer.json()["error"] if answer.status_code != 200 else {"code": None, "param": None}
                if (error["code"], error["param"]) != (expected.code, expected.param):
                    differing.append((one, expected, answer.status_code, error))

        assert differing == []

    @pytest.mark.parametrize("is_plain", [False, True])
    def test_when_they_are_lines_of_a_file_then_its_errors_are_the_same(
        self, batch_server: RedisServer, tmp_path: Path, endpoint: Endpoint, *, is_plain: bool
    ) -> None:
        requests = sample(endpoint)
        if is_plain:
            requests = [pair for pair in requests if "plain bulk" in verdicts(pair[0])]
        lines = [one.data for one, _ in requests]
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) if is_plain else envelopes([one for one, _ in requests]))

        done = run_producer(
            batch_server, tmp_path, "submit", "in.jsonl", "--errors", "bad.jsonl", "--batch", tmp_path.name
        )

        expected = {number: said for number, (_, said) in enumerate(requests, 1) if said.code is not None}
        assert dict(found_in(tmp_path / "bad.jsonl")) == expected, done.stderr

    def test_when_they_are_lines_of_a_batch_then_its_errors_are_the_same(
        self, client: openai.OpenAI, endpoint: Endpoint
    ) -> None:
        requests = sample(endpoint)

        batch = until(client, begun(client, envelopes([one for one, _ in requests]), endpoint=endpoint))

        assert batch.status == "failed"
        assert batch.errors is not None
        found = {bad.line: Verdict(None, bad.code, bad.param) for bad in batch.errors.data or ()}
        assert found == {number: said for number, (_, said) in enumerate(requests, 1) if said.code is not None}
