"""Request ids, and the lines of the log that have them."""

import io
import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import openai
import pytest

from sluice.gateway.log.lines import JsonLines, PlainLines, configure_log
from tests.gateway.gateway_process import GatewayProcess, gateway_process, line_of, new_key, spec_of
from tests.servers import RedisServer


@pytest.mark.slow
class TestGivenAGateway:
    def test_when_a_request_has_no_id_then_answer_and_log_have_the_same(self, gateway: GatewayProcess) -> None:
        raw = gateway.client().completions.with_raw_response.create(model="null", prompt="once", max_tokens=3)

        line, answer = line_of(gateway, raw.request_id), raw.parse()
        assert {name: line[name] for name in ("method", "path", "status", "is_complete", "job_id")} == {
            "method": "POST", "path": "/v1/completions", "status": 200, "is_complete": True,
            "job_id": answer.id.removeprefix("cmpl-"),
        }  # fmt: skip

    def test_when_a_client_leaves_a_stream_then_the_log_has_it(self, gateway: GatewayProcess) -> None:
        own = uuid4().hex
        with gateway.client().completions.create(
            model="null", prompt="once", max_tokens=4000, stream=True, extra_headers={"x-request-id": own}
        ) as stream:
            next(iter(stream))

        assert line_of(gateway, own)["is_complete"] is False

    @pytest.mark.parametrize("own", ["a1b2-c3", "req_" + 60 * "x"])
    def test_when_the_client_gives_a_sane_one_then_it_is_kept(self, gateway: GatewayProcess, own: str) -> None:
        own = own + uuid4().hex

        answer = gateway.get("/v1/models", **{"x-request-id": own})

        assert answer.headers["x-request-id"] == own
        assert line_of(gateway, own)["path"] == "/v1/models"

    @pytest.mark.parametrize("own", ["", "a b", 'a"b', "x" * 129, "é"])
    def test_when_the_client_gives_another_one_then_it_is_replaced(self, gateway: GatewayProcess, own: str) -> None:
        with gateway.http() as http:
            answer = http.get("/v1/models", headers=[(b"x-request-id", own.encode())])

        assert answer.headers["x-request-id"].startswith("req_")

    def test_when_a_request_cannot_be_read_then_its_error_has_one(self, gateway: GatewayProcess) -> None:
        at = httpx.URL(gateway.url)
        with socket.create_connection((at.host, at.port), timeout=30) as sock, sock.makefile("rb") as answer:
            sock.sendall(b"no request\r\n\r\n")
            head, _, body = answer.read().partition(b"\r\n\r\n")

        [own] = re.findall(rb"x-request-id: (req_[0-9a-f]{32})", head)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "malformed_request"
        assert line_of(gateway, own.decode())["status"] == 400

    def test_when_a_request_is_refused_then_its_error_has_one(self, gateway: GatewayProcess) -> None:
        with pytest.raises(openai.NotFoundError) as raised:
            gateway.client().completions.create(model="gpt-9", prompt="once")

        assert line_of(gateway, raised.value.request_id)["status"] == 404

    def test_when_a_probe_succeeds_then_it_is_not_logged(self, gateway: GatewayProcess) -> None:
        probe = gateway.get("/readyz").headers["x-request-id"]

        line_of(gateway, gateway.get("/v1/models").headers["x-request-id"])

        assert probe not in gateway.log.read_text()

    def test_when_a_path_has_line_breaks_then_the_log_has_one_line(self, gateway: GatewayProcess) -> None:
        refused = gateway.get("/v1/%0A%7B%22event%22%3A%22forged%22%7D").headers["x-request-id"]

        assert line_of(gateway, refused)["path"] == '/v1/\n{"event":"forged"}'


@pytest.mark.slow
class TestGivenAGatewayWithKeys:
    def test_when_a_request_ends_then_the_log_has_its_key_and_no_secret(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        key = new_key(sqlite_url, "acme")

        with gateway_process(queue_server.url, database_url=sqlite_url) as gateway:
            accepted = gateway.get("/v1/models", key).headers["x-request-id"]
            refused = gateway.get("/v1/models", "sk-wrong").headers["x-request-id"]
            known, unknown = line_of(gateway, accepted), line_of(gateway, refused)
            log = gateway.log.read_text()

        assert (known["tenant"], known["status"]) == ("acme", 200)
        assert str(known["key_id"]) in key
        assert ("tenant" in unknown, unknown["status"]) == (False, 401)
        assert key not in log
        assert "sk-wrong" not in log


class TestGivenARecord:
    @pytest.fixture
    def record(self) -> logging.LogRecord:
        """A warning with a field that a client chose, and a traceback."""
        made = logging.LogRecord("sluice", logging.WARNING, "f", 1, "it %s", ("failed",), None)
        made.fields = {"path": "/a\nb \x1b[1m", "status": 500}
        try:
            Path("/nowhere/at all").read_text()
        except OSError:
            made.exc_info = sys.exc_info()
        return made

    def test_when_it_is_written_as_json_then_it_is_one_object(self, record: logging.LogRecord) -> None:
        line = JsonLines().format(record)

        assert "\n" not in line
        found = json.loads(line)
        assert (found["event"], found["level"], found["path"]) == ("it failed", "warning", "/a\nb \x1b[1m")
        assert found["exception"].splitlines()[-1].startswith("FileNotFoundError")

    def test_when_it_is_written_plainly_then_nothing_in_it_is_obeyed(self, record: logging.LogRecord) -> None:
        first, *traceback = PlainLines().format(record).splitlines()

        assert first.endswith(r'warning it failed path="/a\nb \u001b[1m" status=500')
        assert traceback[-1].startswith("FileNotFoundError")


class TestGivenALevel:
    @pytest.fixture(autouse=True)
    def _loggers(self) -> Iterator[None]:
        """Loggers as they were, afterwards."""
        root, ours = logging.getLogger(), logging.getLogger("sluice")
        before = root.handlers[:], root.level, ours.level
        yield
        root.handlers[:], root.level, ours.level = before

    @pytest.mark.parametrize(("level", "lines"), [("info", ["ours", "theirs"]), ("error", [])])
    def test_when_it_is_set_then_lesser_lines_are_left_out(self, level: str, lines: list[str]) -> None:
        stream = io.StringIO()

        configure_log("json", level, stream=stream)
        logging.getLogger("sluice.x").info("ours")
        logging.getLogger("library").info("noise")
        logging.getLogger("library").warning("theirs")

        assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == lines


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODIES: dict[str, dict[str, object]] = {
    "/jobs": {"prompt": "once", "max_tokens": 3},
    "/v1/completions": {"model": "null", "prompt": "once", "max_tokens": 3},
    "/v1/chat/completions": {"model": "null", "messages": [{"role": "user", "content": "once"}], "max_tokens": 3},
}


@pytest.mark.slow
class TestGivenARequestOfATrace:
    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize(("header", "kept"), [(TRACE, TRACE), ("00-no-trace-01", None)])
    def test_when_it_is_submitted_then_its_job_is_of_that_trace(
        self, gateway: GatewayProcess, queue_server: RedisServer, path: str, header: str, kept: str | None
    ) -> None:
        own = uuid4().hex

        with gateway.http() as http:
            answer = http.post(path, json=BODIES[path], headers={"traceparent": header, "x-request-id": own})

        assert answer.status_code in (200, 201), answer.text
        assert spec_of(queue_server, line_of(gateway, own)["job_id"]).traceparent == kept
