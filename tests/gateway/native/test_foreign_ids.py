"""What a key of one tenant learns of another's: nothing, on any route by id."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

import httpx
import pytest

from sluice.gateway.api_keys.key import split_key
from sluice.gateway.keyring import Keyring
from tests.gateway.gateway_process import new_key
from tests.gateway.native.conftest import Native
from tests.gateway.native.jobs import ended, submitted, unknown_to

pytestmark = pytest.mark.slow

ROUTES = ["GET /jobs/ID/result", "GET /jobs/ID", "POST /jobs/ID/cancel"]
NO_JOB = r"\d+\.(acme|globex)\.[0-9a-f]{64}"
"""An id like those that the gateway looks for instead of foreign ones, and those of `unknown_to`."""

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "once"}}


@pytest.fixture(scope="module")
def foreign(native: Native) -> dict[str, str]:
    """Ids of globex, by the name of the parameter that has them."""
    job = submitted(native.globex, max_tokens=2)
    ended(native.globex, job)
    file = native.globex.post("/v1/files", files={"file": json.dumps(LINE)}, data={"purpose": "batch"}).json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = native.globex.post("/v1/batches", json=wanted).json()["id"]
    response = native.globex.post("/v1/responses", json={"model": "null", "input": "hello", "max_output_tokens": 16})
    return {"job_id": job, "file_id": file, "batch_id": batch, "response_id": response.json()["id"]}


@pytest.fixture(scope="module")
def routes(native: Native) -> list[tuple[str, str]]:
    """Every route by id of what a tenant owns."""
    paths: dict[str, Any] = native.acme.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if "{" in path and "_id}" in path
    ]


def answer_to(client: httpx.Client, method: str, path: str, value: str) -> tuple[int, str]:
    """The answer to a request by id, without the id."""
    name = path.partition("{")[2].partition("}")[0]
    answer = client.request(method, path.replace(f"{{{name}}}", value))
    return answer.status_code, answer.text.replace(value, "ID")


class TestGivenIdsOfAnotherTenant:
    def test_when_they_are_used_on_any_route_then_they_are_as_unknown(
        self, native: Native, foreign: dict[str, str], routes: list[tuple[str, str]]
    ) -> None:
        unknown = {name: value[:-6] + "zzzzzz" for name, value in foreign.items()}
        assert {path.partition("{")[2].partition("}")[0] for _, path in routes} == set(foreign)

        for method, path in routes:
            name = path.partition("{")[2].partition("}")[0]
            found = answer_to(native.acme, method, path, foreign[name])

            assert found == answer_to(native.acme, method, path, unknown[name])
            assert found[0] == 404

        for method, path in routes:
            if method == "GET" and not path.endswith("/content"):
                name = path.partition("{")[2].partition("}")[0]
                assert answer_to(native.globex, method, path, foreign[name])[0] == 200

    @pytest.mark.parametrize("name", ["file_id", "batch_id", "job_id", "response_id"])
    @pytest.mark.parametrize(
        "value",
        [
            "..%2f..%2fetc%2fpasswd",
            "%2e%2e",
            "%00",
            "file-%0d%0ax",
            "file-*",
            "a" * 5000,
            "file-%2fuploads",
            "%ff",
        ],
    )
    def test_when_an_id_is_a_path_or_a_pattern_then_it_is_404(
        self, native: Native, routes: list[tuple[str, str]], name: str, value: str
    ) -> None:
        for method, path in routes:
            if f"{{{name}}}" in path:
                found = native.acme.request(method, path.replace(f"{{{name}}}", value))

                assert found.status_code in (404, 405), (method, path)
                assert len(found.content) < 2000

    def test_when_they_are_cursors_of_lists_then_they_are_as_unknown_and_list_ones_own(
        self, native: Native, foreign: dict[str, str]
    ) -> None:
        for path, name in (("/v1/files", "file_id"), ("/v1/batches", "batch_id")):
            found = native.acme.get(path, params={"after": foreign[name]}).json()["data"]

            assert found == native.acme.get(path, params={"after": foreign[name][:-6] + "ffffff"}).json()["data"]
            assert all(native.acme.get(f"{path}/{one['id']}").status_code == 200 for one in found)

        rows = native.acme.get("/jobs", params={"after": f"{10**14}:{foreign['job_id']}"}).json()["data"]
        assert {row["tenant"] for row in rows} <= {"acme"}

    def test_when_a_batch_is_made_of_their_file_then_it_is_as_unknown(
        self, native: Native, foreign: dict[str, str]
    ) -> None:
        wanted = {"input_file_id": foreign["file_id"], "endpoint": "/v1/completions", "completion_window": "1h"}

        found = native.acme.post("/v1/batches", json=wanted)
        unknown = native.acme.post("/v1/batches", json={**wanted, "input_file_id": "file-zzz"})

        assert found.status_code == unknown.status_code == 400
        assert found.text.replace(foreign["file_id"], "ID") == unknown.text.replace("file-zzz", "ID")

    @pytest.mark.parametrize("route", ROUTES)
    def test_when_the_server_is_asked_then_as_for_unknown_ones(
        self, native: Native, foreign: dict[str, str], route: str
    ) -> None:
        found = commands_for(native, route, foreign["job_id"])

        assert found != []
        assert (
            found
            == commands_for(native, route, unknown_to("globex"))
            == commands_for(native, route, unknown_to("acme"))
        )

    @pytest.mark.long  # alone on the machine
    @pytest.mark.parametrize("route", ROUTES)
    def test_when_answers_are_timed_then_they_take_as_long_as_unknown_ones(
        self, native: Native, foreign: dict[str, str], route: str
    ) -> None:
        method, path = route.split(" ")

        def ask(job_id: str) -> None:
            assert native.acme.request(method, path.replace("ID", job_id)).status_code == 404

        ratio = ratio_of(lambda: ask(foreign["job_id"]), lambda: ask(unknown_to("globex")), 20)
        own = ratio_of(lambda: ask(foreign["job_id"]), lambda: ask(unknown_to("acme")), 20)

        assert 0.67 < ratio < 1.5
        assert 0.67 < own < 1.5


def commands_for(native: Native, route: str, job_id: str) -> list[str]:
    """The commands with the id of a job that a request makes the gateway send, with the job's tenant instead."""
    method, path = route.split(" ")
    known = re.compile(f"{NO_JOB}|{re.escape(job_id)}")
    with native.server.client() as client, client.monitor() as monitor:
        assert native.acme.request(method, path.replace("ID", job_id)).status_code == 404
        client.echo("the end")
        texts: Iterator[str] = (seen["command"] for seen in monitor.listen())
        texts = takewhile(lambda text: text != "ECHO the end", texts)
        return [known.sub(r"\1", text) for text in texts if known.search(text)]


def ratio_of(first: Callable[[], object], second: Callable[[], object], count: int) -> float:
    """How much longer the first takes, each time: what a busy machine adds to some of the measurements is left out."""
    return median(shortest_ratio(first, second, count) for _ in range(7))


def shortest_ratio(first: Callable[[], object], second: Callable[[], object], count: int) -> float:
    """The shortest of some times of the first, to that of the second."""
    shortest_s = {True: math.inf, False: math.inf}
    for i in range(count):
        for is_first in (i % 2 == 0, i % 2 == 1):
            began_s = time.perf_counter()
            (first if is_first else second)()
            shortest_s[is_first] = min(shortest_s[is_first], time.perf_counter() - began_s)
    return shortest_s[True] / shortest_s[False]


class TestGivenAKeyThatIsChecked:
    def test_when_it_is_wrong_then_the_time_does_not_tell_how(self, keys_url: str) -> None:
        right = new_key(keys_url, "acme")
        key_id, secret = split_key(right)
        keyring = Keyring(keys_url)
        keyring.read()
        wrongs = {
            "first letter": f"sluice_{key_id}_{'A' if secret[0] != 'A' else 'B'}{secret[1:]}",
            "last letter": f"sluice_{key_id}_{secret[:-1]}{'A' if secret[-1] != 'A' else 'B'}",
            "unknown id": f"sluice_{'0' * len(key_id)}_{secret}",
        }

        ratios = {
            why: ratio_of(partial(keyring.key_of, text), partial(keyring.key_of, wrongs["unknown id"]), 200)
            for why, text in wrongs.items()
        }

        assert keyring.key_of(right) is not None
        assert all(keyring.key_of(text) is None for text in wrongs.values())
        assert {why: ratio for why, ratio in ratios.items() if not 0.8 < ratio < 1.25} == {}
