"""What the gateway answers to requests that are wrong, foreign or badly timed."""

import signal
from typing import Any

import pytest

from sluice.producer import Producer, QueueSettings
from sluice.protocol.keys import QueueKeys
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer, redis_server

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

pytestmark = pytest.mark.slow


class TestGivenAWrongRequest:
    @pytest.mark.parametrize(
        ("body", "code", "param"),
        [
            ({**HELLO, "temperature": -1}, "invalid_request", "temperature"),
            ({**HELLO, "messages": [{"role": "x", "content": "y"}]}, "invalid_request", "messages[0].role"),
            ({**HELLO, "max_completion_tokens": 0}, "invalid_request", "max_completion_tokens"),
            ({**HELLO, "logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
            ({**HELLO, "stop": ""}, "invalid_request", "stop"),
            ({**HELLO, "metadata": {"a": 1}}, "invalid_request", "metadata"),
            ({**HELLO, "logit_bias": {"5": 101}}, "invalid_request", "logit_bias"),
            ({**HELLO, "colour": "red"}, "unknown_parameter", "colour"),
            ({**HELLO, "tools": ["t"]}, "invalid_request", "tools"),
            ({**HELLO, "functions": ["t"]}, "unsupported", "functions"),
            ({**HELLO, "stream": "yes"}, "invalid_request", "stream"),
            ({**HELLO, "stream_options": {}}, "invalid_request", "stream_options"),
            ({"messages": []}, "invalid_request", "messages"),
            ({**HELLO, "model": ["null"]}, "invalid_request", "model"),
            ({**HELLO, "model": {"a": 1}}, "invalid_request", "model"),
            ([], "invalid_request", "body"),
        ],
    )
    def test_when_a_field_is_wrong_then_the_error_names_it(
        self, gateway: GatewayProcess, body: object, code: str, param: str | None
    ) -> None:
        with gateway.http() as http:
            answer = http.post(CHAT, json=body)

        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)

    @pytest.mark.parametrize(
        ("content", "status"), [(b"{", 400), (b'{"user": "\\ud800"}', 400), (b" " * (9 * 1024 * 1024), 413)]
    )
    def test_when_its_body_is_no_json_or_too_large_then_it_is_refused(
        self, gateway: GatewayProcess, content: bytes, status: int
    ) -> None:
        with gateway.http() as http:
            assert http.post(CHAT, content=content).status_code == status

    def test_when_there_is_no_such_route_then_the_error_has_openais_shape(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/audio/speech", json={})

        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", CHAT, "POST"),
            ("PUT", "/v1/files/file-0", "DELETE, GET, HEAD"),
            ("PATCH", "/v1/models", "GET, HEAD"),
        ],
    )
    def test_when_the_route_has_another_method_then_it_is_405_with_those_that_it_has(
        self, gateway: GatewayProcess, method: str, path: str, allowed: str
    ) -> None:
        with gateway.http() as http:
            answer = http.request(method, path)

        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"]["code"] == "method_not_allowed"


class TestGivenAStream:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, HELLO),
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/responses", {"input": "hello", "store": False}),
        ],
    )
    def test_when_it_is_answered_then_proxies_are_told_to_pass_each_event_on(
        self, gateway: GatewayProcess, path: str, body: dict[str, object]
    ) -> None:
        with gateway.http() as http:
            answer = http.post(path, json={**body, "stream": True})

        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-store")


class TestGivenAPageOfAnotherSite:
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"host": "evil.example"}, 421),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"host": "localhost:1234", "origin": "http://localhost:3000"}, 200),
        ],
    )
    def test_when_it_sends_a_request_then_only_loopback_names_are_accepted(
        self, gateway: GatewayProcess, headers: dict[str, str], status: int
    ) -> None:
        with gateway.http() as http:
            assert http.get("/v1/models", headers=headers).status_code == status


class TestGivenAFullQueue:
    def test_when_a_request_comes_then_it_is_told_when_to_try_again(self, valkey: RedisServer) -> None:
        with gateway_process(valkey.url) as gateway, gateway.http() as http, Producer(valkey.url) as producer:
            producer.configure(QueueSettings(max_waiting_jobs=1))
            producer.submit("first")

            answer = http.post(CHAT, json=HELLO)

        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "full_jobs"
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


class TestGivenATenantThatHoldsItsShare:
    def test_when_its_request_comes_then_it_is_refused_and_that_of_another_is_not(self, valkey: RedisServer) -> None:
        with gateway_process(valkey.url) as gateway, gateway.http() as http, Producer(valkey.url) as producer:
            producer.configure(QueueSettings(max_waiting_jobs=2))
            producer.cancel(producer.submit("first", tenant="other"))
            producer.submit("second")

            answer = http.post(CHAT, json=HELLO)

            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert "tenant default has 1 jobs waiting and may have 1 now" in answer.json()["error"]["message"]
            assert 'sluice_gateway_refused_total{bound="tenant_share_percent"} 1\n' in http.get("/metrics").text
            assert not producer.submit("third", tenant="other").is_duplicate


class TestGivenAWrongNumberOfPartitions:
    def test_when_it_serves_then_it_is_not_ready_and_its_log_has_the_cause(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            client.hset(QueueKeys("default").key("config"), "partitions", 2)
        with gateway_process(valkey.url, "--partitions", "3") as gateway, gateway.http() as http:
            ready, answer = http.get("/readyz"), http.post(CHAT, json=HELLO)
            lines = [line for line in gateway.log.read_text().splitlines() if "serve 2 partitions" in line]

        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "gateway_misconfigured")
        assert "serve 2 partitions" in ready.json()["error"]["message"]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_misconfigured")
        assert "partitions" not in answer.text
        assert "retry-after" not in answer.headers
        assert len(lines) == 2


class TestGivenAServerThatIsAway:
    def test_when_a_request_comes_then_it_is_503_and_the_gateway_lives(self) -> None:
        with redis_server("valkey") as server, gateway_process(server.url) as gateway, gateway.http() as http:
            assert http.get("/readyz").status_code == 200
            server.kill()

            answer = http.post(CHAT, json=HELLO)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unreachable")
            assert str(server.socket_path) not in answer.text
            assert http.get("/readyz").status_code == 503
            assert http.get("/livez").status_code == 200

            server.start()
            assert http.get("/readyz").status_code == 200


class TestGivenSigterm:
    def test_when_no_stream_is_open_then_it_ends_well(self, valkey: RedisServer) -> None:
        with gateway_process(valkey.url, is_fork=False) as gateway:
            gateway.process.send_signal(signal.SIGTERM)

            assert gateway.process.wait(20) == 0
