"""TLS with client certificates against a real server: accepted clients, and the errors of the others."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import CertificateRefused, InvalidSetting
from sluice.worker.connection.clients import connect
from sluice.worker.connection.server_checks import wait_until_usable
from sluice.worker.errors import ConfigError, WorkerError
from sluice.worker.log import get_log
from tests.end_to_end.processes import worker_pool
from tests.integration.workers import running_worker
from tests.security.certificates import Authority, has_tls, make_authority, tls_server, url_of

pytestmark = pytest.mark.skipif(not has_tls(), reason="needs openssl and a redis-server built with TLS")


@dataclass(frozen=True, slots=True)
class Guarded:
    """A server that wants certificates of `ours`; `foreign` is another authority."""

    port: int
    ours: Authority
    foreign: Authority

    def url(self, trusted: Authority | None, signer: Authority | None) -> str:
        return url_of(self.port, trusted, signer.sign("client") if signer else None)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as name:
        folder = Path(name)
        ours, foreign = make_authority(folder / "ours"), make_authority(folder / "foreign")
        with tls_server(folder, ours) as port:
            yield Guarded(port, ours, foreign)


WRONG: dict[str, Callable[[Guarded], str]] = {
    "no certificate": lambda server: server.url(server.ours, None),
    "a certificate of another authority": lambda server: server.url(server.ours, server.foreign),
    "a server that is not trusted": lambda server: server.url(server.foreign, server.ours),
    "a server of which nothing is known": lambda server: server.url(None, server.ours),
}
wrong = pytest.mark.parametrize("way", WRONG.values(), ids=WRONG.keys())


class TestGivenACertificateThatIsAccepted:
    async def test_when_both_clients_submit_then_a_worker_behind_tls_does_the_jobs(self, guarded: Guarded) -> None:
        url = guarded.url(guarded.ours, guarded.ours)
        with Producer(url) as producer, running_worker(url):
            async with AsyncProducer(url) as awaiting:
                first = producer.submit("hello", max_tokens=5, ignore_eos=True)
                second = await awaiting.submit("hello", max_tokens=6, ignore_eos=True)

                assert len((await awaiting.result(first, timeout_s=20)).choices[0].token_ids) == 5
                assert sum(len(event.token_ids) for event in producer.stream(second, timeout_s=20)) == 6


class TestGivenACertificateThatIsNot:
    @wrong
    def test_when_a_producer_submits_then_the_error_names_the_files_to_check(
        self, guarded: Guarded, way: Callable[[Guarded], str]
    ) -> None:
        with Producer(way(guarded)) as producer, pytest.raises(CertificateRefused, match="ssl_certfile") as refused:
            producer.submit("hello")

        assert ".. " not in str(refused.value)

    @wrong
    async def test_when_an_async_producer_submits_then_the_error_is_the_same(
        self, guarded: Guarded, way: Callable[[Guarded], str]
    ) -> None:
        async with AsyncProducer(way(guarded)) as producer:
            with pytest.raises(CertificateRefused, match="ssl_certfile"):
                await producer.submit("hello")

    @wrong
    def test_when_a_worker_starts_then_it_says_which_files_to_check(
        self, guarded: Guarded, way: Callable[[Guarded], str]
    ) -> None:
        url = way(guarded)

        # Without a certificate the server may disconnect without a reason: then the worker retries until its timeout.
        with pytest.raises(WorkerError, match="ssl_certfile"):
            wait_until_usable(connect(url, timeout_s=5), url, patience_s=0.3, log=get_log())

    @pytest.mark.long
    def test_when_a_worker_process_starts_with_a_foreign_one_then_it_exits_as_misused(
        self, guarded: Guarded, tmp_path: Path
    ) -> None:
        with worker_pool(guarded.url(guarded.ours, guarded.foreign), tmp_path) as workers:
            worker = workers.start()

            assert worker.wait() == 2
            assert "ssl_certfile" in worker.output


class TestGivenAUrlThatIsWrong:
    @pytest.mark.parametrize("query", ["ssl_ca_certs=/nowhere/ca.pem", "ssl_cert=misspelt.pem"])
    def test_when_it_is_given_then_nothing_is_connected_and_the_name_is_said(self, query: str) -> None:
        url, name = f"rediss://127.0.0.1:1?{query}", query.partition("=")[0]

        with pytest.raises(InvalidSetting, match=name):
            Producer(url)
        with pytest.raises(InvalidSetting, match=name):
            AsyncProducer(url)
        with pytest.raises(ConfigError, match=name):
            connect(url, timeout_s=1)
