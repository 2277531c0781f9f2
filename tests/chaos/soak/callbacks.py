"""The soak's receiver of callbacks, which records each request, and the wait for pending deliveries.

`tests.chaos.checker` reads the notes.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rq import Queue
from rq.registry import ScheduledJobRegistry, StartedJobRegistry
from rq.scheduler import RQScheduler

from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.settings import CallbackSettings
from tests.chaos.soak.fleet import Fleet
from tests.integration.jobs import KEYS

SECRET = "whsec_c29ha2VkIHRvIHRoZSBib25lLCBhbmQgc2lnbmVk"
REFUSED_SHARE = 0.05
LONGEST_ANSWER_S = 0.3
"""So that senders are killed amid deliveries."""

STILL_S = 3.0
"""Deliveries have stopped if nothing changed for this long: one takes less."""

START_S = 12.0
"""For senders to start, on a busy machine."""


@contextmanager
def receiver(notes: Path, seed: int) -> Generator[str]:
    """A server on loopback, by its URL. It takes its time, and refuses some; each request is a line of JSON in `notes`.

    A line: `{"at_ms": …, "headers": {…}, "body": "…", "answered": 200}`, written before the answer goes out.
    """
    dice, lock = random.Random(seed), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class's name
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                status, wait_s = 503 if dice.random() < REFUSED_SHARE else 200, dice.uniform(0, LONGEST_ANSWER_S)
            time.sleep(wait_s)
            note = {"at_ms": time.time() * 1000, "headers": dict(self.headers), "body": body.decode()}
            with lock, notes.open("a") as file:
                file.write(json.dumps({**note, "answered": status}) + "\n")
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Reply; a sender that was killed does not receive it."""

    notes.touch()
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        finally:
            server.shutdown()


def deliver_all(client: Any, callbacks: Fleet, *, patience_s: float) -> None:  # Any: a redis-py client
    """Wait until every callback was delivered or moved to the dead callbacks.

    rq considers a killed sender's job abandoned after a minute, and checks every ten. The function moves rq's
    timestamps back instead of waiting, and restarts the processes, since a new sender checks at once.
    """
    names = CallbackSettings(redis_url="", rq_url="", database_url="", queue=KEYS.queue).rq_names
    queue = rq_queue(names.webhooks, client)
    until_s, still_since_s = time.monotonic() + patience_s, time.monotonic()
    before = left = _left(client, queue)
    while any(left.values()):
        assert time.monotonic() < until_s, f"not delivered: {left}"
        if left != before or left["waiting"]:
            still_since_s = time.monotonic()
        elif time.monotonic() > still_since_s + STILL_S:
            _let_time_pass(client, queue)
            _start_again(callbacks)
            still_since_s = time.monotonic() + START_S
        time.sleep(0.1)
        before, left = left, _left(client, queue)


def _start_again(callbacks: Fleet) -> None:
    for member in callbacks.members:
        with suppress(ProcessLookupError):
            member.signal(signal.SIGTERM)


def _left(client: Any, queue: Queue) -> dict[str, int]:
    """Count undelivered callbacks by place."""
    begun, due = StartedJobRegistry(queue=queue), ScheduledJobRegistry(queue=queue)
    return {
        "with the queue": int(client.xlen(KEYS.callbacks)),
        "waiting": int(client.llen(queue.key)),
        "taken": int(client.llen(queue.intermediate_queue_key)),
        "begun": int(client.zcard(begun.key)),
        "for another try": int(client.zcard(due.key)),
    }


def _let_time_pass(client: Any, queue: Queue) -> None:
    for registry in (StartedJobRegistry(queue=queue), ScheduledJobRegistry(queue=queue)):
        for member in client.zrange(registry.key, 0, -1):
            client.zadd(registry.key, {member: 1}, xx=True)
    for job_id in queue.intermediate_queue.get_job_ids():
        client.set(queue.intermediate_queue.get_first_seen_key(job_id), 1.0)
    # A killed process may still hold these locks, and the movers are restarted next.
    client.delete(queue.registry_cleaning_key, RQScheduler.get_locking_key(queue.name))
