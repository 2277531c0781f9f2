"""One client of the gateway: `python -m tests.chaos.network.posting …`, until SIGTERM. It journals what was confirmed.

It posts each job with the same id until the gateway confirms it at the durability of the queue, then follows every
fourth to its end over server-sent events, across disconnects, and notes each output that is not the undisturbed one.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tests.chaos.catalogue import Ask, Intent, JournalWriter, catalogue_of
from tests.chaos.checker.evidence import Reference, read_reference
from tests.integration.jobs import new_job_id

TRY_S = 10.0
"""Longest wait for the gateway's next byte."""

RETRY_S = 0.2
FOLLOWED = 4
"""Every so many jobs, one is followed."""

REPEATED = frozenset({408, 429, 500, 502, 503, 504})


class Poster:
    """Posts jobs of a catalogue, one at a time."""

    def __init__(self, http: httpx.Client, journal: JournalWriter, reference: Reference, notes: Path) -> None:
        self._http = http
        self._journal = journal
        self._reference = reference
        self._notes = notes

    def post(self, number: int, ask: Ask) -> str:
        """Submit until it is confirmed; return its id."""
        job_id = new_job_id("default")
        self._journal.intend([Intent(asked=job_id, ask=number)])
        body: dict[str, Any] = {**ask.options, "job_id": job_id, "priority": 2}  # Any: JSON
        body["prompt" if isinstance(ask.prompt, str) else "messages"] = ask.prompt
        while not self._is_confirmed(body):
            time.sleep(RETRY_S)
        self._journal.acknowledge([job_id])
        return job_id

    def _is_confirmed(self, body: Mapping[str, Any]) -> bool:
        try:
            answer = self._http.post("/jobs", json=body)
        except httpx.TransportError:
            return False
        if answer.status_code in REPEATED:
            return False
        answer.raise_for_status()
        return not answer.json()["is_less_durable"]

    def follow(self, job_id: str, number: int) -> None:
        """Read a job's events to its end, and note what differs from the undisturbed run."""
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        for event in self._events(job_id):
            choice = int(event.get("choice", 0))
            if event["start"] != len(tokens.setdefault(choice, [])):
                self._note(job_id, f"choice {choice} goes on at {event['start']} after {len(tokens[choice])}")
            tokens[choice] += event["token_ids"]
            texts[choice] = texts.get(choice, "") + event["text"]
        for choice, expected in enumerate(self._reference[str(number)]):
            if (tuple(tokens.get(choice, ())), texts.get(choice, "")) != (expected.ids, expected.text):
                self._note(job_id, f"choice {choice} was read as {texts.get(choice)!r}, and is {expected.text!r}")

    def _events(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Each output event, over as many connections as it takes."""
        last: str | None = None
        while last != "end":
            headers = {} if last is None else {"last-event-id": last}
            try:
                with self._http.stream("GET", f"/jobs/{job_id}/events", headers=headers) as answer:
                    for name, place, data in _read_events(answer.iter_lines()):
                        last = place or last
                        if name == "output":
                            yield data
            except httpx.TransportError:
                pass
            if last != "end":
                time.sleep(RETRY_S)

    def _note(self, job_id: str, what: str) -> None:
        with self._notes.open("a") as notes:
            notes.write(f"{job_id}: {what}\n")


def _read_events(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, id and data of each server-sent event."""
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "data" in found:
            yield found.get("event", ""), found.get("id", ""), json.loads(found["data"])
            found = {}


def main() -> int:
    """Post until SIGTERM."""
    given = _arguments()
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    dice, asks = random.Random(given.seed), catalogue_of(given.catalogue)
    headers = {"authorization": f"Bearer {given.api_key}"}
    with (
        httpx.Client(base_url=given.url, headers=headers, timeout=TRY_S) as http,
        JournalWriter(given.journal) as journal,
    ):
        poster = Poster(http, journal, read_reference(given.reference), given.notes)
        while not stopping.wait(dice.expovariate(given.jobs_per_s)):
            number = dice.randrange(len(asks))
            job_id = poster.post(number, asks[number])
            if dice.randrange(FOLLOWED) == 0:
                poster.follow(job_id, number)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Post jobs to the gateway until SIGTERM.")
    parser.add_argument("--url", required=True, help="of the gateway")
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True, help="what an undisturbed run said")
    parser.add_argument("--notes", type=Path, required=True, help="where to note outputs that differ from it")
    parser.add_argument("--catalogue", required=True, help="seed:size:max_tokens of the asks")
    parser.add_argument("--jobs-per-s", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
