"""Certificates for tests, made by openssl: an authority, its certificates, and a server that requires them."""

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from tests.servers import RedisServer, binary_of, free_port

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
HAS_OPENSSL = shutil.which("openssl") is not None


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    own: Identity

    def sign(self, name: str) -> Identity:
        """A certificate for this name and for 127.0.0.1."""
        folder = self.own.key.parent
        made = Identity(folder / f"{name}.pem", folder / f"{name}.key")
        request, names = folder / f"{name}.csr", folder / f"{name}.names"
        names.write_text("subjectAltName=IP:127.0.0.1")
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        signer = ("-CA", self.own.certificate, "-CAkey", self.own.key, "-CAcreateserial", "-days", "2")
        _openssl("x509", "-req", "-in", request, *signer, "-extfile", names, "-out", made.certificate)
        return made


def make_authority(folder: Path) -> Authority:
    """Make a new certificate authority."""
    folder.mkdir()
    own = Identity(folder / "ca.pem", folder / "ca.key")
    _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=ca", "-keyout", own.key, "-out", own.certificate)
    return Authority(own)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def url_of(port: int, trusted: Authority | None, own: Identity | None) -> str:
    """Return a rediss:// URL with the client's trusted authority and certificate."""
    files: dict[str, Path] = {}
    if trusted:
        files["ssl_ca_certs"] = trusted.own.certificate
    if own:
        files |= {"ssl_certfile": own.certificate, "ssl_keyfile": own.key}
    return f"rediss://127.0.0.1:{port}?{urlencode(files)}"


def has_tls() -> bool:
    """Whether the system's server was built with TLS (the packaged Valkey and Redis 6.2 are not)."""
    binary = binary_of("redis-7.0")
    return HAS_OPENSSL and binary is not None and b"tls-port" in binary.read_bytes()


@contextmanager
def tls_server(folder: Path, authority: Authority) -> Generator[int]:
    """A Redis 7.0 that asks every client for a certificate of this authority; its port."""
    port, own = free_port(), authority.sign("server")
    files = ("--tls-cert-file", own.certificate, "--tls-key-file", own.key, "--tls-ca-cert-file",
             authority.own.certificate)  # fmt: skip
    extra = ("--tls-port", str(port), *map(str, files), "--tls-auth-clients", "yes")
    server = RedisServer("redis-7.0", folder, extra=extra)
    server.start()
    try:
        yield port
    finally:
        server.kill()
