"""Webhook events of jobs and batches. Knows no queue and no HTTP."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.protocol.calls import BatchView
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import decode_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One webhook to send. A repeated read of the same end gives the same event with the same id."""

    id: str
    url: str
    subject: str
    """The job or batch that has ended."""

    body: str

    @classmethod
    def of(cls, url: str, kind: str, at_ms: int, data: Mapping[str, object], *, of_what: str) -> "Event":
        """Make an event. Its id is a hash of `of_what`, which identifies the end."""
        event_id = f"evt_{hashlib.sha256(of_what.encode()).hexdigest()[:32]}"
        body = {"id": event_id, "type": kind, "created_at_ms": at_ms, "data": data}
        subject = str(data.get("job_id") or data.get("batch"))
        return cls(
            id=event_id, url=url, subject=subject, body=json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        )


def owner_of(body: str) -> tuple[str, str]:
    """Return queue and tenant of an event's body. Batches and other bodies have no tenant: it is empty."""
    try:
        data = json.loads(body)["data"]
        return str(data["queue"]), split_job_id(str(data["job_id"]))[1]
    except (ValueError, KeyError, TypeError):
        return "", ""


def job_event(keys: QueueKeys, fields: Mapping[str, str], spec_data: bytes) -> Event | None:
    """Make the event of a job's end; None if the job has no callback URL.

    Raises:
        WireError, KeyError, ValueError: the entry is malformed.
    """
    spec = decode_spec(spec_data)
    if spec.callback_url is None:
        return None
    job_id, state, version = fields["id"], fields["state"], int(fields["version"])
    data = {
        "job_id": job_id,
        "queue": keys.queue,
        "state": state,
        "error": fields.get("error") or None,
        "batch": spec.batch or fields.get("batch") or None,
        "model": spec.model,
        "metadata": dict(spec.metadata),
        "custom_id": fields.get("custom_id") or None,
        "line": int(fields.get("line") or 0) or None,
    }
    # With the submit time, because an id may be used again.
    of_what = f"{job_id} {version} {fields['submitted']}"
    return Event.of(spec.callback_url, f"job.{state}", int(fields["at"]), data, of_what=of_what)


def batch_event(queue: str, batch: BatchView, completed_ms: int, url: str) -> Event:
    """Make the event of a completed batch for one URL. Every partition that reports the end makes the same event."""
    totals = {name: getattr(batch, name) for name in ("total", "done", "failed", "cancelled", "expired")}
    data = {"batch": batch.id, "queue": queue, "jobs": totals}
    return Event.of(url, "batch.completed", completed_ms, data, of_what=f"{queue} {batch.id} {completed_ms} {url}")
