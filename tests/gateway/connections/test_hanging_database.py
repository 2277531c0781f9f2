"""A database that hangs: requests that need it are refused in time, and nothing else waits for it."""

import asyncio
import signal
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from sluice.gateway.threads import Threads
from sluice.history.database import open_database
from sluice.producer.errors import HistoryUnavailable
from sluice.worker.recorder.migrate import migrate
from tests.gateway.gateway_process import gateway_process
from tests.postgres import HOW_TO_GET, PostgresServer, has_postgres, postgres_server
from tests.servers import RedisServer

NUM_CLIENTS = 30
DRAIN_S = 1.0


@contextmanager
def hanging(server: PostgresServer) -> Generator[None]:
    """A server whose processes all stand still."""
    postmaster = psutil.Process(server.handle.get_pid())
    stopped = [postmaster, *postmaster.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            process.resume()


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.skipif(not has_postgres(), reason=HOW_TO_GET)
@pytest.mark.long  # it waits for time limits
class TestGivenAGatewayWhosePostgresHangs:
    def test_when_clients_ask_and_it_is_to_end_then_nothing_waits_for_long(self, queue_server: RedisServer) -> None:
        with postgres_server() as postgres:
            url = postgres.url(postgres.create_database())
            engine = open_database(url, is_writer=True)
            migrate(engine)
            engine.dispose()
            with (
                gateway_process(queue_server.url, "--drain-limit", str(DRAIN_S), database_url=url) as gateway,
                gateway.http() as http,
                ThreadPoolExecutor(NUM_CLIENTS) as clients,
            ):
                path = f"/v1/responses/{http.post('/v1/responses', json={'input': 'x'}).json()['id']}"
                job_id = http.post("/jobs", json={"prompt": "x"}).json()["id"]
                with hanging(postgres):
                    asked = [clients.submit(gateway.get, path) for _ in range(NUM_CLIENTS)]
                    ready = http.get("/readyz")
                    answered = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
                    shown = http.get(f"/jobs/{job_id}")
                    refused = [one.result() for one in asked]
                    late = clients.submit(httpx.get, gateway.url.removesuffix("/v1") + path, timeout=30)
                    gateway.process.send_signal(signal.SIGTERM)
                    began_s = time.monotonic()
                    status = gateway.process.wait(20)
                    took_s = time.monotonic() - began_s
                    late.exception()

        assert (ready.status_code, answered.status_code, shown.status_code) == (200, 200, 200)
        assert ready.elapsed.total_seconds() < 3
        assert {one.status_code for one in refused} == {503}
        assert {one.json()["error"]["code"] for one in refused} == {"database_unavailable"}
        assert all("retry-after" in one.headers for one in refused)
        assert max(one.elapsed.total_seconds() for one in refused) < 7
        assert status == 0
        assert took_s < DRAIN_S + 3


class TestGivenThreadsWhoseCallsHang:
    async def test_when_one_is_late_or_too_many_wait_then_they_fail_and_the_rest_goes_on(self) -> None:
        threads = Threads("it", HistoryUnavailable, num_threads=1, max_waiting=1, limit_s=0.5)
        begun, release, was_run = threading.Event(), threading.Event(), threading.Event()

        running = asyncio.create_task(threads.run(lambda: (begun.set(), release.wait())))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.create_task(threads.run(was_run.set))
        await asyncio.sleep(0)
        with pytest.raises(HistoryUnavailable, match="wait already"):
            await threads.run(len, "abc")
        late = await asyncio.gather(running, waiting, return_exceptions=True)
        release.set()
        answer = await threads.run(len, "abc")

        assert [type(one) for one in late] == [HistoryUnavailable] * 2
        assert answer == 3
        assert not was_run.is_set()
