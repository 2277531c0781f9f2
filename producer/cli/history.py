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
    UNKNOWN,
    Values,
    connection_options,
    database_option,
    json_option,
    note,
    option,
    producer_of,
    show_answers,
    show_facts,
    show_json,
    show_rows,
    show_table,
    when,
)
from sluice.producer.cli.durations import TIME
from sluice.producer.client import Producer
from sluice.producer.errors import HistoryUnavailable, JobNotFound, ProducerError, QueueUnreachable
from sluice.producer.operations.batches import known_batch
from sluice.producer.operations.views import JobStatus
from sluice.protocol.clock import wall_ms
from sluice.protocol.host.state_folder import history_path
from sluice.protocol.host.terminal import say
from sluice.protocol.states import RECORDED
from sluice.protocol.wire import JobId

if TYPE_CHECKING:
    from sluice.history.filters import JobFilter
    from sluice.history.queries import AttemptRow, Forgotten, JobRow, TimelineRow
    from sluice.producer.timeline.picture import Times

NOT_ENDED = "not ended"
HIDDEN = ("spec", "cost")
"""Facts of the queue that the table leaves out: the encoded options, and an estimate that the scheduler orders by."""

NAMES_IN_HISTORY = {"attempt": "attempts", "owner": "worker"}
"""Values that the queue and the history have under different names."""

ATTEMPT_HEADERS = ("attempt", "incarnation", "started", "ended", "outcome", "why", "gap_s")
STATES = [state.value for state in RECORDED]
LATENCY_HEADERS = ("metric", "jobs", "mean_s", "p50_s", "p90_s", "p95_s", "p99_s", "max_s")
LIST_HEADERS = ("id", "state", "attempts", "submitted", "queue_s", "ttft_s", "e2e_s", "output_tokens", "reason")


_since_option = option("--since", TIME, None, "Include only jobs submitted within this time.", name="since_s")


@click.group()
def jobs() -> None:
    """Show jobs, from the history and from the queue."""


@jobs.command("list")
@click.option("--batch", metavar="NAME", help="Include only jobs of this batch.")
@click.option("--state", type=click.Choice(STATES), help="Include only jobs in this state.")
@click.option("--tenant", metavar="NAME", help="Include only jobs of this tenant.")
@_since_option
@option("--limit", click.IntRange(1), "COUNT", "Maximum number of jobs.", default=50)
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
    from sluice.history.queries import History

    with History(config.database_url(values["database_url"])) as history:
        return history.jobs(_filter_of(values), limit=limit)


def _filter_of(values: Values) -> "JobFilter":
    from sluice.history.filters import JobFilter

    since_s = values["since_s"]
    return JobFilter(
        since_ms=None if since_s is None else round((time.time() - since_s) * 1000),
        **{name: values[name] for name in ("queue", "batch", "tenant", "state") if name in values},
    )


def _cells(row: "JobRow") -> list[object]:
    why = row.error or row.reason
    times = (when(row.submitted_ms), row.queue_s, row.ttft_s, row.e2e_s)
    return [row.id, row.state, row.attempts, *times, row.output_tokens, why]


def _show_batch(values: Values, *, as_json: bool) -> None:
    batch = values.pop("batch")
    for name in ("state", "tenant", "since_s"):
        del values[name]
    with producer_of(values) as producer:
        totals = producer.run(known_batch(producer.target, batch))
    if not as_json:
        note("there is no history; these are the queue's own totals")
    show_facts(asdict(totals), as_json=as_json)


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
    from sluice.producer.timeline.times import times_of

    record, history_error = _in_history(job, values)
    status, queue_error = _in_queue(job, values)
    if record is None and status is None:
        raise _not_found(job, history_error, queue_error)
    _note_unsearched(history_error, queue_error)
    facts: Values = (record.values() if record else {}) | ({"queue": _facts(status)} if status else {})
    if as_json:
        show_json(facts)
        return
    if facts.get("submissions", 1) > 1:
        note(f"this id was submitted {facts['submissions']} times; this is the newest submission")
    times = times_of(status, record and record.row, record.claims if record else ())
    show_table(("what", "value"), list((_newest(record, status) | _moments(times)).items()))
    _draw(times)
    if "timeline" in facts:
        rows = [(when(row["at_ms"]), row["event"], row["epoch"], row["detail"]) for row in facts["timeline"]]
        show_table(("at", "event", "epoch", "detail"), rows)
    if facts.get("attempts"):
        show_table(ATTEMPT_HEADERS, [_attempt_cells(row) for row in facts["attempts"]])


def _not_found(
    job: str, history_error: HistoryUnavailable | None, queue_error: QueueUnreachable | None
) -> ProducerError:
    """Return the error of a job that was not found; it names what was not searched."""
    unsearched = f"The history was not searched: {history_error}" if history_error is not None else None
    if queue_error is not None:
        history = unsearched or "The history does not have it."
        return QueueUnreachable(f"job {job} was not found. {history} The queue was not searched: {queue_error}")
    if unsearched is not None:
        return JobNotFound(JobId(job), advice=unsearched)
    advice = "The history does not have it either. List the jobs that it has: producer jobs list"
    return JobNotFound(JobId(job), advice=advice)


def _note_unsearched(history_error: HistoryUnavailable | None, queue_error: QueueUnreachable | None) -> None:
    if history_error is not None:
        note(f"the history was not searched: {history_error}")
    if queue_error is not None:
        note(f"the queue was not searched, so this may be old: {queue_error}")


def _newest(record: "_Record | None", status: JobStatus | None) -> Values:
    """Return the facts of the history, then those of the queue, which are newer where both have one. Without times."""
    row = record.row if record else None
    if row is not None and status is not None and row.submitted_ms != status.submitted_ms:
        row = None  # of an earlier submission of this id
    now = _facts(status) if status else {}
    facts = [asdict(row) if row else {}, {name: value for name, value in now.items() if name not in HIDDEN}]
    return {
        NAMES_IN_HISTORY.get(name, name): value
        for source in facts
        for name, value in source.items()
        if value not in (None, {}, (), b"") and not name.endswith("_ms")
    }


def _moments(times: "Times | None") -> Values:
    if times is None:
        return {}
    moments = {
        "submitted": times.submitted_ms,
        "started": times.attempts[0].start_ms if times.attempts else None,
        "scheduled": times.scheduled_ms,
        "first_token": times.first_token_ms,
        "ended": times.ended_ms,
    }
    return {name: when(at_ms) for name, at_ms in moments.items() if at_ms is not None}


def _draw(times: "Times | None") -> None:
    """Draw the timeline on a terminal."""
    if times is None or not sys.stdout.isatty():
        return
    from sluice.producer.timeline.picture import picture
    from sluice.producer.timeline.text import lines_of

    width = shutil.get_terminal_size().columns
    for line in ("", *lines_of(picture(times, wall_ms()), times, width=width), ""):
        say(line)


def _attempt_cells(row: Values) -> list[object]:
    times = (when(row["started_ms"]), when(row["ended_ms"]))
    return [row["attempt"], row["incarnation"], *times, row["outcome"], row["why"], row["gap_s"]]


@dataclass(frozen=True, slots=True)
class _Record:
    """The history's record of a job."""

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


def _in_history(job: str, values: Values) -> tuple[_Record | None, HistoryUnavailable | None]:
    """Return the history's record of a job, and why it could not be read."""
    from sluice.history.queries import History

    queue = str(values["queue"])
    try:
        with History(config.database_url(cast("str | None", values["database_url"]))) as history:
            row = history.job(queue, job)
            if row is None:
                return None, None
            number, events = history.num_submissions(queue, job), history.timeline(queue, job)
            return _Record(row, number, events, history.attempts(queue, job)), None
    except HistoryUnavailable as error:
        return None, error


def _in_queue(job: str, values: Values) -> tuple[JobStatus | None, QueueUnreachable | None]:
    """Return the queue's record of a job, and why it could not be read."""
    try:
        with producer_of(values) as producer:
            return producer.status(job), None
    except JobNotFound:
        return None, None
    except QueueUnreachable as error:
        return None, error


def _facts(status: JobStatus) -> Values:
    return {name: getattr(status, name) for name in JobStatus.__dataclass_fields__ if name != "spec"}


@jobs.command("latency")
@click.option("--batch", metavar="NAME", help="Include only jobs of this batch.")
@click.option("--tenant", metavar="NAME", help="Include only jobs of this tenant.")
@_since_option
@json_option
@database_option
@connection_options
def latency(*, as_json: bool, **values: object) -> None:
    """Print percentiles of queue time, TTFT, TPOT, ITL and E2E of done jobs.

    \b
    Example:
        producer jobs latency --batch prompts-1f0c6a
    """
    from sluice.history.queries import History

    with History(config.database_url(cast("str | None", values["database_url"]))) as history:
        rows = [asdict(row) for row in history.latency(_filter_of(values))]
    show_rows(LATENCY_HEADERS, rows, as_json=as_json)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@database_option
@connection_options
def delete(job_ids: tuple[str, ...], **values: object) -> None:
    """Delete the data of ended jobs: prompt, output and channel in Redis; prompt, output and metadata in SQL.

    The history keeps the job's id, state and times. A job that has not ended is not changed. The exit code is 1 if a
    job has not ended or is unknown, or if the history could not be changed.

    \b
    Example:
        producer delete 0.default.1f0c6a
    """
    database_url, queue = cast("str | None", values["database_url"]), str(values["queue"])
    with producer_of(values) as producer:
        left, in_queue, ended = _delete_from_queue(producer, queue, job_ids)
    in_history, error = _delete_from_history(database_url, ended)
    if error is not None:
        note(f"the history was not changed: {error}")
    unknown, answers = UNKNOWN if error is None else "not in the queue", list[str]()
    for job_id in job_ids:
        places = [name for name, has in (("queue", in_queue), ("history", in_history)) if job_id in has]
        answers.append(f"deleted from {' and '.join(places)}" if places else NOT_ENDED if job_id in left else unknown)
    show_answers(job_ids, answers, bad=(NOT_ENDED, unknown))
    # Without any history there is nothing to delete in it.
    if error is not None and (database_url or history_path().exists()):
        sys.exit(1)


def _delete_from_queue(
    producer: Producer, queue: str, job_ids: tuple[str, ...]
) -> "tuple[set[str], set[str], list[Forgotten]]":
    """Delete ended jobs from the queue; returns those left, those deleted, and what to delete from the history."""
    from sluice.history.queries import Forgotten

    views = {job_id: view for job_id, view in zip(job_ids, producer.views(job_ids), strict=True) if view is not None}
    has_ended = [job_id for job_id, view in views.items() if view.state.is_terminal]
    # One that was requeued in the meantime is not deleted.
    deleted = {job_id for job_id, is_deleted in zip(has_ended, producer.delete(has_ended), strict=True) if is_deleted}
    left = views.keys() - deleted
    ended: list[Forgotten] = []
    for job_id in dict.fromkeys(job_ids):
        if job_id not in left:
            view = views.get(job_id)
            state, submitted_ms = (view.state, view.submitted_ms) if view else (None, None)
            ended.append(Forgotten(id=JobId(job_id), queue=queue, state=state, submitted_ms=submitted_ms))
    return left, deleted, ended


def _delete_from_history(
    database_url: str | None, ended: "list[Forgotten]"
) -> tuple[set[JobId], HistoryUnavailable | None]:
    """Delete jobs from the history; returns those that it had, and why it was not changed."""
    from sluice.history.queries import History

    try:
        with History(config.database_url(database_url), is_writer=True) as history:
            return history.forget(ended), None
    except HistoryUnavailable as error:
        return set(), error
