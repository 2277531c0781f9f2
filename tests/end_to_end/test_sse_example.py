"""The example backend over HTTP: uvicorn, a worker process and the embedded server, read as by a browser."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sluice.producer.client import Producer
from sluice.producer.operations.operation import Ask, Operation
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis import embedded
from sluice.protocol.wire import JobId
from tests.end_to_end.processes import ROOT, START_TIMEOUT_S, worker_pool
from tests.servers import binary_of, how_to_get

MAX_TOKENS = 120
CUT_AFTER_EVENTS = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey")),
]


@dataclass(frozen=True)
class ServerSentEvent:
    """One event, as a browser's EventSource sees it."""

    id: str
    kind: str
    data: dict[str, object]


def events_of(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """The events of a stream, each ended by an empty line."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        else:
            yield ServerSentEvent(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}


def expire_output(job_id: JobId) -> Operation[None]:
    """Delete a job's output, as its time to live does."""
    keys = QueueKeys("default")
    yield Ask((("DEL", keys.result(job_id), keys.channel(job_id, 0)),))


def text_of(events: list[ServerSentEvent]) -> str:
    """The text of these events."""
    return "".join(str(event.data["text"]) for event in events)


def wait_for_address(backend: subprocess.Popen[bytes], log: Path) -> str:
    """Read the loopback address that uvicorn chose from its log."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())) is None:
        assert backend.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)
    return found[1]


@dataclass(frozen=True)
class Site:
    """The running example: a browser's client, a producer next to it, and what the backend logs."""

    browser: httpx.Client
    producer: Producer
    log: Path

    def submit(self) -> str:
        """Submit through the example's endpoint and return the job's id."""
        answer = self.browser.post("/jobs", json={"prompt": "Once upon a time", "max_tokens": MAX_TOKENS})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def read(self, job_id: str, *, last_event_id: str | None = None, at_most: int = 10_000) -> list[ServerSentEvent]:
        """Read events, and disconnect after `at_most`."""
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        read: list[ServerSentEvent] = []
        with self.browser.stream("GET", f"/jobs/{job_id}/events", headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for event in events_of(response):
                read.append(event)
                if len(read) == at_most:
                    break
        return read


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("sse")
    state, log = folder / "state", folder / "backend.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    command = [sys.executable, "-m", "uvicorn", "docs.examples.sse:app", "--host", "127.0.0.1", "--port", "0"]
    url = embedded.ensure(state).url
    try:
        with worker_pool(url, folder) as workers, log.open("wb") as stream, Producer(url) as producer:
            backend = subprocess.Popen(
                command, cwd=ROOT, env=environment | {"SLUICE_STATE_DIR": str(state)}, stdout=stream, stderr=stream
            )
            try:
                workers.start_all(1, MODEL="null?step_s=0.005")
                with httpx.Client(base_url=wait_for_address(backend, log), timeout=30, trust_env=False) as browser:
                    yield Site(browser, producer, log)
            finally:
                backend.send_signal(signal.SIGINT)
                backend.wait(timeout=START_TIMEOUT_S)
    finally:
        embedded.stop(state)


class TestGivenTheExampleBackend:
    def test_when_a_browser_reconnects_then_it_has_received_every_token_once(self, site: Site) -> None:
        job_id = site.submit()

        before = site.read(job_id, at_most=CUT_AFTER_EVENTS)
        after = site.read(job_id, last_event_id=before[-1].id)

        places = [int(event.id.split(":")[0]) for event in before + after[:-1]]
        assert len(before) == CUT_AFTER_EVENTS
        assert before[-1].data["is_end"] is False
        assert places[CUT_AFTER_EVENTS] > places[CUT_AFTER_EVENTS - 1]
        assert places == sorted(places)
        assert [event.data["is_end"] for event in after] == [False] * (len(after) - 1) + [True]
        assert text_of(before + after) == site.producer.result(job_id, timeout_s=30).choices[0].text

    def test_when_a_job_has_ended_then_its_stream_is_whole_and_the_browser_stays_away(self, site: Site) -> None:
        job_id = site.submit()
        result = site.producer.result(job_id, timeout_s=30)

        whole = site.read(job_id)
        again = site.browser.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": whole[-1].id})

        assert text_of(whole) == result.choices[0].text
        assert again.status_code == 204

    def test_when_a_job_was_cancelled_then_the_browser_is_told_and_stays_away(self, site: Site) -> None:
        job_id = site.submit()
        site.producer.cancel(job_id)

        events = site.read(job_id)
        again = site.browser.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": events[-1].id})

        assert events[-1].kind == "failed"
        assert again.status_code == 204

    def test_when_the_output_has_expired_then_it_is_gone(self, site: Site) -> None:
        job_id = site.submit()
        site.producer.result(job_id, timeout_s=30)
        site.producer.run(expire_output(JobId(job_id)))

        answer = site.browser.get(f"/jobs/{job_id}/events")

        assert answer.status_code == 410

    def test_when_the_job_is_unknown_then_it_is_not_found(self, site: Site) -> None:
        unknown = site.submit()[:-4] + "0000"

        answer = site.browser.get(f"/jobs/{unknown}/events")

        assert answer.status_code == 404
        assert unknown in answer.json()["detail"]

    @pytest.mark.parametrize("job_id", ["nonsense", "0.default."])
    def test_when_the_id_is_not_one_then_it_is_not_found(self, site: Site, job_id: str) -> None:
        answer = site.browser.get(f"/jobs/{job_id}/events")

        assert answer.status_code == 404

    def test_when_a_value_is_wrong_then_the_answer_says_which(self, site: Site) -> None:
        answer = site.browser.post("/jobs", json={"prompt": "Once upon a time", "max_tokens": -1})

        assert answer.status_code == 422
        assert "max_tokens" in answer.json()["detail"]

    def test_when_the_cursor_is_not_one_then_the_answer_says_so(self, site: Site) -> None:
        answer = site.browser.get(f"/jobs/{site.submit()}/events", headers={"Last-Event-ID": "not-a-place"})

        assert answer.status_code == 400
        assert "not-a-place" in answer.json()["detail"]

    def test_when_browsers_disconnect_then_the_backend_logs_no_error(self, site: Site) -> None:
        site.read(site.submit(), at_most=1)

        whole = site.read(site.submit())

        assert whole[-1].data["is_end"] is True
        assert "Traceback" not in site.log.read_text()
