"""Answer the questions of `docs/guide/history.md` on synthetic data, and write the page.

    python -m tools.history_examples

The rows are made by the recorder's own code from events of jobs, the same each time, on SQLite (and in the tests also
on PostgreSQL). Knows no Redis.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.database import open_database
from sluice.history.rows import changes_of
from sluice.history.tables import HOUR_MS
from sluice.history.writer import HistoryWriter
from sluice.protocol.wire import (
    JobId,
    JobOptions,
    JobRecord,
    JobSpec,
    OutboxEvent,
    encode_prompt,
    encode_record,
    encode_spec,
)
from sluice.worker.recorder.migrate import migrate

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "history.md"
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
NOON_MS = 1_800_014_400_000
"""2027-01-15 12:00 UTC."""

NUM_JOBS = 600
TENANTS = ("acme", "globex", "initech")
WORKERS = ("gpu-0:811", "gpu-1:812")
ERRORS = (("prompt_too_long", "prompt is 9001 tokens; this model reads 8191"), ("bad_logits", "the logits were NaN"))


@dataclass(frozen=True, slots=True)
class Question:
    """What people ask, and the SQL that answers it on both databases."""

    title: str
    sql: str
    remark: str = ""


QUESTIONS = (
    Question(
        "How many jobs are waiting or running, and since when?",
        """
SELECT queue, state, count(*) AS jobs, sum(coalesce(prompt_tokens, estimated_prompt_tokens)) AS prompt_tokens,
       min(submitted_ms) AS oldest_ms
FROM jobs WHERE state IN ('queued', 'running')
GROUP BY queue, state ORDER BY queue, state
""",
    ),
    Question(
        "What were the latencies of this hour?",
        """
SELECT metric, jobs, mean_s, p50_s, p90_s, p99_s, max_s
FROM hourly_latency WHERE queue = 'chat' AND hour_ms = 1800018000000 ORDER BY metric
""",
        "Percentiles are of completed jobs, interpolated as numpy does. `itl_p99_s` is a percentile over jobs of each "
        "job's own 99th percentile.",
    ),
    Question(
        "What are the percentiles of each tenant, or each model?",
        """
SELECT tenant, model, max(last) + 1 AS jobs,
       min(CASE WHEN i >= 0.5 * last THEN ttft_s END) AS p50_s, min(CASE WHEN i >= 0.95 * last THEN ttft_s END) AS p95_s
FROM (SELECT tenant, model, ttft_s, row_number() OVER (PARTITION BY tenant, model ORDER BY ttft_s) - 1 AS i,
             count(*) OVER (PARTITION BY tenant, model) - 1 AS last
      FROM jobs WHERE state = 'done' AND ttft_s IS NOT NULL AND finished_hour_ms >= 1800014400000) AS ranked
GROUP BY tenant, model ORDER BY tenant, model
""",
        "The value at a percentile's place in the order, or the next greater one. It runs on SQLite too, which has no "
        "function for percentiles. Put another metric in the place of `ttft_s`.",
    ),
    Question(
        "Which share of jobs met the goodput limits?",
        """
SELECT limits, hour_ms, jobs, good_jobs, goodput, good_tokens_per_s
FROM hourly_goodput WHERE queue = 'chat' ORDER BY limits, hour_ms
""",
        "`chat` requires the first token within 1 s and each further one within 0.1 s on average; `background` "
        "requires the whole output within an hour. `INSERT INTO goodput_limits (name, ttft_s, tpot_s) VALUES "
        "('premium', 0.3, 0.05)` adds a set of limits.",
    ),
    Question(
        "Which share would meet other limits?",
        """
SELECT count(*) AS jobs,
       avg(CASE WHEN ttft_s <= 0.8 AND (tpot_s IS NULL OR tpot_s <= 0.03) THEN 1.0 ELSE 0.0 END) AS goodput
FROM jobs WHERE queue = 'chat' AND state IN ('done', 'failed')
""",
    ),
    Question(
        "Which tenants use it, and how long do they wait?",
        """
SELECT tenant, count(*) AS jobs, sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens,
       avg(queue_s) AS mean_queue_s, max(queue_s) AS max_queue_s
FROM jobs WHERE state = 'done' GROUP BY tenant ORDER BY sum(output_tokens) DESC
""",
    ),
    Question(
        "What fails, and why?",
        """
SELECT error_code, count(*) AS jobs, min(error) AS example, max(finished_ms) AS last_ms
FROM jobs WHERE state = 'failed' GROUP BY error_code ORDER BY jobs DESC
""",
    ),
    Question(
        "Where did the slowest jobs spend their time?",
        """
SELECT id, queue_s, ttft_s - queue_s AS prefill_s, e2e_s - ttft_s AS decode_s, e2e_s, output_tokens, attempts
FROM jobs WHERE state = 'done' ORDER BY e2e_s DESC LIMIT 5
""",
    ),
    Question(
        "What happened to this job?",
        """
SELECT at, event, epoch, detail FROM timeline
WHERE job_id = (SELECT id FROM jobs WHERE attempts = 2 ORDER BY submitted_ms LIMIT 1) ORDER BY at_ms, place
""",
    ),
    Question(
        "Which jobs survived the death of their worker?",
        """
SELECT exactness, count(*) AS jobs, sum(resumed_tokens) AS resumed_tokens, max(itl_max_s) AS longest_gap_s
FROM jobs WHERE attempts > 1 AND state = 'done' GROUP BY exactness ORDER BY exactness
""",
        "`resumed_tokens` were on the channel already and were not generated again; `exactness` says how exactly the "
        "jobs were resumed.",
    ),
    Question(
        "Which worker processes lost jobs?",
        """
SELECT incarnation, outcome, why, count(*) AS attempts
FROM attempts WHERE outcome IN ('returned', 'failed')
GROUP BY incarnation, outcome, why ORDER BY attempts DESC, why
""",
    ),
    Question(
        "How far is a batch?",
        """
SELECT id, jobs, queued + running AS left_over, done, failed, output_tokens
FROM batch_progress WHERE queue = 'bulk' ORDER BY id
""",
    ),
    Question(
        "What did the prefix cache save?",
        """
SELECT model, sum(cached_tokens) AS cached, sum(prompt_tokens) AS prompt_tokens,
       1.0 * sum(cached_tokens) / sum(prompt_tokens) AS share
FROM jobs WHERE state = 'done' GROUP BY model ORDER BY model
""",
    ),
    Question(
        "Which prompts were submitted more than once?",
        """
SELECT prompt_sha256, count(*) AS jobs, count(DISTINCT tenant) AS tenants, sum(output_tokens) AS output_tokens
FROM jobs WHERE prompt_sha256 IS NOT NULL
GROUP BY prompt_sha256 HAVING count(*) > 1 ORDER BY jobs DESC LIMIT 3
""",
    ),
)


# ---------------------------------------------------------------- a made-up afternoon


def fill(engine: Engine) -> None:
    """Record the afternoon."""
    dice = random.Random(7)
    by_queue: dict[str, list[OutboxEvent]] = {"chat": [], "bulk": []}
    for number in range(NUM_JOBS):
        queue = "bulk" if number % 3 == 0 else "chat"
        at_ms = NOON_MS + number * 2 * HOUR_MS // NUM_JOBS
        for event in _job(dice, queue, number, at_ms):
            by_queue[queue].append(replace(event, fields={**event.fields, "submitted_ms": at_ms}))
    writer = HistoryWriter(engine)
    for queue, events in by_queue.items():
        writer.write(changes_of(queue, events).values())


def _job(dice: random.Random, queue: str, number: int, at_ms: int) -> Iterator[OutboxEvent]:
    tenant = dice.choice(TENANTS)
    job_id = JobId(f"0.{tenant}.{number:06x}")
    prompt_tokens = dice.randint(40, 900)
    yield _event("submitted", job_id, 1, at_ms, _asked(dice, queue, number, prompt_tokens))
    fate = dice.random()
    pulled_ms = at_ms + dice.randint(1, 400)
    if number >= NUM_JOBS - 12:
        if fate < 0.5:
            yield _event("started", job_id, 2, pulled_ms, _claim(1))
        return
    yield _event("started", job_id, 2, pulled_ms, _claim(1))
    if fate < 0.03:
        code, sentence = ERRORS[number % 2]
        yield _end(job_id, 3, pulled_ms + 20, 1, "failed", None, error=sentence, error_code=code)
        return
    resumed = fate > 0.97
    if resumed:
        yield _event("returned", job_id, 3, pulled_ms + 4100, {"why": b"death", "epoch": 1})
        yield _event("started", job_id, 4, pulled_ms + 4150, _claim(2))
    yield _done(dice, job_id, at_ms, pulled_ms, prompt_tokens, is_resumed=resumed)


def _asked(dice: random.Random, queue: str, number: int, prompt_tokens: int) -> dict[str, bytes | int | None]:
    spec = JobSpec(options=JobOptions(max_tokens=256), metadata={"team": dice.choice(("search", "ads"))})
    question = number if dice.random() < 0.95 else 42
    fields: dict[str, bytes | int | None] = {
        "priority": 0 if queue == "bulk" else 5,
        "prompt_tokens": prompt_tokens,
        "cost": prompt_tokens + 256,
        "spec": encode_spec(spec),
        "seed": str(dice.getrandbits(64)).encode(),
        "prompt_to_hash": encode_prompt(f"Question {question}"),
    }
    return fields | ({"batch": b"nightly-1" if number < NUM_JOBS // 2 else b"nightly-2"} if queue == "bulk" else {})


def _claim(epoch: int) -> dict[str, bytes | int | None]:
    return {"epoch": epoch, "attempt": epoch, "incarnation": b"5f2c" if epoch == 1 else b"9b1e"}


def _done(
    dice: random.Random, job_id: JobId, at_ms: int, pulled_ms: int, prompt_tokens: int, *, is_resumed: bool
) -> OutboxEvent:
    output_tokens, gap_ms = dice.randint(1, 250), dice.uniform(12, 45)
    scheduled_ms = pulled_ms + dice.randint(1, 30)
    first_token_ms = scheduled_ms + prompt_tokens + dice.randint(5, 40)
    epoch, lost_ms = (2, 4150) if is_resumed else (1, 0)
    record = JobRecord(
        model="llama-3-8b",
        fingerprint="c0ffee",
        worker=WORKERS[epoch - 1],
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens // 2 // 16 * 16 if dice.random() < 0.6 else 0,
        output_tokens=output_tokens,
        resumed_tokens=output_tokens // 3 if is_resumed else 0,
        preemptions=int(dice.random() < 0.04),
        first_scheduled_ms=scheduled_ms,
        first_token_ms=first_token_ms,
        itl_p50_ms=gap_ms,
        itl_p99_ms=gap_ms * 2.5,
        itl_max_ms=gap_ms * 3 + lost_ms,
        exactness="same_fingerprint" if is_resumed else "undisturbed",
    )
    ended_ms = first_token_ms + int(gap_ms * (output_tokens - 1)) + lost_ms
    reason = "length" if output_tokens > 240 else "stop"
    return _end(job_id, 3 + 2 * int(is_resumed), ended_ms, epoch, "done", reason, record=encode_record(record))


def _end(
    job_id: JobId, version: int, at_ms: int, epoch: int, state: str, reason: str | None, **more: str | bytes
) -> OutboxEvent:
    fields: dict[str, bytes | int | None] = {"state": state.encode(), "reason": reason.encode() if reason else None}
    also = {name: value.encode() if isinstance(value, str) else value for name, value in more.items()}
    return _event("ended", job_id, version, at_ms, {**fields, **_claim(epoch), **also})


def _event(kind: str, job_id: JobId, version: int, at_ms: int, fields: dict[str, bytes | int | None]) -> OutboxEvent:
    return OutboxEvent(kind=kind, job_id=job_id, version=version, at_ms=at_ms, fields=fields)  # pyright: ignore[reportArgumentType]  # one of four words


# ---------------------------------------------------------------- the page


def page(text: str, engine: Engine) -> str:
    """The page with its questions answered from `engine`."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "".join(_section(n, q, engine) for n, q in enumerate(QUESTIONS, 1)) + END + after


def _section(number: int, question: Question, engine: Engine) -> str:
    with engine.connect() as connection:
        result = connection.execute(sa.text(question.sql))
        lines = _table(list(result.keys()), [tuple(row) for row in result])
    remark = f"{question.remark}\n\n" if question.remark else ""
    return f"### {number}. {question.title}\n\n{remark}```sql{question.sql}```\n```\n{lines}```\n\n"


def _table(names: Sequence[str], rows: Sequence[tuple[object, ...]]) -> str:
    cells = [list(names), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in cells
    )


def _shown(value: object) -> str:
    """As both databases mean it, whatever their drivers make of a number."""
    if isinstance(value, float) or (isinstance(value, Decimal) and value != value.to_integral_value()):
        return f"{value:.3f}"
    return "" if value is None else str(value)


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_database(f"sqlite:///{folder}/history.db", is_writer=True)
        migrate(engine)
        fill(engine)
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), engine), encoding="utf-8")
        engine.dispose()


if __name__ == "__main__":
    main()
