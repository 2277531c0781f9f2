"""The tables of the job history, the same on SQLite and PostgreSQL.

`migrations/` creates the tables declared here.

Times are integer milliseconds of the server's wall clock (`_ms`), durations are seconds (`_s`). The database computes
durations from times, so a row is correct in whatever order its parts arrive. There are no foreign keys.

What workers measure is declared by `JobRecord`; columns that others set, here.

Each table, view (`views.py`) and column has a comment. `worker migrate` stores the comments in PostgreSQL, and
`python -m tools.history_pages` writes them into docs/reference/history.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from sluice.protocol.messages import JobRecord, Measure

metadata = sa.MetaData()
"""Tables. Alembic compares the database with these."""

SCHEMA_REVISION = "0017"
"""The newest migration. Revisions are numbers in four digits: a lower one is older."""

HOUR_MS = 3_600_000

Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
Ms = sa.BigInteger
Count = sa.BigInteger
AnyColumn = sa.Column[Any]  # Any: of several types
AnyRow = sa.Row[*tuple[Any, ...]]  # Any: as the columns


class Group(Enum):
    """When columns are set. `rows.merge` and `upserts` merge each group in one way, whatever the order of events."""

    NEWEST = "newest event"
    """The values of the event with the highest version, empty ones included."""

    SUBMITTED = "submit"
    LEAST = "least seen"
    GREATEST = "greatest seen"
    STARTED = "start"
    ENDED = "end"
    """The values of an attempt's first end: a requeue of a failed job does not change how its attempt ended."""


def columns_of(table: sa.Table, group: Group) -> tuple[str, ...]:
    """Return the names of the columns of a group."""
    return tuple(column.name for column in table.columns if column.info.get(Group) is group)


def columns_in(view: str) -> tuple[str, ...]:
    """Return the names of the columns of `jobs` that a view shows, besides those that its query names."""
    return tuple(column.name for column in jobs.columns if column.info.get("view") == view)


def _grouped(group: Group, *columns: AnyColumn) -> tuple[AnyColumn, ...]:
    for column in columns:
        column.info[Group] = group
    return columns


def _measured(table: str) -> Iterator[AnyColumn]:
    """Yield the columns of what workers measure."""
    kinds: dict[object, Any] = {int: Count, int | None: Count, str | None: sa.Text}  # Any: types of SQL
    for field in fields(JobRecord):
        measure: Measure = field.metadata[Measure]
        if measure.table != table:
            continue
        kind = sa.Double if measure.column.endswith("_s") else kinds.get(field.type, Json)
        kind = sa.Integer if measure.bits == 32 else kind
        yield sa.Column(measure.column, kind, comment=measure.meaning, info={"view": measure.view, "is_measured": True})


def _seconds(name: str, later: str, earlier: str, comment: str) -> AnyColumn:
    computed = sa.Computed(f"({later} - {earlier}) / 1000.0", persisted=True)
    return sa.Column(name, sa.Double, computed, comment=comment, info={"view": "hourly_latency"})


TPOT_SQL = (
    "CASE WHEN output_tokens > choices"
    " THEN (finished_ms - first_token_ms) / 1000.0 / (1.0 * output_tokens / choices - 1) END"
)
"""(E2E - TTFT) / (n - 1), with n the tokens of a choice on average."""

HOUR_SQL = f"finished_ms - finished_ms % {HOUR_MS}"
HAS_BATCH, HAS_ERROR = sa.text("batch IS NOT NULL"), sa.text("error_code IS NOT NULL")
HAS_PROMPT = sa.text("prompt IS NOT NULL")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="of the job: partition, tenant and a name"),
    sa.Column("queue", sa.Text, nullable=False, comment="that it was submitted to"),
    sa.Column("partition", sa.Integer, nullable=False, comment="of the queue, from 0"),
    sa.Column("tenant", sa.Text, nullable=False, comment="who submitted it"),
    sa.Column(
        "submitted_ms",
        Ms,
        primary_key=True,
        comment="when it was submitted; with the id the key: an id may be used again",
        info={"view": "job_times"},
    ),
    *_grouped(Group.LEAST, sa.Column("pulled_ms", Ms, comment="first pulled by a worker", info={"view": "job_times"})),
    *_grouped(
        Group.GREATEST,
        sa.Column("attempts", sa.Integer, comment="how often it was started"),
        sa.Column("record_error", sa.Text, comment="why a part of this row, or its result, is missing or was cleaned"),
    ),
    _seconds("queue_s", "scheduled_ms", "submitted_ms", "from submit to first scheduled"),
    _seconds("ttft_s", "first_token_ms", "submitted_ms", "from submit to first token on the channel"),
    sa.Column(
        "tpot_s",
        sa.Double,
        sa.Computed(TPOT_SQL, persisted=True),
        comment="time of each token after the first",
        info={"view": "hourly_latency"},
    ),
    *_grouped(
        Group.NEWEST,
        sa.Column(
            "version", sa.BigInteger, nullable=False, comment="of the newest event; raised at each change of state"
        ),
        sa.Column("state", sa.Text, nullable=False, comment="queued, running, done, failed, cancelled or expired"),
        sa.Column(
            "error", sa.Text, comment="why it failed, as a sentence; of the last attempt while it waits for a retry"
        ),
        sa.Column("error_code", sa.Text, comment="the same as a constant word for programs"),
        *_measured("jobs"),
        sa.Column("finished_ms", Ms, comment="when its end was on the channel", info={"view": "job_times"}),
    ),
    _seconds("e2e_s", "finished_ms", "submitted_ms", "from submit to end on the channel"),
    sa.Column(
        "finished_hour_ms", Ms, sa.Computed(HOUR_SQL, persisted=True), comment="begin of the hour of finished_ms"
    ),
    *_grouped(
        Group.SUBMITTED,
        sa.Column("priority", sa.Integer, comment="its class; a higher one goes first"),
        sa.Column("choices", sa.Integer, comment="n: completions asked for"),
        sa.Column("estimated_prompt_tokens", Count, comment="as counted at submit"),
        sa.Column("reserved_tokens", Count, comment="reserved for it at submit; what it cost is in job_costs"),
        sa.Column("seed", sa.Text, comment="of its noise: unsigned, 64 bit, decimal"),
        sa.Column("batch", sa.Text, comment="name that it was submitted under with others"),
        sa.Column("not_before_ms", Ms, comment="no worker starts it earlier"),
        sa.Column("deadline_ms", Ms, comment="it expires then, running or not"),
        sa.Column("ttl_ms", Ms, comment="it expires then unless a worker has started it"),
        sa.Column("traceparent", sa.Text, comment="W3C trace context of its submit"),
        sa.Column("options", Json, comment="of its generation, as submitted"),
        sa.Column("metadata", Json, comment="pairs of text that its producer gave"),
        sa.Column("prompt_sha256", sa.Text, comment="hex; where the history keeps prompts or their hash"),
        sa.Column(
            "prompt", sa.Text, comment="text; JSON of messages or token ids; only where the history keeps prompts"
        ),
        sa.Column(
            "asked", Json, comment="{prompt, spec, digest}: what it takes to submit it again; only with its prompt"
        ),
        sa.Column("custom_id", sa.Text, comment="of its line in a bulk file; line-N if the line has none"),
        sa.Column("line", sa.BigInteger, comment="number of that line, from 1"),
        sa.Column("endpoint", sa.Text, comment="of that line: the response format of its export"),
    ),
    sa.Column("deleted_ms", Ms, comment="its data was deleted on request; nothing is written here any more"),
    sa.Index("jobs_by_state", "state", "submitted_ms"),
    sa.Index("jobs_by_tenant", "tenant", "submitted_ms"),
    sa.Index("jobs_by_queue", "queue", "submitted_ms"),
    sa.Index(
        "jobs_by_batch",
        *("queue", "batch", "submitted_ms", "state"),
        sqlite_where=HAS_BATCH,
        postgresql_where=HAS_BATCH,
    ),
    sa.Index("jobs_by_error", "error_code", "submitted_ms", sqlite_where=HAS_ERROR, postgresql_where=HAS_ERROR),
    sa.Index("jobs_by_hour", "finished_hour_ms"),
    sa.Index("jobs_by_queue_and_hour", "queue", "finished_hour_ms"),
    sa.Index(
        "jobs_with_prompt",
        *("queue", "finished_hour_ms"),
        sqlite_where=HAS_PROMPT,
        postgresql_where=HAS_PROMPT,
    ),
    comment="one row per submission of a job",
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True, comment="of the job"),
    sa.Column("submitted_ms", Ms, primary_key=True, comment="when the job was submitted"),
    sa.Column("epoch", sa.BigInteger, primary_key=True, comment="fencing number of the claim"),
    *_grouped(
        Group.STARTED,
        sa.Column("attempt", sa.Integer, comment="counted from 1"),
        sa.Column("incarnation", sa.Text, comment="the start of a worker process that had it"),
        sa.Column("started_ms", Ms, comment="when a worker pulled it"),
    ),
    *_grouped(
        Group.ENDED,
        sa.Column("ended_ms", Ms, comment="when the attempt ended"),
        sa.Column("outcome", sa.Text, comment="done, failed, cancelled, expired or returned; none while it runs"),
        sa.Column("why", sa.Text, comment="why it was returned, or the error code"),
        *_measured("attempts"),
        sa.Column("seen_ms", Ms, comment="last heartbeat of its worker, if that died"),
        sa.Column(
            "end_version", sa.BigInteger, comment="the job's version at this end; the first end of a claim stands"
        ),
    ),
    sa.Index("attempts_by_incarnation", "incarnation", "started_ms"),
    comment="one row per claim of a job by a worker",
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True, comment="of the job"),
    sa.Column("submitted_ms", Ms, primary_key=True, comment="when the job was submitted"),
    sa.Column("version", sa.BigInteger, nullable=False, comment="of the event that brought it"),
    sa.Column("finished_ms", Ms, nullable=False, comment="as of the job"),
    sa.Column("choices", Json, nullable=False, comment="[{text, finish_reason, token_ids, logprobs, format}] in order"),
    sa.Column("usage", Json, nullable=False, comment="{prompt_tokens, output_tokens, cached_tokens}"),
    comment="one row per job that is done, where the history keeps results",
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("queue", sa.Text, primary_key=True, comment="of its jobs"),
    sa.Column("id", sa.Text, primary_key=True, comment="its name"),
    sa.Column("created_ms", Ms, nullable=False, comment="first event of one of its jobs"),
    sa.Column("completed_ms", Ms, comment="last end, once all its jobs have ended; none while one is open"),
    sa.Column("refreshed_ms", Ms, comment="when the counters were counted; the view batch_progress is always exact"),
    sa.Column("jobs", Count, nullable=False, server_default="0", comment="its jobs"),
    sa.Column("queued", Count, nullable=False, server_default="0", comment="of them, those that wait"),
    sa.Column("running", Count, nullable=False, server_default="0", comment="those that run"),
    sa.Column("done", Count, nullable=False, server_default="0", comment="those that are done"),
    sa.Column("failed", Count, nullable=False, server_default="0", comment="those that failed"),
    sa.Column("cancelled", Count, nullable=False, server_default="0", comment="those cancelled"),
    sa.Column("expired", Count, nullable=False, server_default="0", comment="those that ran out of time"),
    sa.Index("batches_by_time", "created_ms"),
    comment="one row per batch: its totals, a moment late",
)

goodput_limits = sa.Table(
    "goodput_limits",
    metadata,
    sa.Column("name", sa.Text, primary_key=True, comment="of this set of limits"),
    sa.Column("ttft_s", sa.Double, comment="a good job's first token came within this; none: any"),
    sa.Column("tpot_s", sa.Double, comment="and each further token took at most this on average; none: any"),
    sa.Column("e2e_s", sa.Double, comment="and it ended within this; none: any"),
    comment="limits of the view hourly_goodput; add your own",
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="the public part of the key"),
    sa.Column("digest", sa.Text, nullable=False, comment="SHA-256 of its secret, hex"),
    sa.Column("tenant", sa.Text, nullable=False, comment="for which it makes requests"),
    sa.Column(
        "scopes", sa.Text, nullable=False, comment="some of submit, read, control, admin and metrics, with commas"
    ),
    sa.Column("rpm", Count, comment="most requests a minute; none: no limit"),
    sa.Column("tpm", Count, comment="most tokens a minute; none: no limit"),
    sa.Column("created_ms", Ms, nullable=False, comment="when it was created"),
    sa.Column("expires_ms", Ms, comment="when it ends; none: never"),
    sa.Column("revoked_ms", Ms, comment="when it was revoked; none: it is valid"),
    sa.Column("last_used_ms", Ms, comment="a few seconds late"),
    comment="keys of the HTTP gateway, without their secrets",
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="as clients name it"),
    sa.Column("tenant", sa.Text, nullable=False, comment="whose it is"),
    sa.Column("purpose", sa.Text, nullable=False, comment="batch or batch_output"),
    sa.Column("filename", sa.Text, nullable=False, comment="as its client named it"),
    sa.Column("bytes", Count, nullable=False, comment="of its content"),
    sa.Column("created_ms", Ms, nullable=False, comment="when it was uploaded or written"),
    sa.Column(
        "objects", Json, nullable=False, comment="[key, bytes, lines] of each object that its content is made of"
    ),
    sa.Index("files_by_tenant", "tenant", "created_ms", "id"),
    comment="files of the gateway's clients and batches, without their contents",
)

gateway_batches = sa.Table(
    "gateway_batches",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="also the name of its jobs' batch in the queue"),
    sa.Column("tenant", sa.Text, nullable=False, comment="whose it is"),
    sa.Column("queue", sa.Text, nullable=False, comment="of its jobs"),
    sa.Column("partitions", sa.Integer, nullable=False, comment="of the queue"),
    sa.Column("endpoint", sa.Text, nullable=False, comment="of its lines"),
    sa.Column("model", sa.Text, comment="that its lines name"),
    sa.Column("input_file", sa.Text, nullable=False, comment="id of the file with its lines"),
    sa.Column("window", sa.Text, nullable=False, comment="completion_window"),
    sa.Column("metadata", Json, comment="pairs of text that its client gave"),
    sa.Column("status", sa.Text, nullable=False, comment="as clients read it"),
    sa.Column("created_ms", Ms, nullable=False, comment="when it was created"),
    sa.Column("expires_ms", Ms, nullable=False, comment="its deadline"),
    sa.Column("times", Json, nullable=False, comment="when it reached each status, in ms"),
    sa.Column("errors", Json, comment="{code, line, message, param} of the first bad lines"),
    sa.Column("total", Count, nullable=False, comment="lines; 0 until all are checked"),
    sa.Column("completed", Count, nullable=False, comment="lines, a few seconds late"),
    sa.Column("failed", Count, nullable=False, comment="likewise, with those cancelled or expired"),
    sa.Column("output_file", sa.Text, comment="id of the file with the answers"),
    sa.Column("error_file", sa.Text, comment="id of the file with the errors"),
    # What its task needs to go on.
    sa.Column("names", sa.Text, comment="key of the object with the custom ids"),
    sa.Column("submitted", Count, nullable=False, comment="lines that the queue has, or has refused"),
    sa.Column("file_offset", Count, nullable=False, server_default="0", comment="bytes of the file with them"),
    sa.Column("refused", Count, nullable=False, comment="lines that the queue has refused"),
    sa.Column("expired", Count, nullable=False, comment="lines that the deadline ended"),
    sa.Column("collected", sa.LargeBinary, comment="a bit for each line whose outcome is in a part"),
    sa.Column("looked_at", Count, nullable=False, server_default="0", comment="place where the next look begins"),
    sa.Column("parts", Json, nullable=False, comment="{output, error, checked}: [key, bytes, lines] of each object"),
    sa.Column("written_ms", Ms, comment="when the last part was written"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="fencing number of the task that has it"),
    sa.Column("due_ms", Ms, nullable=False, comment="a task has it until then"),
    sa.Index("gateway_batches_by_tenant", "tenant", "created_ms", "id"),
    sa.Index("gateway_batches_by_status", "status", "due_ms"),
    comment="batches of the gateway: what clients read, and how far its task is",
)

VerbatimJson = sa.JSON(none_as_null=True)
"""JSON that the database keeps as it is: JSONB refuses the character NUL."""

IS_OPEN = sa.text("status = 'open'")

responses = sa.Table(
    "responses",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="made of the job's"),
    sa.Column("tenant", sa.Text, nullable=False, comment="whose it is"),
    sa.Column("queue", sa.Text, nullable=False, comment="of its job"),
    sa.Column("job_id", sa.Text, nullable=False, comment="of its job"),
    sa.Column("created_ms", Ms, nullable=False, comment="when it was asked for"),
    sa.Column("expires_ms", Ms, nullable=False, comment="when the row is deleted"),
    sa.Column("previous_id", sa.Text, comment="the response that its conversation continues"),
    sa.Column("depth", sa.Integer, nullable=False, comment="responses before it in its conversation"),
    sa.Column("is_background", sa.Boolean, nullable=False, comment="whether it was asked for in the background"),
    sa.Column("model", sa.Text, nullable=False, comment="that the request named"),
    sa.Column("options", VerbatimJson, nullable=False, comment="parameters of the request that the response repeats"),
    sa.Column("input", VerbatimJson, nullable=False, comment="[{role, content}] in order"),
    sa.Column("idempotency_key", sa.Text, comment="of the request"),
    sa.Column("digest", sa.Text, nullable=False, comment="SHA-256 of the request, hex"),
    sa.Column("status", sa.Text, nullable=False, comment="open, lost, completed, incomplete, failed or cancelled"),
    sa.Column("ended_ms", Ms, comment="when its end was stored here"),
    sa.Column("output", VerbatimJson, comment="all of its text, once it has ended"),
    sa.Column("usage", VerbatimJson, comment="its tokens, once it has ended"),
    sa.Column("error", VerbatimJson, comment="{code, message}, if it failed"),
    sa.Column(
        "bytes", Count, nullable=False, server_default="0", comment="of its input, options and output, and 1024 more"
    ),
    sa.Index("responses_by_size", "tenant", "bytes"),
    sa.Index("responses_by_key", "tenant", "idempotency_key", unique=True),
    sa.Index("responses_by_expiry", "expires_ms"),
    sa.Index("responses_open", "id", sqlite_where=IS_OPEN, postgresql_where=IS_OPEN),
    comment="what the gateway keeps for /v1/responses",
)

page_sessions = sa.Table(
    "page_sessions",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True, comment="SHA-256 of the cookie, hex"),
    sa.Column("key_id", sa.Text, nullable=False, comment="the key that signed in"),
    sa.Column("created_ms", Ms, nullable=False, comment="when it signed in"),
    sa.Column("expires_ms", Ms, nullable=False, comment="when the sign-in ends"),
    sa.Index("page_sessions_by_expiry", "expires_ms"),
    comment="sign-ins at the gateway's page",
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="of the entry"),
    sa.Column("at_ms", Ms, nullable=False, comment="when it was done"),
    sa.Column("key_id", sa.Text, comment="none: the gateway has no keys"),
    sa.Column("tenant", sa.Text, comment="of the key"),
    sa.Column(
        "action",
        sa.Text,
        nullable=False,
        comment="cancel, requeue, delete, submit, add_schedule, pause_schedule, resume_schedule, remove_schedule, "
        "set_limits, set_price, sign_in, sign_out",
    ),
    sa.Column("queue", sa.Text, comment="of the target; none if it has none"),
    sa.Column(
        "target",
        sa.Text,
        nullable=False,
        comment="id of the job, schedule or key, tenant, model, or address; one row for each",
    ),
    sa.Column("outcome", sa.Text, comment="none: the gateway ended before it knew"),
    sa.Index("audit_log_by_time", "at_ms"),
    sa.Index("audit_log_by_target", "target", "at_ms"),
    comment="what was changed on the gateway's page, and limits and schedules changed over HTTP",
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("model", sa.Text, primary_key=True, comment="as in jobs"),
    sa.Column("since_ms", Ms, primary_key=True, comment="jobs submitted from then on"),
    sa.Column("input", sa.Double, nullable=False, comment="of a million prompt tokens"),
    sa.Column("cached", sa.Double, nullable=False, comment="of a million of them that the prefix cache had"),
    sa.Column("output", sa.Double, nullable=False, comment="of a million output tokens"),
    sa.Column("currency", sa.Text, nullable=False, comment="of these prices"),
    comment="what a model's tokens cost from a point in time on; add your own",
)

queue_of_id = jobs.c.queue.concat("")
"""A job's queue, for conditions on its id: with the column, SQLite takes an index by queue and reads all of it."""


def of_submissions(
    table: sa.Table,
    submissions: Sequence[tuple[object, object]] | sa.BindParameter[object],
    ids: sa.BindParameter[object] | None = None,
) -> sa.ColumnElement[bool]:
    """Return whether a row of `jobs`, `attempts` or `results` is of one of these (job id, submit time).

    Asks for the ids as well, for their index: SQLite scans the table for pairs alone.
    """
    job_id, submitted_ms, *_ = table.primary_key.columns
    job_ids = ids if isinstance(submissions, sa.BindParameter) else [each for each, _ in submissions]
    assert job_ids is not None, "a parameter of submissions needs one of their ids"
    return sa.and_(job_id.in_(job_ids), sa.tuple_(job_id, submitted_ms).in_(submissions))
