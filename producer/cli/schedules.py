"""The commands `producer schedules …`."""

import time
from datetime import datetime
from typing import get_args

import click

from sluice.producer.bulk.schedule_lines import jobs_of_lines
from sluice.producer.cli.common import (
    Command,
    Values,
    connection_options,
    json_option,
    note,
    option,
    options_of,
    producer_of,
    sampling_options,
    show_rows,
)
from sluice.producer.operations.schedules import ScheduleView
from sluice.protocol.bulk_files.input import opened
from sluice.protocol.host.terminal import say
from sluice.protocol.jobs import Job, Options
from sluice.protocol.schedules.firing import FIRE_EVERY_S, Look
from sluice.protocol.schedules.schedule import Misfire, Overlap

HEADERS = ("name", "tenant", "cron", "zone", "jobs", "misfire", "overlap", "paused", "last_run", "next_run")


@click.group()
def schedules() -> None:
    """Submit jobs at the times of cron rules."""


def tenant_option(command: Command) -> Command:
    """Add the option of a schedule's tenant."""
    return option("--tenant", str, "NAME", "Tenant of the schedule.", default="default")(command)


@schedules.command("add")
@click.argument("name")
@option("--cron", str, "RULE", "Minute, hour, day, month and weekday, or a name such as @daily.", required=True)
@option("--tz", str, "ZONE", "Time zone of the rule, such as Europe/Berlin.", default="UTC")
@option("--file", str, "FILE.jsonl|-", "The jobs of each run: lines as of `producer submit`.")
@option("--prompt", str, "TEXT", "The job of each run, in place of a file.")
@option(
    "--misfire",
    click.Choice(get_args(Misfire)),
    None,
    "Of times that nobody fired, run the latest, all (the newest 100), or none.",
    default="latest",
)
@option(
    "--overlap",
    click.Choice(get_args(Overlap)),
    None,
    "Whether a run is left out while a job of the last one waits or runs.",
    default="allow",
)
@click.option("--model", metavar="NAME", help="Model that the workers must serve.")
@sampling_options
@connection_options
def add(name: str, *, file: str | None, prompt: str | None, **values: object) -> None:
    """Add the schedule NAME, or replace it. The workers of the queue submit its jobs, once at each of its times.

    Options on the command line are defaults of the lines. --deadline and --not-before count from each run.

    \b
    Examples:
        producer schedules add report --cron "0 9 * * mon-fri" --tz Europe/Berlin --file report.jsonl
        producer schedules add hello --cron @hourly --prompt "Name three rivers." --max-tokens 40
    """
    if (file is None) == (prompt is None):
        raise click.UsageError("give a --file, or a --prompt.")
    rule: Values = {key: values.pop(key) for key in ("cron", "tz", "misfire", "overlap")}
    options = options_of(values)
    jobs = [Job(prompt)] if prompt is not None else _jobs(str(file), options)
    with producer_of(values) as producer:
        view = producer.add_schedule(name, jobs, **rule, **options)
    say(f"schedule {name!r} runs next at {_shown(view.next_runs[0])}")


def _jobs(path: str, options: Options) -> list[Job]:
    """Return the jobs of a file.

    Raises:
        InvalidJob: a line is wrong, or there are too many.
        OSError: the file cannot be read.
    """
    with opened(path) as file:
        return jobs_of_lines(file, options)


@schedules.command("list")
@click.option("--tenant", metavar="NAME", help="Only schedules of this tenant.")
@json_option
@connection_options
def list_schedules(*, tenant: str | None, as_json: bool, **values: object) -> None:
    """List the schedules of a queue, each with its last and next run.

    \b
    Example:
        producer schedules list
    """
    with producer_of(values) as producer:
        views = producer.schedules(tenant=tenant)
    show_rows(HEADERS, list(map(_row, views)), as_json=as_json)


@schedules.command("next")
@click.argument("name")
@option("--count", click.IntRange(1, 1000), "COUNT", "Number of times.", default=5)
@tenant_option
@connection_options
def next_runs(name: str, *, count: int, tenant: str, **values: object) -> None:
    """Print the next times of the schedule NAME, in its time zone.

    \b
    Example:
        producer schedules next report --count 3
    """
    with producer_of(values) as producer:
        view = producer.schedule(name, tenant=tenant, num_next=count)
    for moment in view.next_runs:
        say(_shown(moment))
    if view.paused:
        note("It is paused, and does not run until it is resumed.")


@schedules.command()
@click.argument("name")
@tenant_option
@connection_options
def pause(name: str, *, tenant: str, **values: object) -> None:
    """Pause the schedule NAME. The times of the pause do not run, also not later.

    \b
    Example:
        producer schedules pause report
    """
    with producer_of(values) as producer:
        producer.pause_schedule(name, tenant=tenant)
    say(f"schedule {name!r} is paused")


@schedules.command()
@click.argument("name")
@tenant_option
@connection_options
def resume(name: str, *, tenant: str, **values: object) -> None:
    """Resume the paused schedule NAME.

    \b
    Example:
        producer schedules resume report
    """
    with producer_of(values) as producer:
        producer.pause_schedule(name, tenant=tenant, is_paused=False)
    say(f"schedule {name!r} is resumed")


@schedules.command()
@click.argument("name")
@tenant_option
@connection_options
def remove(name: str, *, tenant: str, **values: object) -> None:
    """Remove the schedule NAME. Jobs that it has submitted continue.

    \b
    Example:
        producer schedules remove report
    """
    with producer_of(values) as producer:
        producer.remove_schedule(name, tenant=tenant)
    say(f"schedule {name!r} is removed")


@schedules.command("run")
@click.option("--once", "is_once", is_flag=True, help="Submit what is due now, and end.")
@connection_options
def run_schedules(*, is_once: bool, **values: object) -> None:
    """Submit the runs that are due, until Ctrl-C: for a queue whose workers do not always run, as they do the same.

    \b
    Example:
        producer schedules run --once
    """
    told = list[str]()
    with producer_of(values) as producer:
        while True:
            told = _report(producer.fire_schedules(), told)
            if is_once:
                return
            time.sleep(FIRE_EVERY_S)


def _report(look: Look, told: list[str]) -> list[str]:
    """Print the ids of submitted jobs, and problems that the last look did not have; return the problems."""
    for fired in look.fired:
        for job_id in fired.job_ids:
            say(job_id)
    problems = [f"schedule {problem.schedule_id}: {problem.message}" for problem in look.problems]
    for problem in problems:
        if problem not in told:
            note(problem)
    return problems


def _row(view: ScheduleView) -> Values:
    return {
        "name": view.name,
        "tenant": view.tenant,
        "cron": view.cron,
        "zone": view.zone,
        "jobs": view.num_jobs,
        "misfire": view.misfire,
        "overlap": view.overlap,
        "paused": view.paused,
        "last_run": None if view.last_run is None else _shown(view.last_run),
        "next_run": None if view.paused else _shown(view.next_runs[0]),
    }


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="minutes")
