"""Events of an outbox, made by hand: in the shape in which the scripts write them."""

from collections.abc import Iterable
from typing import Any

from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.wire import (
    ChoiceResult,
    JobOptions,
    JobRecord,
    JobResult,
    JobSpec,
    OutboxEvent,
    ResolvedOptions,
    Usage,
    decode_events,
    encode_prompt,
    encode_record,
    encode_result,
    encode_spec,
)

QUEUE = "enrichment"
KEYS = QueueKeys(QUEUE)
NOON_MS = 1_800_000_000_000
RESOLVED = ResolvedOptions(
    max_tokens=64, temperature=0.5, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.05, end_token_ids=(2,)
)
OF_NOON: dict[str, object] = {"submitted_ms": NOON_MS}
"""A job that was submitted at noon."""

Packed = list[Any]  # what msgpack takes


def submitted(job_id: str, at_ms: int = NOON_MS, version: int = 1, **fields: object) -> Packed:
    """A job was accepted; its other events must have the same submit time."""
    spec = JobSpec(options=JobOptions(max_tokens=64, temperature=0.5), metadata={"custom_id": f"line-{job_id[-3:]}"})
    usual: dict[str, object] = {
        "queue": QUEUE.encode(), "priority": 3, "prompt_tokens": 12, "cost": 76, "spec": encode_spec(spec),
        "seed": b"18446744073709551615", "submitted_ms": at_ms,
    }  # fmt: skip
    return ["submitted", job_id, version, at_ms, usual | fields]


def started(job_id: str, at_ms: int = NOON_MS + 40, version: int = 2, **fields: object) -> Packed:
    """A worker pulled it."""
    return ["started", job_id, version, at_ms, {"epoch": 1, "attempt": 1, "incarnation": b"inc-1"} | OF_NOON | fields]


def returned(job_id: str, at_ms: int = NOON_MS + 80, version: int = 3, **fields: object) -> Packed:
    """It went back to the stream."""
    return ["returned", job_id, version, at_ms, {"why": b"owner_died", "epoch": 1} | OF_NOON | fields]


def ended(job_id: str, at_ms: int = NOON_MS + 1050, version: int = 3, **fields: object) -> Packed:
    """It reached a terminal state; as of a job of 20 tokens unless given."""
    usual: dict[str, object] = {
        "state": b"done", "reason": b"stop", "epoch": 1, "attempt": 1, "incarnation": b"inc-1",
        "record": encode_record(record()),
    }  # fmt: skip
    return ["ended", job_id, version, at_ms, usual | OF_NOON | fields]


def record(**changes: Any) -> JobRecord:
    """What a worker measured."""
    usual: dict[str, Any] = {
        "model": "tiny", "fingerprint": "f1", "worker": "host:17", "finish_reason": "stop", "prompt_tokens": 11,
        "cached_tokens": 4, "output_tokens": 20, "preemptions": 1, "first_scheduled_ms": NOON_MS + 50,
        "first_token_ms": NOON_MS + 100, "itl_p50_ms": 40.0, "itl_p99_ms": 90.0, "itl_max_ms": 120.0,
        "exactness": "undisturbed", "resolved": RESOLVED,
    }  # fmt: skip
    return JobRecord(**usual | changes)


def result(*texts: str) -> bytes:
    """An encoded output with one choice per text."""
    choices = tuple(ChoiceResult(text=text, token_ids=(5, 6), finish_reason="stop") for text in texts)
    return encode_result(JobResult(choices=choices, usage=Usage(prompt_tokens=11, output_tokens=2 * len(texts))))


def prompt(text: str) -> bytes:
    """An encoded text prompt."""
    return encode_prompt(text)


def pack(events: Iterable[Packed]) -> bytes:
    """One outbox entry's field, as the scripts pack it."""
    return pack_for_script(list(events))


def unpacked(events: Iterable[Packed]) -> list[OutboxEvent]:
    """The same events as the recorder reads them."""
    return decode_events(pack(events))
