"""A gateway that is told to end lets answers end, or ends them with an error: never as if they were whole."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from sluice.protocol.states import JobState
from tests.gateway.connections.test_slow_readers import open_stream, read_until_reset, wait_for_end
from tests.gateway.gateway_process import GatewayProcess, data_lines, gateway_process
from tests.servers import RedisServer

COMPLETIONS = "/v1/completions"

pytestmark = pytest.mark.slow


def request(max_tokens: int, **options: Any) -> dict[str, Any]:  # Any: JSON
    """The body of a request."""
    return {"prompt": "x", "max_tokens": max_tokens, **options}


def wait_until_connected(gateway: GatewayProcess, num_clients: int) -> None:
    """Wait until a gateway has so many clients."""
    process, port, until_s = psutil.Process(gateway.process.pid), urlsplit(gateway.url).port, time.monotonic() + 10
    while (
        sum(one.laddr[1:] == (port,) and one.status == "ESTABLISHED" for one in process.net_connections()) < num_clients
    ):
        assert time.monotonic() < until_s
        time.sleep(0.005)  # the kernel tells nobody


class TestGivenSigtermAmidAnswers:
    def test_when_some_end_in_time_then_those_are_whole_and_the_others_end_with_an_error(
        self, queue_server: RedisServer
    ) -> None:
        with (
            gateway_process(queue_server.url, "--drain-limit", "1.5") as gateway,
            gateway.http() as http,
            ThreadPoolExecutor() as threads,
            http.stream("POST", COMPLETIONS, json=request(4000, stream=True)) as stream,
            http.stream("POST", COMPLETIONS, json=request(30, stream=True)) as short,
        ):
            whole = threads.submit(http.post, COMPLETIONS, json=request(4000))
            wait_until_connected(gateway, 3)
            gateway.process.send_signal(signal.SIGTERM)
            ended = data_lines(short.iter_lines())
            lines = [line for line in stream.iter_lines() if line]
            refused = whole.result()
            status = gateway.process.wait(20)

        job_id = json.loads(lines[0].removeprefix("data: "))["id"].removeprefix("cmpl-")
        assert ended[-1] == "[DONE]"
        assert lines[-2] == "event: error"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert wait_for_end(queue_server, job_id) is JobState.CANCELLED
        assert status == 0

    @pytest.mark.long
    def test_when_the_stock_client_reads_then_it_raises(self, queue_server: RedisServer) -> None:
        with gateway_process(queue_server.url, "--drain-limit", "0") as gateway, gateway.client() as client:
            chunks = client.completions.create(model="null", prompt="x", max_tokens=4000, stream=True)
            next(chunks)
            gateway.process.send_signal(signal.SIGTERM)

            with pytest.raises(openai.APIError, match="shutting down"):
                list(chunks)

    @pytest.mark.long
    def test_when_a_client_does_not_read_then_its_connection_is_reset(self, queue_server: RedisServer) -> None:
        # What the client does not read fills every buffer within the limit.
        with gateway_process(queue_server.url, "--drain-limit", "1") as gateway:
            client, _, received = open_stream(gateway, num_choices=32, max_tokens=4000)
            gateway.process.send_signal(signal.SIGTERM)
            gateway.process.wait(20)
            with closing(client):
                received += read_until_reset(client)

        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
