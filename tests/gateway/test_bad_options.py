"""Requests with options that nobody can honour, between requests that are right: a real model behind a gateway."""

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sluice.protocol.sampling import OPTIONS
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import redis_server

pytestmark = pytest.mark.slow

UNKNOWN = 2_000_000
BEYOND: list[Mapping[str, Any]] = [
    body
    for name, option in OPTIONS.items()
    if option.least is not None and option.most is not None and name not in {"top_k", "dimensions"}
    for body in ({name: option.least - 1}, {name: option.most + 1}, {name: "many"}, {name: [1]})
]
CONTRADICTIONS: list[Mapping[str, Any]] = [
    {"min_tokens": 9, "max_tokens": 8},
    {"min_tokens": -1},
    {"stop": [""]},
    {"stop": ["x"] * 17},
    {"stop": "x" * 257},
    {"stop_token_ids": [-1]},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"five": 1}},
    {"logit_bias": {str(token): 1 for token in range(1025)}},
    {"top_k": -2},
    {"structured": {"regex": "("}},
    {"structured": {"regex": "a", "choice": ["b"]}},
    {"structured": {"json_schema": {"type": "nothing"}}},
    {"structured": {"lark": "start: missing"}},
    {"structured": {"regex": "[ab]{3}"}, "ignore_eos": True},
    {"structured": {"regex": "[ab]{3}"}, "max_tokens": 0, "prompt_logprobs": 0},
    {"max_tokens": 0},
    {"max_tokens": 0, "prompt_logprobs": 0, "n": 2},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [-1]},
    {"max_tokens": 900_000},
]
FOR_THE_WORKER: list[Mapping[str, Any]] = [
    {"prompt": [UNKNOWN]},
    {"logit_bias": {str(UNKNOWN): 1}},
    {"stop_token_ids": [UNKNOWN]},
    {
        "structured": {"regex": "[ab]{3}"},
        "logit_bias": {str(token): -100 for token in range(1024)},
        "prompt": [UNKNOWN],
    },
]
"""Only a worker knows the model's vocabulary."""

BAD = [*BEYOND, *CONTRADICTIONS, *FOR_THE_WORKER]
GOOD: list[Mapping[str, Any]] = [
    {"prompt": "The sea is", "temperature": 0},
    {"prompt": "The sea is", "seed": 3},
    {"prompt": "The sea is", "seed": 4, "n": 2, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"prompt": "The sea is", "seed": 5, "logprobs": 3, "echo": True},
    {"prompt": "The sea is", "seed": 6, "structured": {"regex": "[a-z]{20,40}"}},
    {"prompt": "The sea is", "seed": 7, "logit_bias": {"70": -100}, "min_tokens": 40},
    {"prompt": [0, 0, 0], "seed": 8},
    {"prompt": [0], "max_tokens": 0, "prompt_logprobs": 2},
]
"""Also a prompt of special tokens alone, and one with nothing before it that predicts it."""

NAMES_OF: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset({"max_tokens"}): ("max_tokens", "nothing"),
    frozenset({"structured"}): ("structured", "grammar", "regex", "schema"),
}
"""What a message may name instead of the fields of the request."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    """Shadows the package's: a worker with the small model serves this one's queue."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("bad_options")) as pool:
        pool.start_all(1, MODEL=str(SMALL_MODEL))
        with gateway_process(server.url) as made:
            yield made


def ask(gateway: GatewayProcess, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Complete a prompt; return status and answer."""
    whole = {"model": SMALL_MODEL.name, "prompt": "The sea is", "max_tokens": 40, **body}
    with gateway.http() as http:
        answer = http.post("/v1/completions", json=whole, timeout=60)
    return answer.status_code, answer.json()


def choices_of(answer: tuple[int, Any]) -> Any:
    """Return what a good request's answer says."""
    status, body = answer
    assert status == 200, body
    return body["choices"]


class TestGivenBadRequestsAmongGoodOnes:
    def test_when_they_run_together_then_each_bad_one_is_told_why_and_the_good_ones_are_unchanged(
        self, gateway: GatewayProcess
    ) -> None:
        calm = [choices_of(ask(gateway, body)) for body in GOOD]
        rounds = 1 + len(BAD) // len(GOOD)
        mixed = [body for number in range(rounds) for body in (*BAD[number::rounds], *GOOD)]

        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(partial(ask, gateway), mixed))

        for body, answer in zip(mixed, answers, strict=True):
            if body in GOOD:
                assert choices_of(answer) == calm[GOOD.index(body)]
        refusals = [(body, answer) for body, answer in zip(mixed, answers, strict=True) if body not in GOOD]
        assert len(refusals) == len(BAD)
        for body, (status, said) in refusals:
            assert status == 400, (body, status, said)
            assert any(name in said["error"]["message"] for name in NAMES_OF.get(frozenset(body), body)), (body, said)
