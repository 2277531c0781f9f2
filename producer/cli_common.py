"""What the commands share: options, printing, and what errors become. Results go to stdout, all else to stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import click

from producer.client import Producer
from producer.errors import InvalidSetting
from producer.jobs import OPTION_NAMES, Options

Command = TypeVar("Command", bound=Callable[..., Any])  # Any: a command's parameters are its options
Values = dict[str, Any]  # Any: as above

EXIT_CODES = """\b
Exit codes:
    0    done
    1    failed: the job did not get done, the server is away, a line was bad
    2    misused: an option, a file or a job that is wrong in itself
    130  interrupted by Ctrl-C
"""


def connection_options(command: Command) -> Command:
    """Where the queue is."""
    for option in (
        click.option(
            "--partitions", metavar="COUNT", type=click.IntRange(1), default=1, show_default=True,
            envvar="SLUICE_PARTITIONS", show_envvar=True, help="Partitions of the queue.",
        ),
        click.option(
            "--queue", metavar="NAME", default="default", show_default=True, envvar="SLUICE_QUEUE", show_envvar=True,
            help="Queue to speak of.",
        ),
        click.option(
            "--redis-url", "url", metavar="URL", envvar="SLUICE_REDIS_URL", show_envvar=True,
            help="Server: redis, rediss, unix, redis+sentinel or redis+cluster URL. Default: the embedded one.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def database_option(command: Command) -> Command:
    """Where the history is."""
    return click.option(
        "--database-url", metavar="URL", envvar="SLUICE_DATABASE_URL", show_envvar=True,
        help="Job history: sqlite:///FILE or postgresql://… Default: SQLite beside the embedded server.",
    )(command)  # fmt: skip


def durability_option(command: Command) -> Command:
    """What an accepted job survives."""
    return click.option(
        "--durability", metavar="LEVEL",
        help="What an accepted job survives: memory, aof, fsync or replica:N. Default: as the queue says.",
    )(command)  # fmt: skip


def json_option(command: Command) -> Command:
    """Print for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def sampling_options(command: Command) -> Command:
    """How to generate, and what the queue should know of a job."""
    for option in reversed(
        [
            _option("--max-tokens", int, "TOKENS", "Stop after this many tokens. Default: 256."),
            _option("--min-tokens", int, "TOKENS", "Do not stop before this many tokens."),
            _option("--temperature", float, "NUMBER", "0 is greedy. Default: 1."),
            _option("--top-p", float, "SHARE", "Keep the likeliest tokens that make up this probability."),
            _option("--top-k", int, "COUNT", "Keep this many likeliest tokens. 0 keeps all."),
            _option("--min-p", float, "SHARE", "Keep tokens at least this likely beside the likeliest."),
            _option("--repetition-penalty", float, "FACTOR", "Over 1 discourages tokens of prompt and output."),
            _option("--frequency-penalty", float, "NUMBER", "Subtract this for each time that a token occurred."),
            _option("--presence-penalty", float, "NUMBER", "Subtract this if a token occurred."),
            _option("--stop", str, "TEXT", "End at this text, which is left out. May be repeated.", multiple=True),
            _option("--seed", int, "NUMBER", "Key of the noise. Default: drawn at submit."),
            _option("--priority", int, "CLASS", "0 (least urgent) to 9. Default: 0."),
            _option("--tenant", str, "NAME", "Whose job it is. Default: default."),
            _option("--ttl", float, "SECONDS", "Expire if nobody has begun it after this long.", name="ttl_s"),
            _option("--deadline", float, "SECONDS", "Expire if it has not ended after this long."),
            _option("--not-before", float, "SECONDS", "Begin no sooner than in this long."),
            _option("--callback-url", str, "URL", "POST the end of each job there."),
        ]
    ):
        command = option(command)
    return command


def _option(
    flag: str, kind: type[object], metavar: str, text: str, *, multiple: bool = False, name: str | None = None
) -> Callable[[Command], Command]:
    return click.option(flag, *([name] if name else []), type=kind, metavar=metavar, multiple=multiple, help=text)


def options_of(values: Values) -> Options:
    """The job options among a command's values; they are taken out."""
    options = {name: values.pop(name) for name in list(values) if name in OPTION_NAMES}
    for name in ("deadline", "not_before"):
        if options.get(name) is not None:
            options[name] = timedelta(seconds=options[name])
    # What is not given is left to its default.
    return cast("Options", {name: value for name, value in options.items() if value not in (None, (), [])})


def producer_of(values: Values) -> Producer:
    """The client that a command's connection options describe; they are taken out."""
    names = ("url", "queue", "partitions", "database_url", "durability")
    return Producer(**{name: values.pop(name) for name in names if name in values})


def note(text: str) -> None:
    """Say something beside the result."""
    click.echo(text, err=True)


def is_watched() -> bool:
    """Whether a person looks at stderr."""
    return sys.stderr.isatty()


def show_json(value: object) -> None:
    """Print a value as one JSON document."""
    click.echo(json.dumps(value, ensure_ascii=False, default=_plain, indent=2 if sys.stdout.isatty() else None))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def show_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: aligned on a terminal, separated by tabs elsewhere."""
    cells = [[shown(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (list(headers), *cells):
            click.echo("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*headers, box=None, header_style="bold", pad_edge=False)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def shown(value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def when(ms: int | None) -> str:
    """A stored time, as UTC to the millisecond."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def confirmed(question: str, *, is_sure: bool) -> None:
    """Ask before something that cannot be undone.

    Raises:
        InvalidSetting: nobody can be asked, and --yes is not given.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise InvalidSetting("this cannot be undone: give --yes")
    click.confirm(question, abort=True, err=True)
