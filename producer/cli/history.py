"""The commands `producer jobs …` and `producer delete`, which read and change the job history."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import click

from sluice.producer import config
from sluice.producer.cli.common import (
    Values,
    connection_options,
    database_option,
    json_option,
    note,
    producer_of,
    show_json,
    show_table,
    when,
)
from sluice.producer.client import Producer
from sluice.producer.contract.host.terminal import say
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import HistoryUnavailable, JobNotFound, QueueUnreachable
from sluice.producer.operations.views import JobStatus

if TYPE_CHECKING:
    from sluice.producer.history.queries import AttemptRow, Forgotten, JobRow, TimelineRow

ATTEMPT_HEADERS = ("attempt", "incarnation", "started", "ended", "outcome", "why", "gap_s")
STATES = [state.value for state in JobState]
LIST_HEADERS = ("id", "state", "attempts", "submitted", "queue_s", "ttft_s", "e2e_s", "output_tokens", "reason")


@click.group()
def jobs() -> None:
    """Show jobs, from the history and from the queue."""


@jobs.command("list")
@click.option("--batch", metavar="NAME", help="Include only jobs of this batch.")
@click.option("--state", type=click.Choice(STATES), help="Include only jobs in this state.")
@click.option("--tenant", metavar="NAME", help="Include only jobs of this tenant.")
@click.option("--since", "since_s", metavar="SECONDS", type=float, help="Include only jobs submitted within this time.")
@click.option(
    "--limit", metavar="COUNT", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of jobs."
)
@json_option
@database_option
@connection_options
def list_jobs(*, as_json: bool, limit: int, **values: object) -> None:
    """List the newest jobs of a queue from the history.

    Without a history, --batch shows the totals that the queue keeps.

    \b
    Example:
        producer jobs list --state failed --limit 20
    """
    try:
        rows = _listed(values, limit)
    except HistoryUnavailable:
        if values["batch"] is None:
            raise
        return _show_batch(values, as_json=as_json)
    if as_json:
        return show_json([asdict(row) for row in rows])
    # Only jobs of bulk files have lines.
    more = ("line", "custom_id") if any(row.line is not None for row in rows) else ()
    cells = [_cells(row) + [getattr(row, name) for name in more] for row in rows]
    return show_table((*LIST_HEADERS, *more), cells)


def _listed(values: Values, limit: int) -> "list[JobRow]":
    from sluice.producer.history.queries import History, JobFilter

    since_s = values["since_s"]
    wanted = JobFilter(
        queue=values["queue"],
        batch=values["batch"],
        state=values["state"],
        tenant=values["tenant"],
        since_ms=None if since_s is None else round((time.time() - since_s) * 1000),
    )
    with History(config.database_url(values["database_url"])) as history:
        return history.jobs(wanted, limit=limit)


def _cells(row: "JobRow") -> list[object]:
    why = row.error or row.reason
    times = (when(row.submitted_ms), row.queue_s, row.ttft_s, row.e2e_s)
    return [row.id, row.state, row.attempts, *times, row.output_tokens, why]


def _show_batch(values: Values, *, as_json: bool) -> None:
    batch = values.pop("batch")
    for name in ("state", "tenant", "since_s"):
        del values[name]
    with producer_of(values) as producer:
        totals = producer.batch(batch)
    if as_json:
        show_json(totals)
    else:
        note("there is no history; these are the queue's own totals")
        show_table(("what", "value"), list(asdict(totals).items()))


@jobs.command("show")
@click.argument("job")
@json_option
@database_option
@connection_options
def show_job(job: str, *, as_json: bool, **values: object) -> None:
    """Show one job: its state, figures, timeline and attempts, from the history and from the queue.

    \b
    Example:
        producer jobs show 0.default.1f0c6a
    """
    record, status = _in_history(job, values), _in_queue(job, values)
    known: Values = (record.values() if record else {}) | ({"queue": _facts(status)} if status else {})
    if not known:
        advice = "The history does not have it either. List the jobs that it has: producer jobs list"
        raise JobNotFound(JobId(job), advice=advice)
    if as_json:
        show_json(known)
        return
    facts: Values = known.get("history") or known.get("queue") or {}
    if known.get("submissions", 1) > 1:
        note(f"this id was submitted {known['submissions']} times; this is the newest submission")
    show_table(("what", "value"), [(name, value) for name, value in facts.items() if value not in (None, {}, b"")])
    _draw(status, record)
    if "timeline" in known:
        rows = [(when(row["at_ms"]), row["event"], row["epoch"], row["detail"]) for row in known["timeline"]]
        show_table(("at", "event", "epoch", "detail"), rows)
    if known.get("attempts"):
        show_table(ATTEMPT_HEADERS, [_attempt_cells(row) for row in known["attempts"]])


def _draw(status: JobStatus | None, record: "_Record | None") -> None:
    """Draw the timeline on a terminal."""
    if not sys.stdout.isatty():
        return
    from sluice.producer.timeline.picture import picture
    from sluice.producer.timeline.text import lines_of
    from sluice.producer.timeline.times import times_of

    times = times_of(status, record and record.row, record.claims if record else ())
    if times is not None:
        width = shutil.get_terminal_size().columns
        for line in ("", *lines_of(picture(times, round(time.time() * 1000)), times, width=width), ""):
            say(line)


def _attempt_cells(row: Values) -> list[object]:
    times = (when(row["started_ms"]), when(row["ended_ms"]))
    return [row["attempt"], row["incarnation"], *times, row["outcome"], row["why"], row["gap_s"]]


@dataclass(frozen=True, slots=True)
class _Record:
    """What the history has of a job."""

    row: "JobRow"
    num_submissions: int
    events: Sequence["TimelineRow"]
    claims: Sequence["AttemptRow"]

    def values(self) -> Values:
        """Return it as JSON has it."""
        return {
            "history": asdict(self.row),
            "submissions": self.num_submissions,
            "timeline": [asdict(event) for event in self.events],
            "attempts": [asdict(claim) for claim in self.claims],
        }


def _in_history(job: str, values: Values) -> _Record | None:
    from sluice.producer.history.queries import History

    queue = str(values["queue"])
    try:
        with History(config.database_url(cast("str | None", values["database_url"]))) as history:
            row = history.job(queue, job)
            if row is None:
                return None
            number, events = history.num_submissions(queue, job), history.timeline(queue, job)
            return _Record(row, number, events, history.attempts(queue, job))
    except HistoryUnavailable:
        return None


def _in_queue(job: str, values: Values) -> JobStatus | None:
    try:
        with producer_of(values) as producer:
            return producer.status(job)
    except (JobNotFound, QueueUnreachable):
        return None


def _facts(status: JobStatus) -> Values:
    facts = {name: getattr(status, name) for name in JobStatus.__dataclass_fields__ if name != "spec"}
    return {**facts, **{name: when(facts[name]) for name in ("submitted_ms", "started_ms", "ended_ms")}}


@jobs.command("latency")
@click.option("--batch", metavar="NAME", help="Include only jobs of this batch.")
@click.option("--tenant", metavar="NAME", help="Include only jobs of this tenant.")
@click.option("--since", "since_s", metavar="SECONDS", type=float, help="Include only jobs submitted within this time.")
@json_option
@database_option
@connection_options
def latency(*, as_json: bool, **values: object) -> None:
    """Print percentiles of queue time, TTFT, TPOT, ITL and E2E of done jobs.

    \b
    Example:
        producer jobs latency --batch prompts-1f0c6a
    """
    from sluice.producer.history.queries import History, JobFilter

    since_s = cast("float | None", values["since_s"])
    wanted = JobFilter(
        queue=cast("str", values["queue"]),
        batch=cast("str | None", values["batch"]),
        tenant=cast("str | None", values["tenant"]),
        since_ms=None if since_s is None else round((time.time() - since_s) * 1000),
    )
    with History(config.database_url(cast("str | None", values["database_url"]))) as history:
        rows = [asdict(row) for row in history.latency(wanted)]
    if as_json:
        show_json(rows)
    else:
        headers = ("metric", "jobs", "mean_s", "p50_s", "p90_s", "p95_s", "p99_s", "max_s")
        show_table(headers, [[row[header] for header in headers] for row in rows])


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@database_option
@connection_options
def delete(job_ids: tuple[str, ...], **values: object) -> None:
    """Delete the data of ended jobs: prompt, output and channel in Redis; prompt, output and metadata in SQL.

    The history keeps the job's id, state and times. A job that has not ended is not changed.

    \b
    Example:
        producer delete 0.default.1f0c6a
    """
    database_url, queue = cast("str | None", values["database_url"]), str(values["queue"])
    with producer_of(values) as producer:
        answers, forgotten = _deleted(producer, queue, job_ids)
    known = _forget(database_url, forgotten)
    for job_id, answer in answers.items():
        found = answer or ("deleted" if known else "unknown")
        say(f"{job_id}\t{found}")
    if any(answer == "not ended" for answer in answers.values()):
        sys.exit(1)


def _deleted(
    producer: Producer, queue: str, job_ids: tuple[str, ...]
) -> tuple[dict[str, str | None], "list[Forgotten]"]:
    """Delete jobs from Redis; returns the result of each (None: unknown) and the jobs to delete from the history."""
    from sluice.producer.history.queries import Forgotten

    views = producer.views(job_ids)
    ended = [view.id for view in views if view is not None and view.state.is_terminal]
    producer.delete(ended)
    answers: dict[str, str | None] = {}
    forgotten: list[Forgotten] = []
    for job_id, view in zip(job_ids, views, strict=True):
        has_ended = view is None or view.state.is_terminal
        answers[job_id] = "not ended" if not has_ended else None if view is None else "deleted"
        if has_ended:
            state, submitted_ms = (view.state, view.submitted_ms) if view else (None, None)
            forgotten.append(Forgotten(id=JobId(job_id), queue=queue, state=state, submitted_ms=submitted_ms))
    return answers, forgotten


def _forget(database_url: str | None, forgotten: "list[Forgotten]") -> int:
    from sluice.producer.history.queries import History

    try:
        with History(config.database_url(database_url), is_writer=True) as history:
            return history.forget(forgotten)
    except HistoryUnavailable as error:
        note(f"the history was not changed: {error}")
        return 0
