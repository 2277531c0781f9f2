"""The port that a gateway listens on."""

import json
import socket

from sluice.gateway.server import open_port
from sluice.gateway.settings import GatewaySettings
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer


class TestGivenAnOpenPort:
    def test_when_a_client_connects_then_its_tokens_do_not_wait_for_acknowledgements(self) -> None:
        with (
            open_port(GatewaySettings(database_url="", port=0)) as listening,
            socket.create_connection(listening.getsockname()),
        ):
            accepted, _ = listening.accept()

        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class TestGivenAGatewayThatLogsJson:
    def test_when_it_has_served_then_it_has_written_nothing_else(self, valkey: RedisServer) -> None:
        with gateway_process(valkey.url) as gateway:
            gateway.get("/v1/models")
            gateway.process.terminate()
            gateway.process.wait(30)
            lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]

        assert lines[0] | {"event": "gateway started", "queues": ["default"], "needs_key": False} == lines[0]
        assert {line["level"] for line in lines} <= {"info", "warning"}
