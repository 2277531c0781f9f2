"""The `worker` command. Results go to stdout, everything else to stderr; exit codes are those of `worker.errors`."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from worker.config import CONFIG_FILE_NAME, SETTINGS, Setting, WorkerConfig, load_config
from worker.devices import is_device
from worker.errors import ConfigError, ExitCode, WorkerError
from worker.fleet import is_fleet, start_fleet

Command = TypeVar("Command", bound=Callable[..., Any])  # click passes options by name

_WORKER = ("redis", "history", "queue", "model", "batching", "beat", "drain", "metrics", "log")
_HISTORY = ("history.database_url",)
_QUEUE = ("redis.url", "queue.name", "queue.partitions")
_TUNED = (
    "queue.name", "model.dtype", "model.quantization", "model.kv_cache_dtype", "model.num_blocks",
    "model.memory_fraction", "model.max_model_len", "model.num_threads",
    "batching.discipline", "batching.batch_window_s",
)  # fmt: skip
"""What `worker tune` has flags for; the rest of the engine's settings are what it looks for."""

_NO_FLAG = frozenset({"model.device", "callbacks.secret"})
"""--gpu and --cpu stand for the first; the second is a secret itself, and `ps` shows a command line to everyone."""


def _options(*parts: str) -> Callable[[Command], Command]:
    """Give a command a flag for each setting that it reads, by section or by `section.name`, and `--config`."""

    def decorate(command: Command) -> Command:
        for leaf in reversed(SETTINGS):
            if (leaf.section in parts or leaf.key in parts) and leaf.key not in _NO_FLAG:
                command = _option(leaf)(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            envvar=CONFIG_FILE_NAME,
            show_envvar=True,
            help="TOML file with the same settings, as `[section]` and `name = value`.",
        )(command)

    return decorate


def _option(leaf: Setting) -> Callable[[Command], Command]:
    shown = "" if leaf.default is None or leaf.is_switch else f"; default: {leaf.default}"
    help_text = f"{leaf.help}  [env var: {leaf.env_name}{shown}]"
    # What is given is read by `load_config`, together with file and environment, so that all problems are told at once.
    name = leaf.key.replace(".", "__")
    if leaf.is_switch:
        return click.option(f"{leaf.flag}/--no-{leaf.flag[2:]}", name, default=None, help=help_text)
    return click.option(leaf.flag, name, metavar=leaf.metavar, default=None, help=help_text)


def _gpus(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """One GPU by its number, several with commas, or all: as a device's name."""
    if value is not None and not is_device(f"cuda:{value}"):
        raise click.BadParameter(f"expected a GPU's number, several as in 0,2, or all; got {value!r}", param=param)
    return None if value is None else f"cuda:{value}"


def _device_options(command: Command) -> Command:
    command = click.option("--cpu", is_flag=True, help="Run on the CPU, as without --gpu.")(command)
    return click.option(
        "--gpu", metavar="NUMBER", callback=_gpus, help="Run on this GPU. 0,2 or all: one worker process for each."
    )(command)


def _device_of(gpu: str | None, *, cpu: bool) -> str | None:
    if gpu is not None and cpu:
        raise click.UsageError("--gpu and --cpu exclude each other")
    return gpu or ("cpu" if cpu else None)


def _config_of(config_file: Path | None, given: Mapping[str, object], **own: object) -> WorkerConfig:
    flags = {name.replace("__", "."): value for name, value in given.items() if value is not None}
    flags |= {name.replace("__", "."): value for name, value in own.items() if value is not None}
    return load_config(os.environ, file=config_file, flags=flags)


class _Commands(click.Group):
    """Turns our errors into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # as in click
        """Run the command; never show a traceback for what the operator can mend."""
        try:
            return super().invoke(ctx)
        except WorkerError as error:
            click.echo(str(error), err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="sluice", message="%(version)s")
def main() -> None:
    """Serve a queue of generation jobs with a model on this machine."""
    # Histories and exports hold people's texts: what this process and its children write is their user's alone.
    os.umask(0o077)


@main.command()
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends, as when started by a fleet.")
@_device_options
@_options(*_WORKER)
def start(gpu: str | None, cpu: bool, until_eof: bool, config_file: Path | None, **given: object) -> NoReturn:
    """Drain a queue into a model until told to stop.

    Without --redis-url a server on a unix socket is found or started, with a SQLite history beside it.

    \b
    Signals: TERM (or INT) drains, a second one hands everything back at once, TSTP stops pulling and CONT pulls
    again, USR1 logs what every sequence is doing.
    Exit codes: 0 stopped as asked; 1 broken, restart; 2 settings are wrong, do not restart; 3 Redis away, restart
    later.

    With several GPUs (--gpu all, --gpu 0,2), or --processes on the CPU, a parent starts a worker process for each,
    starts one again that died, passes signals on, and ends when all are gone.

    \b
    Examples:
        worker start --gpu 0 --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
        worker start --gpu all --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
    """
    config = _config_of(config_file, given, model__device=_device_of(gpu, cpu=cpu))
    if is_fleet(config):
        sys.exit(start_fleet(config, os.environ))
    # Only now: help and misuse should answer at once.
    from worker.start import start as start_worker

    sys.exit(start_worker(config, os.environ, until_eof=until_eof))


@main.command()
@_device_options
@_options(*_WORKER)
def doctor(gpu: str | None, cpu: bool, config_file: Path | None, **given: object) -> NoReturn:
    """Check everything that a worker depends on, and say what to do.

    \b
    Example:
        worker doctor --gpu 0 --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
    """
    from worker.doctor import examine

    device = _device_of(gpu, cpu=cpu)
    try:
        config = _config_of(config_file, given, model__device=device)
    except ConfigError as error:
        click.echo(str(error))
        sys.exit(ExitCode.BROKEN)
    findings = examine(config, os.environ)
    for finding in findings:
        click.echo(f"{'ok   ' if finding.is_well else 'WRONG'}  {finding.what}: {finding.found}")
        if finding.advice:
            click.echo(f"       {finding.advice}")
    sys.exit(ExitCode.DONE if all(finding.is_well for finding in findings) else ExitCode.BROKEN)


@main.command()
@click.argument("model", metavar="MODEL")
@click.argument(
    "traffic", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[TRAFFIC.jsonl]"
)
@click.option("--ttft", "ttft_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", default=1.0,
              show_default=True, help="A request is served well if its first token comes within this.")  # fmt: skip
@click.option("--tpot", "tpot_ms", type=click.FloatRange(min=0, min_open=True), metavar="MS", default=100.0,
              show_default=True, help="And if its further tokens come this fast, in the mean.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="PER_SECOND", default=1.0,
              show_default=True, help="Requests a second, where the file says no at_s.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=1), metavar="COUNT", default=100, show_default=True,
              help="Look at no more requests than these.")  # fmt: skip
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS", default=24.0, show_default=True,
              help="Without a file: how far back from the newest job the history is read.")  # fmt: skip
@_device_options
@_options(*_TUNED, *_HISTORY)
def tune(model: str, gpu: str | None, cpu: bool, config_file: Path | None, **given: Any) -> None:  # noqa: ANN401  # as click passes them
    """Find the settings that serve a traffic best with MODEL on this machine.

    Measures how long steps take here, replays the traffic in virtual time with each choice of settings, and runs the
    best ones and the current ones (defaults, file, environment) for real, beside what was predicted. Without a file the
    traffic is that of the history's newest jobs.

    \b
    A line of the file, where prompt may stand for prompt_tokens and max_tokens for output_tokens:
        {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 60, "max_tokens": 256}

    \b
    Example:
        worker tune ./Qwen3-0.6B traffic.jsonl --ttft 1 --tpot 50
    """
    from worker.tune import Asked, run_tune

    asked = Asked(**{name: given.pop(name) for name in list(given) if name in Asked.__annotations__})
    config = _config_of(config_file, given, model__path=model, model__device=_device_of(gpu, cpu=cpu))
    click.echo(run_tune(config, os.environ, asked))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_options(*_QUEUE, "redis.timeout_s")
def status(as_json: bool, config_file: Path | None, **given: object) -> None:
    """Show the living workers of a queue.

    \b
    Example:
        worker status --queue default --json
    """
    from worker.status import living_workers, table_of

    workers = living_workers(_config_of(config_file, given), os.environ)
    click.echo(json.dumps(workers, indent=2) if as_json else table_of(workers))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all disagreements, however many of a kind.")
@click.option("--repair", is_flag=True, help="Mend what can be mended, and say what was done.")
@click.option(
    "--journal",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Look for every job that this journal of `producer submit` says was acknowledged.",
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The journal's bulk file: --repair re-adds lost jobs from it.",
)
@click.option("--history/--no-history", "has_history", default=True, help="Compare with the history. Default: do.")
@click.option("--pause-s", type=float, default=2.0, show_default=True, help="Pause between the two looks.")
@click.option("--history-s", type=float, default=30.0, show_default=True, help="Wait this long for the recorder.")
@_options(*_QUEUE, "redis.timeout_s", *_HISTORY, "callbacks.retention_days")
def audit(as_json: bool, config_file: Path | None, **given: Any) -> NoReturn:  # noqa: ANN401  # as click passes them
    """Show that submitted = done + failed + cancelled + expired + queued + running, while all goes on.

    Looks twice at the queue, the history and (with --journal) what a producer was told; what both looks see is a
    disagreement, named by job with what each side says and what to do.

    \b
    Exit codes: 0 all agree; 1 something does not (repaired or not); 2 settings are wrong; 3 a server is away.

    \b
    Examples:
        worker audit --queue default
        worker audit --repair --journal ~/.local/state/sluice/journals/default-prompts.journal --file prompts.jsonl
    """
    from worker.audit.command import Asked, run_audit
    from worker.audit.report import json_of, table_of

    asked = Asked(**{name: given.pop(name) for name in list(given) if name in Asked.__annotations__})
    report = run_audit(_config_of(config_file, given), os.environ, asked)
    click.echo(json_of(report) if as_json else table_of(report))
    sys.exit(ExitCode.BROKEN if report.findings else ExitCode.DONE)


@main.command()
@click.option("--to", "revision", metavar="REVISION", help="Revision to reach; the newest by default.")
@_options(*_HISTORY)
def migrate(revision: str | None, config_file: Path | None, **given: object) -> NoReturn:
    """Bring the history's tables to this version.

    SQLite migrates itself when a worker starts; PostgreSQL is migrated by this command only.

    \b
    Example:
        worker migrate --database-url postgresql+psycopg://sluice@db/sluice
    """
    from worker.migrate import main as run_migrate
    from worker.places import database_url_of

    url = database_url_of(_config_of(config_file, given), os.environ)
    sys.exit(
        run_migrate(url, say=click.echo) if revision is None else run_migrate(url, revision=revision, say=click.echo)
    )


@main.command()
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends, as when started by a worker.")
@_options(*_QUEUE, *_HISTORY, "history.keep_prompts", "log")
def record(until_eof: bool, config_file: Path | None, **given: object) -> NoReturn:
    """Write what happens to jobs into the history; `worker start` runs this beside itself.

    \b
    Example:
        worker record --redis-url redis://queue:6379/0 --database-url postgresql+psycopg://sluice@db/sluice
    """
    from worker.beside import run_recorder

    sys.exit(run_recorder(_config_of(config_file, given), os.environ, until_eof=until_eof))


@main.command()
@_options(*_QUEUE, *_HISTORY, "callbacks", "log")
def callbacks(config_file: Path | None, **given: object) -> NoReturn:
    """Deliver webhooks, export batches and apply retention.

    The keys that sign webhooks are read from SLUICE_CALLBACKS_SECRET or `[callbacks] secret` in the file: a flag would
    show them to everyone on this machine.

    \b
    Example:
        worker callbacks --redis-url redis://queue:6379/0 --retention-days 30
    """
    from worker.beside import run_callbacks

    sys.exit(run_callbacks(_config_of(config_file, given), os.environ))
