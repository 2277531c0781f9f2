"""The commands `producer queues …` and `producer server …`."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import click

from sluice.producer.cli.common import (
    Values,
    confirmed,
    connection_options,
    json_option,
    note,
    option,
    producer_of,
    show_facts,
    show_json,
    show_rows,
    show_table,
    when,
)
from sluice.producer.cli.durations import TIME
from sluice.producer.client import Producer
from sluice.producer.errors import ProducerError
from sluice.producer.operations.totals import queue_totals, tenant_totals
from sluice.producer.operations.views import has_been_used
from sluice.protocol.bounds import TENANT_SHARE
from sluice.protocol.calls import TENANT_LIMITS, QueueSettings, QueueView
from sluice.protocol.durability import read_durability
from sluice.protocol.host.numbers import Number
from sluice.protocol.host.state_folder import state_dir
from sluice.protocol.host.terminal import say
from sluice.protocol.redis import embedded
from sluice.protocol.scaling.backlog import backlog_of
from sluice.protocol.scaling.demand import ScalePolicy, scale_of
from sluice.protocol.workers import workers_of

HEADERS = ("queue", "waiting", "tokens", "running", "oldest_s", "dead", "workers", "paused")
WORKER_HEADERS = (
    "id",
    "name",
    "host",
    "pid",
    "device",
    "model",
    "engine",
    "state",
    "places",
    "running",
    "waiting",
    "tokens_per_s",
)
UNUSED = "queue {!r} has had no job or worker on this server"


class QueueNotFound(ProducerError):
    """The queue has had no job and no worker on this server."""


@click.group()
def queues() -> None:
    """Show queues, pause, purge or configure them."""


@queues.command("list")
@json_option
@connection_options
def list_queues(*, as_json: bool, **values: object) -> None:
    """List every queue of the server: depth in jobs and tokens, oldest waiting job, dead jobs, workers.

    \b
    Example:
        producer queues list
    """
    url = cast("str | None", values["url"])
    rows: list[Values] = []
    with Producer(url) as first:
        names = first.queues()
    for name, partitions in sorted(names.items()):
        with Producer(url, queue=name, partitions=partitions) as producer:
            rows.append(_totals(name, producer.queue()))
    show_rows(HEADERS, rows, as_json=as_json)


@queues.command("show")
@json_option
@connection_options
def show_queue(*, as_json: bool, **values: object) -> None:
    """Show one queue: its totals, lanes, workers and settings.

    \b
    Example:
        producer queues show --queue default
    """
    name = str(values["queue"])
    with producer_of(values) as producer:
        views = _views(producer)
    if as_json:
        show_json({**_totals(name, views), "partitions": views})
        return
    show_table(("what", "value"), list(_totals(name, views).items()))
    show_table(WORKER_HEADERS, [[getattr(row, header) for header in WORKER_HEADERS] for row in workers_of(name, views)])
    for partition, view in enumerate(views):
        show_table(("totals", "jobs"), list(view.totals.items()))
        show_table(("partition", "class", "tenant", "jobs", "tokens"), [(partition, *lane) for lane in view.lanes])
        show_table(("partition", "tenant", "jobs", "tokens", "bytes"), [(partition, *total) for total in view.tenants])
        show_table(("partition", "setting", "value"), [(partition, *setting) for setting in view.settings.items()])


def _views(producer: Producer) -> list[QueueView]:
    """Return the state of each partition.

    Raises:
        QueueNotFound: the queue has had no job, no worker and no setting on this server.
    """
    views = producer.queue()
    if not has_been_used(views) and not any(view.settings for view in views):
        what = UNUSED.format(producer.target.name)
        raise QueueNotFound(f"{what}: its name or the server is wrong. List the queues: producer queues list")
    return views


def _report(producer: Producer, what: str) -> None:
    """Print what was done to a queue. It may be done before its first job: note that its name may also be wrong."""
    name = producer.target.name
    say(f"queue {name!r} {what}")
    if not has_been_used(producer.queue()):
        note(f"{UNUSED.format(name)} yet")


def _totals(name: str, views: Sequence[QueueView]) -> Values:
    totals: Values = asdict(queue_totals(name, views))
    oldest = when(totals.pop("oldest_ms"))
    return {**totals, "oldest": oldest}


@queues.command()
@option("--within", TIME, None, "Time to clear the backlog: 30s, 5m, 1h.", name="within_s", default="5m")
@option("--min", int, "COUNT", "Want at least this many workers.", name="min_workers", default=0)
@option("--max", int, "COUNT", "Want at most this many workers.", name="max_workers", default=100)
@json_option
@connection_options
def scale(*, within_s: float, min_workers: int, max_workers: int, as_json: bool, **values: object) -> None:
    """Show the backlog of a queue in tokens, what a worker gets through, and how many workers clear it in time.

    \b
    Example:
        producer queues scale --queue default --within 5m --max 8 --json
    """
    policy = ScalePolicy(within_s=within_s, min_workers=min_workers, max_workers=max_workers)
    name = str(values["queue"])
    with producer_of(values) as producer:
        facts = asdict(scale_of(backlog_of(name, producer.queue()), policy))
    show_facts(facts, as_json=as_json)


@queues.command()
@connection_options
def pause(**values: object) -> None:
    """Pause a queue: workers take no more jobs. Running jobs continue, and submits are accepted.

    \b
    Example:
        producer queues pause --queue default
    """
    with producer_of(values) as producer:
        producer.pause(is_paused=True)
        _report(producer, "is paused")


@queues.command()
@connection_options
def resume(**values: object) -> None:
    """Resume a paused queue.

    \b
    Example:
        producer queues resume --queue default
    """
    with producer_of(values) as producer:
        _views(producer)
        producer.pause(is_paused=False)
        _report(producer, "is resumed")


@queues.command()
@click.option("--tenant", metavar="NAME", help="Include only jobs of this tenant.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask for confirmation.")
@connection_options
def purge(*, tenant: str | None, is_sure: bool, **values: object) -> None:
    """Cancel every waiting job of a queue. Running jobs continue.

    \b
    Example:
        producer queues purge --queue default --yes
    """
    of = f" of tenant {tenant}" if tenant else ""
    confirmed(f"Cancel every waiting job{of} of queue {values['queue']}?", is_sure=is_sure)
    with producer_of(values) as producer:
        _views(producer)
        num_jobs = producer.purge(tenant=tenant)
    say(f"{num_jobs} jobs cancelled")


DIVIDED = ", in equal parts by partition."
FOR_OWN = ", in place of their own setting; 0: their own."
TENANT_SHARE_HELP = "Refuse submits of a tenant above this share of what others leave of these limits."
AGE_STEP_HELP = "Raise a job by one class, among those below the highest, after this waiting time; 0: strict classes."
WEIGHT_HELP = "Weight of a tenant in mode fair, from 0.001 to 1000. May be repeated."
MAX_RUNNING_HELP = "Most jobs of a tenant that run at once; 0: none starts. May be repeated."
TOKENS_PER_MINUTE_HELP = "Most tokens of prompts and outputs that a tenant's jobs take a minute. May be repeated."


@queues.command("set")
@option("--max-waiting-jobs", click.IntRange(0), "JOBS", f"Refuse submits above this many{DIVIDED}")
@option("--max-waiting-tokens", click.IntRange(0), "TOKENS", f"Refuse submits above this many{DIVIDED}")
@option("--max-waiting-bytes", click.IntRange(0), "BYTES", f"Refuse submits above this size{DIVIDED}")
@option("--max-outbox-entries", click.IntRange(1), "COUNT", f"Refuse submits above this many{DIVIDED}")
@option("--max-outbox-bytes", click.IntRange(1), "BYTES", f"Refuse submits above this size{DIVIDED}")
@option(TENANT_SHARE.flag, click.IntRange(1, 100), "PERCENT", TENANT_SHARE_HELP)
@option("--durability", str, "LEVEL", "Default durability of submits: memory, aof, fsync or replica:N.")
@option("--max-failures", click.IntRange(1), "COUNT", "Fail a job after this many retryable failures.")
@click.option("--mode", type=click.Choice(["fifo", "fair", "deadline"]), help="Order of jobs within a priority class.")
@option("--age-step", TIME, None, AGE_STEP_HELP, name="age_step_s")
@click.option("--weight", "weights", metavar="TENANT=WEIGHT", multiple=True, help=WEIGHT_HELP)
@click.option("--max-running", metavar="TENANT=JOBS|none", multiple=True, help=MAX_RUNNING_HELP)
@click.option("--tokens-per-minute", metavar="TENANT=TOKENS|none", multiple=True, help=TOKENS_PER_MINUTE_HELP)
@option("--channel-ttl", TIME, None, "Keep a channel this long after its job has ended.", name="channel_ttl_s")
@option("--result-ttl", TIME, None, "Keep results this long.", name="result_ttl_s")
@option(
    "--ttft-target",
    Number(0),
    "SECONDS",
    f"Target of workers for the time to the first token{FOR_OWN}",
    name="ttft_target_s",
)
@option(
    "--tpot-target",
    Number(0),
    "SECONDS",
    f"Target of workers for the time per further token{FOR_OWN}",
    name="tpot_target_s",
)
@click.option("--keep-prompts", type=click.Choice(["none", "hash", "full"]), help="Form of prompts in the history.")
@click.option("--keep-results/--no-keep-results", default=None, help="Keep outputs in the history.")
@connection_options
def set_queue(**values: object) -> None:
    """Change settings of a queue. Settings that are not given stay unchanged.

    \b
    Example:
        producer queues set --queue default --max-waiting-jobs 100000 --mode fair --weight acme=2
    """
    settings = _settings(values)
    with producer_of(values) as producer:
        producer.configure(settings)
        given = {name: value for name, value in asdict(settings).items() if value is not None}
        _report(producer, f"has new settings: {', '.join(_shown(name, value) for name, value in given.items())}")


def _shown(name: str, value: object) -> str:
    """Write a setting as on the command line; those of tenants as TENANT=VALUE."""
    flag = name.replace("_", "-")
    if not isinstance(value, dict):
        return f"{flag} {value}"
    numbers = cast("dict[str, float | None]", value)
    # The flag of weights is --weight.
    return " ".join([flag.removesuffix("s"), *(_of_tenant(tenant, number) for tenant, number in numbers.items())])


def _of_tenant(tenant: str, number: float | None) -> str:
    return f"{tenant}={'none' if number is None else f'{number:g}' if isinstance(number, float) else number}"


def _settings(values: Values) -> QueueSettings:
    given = {name: values.pop(name) for name in list(values) if name not in ("url", "queue", "partitions")}
    for name in ("age_step", "channel_ttl", "result_ttl", "ttft_target", "tpot_target"):
        seconds = given.pop(f"{name}_s")
        # Targets may be parts of a millisecond.
        ms = None if seconds is None else seconds * 1000
        given[f"{name}_ms"] = ms if ms is None or name.endswith("target") else round(ms)
    if given["durability"] is not None:
        given["durability"] = str(read_durability(given["durability"]))
    given["weights"] = dict(map(_weight, given.pop("weights"))) or None
    for name in TENANT_LIMITS:
        given[name] = dict(_limit(name, text) for text in given.pop(name)) or None
    if all(value is None for value in given.values()):
        raise click.UsageError("nothing to set: give a setting.")
    try:
        return QueueSettings(**given)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from error


def _weight(text: str) -> tuple[str, float]:
    tenant, _, weight = text.partition("=")
    try:
        return tenant, float(weight)
    except ValueError as error:
        raise click.UsageError(f"--weight is TENANT=WEIGHT, got {text!r}.") from error


def _limit(name: str, text: str) -> tuple[str, int | None]:
    tenant, _, most = text.partition("=")
    try:
        return tenant, None if most == "none" else int(most)
    except ValueError as error:
        flag = f"--{name.replace('_', '-')}"
        raise click.UsageError(f"{flag} is TENANT=NUMBER, or TENANT=none to remove the limit, got {text!r}.") from error


TENANT_HEADERS = (
    "tenant",
    "waiting",
    "tokens",
    "weight",
    "share",
    "running",
    "max_running",
    "tokens_left",
    "tokens_per_minute",
    "is_at_limit",
)


@click.command("tenants")
@json_option
@connection_options
def tenants(*, as_json: bool, **values: object) -> None:
    """List the tenants of a queue with waiting jobs, a weight or a limit.

    \b
    Example:
        producer tenants --queue default
    """
    with producer_of(values) as producer:
        totals = tenant_totals(producer.target.name, _views(producer))
    show_rows(TENANT_HEADERS, [asdict(tenant) for tenant in totals], as_json=as_json)


@click.group()
def server() -> None:
    """Show the embedded server, keep it running, or stop it."""


@server.command("status")
@json_option
def server_status(*, as_json: bool) -> None:
    """Show whether the embedded server is running and used, and the paths of its files.

    \b
    Example:
        producer server status
    """
    own = embedded.Embedded(state_dir())
    facts: Values = {
        "url": own.url,
        "runs": embedded.answers(own),
        "state": embedded.state_of(own),
        "used": embedded.has_users(own),
        "stays": own.stay_path.exists(),
        "free_mib": _free_mib(own.folder),
        "folder": str(own.folder),
        "history": str(own.history_path),
        "log": str(own.log_path),
    }
    show_facts(facts, as_json=as_json)


def _free_mib(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free // 2**20 if folder.exists() else None


@server.command("start")
def server_start() -> None:
    """Start the embedded server, and keep it running while unused, until `producer server stop`.

    \b
    Example:
        producer server start
    """
    note(f"running at {embedded.stay(state_dir()).url}")


@server.command("stop")
def server_stop() -> None:
    """Stop the embedded server. Its data stays on disk; waiting jobs continue after the next start.

    A worker or client that uses it starts it again: stop those first. It stops by itself with its last user, unless it
    was started with `producer server start`.

    \b
    Example:
        producer server stop
    """
    own = embedded.Embedded(state_dir())
    if not embedded.stop(own.folder):
        note("it was not running")
    elif embedded.has_users(own):
        note("stopped; processes that use it start it again")
    else:
        note("stopped")
