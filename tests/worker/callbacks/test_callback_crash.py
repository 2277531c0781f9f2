"""A sender of webhooks dies amid a delivery, or rq is away: the event is sent again, under the same id, or later."""

import multiprocessing
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis
from rq import Queue
from rq.registry import StartedJobRegistry
from structlog.testing import LogCapture

from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.rq_workers import work
from sluice.worker.connection.clients import Client, connect
from tests.history.test_recorder import client_of, num_logged, until
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import end_job, mover, settings_for, webhooks_of


class SlowReceiver:
    """It gets a request and does not answer the first one before it is let. Changes with each request."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.may_answer = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the base class's name
                self.rfile.read(int(self.headers["content-length"]))
                receiver.ids.append(self.headers["webhook-id"])
                receiver.may_answer.wait(30)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """The killed process does not receive the answer."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        """Let everybody go."""
        self.may_answer.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hook() -> Generator[SlowReceiver]:
    """A receiver."""
    state = SlowReceiver()
    try:
        yield state
    finally:
        state.close()


def abandon(client: Client, queue: Queue) -> None:
    """Let the time pass after which rq takes a job of a silent worker for abandoned."""
    registry = StartedJobRegistry(queue=queue)
    for member in client.zrange(registry.key, 0, -1):
        client.zadd(registry.key, {member: 1})


class TestGivenASenderThatIsKilledAmidADelivery:
    @pytest.mark.slow
    def test_when_another_comes_then_the_receiver_gets_the_same_event_again(
        self, valkey: RedisServer, hook: SlowReceiver
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey)
        queue = webhooks_of(settings, client)
        end_job(client, hook.url)
        mover(valkey).drain()
        spawn = multiprocessing.get_context("spawn")
        first, second = (spawn.Process(target=work, args=(queue.name, settings), daemon=True) for _ in range(2))
        first.start()
        until(lambda: len(hook.ids) == 1, "the first has begun to send")

        first.kill()
        first.join()
        hook.may_answer.set()
        abandon(client, queue)
        second.start()

        until(lambda: len(hook.ids) == 2, "the second has sent it again")
        second.terminate()
        second.join(20)
        assert len(set(hook.ids)) == 1


class TestGivenAnRqThatIsAwayWhileTheQueueIsThere:
    def test_when_it_is_back_then_the_end_is_delivered(self, valkey: RedisServer, hook: SlowReceiver) -> None:
        client = client_of(valkey)
        end_job(client, hook.url)
        mover_without_rq = Mover(
            client_of(valkey), connect("unix:///nobody/listens", timeout_s=1), settings_for(valkey)
        )
        with pytest.raises(redis.ConnectionError):
            mover_without_rq.drain()

        mover(valkey).drain()

        assert webhooks_of(settings_for(valkey), client).count == 1

    def test_when_the_mover_runs_then_it_reports_rqs_server_once_and_not_the_queues(
        self, valkey: RedisServer, log: LogCapture
    ) -> None:
        end_job(client_of(valkey), "https://example.org/")
        nobody = "unix:///nobody/listens"
        moving = Mover(client_of(valkey), connect(nobody, timeout_s=1), settings_for(valkey))
        thread = threading.Thread(target=moving.run)
        thread.start()
        try:
            until(lambda: num_logged(log, "rq's redis unreachable") == 1, "it is reported")
        finally:
            moving.stop()
            thread.join(timeout=20)

        assert num_logged(log, "rq's redis unreachable") == 1
        assert num_logged(log, "redis unreachable") == 0
