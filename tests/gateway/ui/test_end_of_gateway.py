"""A gateway that stops, and one with a certificate."""

import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

from tests.gateway.gateway_process import gateway_process, new_key
from tests.security.certificates import HAS_OPENSSL, make_authority
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


class TestGivenAPageThatIsOpen:
    def test_when_the_gateway_stops_then_its_stream_ends_long_before_the_drain(self, queue_server: RedisServer) -> None:
        with gateway_process(queue_server.url, "--drain-limit", "60") as gateway, gateway.http() as http:
            with http.stream("GET", "/ui/events") as answer:
                lines = answer.iter_lines()
                assert next(lines) == "event: parts"
                began_s = time.monotonic()
                gateway.process.send_signal(signal.SIGTERM)
                kinds = [line for line in lines if line.startswith("event: ")]

            gateway.process.wait(30)

            assert kinds[-1] == "event: over"
            assert time.monotonic() - began_s < 20


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs openssl")
class TestGivenACertificate:
    def test_when_somebody_signs_in_then_the_cookie_is_secure(
        self, queue_server: RedisServer, tmp_path: Path, keys_url: str
    ) -> None:
        authority = make_authority(tmp_path / "authority")
        own, key = authority.sign("gateway"), new_key(keys_url, "acme")
        trusting = ssl.create_default_context(cafile=authority.own.certificate)
        files = ("--tls-cert", str(own.certificate), "--tls-key", str(own.key))

        with (
            gateway_process(queue_server.url, *files, database_url=keys_url) as gateway,
            httpx.Client(verify=trusting, base_url=gateway.url.removesuffix("/v1")) as http,
        ):
            origin = {"origin": str(http.base_url).rstrip("/")}
            answer = http.post("/ui/sign-in", data={"key": key}, headers=origin)

        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert "; secure" in cookie
        assert "; httponly" in cookie
