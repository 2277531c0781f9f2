"""Options and output that the commands share. Results go to stdout, everything else to stderr."""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import click

from sluice.producer.cli.durations import TIME
from sluice.producer.client import Producer
from sluice.producer.errors import InvalidSetting
from sluice.protocol.host.terminal import printable, say
from sluice.protocol.jobs import OPTION_NAMES, Options
from sluice.protocol.queue_shares import read_shares
from sluice.protocol.sampling import DEFAULTS, OPTIONS, Option, sentence_of
from sluice.protocol.waits import WaitNotice

Command = TypeVar("Command", bound=Callable[..., Any])  # Any: a command's parameters are its options
Values = dict[str, Any]  # Any: as above

UNKNOWN = "unknown"
"""The answer for a job that neither the queue nor, where it is asked, the history has."""

_SEPARATORS = re.compile("[\\t\\n\\r]")
"""Separators of cells and lines in a table that is not for a terminal."""

EXIT_CODES = """\b
Exit codes:
    0    done
    1    failed: a job did not complete or is unknown, the server is unreachable, or a line is bad
    2    misused: an option, a file or a job is invalid
    130  interrupted by Ctrl-C
"""


def option(
    flag: str, kind: object, metavar: str | None, text: str, *, name: str | None = None, **more: object
) -> Callable[[Command], Command]:
    """Return an option with a value; the help shows its default, if there is one. `metavar` None names its type."""
    names = [flag] if name is None else [flag, name]
    has_default, has_variable = "default" in more, "envvar" in more
    return click.option(
        *names,
        cls=click.Option,
        type=kind,
        metavar=metavar,
        help=text,
        show_default=has_default,
        show_envvar=has_variable,
        **more,
    )


def connection_options(command: Command) -> Command:
    """Add the options that locate the queue."""
    about = "Name of the queue."
    queue = option("--queue", str, "NAME", about, default="default", envvar="SLUICE_QUEUE", callback=_one_queue)
    return server_option(queue(partitions_option(command)))


def _one_queue(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Return the name of the queue. The variable may be a worker's too: with a weight, or with several queues.

    Raises:
        InvalidSetting: it names several.
    """
    if not set(text) & {":", " "}:
        return text
    names = [share.name for share in read_shares(text.split())]
    if len(names) > 1:
        raise InvalidSetting(f"SLUICE_QUEUE names the queues {', '.join(names)}: choose one with --queue")
    return names[0]


def partitions_option(command: Command) -> Command:
    """Add the option of a queue's number of partitions."""
    text = "Number of partitions of the queue. Default: that of its workers."
    return option("--partitions", click.IntRange(1), "COUNT", text, envvar="SLUICE_PARTITIONS")(command)


def server_option(command: Command) -> Command:
    """Add the option that locates the server of the queues."""
    text = "Server: redis, rediss, unix, redis+sentinel or redis+cluster URL. Default: the embedded server."
    return option("--redis-url", str, "URL", text, name="url", envvar="SLUICE_REDIS_URL")(command)


def database_option(command: Command) -> Command:
    """Add the option that locates the job history."""
    text = "Job history: sqlite:///FILE or postgresql://… Default: SQLite next to the embedded server."
    return option("--database-url", str, "URL", text, envvar="SLUICE_DATABASE_URL")(command)


def durability_option(command: Command) -> Command:
    """Add the option of the durability of a submit."""
    text = "Durability of accepted jobs: memory, aof, fsync or replica:N. Default: that of the queue."
    return option("--durability", str, "LEVEL", text)(command)


def json_option(command: Command) -> Command:
    """Add the option for JSON output."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def sampling_options(command: Command) -> Command:
    """Add the options of a job. Types and defaults of sampling options are those of the contract."""
    for add in reversed(
        [
            *(_sampling_option(name, about) for name, about in OPTIONS.items() if about.metavar is not None),
            click.option(
                "--stop", multiple=True, metavar="TEXT", help="End the output before this text. May be repeated."
            ),
            option("--seed", int, "NUMBER", "Seed of the sampling. Default: random."),
            option("--priority", int, "CLASS", "Priority class, 0 (least urgent) to 9. Default: 0."),
            option("--tenant", str, "NAME", "Tenant of the job. Default: default."),
            option("--ttl", TIME, None, "Expire if not started within this time. Default: never.", name="ttl_s"),
            option("--deadline", TIME, None, "Expire if not ended within this time. Default: never."),
            option("--not-before", TIME, None, "Start no sooner than after this time. Default: at once."),
            option("--callback-url", str, "URL", "POST the end of each job to this URL."),
        ]
    ):
        command = add(command)
    return command


def _sampling_option(name: str, sampling: Option) -> Callable[[Command], Command]:
    default: object = DEFAULTS[name] if sampling.neutral is None else sampling.neutral
    return option(f"--{name.replace('_', '-')}", type(default), sampling.metavar, sentence_of(name))


def options_of(values: Values) -> Options:
    """Remove the job options from the values of a command and return them."""
    options = {name: values.pop(name) for name in list(values) if name in OPTION_NAMES}
    for name in ("deadline", "not_before"):
        if options.get(name) is not None:
            options[name] = timedelta(seconds=options[name])
    # Absent options keep their defaults.
    return cast("Options", {name: value for name, value in options.items() if value not in (None, (), [])})


def producer_of(values: Values) -> Producer:
    """Remove the connection options from the values of a command and return the client they describe."""
    names = ("url", "queue", "partitions", "database_url", "durability")
    return Producer(**{name: values.pop(name) for name in names if name in values}, on_wait=note_wait)


def note_wait(notice: WaitNotice) -> None:
    """Print what a command waits for to stderr, and when it continues."""
    note(f"producer: {notice.message}" if notice.is_over else f"producer: waiting: {notice.message}")


def note(text: str) -> None:
    """Print a message to stderr."""
    say(text, err=True)


def is_watched() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


def show_answers(job_ids: Sequence[str], answers: Sequence[str], *, bad: Collection[str]) -> None:
    """Print the answer for each job; exit with 1 if one of them is bad."""
    for job_id, answer in zip(job_ids, answers, strict=True):
        say(f"{job_id}\t{answer}")
    if not {*answers}.isdisjoint(bad):
        sys.exit(1)


def show_json(value: object) -> None:
    """Print a value as one JSON document."""
    say(json.dumps(value, ensure_ascii=False, default=_plain, indent=2 if sys.stdout.isatty() else None))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def show_facts(facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print names with their values, as JSON or as a table."""
    if as_json:
        show_json(facts)
    else:
        show_table(("what", "value"), facts.items())


def show_rows(headers: Sequence[str], rows: Sequence[Mapping[str, object]], *, as_json: bool) -> None:
    """Print rows, whole as JSON, or in a table the columns of `headers`."""
    if as_json:
        show_json(rows)
    else:
        show_table(headers, [[row[header] for header in headers] for row in rows])


def show_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: aligned on a terminal, otherwise separated by tabs."""
    cells = [[shown(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (list(headers), *cells):
            say("\t".join(_SEPARATORS.sub(" ", cell) for cell in line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*headers, box=None, header_style="bold", pad_edge=False)
    for line in cells:
        table.add_row(*map(printable, line))
    # Without markup and emoji, which rich would read in brackets and between colons.
    Console(markup=False, emoji=False).print(table)


def shown(value: object) -> str:
    """Format a value for a table: names with their values as name=value."""
    if value is None:
        return "-"
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return " ".join(f"{name}={_within(part)}" for name, part in pairs if part is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, cast("Sequence[object]", value)))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _within(value: object) -> str:
    """Format one of several values: as JSON if its end could not be told otherwise."""
    is_plain = isinstance(value, str) and value.isprintable() and not set(value) & set(" =,\"'")
    return str(value) if is_plain and value else json.dumps(value, ensure_ascii=False, default=str)


def when(ms: int | None) -> str:
    """Format a stored time as UTC with milliseconds."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def confirmed(question: str, *, is_sure: bool) -> None:
    """Ask for confirmation of an irreversible action.

    Raises:
        InvalidSetting: stdin is not a terminal, and --yes is not given.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise InvalidSetting("this cannot be undone: give --yes")
    click.confirm(question, abort=True, err=True)
