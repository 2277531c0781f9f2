"""The port that a gateway listens on."""

import socket

from sluice.producer.gateway.server import open_port
from sluice.producer.gateway.settings import GatewaySettings


class TestGivenAnOpenPort:
    def test_when_a_client_connects_then_its_tokens_do_not_wait_for_acknowledgements(self) -> None:
        with (
            open_port(GatewaySettings(database_url="", port=0)) as listening,
            socket.create_connection(listening.getsockname()),
        ):
            accepted, _ = listening.accept()

        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
