"""Webhooks against a real HTTP server: signed, never redirected, never to where they must not go."""

import contextlib
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.producer import BadSignature, verify_webhook
from sluice.protocol.webhooks import sign
from sluice.worker.callbacks.webhooks import Sender, WebhookFailed, WebhookRefused, is_allowed, parse_networks
from sluice.worker.clock import monotonic_s
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError
from tests.worker.callbacks.receiver import Receiver, receiver

LOOPBACK = parse_networks("127.0.0.0/8")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def hook() -> Generator[Receiver]:
    """A receiver."""
    with receiver() as state:
        yield state


def sender(**changes: object) -> Sender:
    """One that may reach loopback."""
    usual: dict[str, object] = {"secrets": SECRET, "timeout_s": 2.0, "networks": LOOPBACK}
    return Sender(**usual | changes)  # pyright: ignore[reportArgumentType]  # settings by name


class TestGivenAReceiver:
    """It checks signatures, as it should."""

    def test_when_an_event_is_sent_then_its_signature_is_right(self, hook: Receiver) -> None:
        status = sender().send(hook.url, "evt_1", b'{"id":"evt_1"}')

        headers, body = hook.got[0]
        assert status == 200
        assert verify_webhook(SECRET, headers, body) == "evt_1"
        assert hook.paths == ["/hook?of=sluice"]

    def test_when_the_secret_is_another_then_verify_refuses(self, hook: Receiver) -> None:
        sender().send(hook.url, "evt_1", b"{}")

        headers, body = hook.got[0]
        with pytest.raises(BadSignature, match="no signature"):
            verify_webhook("whsec_AAAA", headers, body)

    def test_when_keys_are_being_exchanged_then_either_verifies(self, hook: Receiver) -> None:
        sender(secrets="old new").send(hook.url, "evt_1", b"{}")

        headers, body = hook.got[0]
        assert verify_webhook("old", headers, body) == verify_webhook("new", headers, body) == "evt_1"

    @pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
    def test_when_it_answers_with_an_error_then_a_later_try_may_help(self, hook: Receiver, status: int) -> None:
        hook.answers.append(status)

        with pytest.raises(WebhookFailed, match=str(status)):
            sender().send(hook.url, "evt_1", b"{}")

    def test_when_it_is_gone_for_good_then_there_is_no_other_try(self, hook: Receiver) -> None:
        hook.answers.append(410)

        with pytest.raises(WebhookRefused, match="410"):
            sender().send(hook.url, "evt_1", b"{}")

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_when_it_points_elsewhere_then_it_is_not_followed(self, hook: Receiver, status: int) -> None:
        hook.answers.append(status)

        with pytest.raises(WebhookFailed, match=str(status)):
            sender().send(hook.url, "evt_1", b"{}")

        assert len(hook.got) == 1

    def test_when_nothing_listens_then_a_later_try_may_help(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]

            with pytest.raises(WebhookFailed, match="ConnectionRefused"):
                sender().send(f"http://127.0.0.1:{port}/", "evt_1", b"{}")

    def test_when_it_never_answers_then_the_wait_is_bounded(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]

            with pytest.raises(WebhookFailed, match="timed out"):
                sender(timeout_s=0.1).send(f"http://127.0.0.1:{port}/", "evt_1", b"{}")

    @pytest.mark.parametrize("dripped", [b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n", b""], ids=["status", "headers", "body"])
    def test_when_it_drips_then_the_whole_delivery_is_bounded(self, dripped: bytes) -> None:
        head = b"" if dripped.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 3
        rest = dripped or b"content-length: 4000\r\n\r\n"
        with socket.create_server(("127.0.0.1", 0)) as server:
            drip = threading.Thread(target=_drip, args=(server, head + (rest if not dripped else b"")))
            drip.start()

            begin_s = monotonic_s()
            with pytest.raises(WebhookFailed, match="timed out"):
                sender(timeout_s=0.5).send(f"http://127.0.0.1:{server.getsockname()[1]}/", "evt_1", b"{}")
            took_s = monotonic_s() - begin_s
            drip.join()

        assert took_s < 20  # it would drip for 60 s

    @pytest.mark.parametrize("path", ["/h\N{LATIN SMALL LETTER E WITH ACUTE}?q=\N{EURO SIGN}", "/a b", "/100%25"])
    def test_when_its_path_has_other_characters_then_they_are_sent_as_utf8(self, hook: Receiver, path: str) -> None:
        sender().send(hook.url.replace("/hook?of=sluice", path), "evt_1", b"{}")

        assert hook.paths == [quote(path, safe="/?=%")]


def _drip(server: socket.socket, first: bytes) -> None:
    """Answer with `first` at once, and then with one byte at a time, until the other end has gone or for a minute."""
    connection, _ = server.accept()
    gone = threading.Event()
    with connection, contextlib.suppress(OSError):
        connection.sendall(first)
        for _ in range(600):
            connection.sendall(b"H")
            gone.wait(0.1)


class TestGivenKeysThatSignNothing:
    @pytest.mark.parametrize("secrets", ["", " ", "whsec_", "good whsec_", "whsec_abc", "whsec_%%%%"])
    def test_when_they_are_used_then_they_are_refused(self, secrets: str) -> None:
        signed = sign("x", event_id="e", timestamp_s=1, body=b"")

        with pytest.raises(ValueError, match="key"):
            sign(secrets, event_id="e", timestamp_s=1, body=b"")
        with pytest.raises(ValueError, match="key"):
            verify_webhook(secrets, signed, b"", now_s=1)

    @pytest.mark.parametrize("secrets", [" ", "whsec_", "whsec_abc"])
    def test_when_a_process_starts_with_them_then_it_says_so(self, secrets: str) -> None:
        with pytest.raises(ConfigError, match=r"SLUICE_CALLBACKS_SECRET: .*key") as error:
            load_config({"SLUICE_CALLBACKS_SECRET": secrets})

        assert "abc" not in str(error.value)


class TestGivenAUrlFromAStranger:
    """It must not reach what only this machine can."""

    @pytest.mark.parametrize(
        "url",
        [
            "http://127.0.0.1/",
            "http://localhost/",
            "http://[::1]/",
            "http://2130706433/",
            "http://169.254.169.254/latest",
        ],
    )
    def test_when_it_names_a_private_place_then_it_is_refused(self, url: str) -> None:
        with pytest.raises(WebhookRefused, match="not public"):
            Sender(secrets=SECRET).send(url, "evt_1", b"{}")

    @pytest.mark.parametrize(
        "url",
        ["ftp://example.org/", "http://", "http://user:word@example.org/", "http://example.org:99999/", "nonsense"],
    )
    def test_when_it_is_no_url_of_a_receiver_then_it_is_refused(self, url: str) -> None:
        with pytest.raises(WebhookRefused):
            Sender(secrets=SECRET).send(url, "evt_1", b"{}")

    @pytest.mark.parametrize(
        "address",
        [
            "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "fe80::1",
            "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1", "::", "168.63.129.16",
            "192.0.0.192", "192.0.0.9", "192.88.99.1", "64:ff9b:1::7f00:1", "64:ff9b:1::5db8:d822", "fec0::1",
            "::127.0.0.1", "::93.184.216.34", "5f00::1", "2002:a83f:8110::", "64:ff9b::a83f:8110",
        ],
    )  # fmt: skip
    def test_when_an_address_is_not_public_then_it_is_not_allowed(self, address: str) -> None:
        assert not is_allowed(address)

    @pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
    def test_when_an_address_is_public_then_it_is_allowed(self, address: str) -> None:
        assert is_allowed(address)

    def test_when_its_network_is_allowed_then_it_may_be_reached(self) -> None:
        networks = parse_networks("10.0.0.0/8, fd00::/8")

        assert is_allowed("10.9.9.9", networks)
        assert is_allowed("fd00::5", networks)
        assert not is_allowed("192.168.0.1", networks)

    @given(st.ip_addresses())
    def test_when_an_address_is_not_global_then_it_is_never_allowed(
        self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    ) -> None:
        assert ip.is_global or not is_allowed(str(ip))

    def test_when_its_name_changes_its_meaning_then_the_address_that_was_checked_is_used(
        self, hook: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        resolve, asked = socket.getaddrinfo, list[str]()

        def lying(host: str, *rest: Any, **more: Any) -> Any:  # as the resolver it stands for
            if host != "rebinding.test":
                return resolve(host, *rest, **more)
            asked.append(host)
            return resolve("127.0.0.1" if len(asked) == 1 else "169.254.169.254", *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", lying)

        sender().send(hook.url.replace("127.0.0.1", "rebinding.test"), "evt_1", b"{}")

        assert asked == ["rebinding.test"]
        assert hook.got[0][0]["Host"].startswith("rebinding.test:")


class TestGivenAReceiverWithACertificate:
    """Of localhost, by an authority that the machine trusts."""

    @pytest.fixture
    def certified(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ssl.SSLContext]:
        """Make a server's context with a certificate for a name, and trust it."""

        def make(name: str) -> ssl.SSLContext:
            key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
            subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
            kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
            command = ["openssl", "req", *kind, *subject, "-keyout", str(key), "-out", str(certificate)]
            subprocess.run(command, check=True, capture_output=True)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            return context

        if shutil.which("openssl") is None:
            pytest.skip("needs openssl: apt-get install openssl")
        return make

    def test_when_the_certificate_is_the_hosts_then_the_event_arrives(
        self, certified: Callable[[str], ssl.SSLContext]
    ) -> None:
        with receiver(certified("localhost")) as hook:
            sender(networks=parse_networks("127.0.0.0/8,::1")).send(hook.url, "evt_1", b"{}")

            assert len(hook.got) == 1

    def test_when_the_certificate_is_anothers_then_nothing_is_sent(
        self, certified: Callable[[str], ssl.SSLContext]
    ) -> None:
        with receiver(certified("example.org")) as hook:
            with pytest.raises(WebhookFailed, match="certificate"):
                sender(networks=parse_networks("127.0.0.0/8,::1")).send(hook.url, "evt_1", b"{}")

            assert hook.got == []


class TestGivenASignature:
    """Of one body at one time."""

    @given(
        body=st.binary(max_size=200), other=st.binary(max_size=200), secret=st.text(alphabet="abcDEF123", min_size=1)
    )
    def test_when_the_body_differs_then_verify_refuses(self, body: bytes, other: bytes, secret: str) -> None:
        headers = sign(secret, event_id="evt_1", timestamp_s=1000, body=body)

        assert verify_webhook(secret, headers, body, now_s=1000) == "evt_1"
        if other != body:
            with pytest.raises(BadSignature):
                verify_webhook(secret, headers, other, now_s=1000)

    @pytest.mark.parametrize("now_s", [1301, 699])
    def test_when_it_is_old_or_early_then_verify_refuses(self, now_s: float) -> None:
        headers = sign("s", event_id="evt_1", timestamp_s=1000, body=b"")

        with pytest.raises(BadSignature, match="too old"):
            verify_webhook("s", headers, b"", now_s=now_s)

    @pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
    def test_when_a_header_is_missing_then_verify_refuses(self, missing: str) -> None:
        headers = sign("s", event_id="evt_1", timestamp_s=1000, body=b"")
        del headers[missing]

        with pytest.raises(BadSignature, match="header"):
            verify_webhook("s", headers, b"", now_s=1000)

    def test_when_signed_with_the_published_example_then_it_is_the_published_signature(self) -> None:
        """The example of the Standard Webhooks reference libraries' tests."""
        headers = sign(
            SECRET, event_id="msg_p5jXN8AQM9LWM0D4loKWxJek", timestamp_s=1614265330, body=b'{"test": 2432232314}'
        )

        assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
