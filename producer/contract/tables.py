"""The tables of the job history, the same on SQLite and PostgreSQL.

`migrations/` creates the tables declared here; a test compares the two.

Times are integer milliseconds of the server's wall clock (`_ms`), durations are seconds (`_s`). The database computes
durations from times, so a row is correct in whatever order its parts arrive. There are no foreign keys.

    jobs        one row per submission of a job: an id may be used again after the queue has forgotten it
    attempts    one row per claim of a job by a worker
    results     the outputs of jobs, if the history keeps results
    batches     totals of jobs submitted under one name
    goodput_limits   limits of the view `hourly_goodput`; you may add rows
    api_keys    the keys of the HTTP gateway, without their secrets; no part of the history, but in its database
    files       the files of the gateway's clients and batches, without their contents; likewise
    gateway_batches   the batches of the gateway, and how far each is; likewise
    responses   what the HTTP gateway keeps for /v1/responses; likewise
    page_sessions   who is signed in at the gateway's page; likewise
    audit_log   what was changed on the gateway's page; likewise
    prices      what a model's tokens cost; you add rows

The views (`hourly_latency`, `hourly_goodput`, `hourly_usage`, `job_costs`, `job_times`, `timeline`, `batch_progress`)
are declared for reading only.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData()
"""Tables. Alembic compares the database with these."""

views = sa.MetaData()
"""Views, declared for reading only; the migrations hold their SQL."""

SCHEMA_REVISION = "0015"
"""The newest migration. Revisions are numbers in four digits: a lower one is older."""

HOUR_MS = 3_600_000

Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
Ms = sa.BigInteger
Count = sa.BigInteger


def _seconds(later: str, earlier: str) -> sa.Computed:
    return sa.Computed(f"({later} - {earlier}) / 1000.0", persisted=True)


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
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("submitted_ms", Ms, primary_key=True, comment="with the id, the key: an id may be used again"),
    # From the newest event: the group of columns that is updated together with `version`.
    sa.Column("version", sa.BigInteger, nullable=False, comment="of the newest event; raised at each change of state"),
    sa.Column("state", sa.Text, nullable=False, comment="queued, running, done, failed, cancelled or expired"),
    sa.Column("reason", sa.Text, comment="stop or length when done; else why it was cancelled, expired or returned"),
    sa.Column("error", sa.Text),
    sa.Column("error_code", sa.Text, comment="a constant word for programs"),
    sa.Column("worker", sa.Text, comment="host and process of the owner, or its incarnation"),
    sa.Column("finished_ms", Ms),
    sa.Column("model", sa.Text),
    sa.Column("fingerprint", sa.Text, comment="of weights, tokenizer, template, dtype and noise"),
    sa.Column("prompt_tokens", Count, comment="exact; see estimated_prompt_tokens before the end"),
    sa.Column("cached_tokens", Count, comment="prompt tokens found in the prefix cache"),
    sa.Column("output_tokens", Count, comment="of all choices"),
    sa.Column("resumed_tokens", Count, comment="tokens taken over from an earlier attempt"),
    sa.Column("preemptions", sa.Integer),
    sa.Column("scheduled_ms", Ms, comment="first scheduled"),
    sa.Column("first_token_ms", Ms, comment="first token on the channel"),
    sa.Column("last_token_ms", Ms, comment="last token computed; none if the last attempt computed none"),
    sa.Column("itl_p50_s", sa.Double, comment="gaps between tokens of this job"),
    sa.Column("itl_p99_s", sa.Double),
    sa.Column("itl_max_s", sa.Double, comment="longest wait of a reader, with takeovers, outages and preemption"),
    sa.Column("sampling", Json, comment="values of options that a model may state, as used; and its end tokens"),
    sa.Column("exactness", sa.Text, comment="undisturbed, same_fingerprint or other_fingerprint"),
    # From the submit: written once.
    sa.Column("priority", sa.Integer),
    sa.Column("choices", sa.Integer, comment="n: completions asked for"),
    sa.Column("estimated_prompt_tokens", Count, comment="as counted at submit"),
    sa.Column("cost", Count, comment="tokens reserved for it at submit"),
    sa.Column("seed", sa.Text, comment="unsigned, 64 bit, decimal"),
    sa.Column("batch", sa.Text),
    sa.Column("not_before_ms", Ms),
    sa.Column("deadline_ms", Ms),
    sa.Column("ttl_ms", Ms),
    sa.Column("traceparent", sa.Text),
    sa.Column("options", Json),
    sa.Column("metadata", Json),
    sa.Column("prompt_sha256", sa.Text, comment="hex; where the history keeps prompts or their hash"),
    sa.Column("prompt", sa.Text, comment="text; JSON of messages or token ids; only where the history keeps prompts"),
    sa.Column("asked", Json, comment="{prompt, spec, digest}: what it takes to submit it again; only with its prompt"),
    sa.Column("custom_id", sa.Text, comment="of its line in a bulk file; line-N if the line has none"),
    sa.Column("line", sa.BigInteger, comment="number of that line, from 1"),
    sa.Column("endpoint", sa.Text, comment="of that line: the response format of its export"),
    # Independent of the order of events: the least or the greatest value seen.
    sa.Column("pulled_ms", Ms, comment="first pulled by a worker"),
    sa.Column("attempts", sa.Integer, comment="how often it was started"),
    # Written by the history itself.
    sa.Column("record_error", sa.Text, comment="why parts of this row were refused and cleaned"),
    sa.Column("deleted_ms", Ms, comment="its data was deleted on request; nothing is written here any more"),
    # Computed by the database.
    sa.Column("queue_s", sa.Double, _seconds("scheduled_ms", "submitted_ms")),
    sa.Column("ttft_s", sa.Double, _seconds("first_token_ms", "submitted_ms")),
    sa.Column("e2e_s", sa.Double, _seconds("finished_ms", "submitted_ms")),
    sa.Column("tpot_s", sa.Double, sa.Computed(TPOT_SQL, persisted=True)),
    sa.Column("finished_hour_ms", Ms, sa.Computed(HOUR_SQL, persisted=True)),
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
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("submitted_ms", Ms, primary_key=True, comment="of the job"),
    sa.Column("epoch", sa.BigInteger, primary_key=True, comment="fencing number of the claim"),
    sa.Column("attempt", sa.Integer, comment="counted from 1"),
    sa.Column("incarnation", sa.Text, comment="the start of a worker process that had it"),
    sa.Column("started_ms", Ms),
    sa.Column("ended_ms", Ms),
    sa.Column("outcome", sa.Text, comment="done, failed, cancelled, expired or returned; none while it runs"),
    sa.Column("why", sa.Text, comment="why it was returned, or the error code"),
    sa.Column("gap_s", sa.Double, comment="longest wait of a reader in it, from the last token of the one before"),
    sa.Column("seen_ms", Ms, comment="last heartbeat of its worker, if that died"),
    sa.Column("preempted_s", sa.Double, comment="the waits of all its preemptions"),
    sa.Column("preemption_times", Json, comment="of its first 16: [[ms from started_ms, ms until it ran again]]"),
    sa.Column("end_version", sa.BigInteger, comment="the job's version at this end; the first end of a claim stands"),
    sa.Index("attempts_by_incarnation", "incarnation", "started_ms"),
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("submitted_ms", Ms, primary_key=True, comment="of the job"),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("finished_ms", Ms, nullable=False),
    sa.Column("choices", Json, nullable=False, comment="[{text, finish_reason, token_ids, logprobs}] in order"),
    sa.Column("usage", Json, nullable=False, comment="{prompt_tokens, output_tokens, cached_tokens}"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("queue", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("created_ms", Ms, nullable=False, comment="first event of one of its jobs"),
    sa.Column("completed_ms", Ms, comment="last end, once all its jobs have ended; none while one is open"),
    sa.Column("refreshed_ms", Ms, comment="when the counters were counted; the view batch_progress is always exact"),
    sa.Column("jobs", Count, nullable=False, server_default="0"),
    sa.Column("queued", Count, nullable=False, server_default="0"),
    sa.Column("running", Count, nullable=False, server_default="0"),
    sa.Column("done", Count, nullable=False, server_default="0"),
    sa.Column("failed", Count, nullable=False, server_default="0"),
    sa.Column("cancelled", Count, nullable=False, server_default="0"),
    sa.Column("expired", Count, nullable=False, server_default="0"),
    sa.Index("batches_by_time", "created_ms"),
)

goodput_limits = sa.Table(
    "goodput_limits",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("ttft_s", sa.Double, comment="a good job's first token came within this; none: any"),
    sa.Column("tpot_s", sa.Double, comment="and each further token took at most this on average; none: any"),
    sa.Column("e2e_s", sa.Double, comment="and it ended within this; none: any"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="the part of the key that is no secret"),
    sa.Column("digest", sa.Text, nullable=False, comment="SHA-256 of its secret, hex"),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column(
        "scopes", sa.Text, nullable=False, comment="some of submit, read, control, admin and metrics, with commas"
    ),
    sa.Column("rpm", Count, comment="most requests a minute; none: no limit"),
    sa.Column("tpm", Count, comment="most tokens a minute; none: no limit"),
    sa.Column("created_ms", Ms, nullable=False),
    sa.Column("expires_ms", Ms),
    sa.Column("revoked_ms", Ms),
    sa.Column("last_used_ms", Ms, comment="a few seconds late"),
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False, comment="batch or batch_output"),
    sa.Column("filename", sa.Text, nullable=False, comment="as its client named it"),
    sa.Column("bytes", Count, nullable=False),
    sa.Column("created_ms", Ms, nullable=False),
    sa.Column(
        "objects", Json, nullable=False, comment="[key, bytes, lines] of each object that its content is made of"
    ),
    sa.Index("files_by_tenant", "tenant", "created_ms", "id"),
)

gateway_batches = sa.Table(
    "gateway_batches",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="also the name of its jobs' batch in the queue"),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("partitions", sa.Integer, nullable=False, comment="of the queue"),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("model", sa.Text, comment="that its lines name"),
    sa.Column("input_file", sa.Text, nullable=False),
    sa.Column("window", sa.Text, nullable=False, comment="completion_window"),
    sa.Column("metadata", Json),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("created_ms", Ms, nullable=False),
    sa.Column("expires_ms", Ms, nullable=False),
    sa.Column("times", Json, nullable=False, comment="when it reached each status, in ms"),
    sa.Column("errors", Json, comment="{code, line, message, param} of the first bad lines"),
    sa.Column("total", Count, nullable=False, comment="lines; 0 until all are checked"),
    sa.Column("completed", Count, nullable=False, comment="lines, a few seconds late"),
    sa.Column("failed", Count, nullable=False, comment="likewise, with those cancelled or expired"),
    sa.Column("output_file", sa.Text),
    sa.Column("error_file", sa.Text),
    # What its task needs to go on.
    sa.Column("names", sa.Text, comment="key of the object with the custom ids"),
    sa.Column("submitted", Count, nullable=False, comment="lines that the queue has, or has refused"),
    sa.Column("file_offset", Count, nullable=False, server_default="0", comment="bytes of the file with them"),
    sa.Column("refused", Count, nullable=False, comment="lines that the queue has refused"),
    sa.Column("expired", Count, nullable=False, comment="lines that the deadline ended"),
    sa.Column("collected", sa.LargeBinary, comment="a bit for each line whose outcome is in a part"),
    sa.Column("looked_at", Count, nullable=False, server_default="0", comment="place where the next look begins"),
    sa.Column("parts", Json, nullable=False, comment="{output, error}: [key, bytes, lines] of each object"),
    sa.Column("written_ms", Ms, comment="when the last part was written"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="fencing number of the task that has it"),
    sa.Column("due_ms", Ms, nullable=False, comment="a task has it until then"),
    sa.Index("gateway_batches_by_tenant", "tenant", "created_ms", "id"),
    sa.Index("gateway_batches_by_status", "status", "due_ms"),
)

VerbatimJson = sa.JSON(none_as_null=True)
"""JSON that the database keeps as it is: JSONB refuses the character NUL."""

IS_OPEN = sa.text("status = 'open'")

responses = sa.Table(
    "responses",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, comment="made of the job's"),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False),
    sa.Column("created_ms", Ms, nullable=False),
    sa.Column("expires_ms", Ms, nullable=False, comment="when the row is deleted"),
    sa.Column("previous_id", sa.Text, comment="the response that its conversation continues"),
    sa.Column("depth", sa.Integer, nullable=False, comment="responses before it in its conversation"),
    sa.Column("is_background", sa.Boolean, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("options", VerbatimJson, nullable=False, comment="parameters of the request that the response repeats"),
    sa.Column("input", VerbatimJson, nullable=False, comment="[{role, content}] in order"),
    sa.Column("idempotency_key", sa.Text),
    sa.Column("digest", sa.Text, nullable=False, comment="SHA-256 of the request, hex"),
    sa.Column("status", sa.Text, nullable=False, comment="open, lost, completed, incomplete, failed or cancelled"),
    sa.Column("ended_ms", Ms, comment="when its end was stored here"),
    sa.Column("output", VerbatimJson, comment="all of its text, once it has ended"),
    sa.Column("usage", VerbatimJson),
    sa.Column("error", VerbatimJson),
    sa.Index("responses_by_key", "tenant", "idempotency_key", unique=True),
    sa.Index("responses_by_expiry", "expires_ms"),
    sa.Index("responses_open", "id", sqlite_where=IS_OPEN, postgresql_where=IS_OPEN),
)

page_sessions = sa.Table(
    "page_sessions",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True, comment="SHA-256 of the cookie, hex"),
    sa.Column("key_id", sa.Text, nullable=False, comment="the key that signed in"),
    sa.Column("created_ms", Ms, nullable=False),
    sa.Column("expires_ms", Ms, nullable=False),
    sa.Index("page_sessions_by_expiry", "expires_ms"),
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("at_ms", Ms, nullable=False),
    sa.Column("key_id", sa.Text, comment="none: the gateway has no keys"),
    sa.Column("tenant", sa.Text, comment="of the key"),
    sa.Column(
        "action", sa.Text, nullable=False, comment="cancel, requeue, delete, submit, set_price, sign_in, sign_out"
    ),
    sa.Column("queue", sa.Text),
    sa.Column("target", sa.Text, nullable=False, comment="id of the job or key, model, or address; one row for each"),
    sa.Column("outcome", sa.Text, comment="none: the gateway ended before it knew"),
    sa.Index("audit_log_by_time", "at_ms"),
    sa.Index("audit_log_by_target", "target", "at_ms"),
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("since_ms", Ms, primary_key=True, comment="jobs submitted from then on"),
    sa.Column("input", sa.Double, nullable=False, comment="of a million prompt tokens"),
    sa.Column("cached", sa.Double, nullable=False, comment="of a million of them that the prefix cache had"),
    sa.Column("output", sa.Double, nullable=False, comment="of a million output tokens"),
    sa.Column("currency", sa.Text, nullable=False),
)

queue_of_id = jobs.c.queue.concat("")
"""A job's queue, for conditions on its id: with the column, SQLite takes an index by queue and reads all of it."""

hourly_latency = sa.Table(
    "hourly_latency",
    views,
    sa.Column("hour_ms", Ms),
    sa.Column("queue", sa.Text),
    sa.Column("metric", sa.Text, comment="queue_s, ttft_s, tpot_s, itl_p50_s, itl_p99_s or e2e_s"),
    sa.Column("jobs", Count),
    sa.Column("mean_s", sa.Double),
    sa.Column("p50_s", sa.Double),
    sa.Column("p90_s", sa.Double),
    sa.Column("p95_s", sa.Double),
    sa.Column("p99_s", sa.Double),
    sa.Column("max_s", sa.Double),
)
"""Percentiles of the jobs done in each hour, interpolated as numpy does."""

hourly_goodput = sa.Table(
    "hourly_goodput",
    views,
    sa.Column("limits", sa.Text, comment="name in goodput_limits"),
    sa.Column("hour_ms", Ms),
    sa.Column("queue", sa.Text),
    sa.Column("jobs", Count, comment="done or failed in this hour"),
    sa.Column("good_jobs", Count, comment="done within every limit"),
    sa.Column("goodput", sa.Double, comment="good_jobs / jobs"),
    sa.Column("good_jobs_per_s", sa.Double),
    sa.Column("good_tokens_per_s", sa.Double, comment="output tokens of good jobs"),
)

job_times = sa.Table(
    "job_times",
    views,
    sa.Column("id", sa.Text),
    sa.Column("queue", sa.Text),
    sa.Column("tenant", sa.Text),
    sa.Column("state", sa.Text),
    sa.Column("submitted_at", sa.Text, comment="UTC, ISO 8601, milliseconds"),
    sa.Column("pulled_at", sa.Text),
    sa.Column("scheduled_at", sa.Text),
    sa.Column("first_token_at", sa.Text),
    sa.Column("finished_at", sa.Text),
)
"""The times of a job as text."""

timeline = sa.Table(
    "timeline",
    views,
    sa.Column("job_id", sa.Text),
    sa.Column("submitted_ms", Ms),
    sa.Column("at_ms", Ms),
    sa.Column("at", sa.Text, comment="UTC, ISO 8601, milliseconds"),
    sa.Column("event", sa.Text, comment="submitted, pulled, scheduled, first_token, returned, done, failed …"),
    sa.Column("epoch", sa.BigInteger),
    sa.Column("detail", sa.Text),
)
"""One row per event of a job: select by job_id and submitted_ms, order by at_ms."""

batch_progress = sa.Table(
    "batch_progress",
    views,
    sa.Column("queue", sa.Text),
    sa.Column("id", sa.Text),
    sa.Column("jobs", Count),
    sa.Column("queued", Count),
    sa.Column("running", Count),
    sa.Column("done", Count),
    sa.Column("failed", Count),
    sa.Column("cancelled", Count),
    sa.Column("expired", Count),
    sa.Column("prompt_tokens", Count),
    sa.Column("output_tokens", Count),
    sa.Column("first_submitted_ms", Ms),
    sa.Column("last_finished_ms", Ms),
)
"""Totals of a batch, counted from its jobs at each query."""

_USAGE = ("prompt_tokens", "cached_tokens", "output_tokens")

job_costs = sa.Table(
    "job_costs",
    views,
    sa.Column("id", sa.Text),
    sa.Column("submitted_ms", Ms),
    sa.Column("hour_ms", Ms, comment="in which it ended"),
    sa.Column("queue", sa.Text),
    sa.Column("tenant", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("state", sa.Text),
    *(sa.Column(name, Count) for name in _USAGE),
    sa.Column("cost", sa.Double, comment="none: its model had no price"),
    sa.Column("currency", sa.Text),
)
"""What each ended job cost, by the price that held when it was submitted."""

hourly_usage = sa.Table(
    "hourly_usage",
    views,
    sa.Column("hour_ms", Ms),
    sa.Column("queue", sa.Text),
    sa.Column("tenant", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("currency", sa.Text),
    sa.Column("jobs", Count, comment="that ended in this hour"),
    sa.Column("done", Count),
    *(sa.Column(name, Count) for name in _USAGE),
    sa.Column("cost", sa.Double),
)
"""Tokens and cost of the jobs that ended in each hour."""


def of_submissions(
    table: sa.Table,
    submissions: Sequence[tuple[object, object]] | sa.BindParameter[object],
    ids: sa.BindParameter[object] | None = None,
) -> sa.ColumnElement[bool]:
    """Return whether a row of `jobs`, `attempts` or `results` is of one of these (job id, submit time).

    Asks for the ids as well, for their index: SQLite scans the table for pairs alone.
    """
    job_id, submitted_ms, *_ = table.primary_key.columns
    known = ids if isinstance(submissions, sa.BindParameter) else [one for one, _ in submissions]
    assert known is not None, "a parameter of submissions needs one of their ids"
    return sa.and_(job_id.in_(known), sa.tuple_(job_id, submitted_ms).in_(submissions))
