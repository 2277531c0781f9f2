"""Compare the requests that a receiver of webhooks recorded with the callbacks of jobs (docs/guide/callbacks.md).

Notes are lines of JSON, one for each request: `{"at_ms": …, "headers": {…}, "body": "…", "answered": 200}`.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCE_S = 300
"""A receiver drops what was signed longer ago."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request that a receiver got."""

    event_id: str
    kind: str
    job_id: str
    state: str
    is_signed: bool
    is_taken: bool
    """Whether the receiver answered with 2xx; otherwise it must be sent again."""


Deliveries = Mapping[str, Sequence[Delivery]]
"""By job, in order."""


def read_deliveries(path: Path, secret: str) -> Deliveries:
    """Read a receiver's notes.

    Args:
        path: The notes.
        secret: `whsec_<base64>`, from which the keys derive with which they are to be signed.
    """
    key = base64.b64decode(secret.removeprefix("whsec_"))
    found: dict[str, list[Delivery]] = {}
    for line in path.read_text().splitlines():
        one = _delivery(json.loads(line), key)
        found.setdefault(one.job_id, []).append(one)
    return found


def _delivery(note: Mapping[str, Any], key: bytes) -> Delivery:
    headers = {name.lower(): value for name, value in note["headers"].items()}
    event = json.loads(note["body"])
    tenant = event["data"]["job_id"].split(".")[1]
    key = hmac.digest(key, f"sluice webhooks of tenant {tenant}".encode(), hashlib.sha256)
    is_signed = event["id"] == headers["webhook-id"] and _is_signed(headers, note["body"], note["at_ms"] / 1000, key)
    is_taken = 200 <= note["answered"] < 300
    return Delivery(
        headers["webhook-id"], event["type"], event["data"]["job_id"], event["data"]["state"], is_signed, is_taken
    )


def _is_signed(headers: Mapping[str, str], body: str, at_s: float, key: bytes) -> bool:
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
    right = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    is_fresh = abs(at_s - int(headers["webhook-timestamp"])) < TOLERANCE_S
    return is_fresh and right in headers["webhook-signature"].split()


def check_deliveries(state: str, deliveries: Sequence[Delivery]) -> Iterator[str]:
    """Yield findings about the callbacks of an ended job that has a callback."""
    if not any(one.is_taken for one in deliveries):
        yield f"callback: it wanted one, and of {len(deliveries)} none arrived"
    if len({one.event_id for one in deliveries}) > 1:
        yield f"callback: its end came under {sorted({one.event_id for one in deliveries})}"
    if not all(one.is_signed for one in deliveries):
        yield "callback: one came with a wrong signature"
    reported = {(one.kind, one.state) for one in deliveries}
    if reported - {(f"job.{state}", state)}:
        yield f"callback: {sorted(reported)} was reported for a job that is {state}"


def check_unasked(deliveries: Deliveries, wanted: set[str]) -> Iterator[tuple[str, str]]:
    """Yield deliveries of jobs without a callback, and of unknown jobs."""
    for job_id in deliveries.keys() - wanted:
        yield job_id, "callback: one came that was not requested"
