"""A gateway with a certificate."""

import ssl
from pathlib import Path

import httpx
import pytest

from sluice.producer.cli.main import main
from tests.gateway.gateway_process import gateway_process
from tests.security.certificates import HAS_OPENSSL, Authority, make_authority
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_OPENSSL, reason="needs openssl")]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs the gateway's certificate."""
    return make_authority(tmp_path / "authority")


class TestGivenACertificate:
    def test_when_it_is_served_then_plain_http_is_not(self, valkey: RedisServer, authority: Authority) -> None:
        own = authority.sign("gateway")
        files = ("--tls-cert", str(own.certificate), "--tls-key", str(own.key))
        trusting = ssl.create_default_context(cafile=authority.own.certificate)

        with gateway_process(valkey.url, *files) as gateway:
            assert gateway.url.startswith("https://")
            with httpx.Client(verify=trusting) as http:
                assert http.get(f"{gateway.url}/models").status_code == 200
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"), httpx.Client() as http:
                http.get(f"{gateway.url}/models")
            with pytest.raises(httpx.RemoteProtocolError), httpx.Client() as http:
                http.get(f"{gateway.url}/models".replace("https", "http"))

    @pytest.mark.parametrize("wrong", ["missing", "another's", "one only"])
    def test_when_its_files_do_not_fit_then_the_gateway_says_so_and_ends(
        self, wrong: str, valkey: RedisServer, authority: Authority, capsys: pytest.CaptureFixture[str]
    ) -> None:
        own, other = authority.sign("gateway"), authority.sign("other")
        files = {
            "missing": ["--tls-cert", "/nowhere/cert.pem", "--tls-key", str(own.key)],
            "another's": ["--tls-cert", str(own.certificate), "--tls-key", str(other.key)],
            "one only": ["--tls-cert", str(own.certificate)],
        }

        with pytest.raises(SystemExit) as ended:
            main(["serve", "--port", "0", "--redis-url", valkey.url, *files[wrong]])

        assert ended.value.code == 2
        assert "--tls-key" in capsys.readouterr().err
