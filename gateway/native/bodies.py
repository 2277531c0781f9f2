"""Responses of the native routes: JSON of jobs, and its schemas. No I/O."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sluice.gateway.openapi.schemas import FLAG, NUMBER, TEXT, Schema, list_of, object_schema, or_null, schema_of
from sluice.history.queries import AttemptRow, JobRow, TimelineRow
from sluice.producer.errors import JobNotDone
from sluice.producer.operations.submission import Receipt
from sluice.producer.operations.views import JobStatus
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.logprobs import logprobs_to_json
from sluice.protocol.openai_format.tools import parsed_object
from sluice.protocol.states import JobState
from sluice.protocol.wire import ChoiceResult, JobResult, Usage

STATE: Schema = schema_of(JobState)

HIDDEN = frozenset(
    {"id", "state", "owner", "deaths", "spec", "waits_for", "limit", "worker", "incarnation", "fingerprint"}
)
"""Fields that responses leave out: they name machines, or are shown elsewhere."""


def _titled(title: str, kind: Any) -> Schema:  # noqa: ANN401  # a dataclass
    """Return the schema of a dataclass without its hidden fields."""
    schema = schema_of(kind)
    names = [name for name in schema["required"] if name not in HIDDEN]
    properties = {name: schema["properties"][name] for name in names}
    return {"title": title, "type": "object", "properties": properties, "required": names}


def _shown(value: Any) -> Object:  # noqa: ANN401  # a dataclass
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in HIDDEN}


PARSED: Schema = {
    **or_null(
        object_schema(
            "ParsedOutput",
            content=TEXT,
            reasoning=or_null(TEXT),
            calls=list_of(object_schema(name=TEXT, arguments=TEXT)),
        )
    ),
    "description": "The text taken apart: reasoning, content and calls of functions; null if it marks none.",
}


def choice_schema(kind: type[ChoiceResult]) -> Schema:
    """Return the schema of one choice of a result."""
    schema = schema_of(kind)
    properties = {"index": NUMBER, **schema["properties"], "parsed": PARSED}
    return {"title": "Choice", "type": "object", "properties": properties, "required": list(properties)}


NOW, RECORD = _titled("JobInQueue", JobStatus), _titled("JobInHistory", JobRow)
NOW["properties"]["seed"] = {**TEXT, "description": "An unsigned 64-bit number, in decimal."}
LISTED = object_schema("ListedJob", id=TEXT, state=STATE, **RECORD["properties"])
FAILURE = object_schema("JobError", code=or_null(TEXT), message=TEXT)
EVENT_OF_JOB, ATTEMPT = _titled("TimelineEvent", TimelineRow), _titled("Attempt", AttemptRow)

JOB = object_schema(
    "Job",
    id=TEXT,
    state=STATE,
    queue=TEXT,
    now={**or_null(NOW), "description": "The queue's facts; null if it has forgotten the job."},
    history={**or_null(RECORD), "description": "The history's facts; null if it has no row yet."},
    timeline=list_of(EVENT_OF_JOB),
    attempts=list_of(ATTEMPT),
)
JOBS = object_schema(
    "Jobs",
    data=list_of(LISTED),
    next={**or_null(TEXT), "description": "The `after` of the next page; null: there is none."},
)
SUBMITTED = object_schema(
    "Submitted",
    id=TEXT,
    queue=TEXT,
    state=STATE,
    is_duplicate={**FLAG, "description": "Whether the queue already had the job."},
    ahead_jobs=schema_of(int | None),
    ahead_tokens=schema_of(int | None),
    is_less_durable={
        **FLAG,
        "description": "Whether the server has not confirmed the durability that the queue requires.",
    },
)
RESULT = object_schema(
    "JobResult",
    id=TEXT,
    state=STATE,
    error={**or_null(FAILURE), "description": "Why a job that is not done ended; `choices` has its output so far."},
    model=or_null(TEXT),
    choices=list_of(choice_schema(ChoiceResult)),
    usage=or_null(schema_of(Usage)),
)
CHANGED = object_schema(
    "Changed", id=TEXT, state={**TEXT, "description": "The state reached; `asked`: its worker will stop it."}
)


def job_body(job_id: str, queue: str, now: JobStatus | None, record: "Record | None") -> Object:
    """Format the facts about a job from the queue, the history or both."""
    row = None if record is None else record[0]
    state = now.state if now is not None else row.state if row is not None else None
    return {
        "id": job_id,
        "state": state,
        "queue": queue,
        "now": None if now is None else {**_shown(now), "seed": str(now.seed)},
        "history": None if row is None else _shown(row),
        "timeline": [] if record is None else [_event(event) for event in record[1]],
        "attempts": [] if record is None else [_shown(attempt) for attempt in record[2]],
    }


def _event(event: TimelineRow) -> Object:
    # The detail of a pull is the worker's name.
    return _shown(replace(event, detail=None) if event.event == "pulled" else event)


Record = tuple[JobRow, Sequence[TimelineRow], Sequence[AttemptRow]]
"""A job in the history, its events and its attempts."""


def listed_body(row: JobRow) -> Object:
    """Format one job of a list."""
    return {"id": row.id, "state": row.state, **_shown(row)}


def receipt_body(receipt: Receipt, queue: str) -> Object:
    """Format the response to a submit."""
    return {**{field.name: getattr(receipt, field.name) for field in fields(receipt)}, "queue": queue}


def result_body(job_id: str, result: JobResult | None, ended: JobNotDone | None = None) -> Object:
    """Format the output of a job; `ended`: how it ended if it is not done."""
    return {
        "id": job_id,
        "state": JobState.DONE if ended is None else ended.state,
        "error": None if ended is None else {"code": ended.code, "message": ended.reason},
        "model": None if result is None else result.model,
        "choices": [] if result is None else [_choice(index, choice) for index, choice in enumerate(result.choices)],
        "usage": None if result is None else asdict(result.usage),
    }


def _choice(index: int, choice: ChoiceResult) -> Object:
    return {
        "index": index,
        **{field.name: getattr(choice, field.name) for field in fields(choice)},
        "logprobs": logprobs_to_json(choice.logprobs),
        "parsed": parsed_object(choice),
    }
