"""What tests do with jobs over HTTP."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, TypeVar

import httpx

Found = TypeVar("Found")


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    kind: str
    id: str | None
    data: Any  # JSON


def submitted(client: httpx.Client, **fields: Any) -> str:  # Any: JSON, here and below
    """Submit a job, and return its id."""
    answer = client.post("/jobs", json={"prompt": "once", "max_tokens": 20, **fields})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()["id"]


def unknown_to(tenant: str) -> str:
    """An id that no job has."""
    return f"0.{tenant}.{token_hex(32)}"


def wait_for(found: Callable[[], Found | None]) -> Found:
    """Wait until something is found."""
    deadline_s = time.monotonic() + 20
    while not (value := found()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return value


def ended(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """Wait for a job to end, and return its result."""

    def result() -> dict[str, Any] | None:
        answer = client.get(f"/jobs/{job_id}/result")
        return answer.json() if answer.status_code == 200 else None

    return wait_for(result)


def recorded(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """Wait until the history has the end of a job, and show it."""

    def shown() -> dict[str, Any] | None:
        job = client.get(f"/jobs/{job_id}").json()
        return job if job["history"] is not None and job["history"]["finished_ms"] else None

    return wait_for(shown)


def events_of(client: httpx.Client, job_id: str, last: str | None = None) -> list[Event]:
    """Read the events of a job to the end."""
    headers = {} if last is None else {"last-event-id": last}
    with client.stream("GET", f"/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        return list(parsed(answer.iter_raw()))


def parsed(pieces: Iterator[bytes]) -> Iterator[Event]:
    """Parse server-sent events as a browser does: lines end in LF."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
            yield Event(fields["event"], fields.get("id"), json.loads(fields["data"]))


def texts(events: list[Event], num_choices: int = 1) -> list[str]:
    """The text of each choice."""
    outputs = [event.data for event in events if event.kind == "output"]
    return ["".join(one["text"] for one in outputs if one["choice"] == choice) for choice in range(num_choices)]


def tokens(events: list[Event], num_choices: int = 1) -> list[list[int]]:
    """The tokens of each choice."""
    outputs = [event.data for event in events if event.kind == "output"]
    return [
        [token for one in outputs if one["choice"] == choice for token in one["token_ids"]]
        for choice in range(num_choices)
    ]
