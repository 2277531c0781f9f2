"""The commands `producer cancel`, `producer requeue` and `producer batches …`."""

from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from typing import cast

import click

from sluice.producer.cli.common import (
    UNKNOWN,
    Values,
    connection_options,
    json_option,
    note,
    option,
    producer_of,
    show_answers,
    show_facts,
    show_json,
    show_table,
    when,
)
from sluice.producer.cli.durations import TIME
from sluice.producer.operations.batches import known_batch
from sluice.producer.operations.dead import DeadFilter
from sluice.protocol.calls import BatchView, JobView
from sluice.protocol.chains.chain import listed
from sluice.protocol.host.terminal import say
from sluice.protocol.states import JobState

REQUEUED = "requeued"
MOST_SHOWN = 20
DEAD_HEADERS = ("id", "error_code", "attempt", "failures", "deaths", "ended", "error")


@click.command()
@click.option("--tenant", metavar="NAME", help="Only chains of this tenant.")
@click.option("--limit", metavar="COUNT", type=click.IntRange(1), default=100, show_default=True, help="Most chains.")
@json_option
@connection_options
def chains(*, tenant: str | None, limit: int, as_json: bool, **values: object) -> None:
    """List the blocked jobs, and the jobs for which they wait. A line is a chain: the jobs of one submit.

    --json has all ids.

    \b
    Example:
        producer chains --tenant acme
    """
    with producer_of(values) as producer:
        found = producer.chains(tenant=tenant, limit=limit)
    if as_json:
        return show_json([asdict(chain) for chain in found])
    rows = [
        (chain.id, len(chain.job_ids), listed(chain.job_ids), chain.after.text, when(chain.submitted_ms))
        for chain in found
    ]
    return show_table(("chain", "jobs", "blocked", "waits_for", "submitted"), rows)


@click.command()
@click.argument("job_ids", metavar="[JOB]...", nargs=-1)
@click.option("--batch", metavar="NAME", help="Cancel every unfinished job of this batch, and close it.")
@click.option("--chain", metavar="ID", help="Cancel every unfinished job of this chain; see `producer chains`.")
@click.option("--reason", metavar="TEXT", help="Reason to record with the jobs.")
@connection_options
def cancel(
    job_ids: tuple[str, ...], *, batch: str | None, chain: str | None, reason: str | None, **values: object
) -> None:
    """Cancel jobs.

    A waiting job ends at once; a running one is stopped by its worker, and a blocked one is ended by any. Prints the
    state reached, or `asked`, for each job; for a batch, the number of jobs. A blocked job is in no batch before it is
    released: --batch leaves it alone, --chain cancels it.

    \b
    Example:
        producer cancel 0.default.1f0c6a
        producer cancel --batch prompts-1f0c6a
        producer cancel --chain 1796049076768-e2c6ac4afb4993a1
    """
    if bool(job_ids) + (batch is not None) + (chain is not None) != 1:
        raise click.UsageError("give jobs, a --batch, or a --chain.")
    with producer_of(values) as producer:
        if chain is not None:
            answers = producer.cancel_chain(chain, reason=reason)
            return show_answers([*answers], [*answers.values()], bad=[UNKNOWN])
        if batch is None:
            return show_answers(job_ids, producer.cancel_many(job_ids, reason=reason), bad=[UNKNOWN])
        done = producer.cancel_batch(batch, reason=reason)
    return say(f"{done.num_ended} jobs cancelled, {done.num_asked} asked to stop")


@click.command()
@click.argument("job_ids", metavar="[JOB]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Select every dead job.")
@click.option("--error-code", metavar="CODE", help="Select dead jobs with this error code.")
@click.option("--tenant", metavar="NAME", help="Select dead jobs of this tenant.")
@click.option("--batch", metavar="NAME", help="Select dead jobs of this batch.")
@option("--min-age", TIME, None, "Select jobs that failed at least this long ago.", name="min_age_s")
@option("--max-age", TIME, None, "Select jobs that failed at most this long ago.", name="max_age_s")
@click.option("--yes", "is_sure", is_flag=True, help="Requeue the selected jobs instead of listing them.")
@json_option
@connection_options
def requeue(job_ids: tuple[str, ...], *, is_all: bool, is_sure: bool, as_json: bool, **values: object) -> None:
    """Requeue failed jobs, which resume after their last token.

    Jobs given by id are requeued at once. A job is not requeued if it has not failed, if its prompt has expired, or if
    a newer job has its idempotency key. Filters are combined with and; without --yes, the selected jobs are only
    listed.

    \b
    Example:
        producer requeue 0.default.1f0c6a
        producer requeue --error-code out_of_memory --max-age 1h
        producer requeue --error-code out_of_memory --max-age 1h --yes
    """
    names = ("error_code", "tenant", "batch", "min_age_s", "max_age_s")
    given = {name: values.pop(name) for name in names}
    has_filter = is_all or any(value is not None for value in given.values())
    if bool(job_ids) == has_filter:
        raise click.UsageError("give jobs, or a filter: --all, --error-code, --tenant, --batch, --min-age, --max-age.")
    if job_ids:
        return _requeue_each(job_ids, values)
    filter_ = DeadFilter(**cast("Values", given))
    return _requeue_dead(filter_, values) if is_sure else _show_dead(filter_, values, as_json=as_json)


def _requeue_each(job_ids: tuple[str, ...], values: Values) -> None:
    with producer_of(values) as producer:
        are_requeued = producer.requeue(job_ids)
        views = dict(zip(job_ids, producer.views(job_ids), strict=True))
    answers = [
        REQUEUED if is_requeued else _why_not(views[job_id])
        for job_id, is_requeued in zip(job_ids, are_requeued, strict=True)
    ]
    show_answers(job_ids, answers, bad={*answers} - {REQUEUED})


def _why_not(view: JobView | None) -> str:
    """Return why a job was not requeued; `view` is its state, None for an unknown job."""
    if view is None:
        return UNKNOWN
    if view.state is not JobState.FAILED:
        return f"not requeued: it is {view.state}, not failed"
    return "not requeued: its prompt has expired, or a newer job has its idempotency key"


def _requeue_dead(filter_: DeadFilter, values: Values) -> None:
    with producer_of(values) as producer:
        num_jobs = producer.requeue_dead(filter_)
    say(f"{num_jobs} jobs requeued")


def _show_dead(filter_: DeadFilter, values: Values, *, as_json: bool) -> None:
    with producer_of(values) as producer:
        views = producer.dead(filter_)
    if as_json:
        return show_json([_dead_facts(view) for view in views])
    newest = views[-MOST_SHOWN:][::-1]
    show_table(DEAD_HEADERS, [[_dead_facts(view)[name] for name in DEAD_HEADERS] for view in newest])
    codes = ", ".join(f"{code}: {count}" for code, count in Counter(view.error_code for view in views).most_common())
    note(f"{len(views)} dead jobs are selected" + (f" ({codes})" if codes else ""))
    return note("Nothing was changed: give --yes to requeue them.")


def _dead_facts(view: JobView) -> Values:
    deaths = " ".join(f"{death.incarnation}({'apart' if death.is_apart else death.mates})" for death in view.deaths)
    return {
        "id": view.id,
        "error_code": view.error_code,
        "attempt": view.attempt,
        "failures": view.failures,
        "deaths": deaths or None,
        "ended": when(view.ended_ms),
        "error": view.error,
        "batch": view.batch,
        "requeues": view.requeues,
    }


# ---------------------------------------------------------------- batches


@click.group()
def batches() -> None:
    """Show batches, close them, or set their deadline."""


@batches.command("show")
@click.argument("name")
@json_option
@connection_options
def show_batch(name: str, *, as_json: bool, **values: object) -> None:
    """Show the totals of a batch.

    \b
    Example:
        producer batches show prompts-1f0c6a
    """
    with producer_of(values) as producer:
        _show(producer.run(known_batch(producer.target, name)), as_json=as_json)


@batches.command("close")
@click.argument("name")
@click.option("--callback-url", metavar="URL", help="POST to this URL once, when all jobs have ended.")
@json_option
@connection_options
def close_batch(name: str, *, callback_url: str | None, as_json: bool, **values: object) -> None:
    """Close a batch: it accepts no more jobs, and is complete when the last job has ended.

    \b
    Example:
        producer batches close prompts-1f0c6a
    """
    with producer_of(values) as producer:
        _show(producer.close_batch(name, callback_url=callback_url), as_json=as_json)


@batches.command("expire")
@click.argument("name")
@click.option("--in", "in_s", type=TIME, required=True, help="Time until the deadline.")
@json_option
@connection_options
def expire_batch(name: str, *, in_s: float, as_json: bool, **values: object) -> None:
    """Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire.

    \b
    Example:
        producer batches expire prompts-1f0c6a --in 1h
    """
    with producer_of(values) as producer:
        _show(producer.expire_batch(name, timedelta(seconds=in_s)), as_json=as_json)


def _show(view: BatchView, *, as_json: bool) -> None:
    times = {"completed_ms": when(view.completed_ms), "deadline_ms": when(view.deadline_ms)}
    facts = {name.removesuffix("_ms"): value for name, value in {**asdict(view), **times}.items()}
    show_facts(asdict(view) if as_json else facts, as_json=as_json)
