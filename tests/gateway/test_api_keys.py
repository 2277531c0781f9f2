"""API keys: who is let in, in whose name, and what an attacker learns."""

import signal
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from sluice.gateway.api_keys.key import ApiKey
from sluice.gateway.api_keys.store import KeyStore
from sluice.producer import Producer
from sluice.producer.cli.main import main
from sluice.protocol.job_ids import split_job_id
from tests.gateway.gateway_process import GatewayProcess, delete_all, gateway_process, line_of, new_key, revoke, spec_of
from tests.servers import RedisServer

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
FRIEND = "https://chat.example.com"
HELLO: dict[str, Any] = {"model": "null", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Guarded:
    """A gateway with keys, and a key of each kind."""

    gateway: GatewayProcess
    url: str
    active: str
    reader: str
    writer: str
    expired: str
    slow: str


@pytest.fixture(scope="module")
def guarded(queue_server: RedisServer, keys_url: str) -> Generator[Guarded]:
    """A gateway on loopback whose database has keys."""
    keys = {
        "active": new_key(keys_url, "acme"),
        "reader": new_key(keys_url, "acme", scopes=("read",)),
        "writer": new_key(keys_url, "acme", scopes=("submit",)),
        "expired": new_key(keys_url, "acme", expires_ms=1),
        "slow": new_key(keys_url, "acme", rpm=2, tpm=600),
    }
    with gateway_process(queue_server.url, "--cors-origin", FRIEND, database_url=keys_url) as made:
        yield Guarded(made, keys_url, **keys)


def time_until(is_so: Callable[[], bool]) -> float:
    """Wait for a condition, and return how long it took."""
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < 20
        time.sleep(0.01)
    return time.monotonic() - began_s


class TestGivenAKey:
    def test_when_jobs_are_submitted_then_they_are_its_tenants(self, guarded: Guarded) -> None:
        client = guarded.gateway.client(guarded.active)

        answer = client.completions.create(model="null", prompt="hello", max_tokens=4)
        first, *_ = client.completions.create(model="null", prompt="hello", max_tokens=4, stream=True)

        tenants = [split_job_id(job_id.removeprefix("cmpl-"))[1] for job_id in (answer.id, first.id)]
        assert tenants == ["acme", "acme"]

    def test_when_another_tenant_is_asked_for_then_the_request_is_refused(self, guarded: Guarded) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            guarded.gateway.client(guarded.active).chat.completions.create(**HELLO, extra_body={"tenant": "other"})

        assert raised.value.code == "unknown_parameter"

    def test_when_it_lacks_the_scope_submit_then_it_is_403_and_nothing_is_submitted(
        self, guarded: Guarded, queue_server: RedisServer
    ) -> None:
        with Producer(queue_server.url) as producer:
            before = producer.queue()[0].totals.get("submitted", 0)

            with pytest.raises(openai.PermissionDeniedError) as raised:
                guarded.gateway.client(guarded.reader).chat.completions.create(**HELLO)

            assert producer.queue()[0].totals.get("submitted", 0) == before
        assert raised.value.code == "missing_scope"

    def test_when_it_lacks_the_scope_read_then_it_submits_but_lists_nothing(self, guarded: Guarded) -> None:
        client = guarded.gateway.client(guarded.writer)

        with pytest.raises(openai.PermissionDeniedError):
            client.models.list()

        assert client.completions.create(model="null", prompt="hello", max_tokens=4).choices

    def test_when_it_is_revoked_then_it_is_refused_within_a_second(self, guarded: Guarded) -> None:
        key = new_key(guarded.url, "acme")
        with guarded.gateway.http(key) as http:
            time_until(lambda: http.get(MODELS).status_code == 200)

            revoke(guarded.url, key)

            assert time_until(lambda: http.get(MODELS).status_code == 401) < 1.0
        assert guarded.gateway.get(MODELS, guarded.active).status_code == 200


class TestGivenAKeyWithLimits:
    def test_when_they_are_used_up_then_answers_say_what_is_left_until_429(self, guarded: Guarded) -> None:
        client = guarded.gateway.client(guarded.slow)

        whole = client.completions.with_raw_response.create(model="null", prompt="four", max_tokens=99)
        with client.completions.with_streaming_response.create(
            model="null", prompt="four", max_tokens=99, stream=True
        ) as streamed:
            streamed.read()
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="null", prompt="four", max_tokens=99)

        assert [left_in(answer.headers) for answer in (whole, streamed, raised.value.response)] == [
            ("2", "1", "500"), ("2", "0", "400"), ("2", "0", "400"),
        ]  # fmt: skip
        assert raised.value.code == "rate_limit_exceeded"
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 30

    def test_when_a_request_adds_no_job_then_it_costs_nothing(self, guarded: Guarded) -> None:
        key, once = new_key(guarded.url, "acme", rpm=2, tpm=60_000), {"Idempotency-Key": uuid4().hex}
        time_until(lambda: guarded.gateway.get(MODELS, key).status_code == 200)

        with guarded.gateway.http(key) as http:
            answers = [
                http.post("/v1/completions", json={"prompt": "four", "max_tokens": max_tokens}, headers=once)
                for max_tokens in (9, 9, 20_000, 9)
            ]

        assert [answer.status_code for answer in answers] == [200, 200, 422, 200]
        left = [answer.headers for answer in answers if answer.status_code == 200]
        assert [headers["x-ratelimit-remaining-requests"] for headers in left] == ["1"] * 3
        tokens = [int(headers["x-ratelimit-remaining-tokens"]) for headers in left]
        assert tokens == sorted(tokens)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "four"}),
            ("/v1/responses", {"input": "four"}),
            ("/v1/responses", {"input": "four", "store": False}),
            ("/jobs", {"prompt": "four"}),
        ],
    )
    def test_when_max_tokens_is_left_out_then_the_job_gets_what_was_charged(
        self, guarded: Guarded, queue_server: RedisServer, path: str, body: dict[str, object]
    ) -> None:
        keys = [new_key(guarded.url, "acme", tpm=1000), new_key(guarded.url, "acme", rpm=10)]
        time_until(lambda: guarded.gateway.get(MODELS, keys[-1]).status_code == 200)

        most: list[int | None] = []
        for key in keys:
            with guarded.gateway.http(key) as http:
                answer = http.post(path, json=body)
            job_id = line_of(guarded.gateway, answer.headers["x-request-id"])["job_id"]
            most.append(spec_of(queue_server, job_id).options.max_tokens)

        assert most == [256, None]


def left_in(headers: Mapping[str, str]) -> tuple[str, str, str]:
    """The limit of requests, the requests that are left, and the tokens, rounded to hundreds since they come back."""
    remaining = int(headers["x-ratelimit-remaining-tokens"])
    names = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests")
    return headers[names[0]], headers[names[1]], str(remaining // 100 * 100)


class TestGivenAPageOfAnotherSite:
    def test_when_a_page_of_another_site_asks_then_it_may_not_read_the_answer(self, guarded: Guarded) -> None:
        preflight, answer = self.asked_by("https://evil.example", guarded)

        assert (preflight.status_code, answer.status_code) == (400, 200)
        assert "access-control-allow-origin" not in {**preflight.headers, **answer.headers}

    def test_when_its_origin_is_allowed_then_it_may_but_needs_a_key(self, guarded: Guarded) -> None:
        preflight, answer = self.asked_by(FRIEND, guarded)
        refused = guarded.gateway.get(MODELS, origin=FRIEND)

        assert (preflight.status_code, answer.status_code, refused.status_code) == (200, 200, 401)
        assert {found.headers["access-control-allow-origin"] for found in (preflight, answer, refused)} == {FRIEND}
        assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]

    @pytest.mark.parametrize("origin", ["*", "chat.example.com", "https://chat.example.com/"])
    def test_when_an_origin_is_not_exact_then_the_gateway_refuses_to_start(
        self, origin: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--port", "0", "--cors-origin", origin])

        assert ended.value.code == 2
        assert "--cors-origin must be" in capsys.readouterr().err

    def asked_by(self, origin: str, guarded: Guarded) -> tuple[httpx.Response, httpx.Response]:
        """The answers to a browser that asks whether it may send a key, and that sends it."""
        asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        with guarded.gateway.http() as http:
            preflight = http.options(CHAT, headers={"origin": origin, **asking})
        return preflight, guarded.gateway.get(MODELS, guarded.active, origin=origin)


class TestGivenAWrongKey:
    def test_when_it_is_unknown_expired_or_forged_then_the_answers_are_the_same(self, guarded: Guarded) -> None:
        active = guarded.active
        forged = active[:-1] + ("a" if active[-1] != "a" else "b")
        unknown = active.replace(active.split("_")[1], "0" * 12)
        wrong = (guarded.expired, forged, unknown, active[:-43], "none", "sluice__", "x" * 4000)

        answers = [guarded.gateway.get(MODELS, key) for key in wrong]

        assert {(answer.status_code, answer.headers["www-authenticate"]) for answer in answers} == {(401, "Bearer")}
        assert len({answer.text for answer in answers}) == 1
        assert answers[0].json()["error"]["code"] == "invalid_api_key"

    def test_when_it_is_sent_by_the_stock_client_then_that_raises(self, guarded: Guarded) -> None:
        with pytest.raises(openai.AuthenticationError, match="unknown, revoked or expired"):
            guarded.gateway.client("none").models.list()

    def test_when_two_are_sent_then_the_request_is_refused(self, guarded: Guarded) -> None:
        twice = [("authorization", f"Bearer {guarded.active}"), ("authorization", "Bearer none")]

        with guarded.gateway.http() as http:
            assert http.get(MODELS, headers=twice).status_code == 401


class TestGivenNoKeyInTheRequest:
    @pytest.mark.parametrize(
        "path", [MODELS, CHAT, "/v1/embeddings", "/%2flivez", "/livez/", "/readyz%2f..%2fv1/models"]
    )
    def test_when_it_is_for_anything_but_health_then_it_is_refused(self, guarded: Guarded, path: str) -> None:
        with guarded.gateway.http() as http:
            refused = http.post(path, json=HELLO)

        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "missing_api_key"

    @pytest.mark.parametrize("path", ["/livez", "/readyz"])
    def test_when_it_is_for_health_then_it_is_answered(self, guarded: Guarded, path: str) -> None:
        assert guarded.gateway.get(path).status_code == 200


@dataclass(frozen=True)
class Used:
    """What is left of a gateway that has served a key."""

    secret: str
    key: ApiKey
    began_ms: float
    answers: list[httpx.Response]
    output: str
    folder: Path


@pytest.fixture(scope="module")
def used(queue_server: RedisServer, keys_url: str) -> Used:
    """Answers, messages and files of a gateway that has ended."""
    key, began_ms = new_key(keys_url, "hooli"), time.time() * 1000 - 1
    with gateway_process(queue_server.url, database_url=keys_url) as gateway:
        with gateway.http(key) as http:
            answers = [http.post(CHAT, json=HELLO), http.post(CHAT, json=[]), http.get(f"/v1/no?api_key={key}")]
        answers.append(gateway.get(MODELS, f"{key}x"))
        gateway.process.send_signal(signal.SIGTERM)
        gateway.process.wait(20)
        output = gateway.log.read_text()
    with KeyStore(keys_url) as store:
        [kept] = store.keys(tenant="hooli")
    folder = Path(keys_url.removeprefix("sqlite:///")).parent
    return Used(key.split("_", 2)[2], kept, began_ms, answers, output, folder)


class TestGivenAGatewayThatHasServedAKey:
    def test_when_its_answers_and_messages_are_read_then_the_key_is_not_there(self, used: Used) -> None:
        assert [answer.status_code for answer in used.answers] == [200, 400, 404, 401]
        assert used.secret not in used.output + "".join(answer.text + str(answer.headers) for answer in used.answers)

    def test_when_its_stores_are_read_then_the_key_is_not_there(self, used: Used, queue_server: RedisServer) -> None:
        secret = used.secret.encode()

        with queue_server.client() as client:
            values = [client.dump(name) or b"" for name in client.scan_iter()]
        values += [path.read_bytes() for path in used.folder.iterdir()]

        assert len(values) > 3
        assert not any(secret in value for value in values)

    def test_when_the_key_is_listed_then_its_last_use_is_known(self, used: Used) -> None:
        assert used.key.last_used_ms is not None
        assert used.key.last_used_ms >= used.began_ms


class TestGivenNoKeys:
    def test_when_the_first_is_created_then_loopback_needs_one_even_after_it_is_revoked(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        with gateway_process(queue_server.url, database_url=sqlite_url) as gateway, gateway.http() as http:
            assert http.get(MODELS).status_code == 200

            key = new_key(sqlite_url, "acme")
            assert time_until(lambda: http.get(MODELS).status_code == 401) < 1.0
            revoke(sqlite_url, key)
            time_until(lambda: gateway.get(MODELS, key).status_code == 401)

            assert http.get(MODELS).status_code == 401

    def test_when_a_request_has_a_key_of_ours_then_it_is_401(self, gateway: GatewayProcess) -> None:
        answers = [gateway.get(MODELS, key) for key in (f"sluice_{'0' * 12}_x", "sluice_", "none", None)]

        assert [answer.status_code for answer in answers] == [401, 401, 200, 200]
        assert answers[0].json()["error"]["code"] == "invalid_api_key"
        assert gateway.get("/readyz", "sluice_").status_code == 200

    @pytest.mark.parametrize("url", ["sqlite:////nowhere/keys.db", "of a database without keys"])
    def test_when_keys_are_required_then_it_refuses_to_start(
        self, url: str, sqlite_url: str, valkey: RedisServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = url if ":" in url else sqlite_url
        options = ["--redis-url", valkey.url, "--database-url", url]

        with pytest.raises(SystemExit) as ended:
            main(["serve", "--require-keys", "--port", "0", *options])

        assert ended.value.code == 2
        assert "--require-keys needs API keys" in capsys.readouterr().err


class TestGivenKeysThatAreLost:
    def test_when_the_table_is_emptied_then_loopback_still_needs_one(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        key = new_key(sqlite_url, "acme")
        with gateway_process(queue_server.url, database_url=sqlite_url) as gateway:
            assert gateway.get(MODELS, key).status_code == 200

            delete_all(sqlite_url)
            time_until(lambda: gateway.get(MODELS, key).status_code == 401)

            assert gateway.get(MODELS).status_code == 401


class TestGivenAnAddressThatIsNotLoopback:
    def test_when_the_last_key_is_revoked_then_nobody_is_served(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        key = new_key(sqlite_url, "acme")
        with gateway_process(queue_server.url, "--host", "0.0.0.0", database_url=sqlite_url) as gateway:
            here = replace(gateway, url=gateway.url.replace("0.0.0.0", "127.0.0.1"))
            assert here.get(MODELS, key, host="llm.example.com").status_code == 200

            revoke(sqlite_url, key)
            time_until(lambda: here.get(MODELS, key).status_code == 401)

            assert here.get(MODELS, host="127.0.0.1").status_code == 401

    @pytest.mark.parametrize("has_had_keys", [False, True])
    def test_when_there_is_no_active_key_then_it_refuses_to_start(
        self, has_had_keys: bool, sqlite_url: str, valkey: RedisServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if has_had_keys:
            new_key(sqlite_url, "acme", expires_ms=1)
            revoke(sqlite_url, new_key(sqlite_url, "acme"))
        options = ["--redis-url", valkey.url, "--database-url", sqlite_url]

        with pytest.raises(SystemExit) as ended:
            main(["serve", "--host", "0.0.0.0", "--port", "0", *options])

        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "needs API keys" in error
        assert f"producer keys create --tenant NAME --database-url {sqlite_url}" in error
