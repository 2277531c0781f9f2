"""The command `worker`. Results go to stdout, everything else to stderr. Exit codes are in `worker.errors`."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import click

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.host.numbers import Number
from sluice.protocol.host.optional_packages import without
from sluice.protocol.host.terminal import say
from sluice.protocol.settings import config_option, flag_of
from sluice.version import installed_version
from sluice.worker.config import SETTINGS, WorkerConfig, load_config
from sluice.worker.devices import is_device
from sluice.worker.errors import ConfigError, ExitCode, WorkerError

Command = TypeVar("Command", bound=Callable[..., Any])  # click passes options by name

_WORKER = ("redis", "history", "queue", "model", "batching", "beat", "drain", "metrics", "log")
_HISTORY = ("history.database_url",)
_QUEUE = ("redis.url", "queue.name", "queue.partitions")
_TUNED = (
    *("queue.name", "model.dtype", "model.quantization", "model.kv_cache_dtype", "model.num_blocks"),
    *("model.memory_fraction", "model.max_model_len", "model.num_threads"),
    *("batching.discipline", "batching.batch_window_s"),
)
"""Flags of `worker tune`. It searches the engine's other settings itself."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_POSITIVE = Number(0, min_open=True)

_NO_FLAG = frozenset({"model.device", "callbacks.secret"})
"""--gpu and --cpu set the first. The second is a secret, and `ps` shows command lines to all users."""


def _options(*parts: str) -> Callable[[Command], Command]:
    """Add `--config` and a flag for each setting in `parts`, which names sections or `section.name`."""

    def decorate(command: Command) -> Command:
        for leaf in reversed(SETTINGS):
            if (leaf.section in parts or leaf.key in parts) and leaf.key not in _NO_FLAG:
                command = flag_of(leaf, leaf.key.replace(".", "__"))(command)
        return config_option("section")(command)

    return decorate


def _gpus(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Convert a GPU number, several separated by commas, or `all` to a device name."""
    if value is not None and not is_device(f"cuda:{value}"):
        raise click.BadParameter(f"expected a GPU number, several as in 0,2, or all; got {value!r}", param=param)
    return None if value is None else f"cuda:{value}"


def _device_options(command: Command) -> Command:
    """Add --gpu and --cpu, which set the device."""

    @wraps(command)
    def with_device(*, gpu: str | None, cpu: bool, **given: Any) -> Any:  # noqa: ANN401  # as click passes them
        if gpu is not None and cpu:
            raise click.UsageError("--gpu and --cpu exclude each other")
        return command(model__device=gpu or ("cpu" if cpu else None), **given)

    with_cpu = click.option("--cpu", is_flag=True, help="Run on the CPU. This is the default.")(with_device)
    gpu_help = "Run on this GPU. 0,2 or all starts one worker process per GPU."
    with_gpu = click.option("--gpu", metavar="NUMBER", callback=_gpus, help=gpu_help)(with_cpu)
    return cast("Command", with_gpu)  # `wraps` keeps what click needs


def _value(
    flag: str, name: str, kind: object, metavar: str, text: str, default: float | None = None
) -> Callable[[Command], Command]:
    """Return an option with a value; the help shows its default, if there is one."""
    has_default = default is not None
    return click.option(flag, name, type=kind, metavar=metavar, default=default, show_default=has_default, help=text)


def _config_of(config_file: Path | None, given: Mapping[str, object], **own: object) -> WorkerConfig:
    return load_config(os.environ, file=config_file, flags=_flags({**given, **own}))


def _flags(given: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that are given, by `section.name`."""
    return {name.replace("__", "."): value for name, value in given.items() if value is not None}


def _taken(given: dict[str, Any], options: type) -> dict[str, Any]:  # Any: as click passes them
    """Remove from the values of a command the fields of a class, and return them."""
    return {name: given.pop(name) for name in list(given) if name in options.__annotations__}


class _Commands(click.Group):
    """A group that reports a `WorkerError`, or that only the client is installed, as a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # as in click
        """Run the command without a traceback for errors that an operator can fix."""
        try:
            return super().invoke(ctx)
        except WorkerError as error:
            say(str(error), err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "sluice"):
                raise
            how = "install the worker: pip install 'sluice-llm[worker]'"
            say(f"the package {package!r} is not installed, as in an installation of the client: {how}", err=True)
            ctx.exit(ExitCode.MISUSED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(installed_version(), message="%(version)s")
def main() -> None:
    """Serve a queue of generation jobs with a model on this machine."""
    # Histories and exports hold prompts and completions: only the user may read the files of this process tree.
    os.umask(0o077)
    # redis-py imports OpenTelemetry's SDK where it is installed, and no command sends redis-py's metrics.
    with without("opentelemetry"):
        import redis as redis


@main.command()
@click.option(
    "--until-eof",
    is_flag=True,
    help="Run one worker in this process, without parent and recorder, and stop when standard input ends.",
)
@click.option("--forks", is_flag=True, hidden=True, help="Fork a worker for each request of the parent process.")
@click.option("--incarnation", hidden=True, help="The identity under which the parent process reports its death.")
@_device_options
@_options(*_WORKER)
def start(
    until_eof: bool,
    forks: bool,
    incarnation: str | None,
    config_file: Path | None,
    **given: object,
) -> NoReturn:
    """Serve a queue, or several by weight, with a model until stopped.

    A small parent process starts the worker and its recorder, forwards signals, and reports the worker's death to the
    queue, so that other workers continue its jobs at once. It exits with the worker's exit code (128 + n if signal n
    ended it).

    Without --redis-url, the worker finds or starts a local server on a unix socket and keeps a SQLite history.

    \b
    Signals:
        TERM, INT  shut down gracefully; a second one returns all jobs at once
        TSTP       stop pulling jobs
        CONT       pull jobs again
        USR1       log the state of every sequence
    \b
    Exit codes:
        0  stopped on request
        1  broken: restart now
        2  wrong settings: do not restart
        3  Redis is unreachable: restart later

    With several GPUs (--gpu all, --gpu 0,2), or with --processes on the CPU, the parent process starts one worker for
    each, restarts those that die, and ends when all have ended.

    \b
    Examples:
        worker start --gpu 0 --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
        worker start --gpu all --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
        worker start --queue chat:3 --queue batch:1
    """
    # Imported here so that help and usage errors are fast, and that the parent process stays small.
    if forks:
        from sluice.worker.serve.forks import serve_forks

        serve_forks(lambda arguments: main.main(list(arguments), prog_name="worker"))
        sys.exit(ExitCode.DONE)
    config = _config_of(config_file, given)
    if until_eof:
        from sluice.worker.serve.start import start as start_worker

        sys.exit(start_worker(config, os.environ, incarnation=incarnation, until_eof=True))
    from sluice.worker.processes.parent import start_parent

    sys.exit(start_parent(config, os.environ))


@main.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--scale-to-backlog", is_flag=True, help="Follow the backlog in tokens.")
@_value(
    "--scale-to-jobs",
    "jobs_per_worker",
    click.IntRange(1),
    "JOBS",
    "Follow the number of jobs instead, whatever their size: one worker for this many.",
)
@_value("--min", "min_workers", click.IntRange(0), "COUNT", "Run at least this many workers.", default=0)
@_value("--within", "within_s", _POSITIVE, "SECONDS", "Time to clear the backlog.", default=300.0)
@_value(
    "--scale-in-after",
    "scale_in_after_s",
    Number(0),
    "SECONDS",
    "Drain a worker when fewer have been enough for this long.",
    default=60.0,
)
@_device_options
@_options(*_WORKER)
def fleet(  # its options
    file: Path | None,
    scale_to_backlog: bool,
    jobs_per_worker: int | None,
    min_workers: int,
    within_s: float,
    scale_in_after_s: float,
    config_file: Path | None,
    **given: object,
) -> NoReturn:
    """Run as many workers as the queue needs, or the workers of several models, on this machine.

    Starts and drains worker processes: at most one for each GPU (--gpu all), or --processes on the CPU, and at least
    --min, which may be 0. Signals and everything else are as in `worker start`.

    With FILE, runs the workers that its tables name, `[workers.NAME]`, each with its model, queue, and device or cores.
    Those that name the same group with `turns` have their device by turns.

    \b
    Examples:
        worker fleet models.toml
        worker fleet --scale-to-backlog --gpu all --within 300 --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
        worker fleet --scale-to-backlog --processes 4 --model ./Qwen3-0.6B
    """
    if file is not None:
        if scale_to_backlog or jobs_per_worker is not None:
            raise click.UsageError("the workers of a file are not scaled: leave out --scale-to-…")
        if config_file is not None:
            raise click.UsageError("the settings of all workers are in the file, too: leave out --config")
        from sluice.worker.processes.models import start_members

        sys.exit(start_members(file, os.environ, _flags(given)))
    if scale_to_backlog == (jobs_per_worker is not None):
        raise click.UsageError("give one of --scale-to-backlog and --scale-to-jobs, or a file")
    config = _config_of(config_file, given)
    from sluice.protocol.scaling.demand import MAX_WORKERS, ScalePolicy
    from sluice.worker.processes.fleet import FleetPolicy, start_fleet

    try:
        scale = ScalePolicy(within_s=within_s, min_workers=min_workers, max_workers=MAX_WORKERS)
    except InvalidSetting as error:
        raise click.UsageError(f"{error}.") from error
    policy = FleetPolicy(scale=scale, scale_in_after_s=scale_in_after_s, jobs_per_worker=jobs_per_worker)
    sys.exit(start_fleet(config, os.environ, policy))


@main.command()
@_device_options
@_options(*_WORKER)
def doctor(config_file: Path | None, **given: object) -> NoReturn:
    """Run the checks of `worker start`, and print what to do.

    \b
    A line begins with:
        ok     in order
        note   a fact
        warn   a worker starts, but check this
        WRONG  `worker start` ends with this sentence

    The exit code is 1 if a line begins with warn or WRONG. Damage in the weights and a lack of memory show only when
    `worker start` loads the model.

    \b
    Example:
        worker doctor --gpu 0 --model ./Qwen3-0.6B --redis-url redis://queue:6379/0
    """
    from sluice.worker.checks.site import CheckLevel, Site
    from sluice.worker.checks.startup import examine
    from sluice.worker.log import get_log

    try:
        config = _config_of(config_file, given)
    except ConfigError as error:
        say(str(error))
        sys.exit(ExitCode.BROKEN)
    is_well = True
    for result in examine(Site(config, os.environ, get_log(), patience_s=0)):
        is_well = is_well and result.level in (CheckLevel.OK, CheckLevel.NOTE)
        say(f"{result.level:5}  {result.what}: {result.found}")
        if result.advice:
            say(f"       {result.advice}")
    sys.exit(ExitCode.DONE if is_well else ExitCode.BROKEN)


@main.command()
@click.argument("model", metavar="MODEL")
@click.argument("traffic", required=False, type=_FILE, metavar="[TRAFFIC.jsonl]")
@_value("--ttft-target", "ttft_s", _POSITIVE, "SECONDS", "Target for the first token of a request.", default=1.0)
@_value("--tpot-target", "tpot_s", _POSITIVE, "SECONDS", "Target for the mean time per further token.", default=0.1)
@_value("--rate", "rate", _POSITIVE, "PER_SECOND", "Arrival rate of requests without at_s in the file.", default=1.0)
@_value("--requests", "requests", click.IntRange(1), "COUNT", "Use at most this many requests.", default=100)
@_value(
    "--hours",
    "hours",
    _POSITIVE,
    "HOURS",
    "Without a file, read this much of the history, back from the newest job.",
    default=24.0,
)
@_device_options
@_options(*_TUNED, *_HISTORY)
def tune(model: str, config_file: Path | None, **given: Any) -> None:  # noqa: ANN401  # as click passes them
    """Find the best batching settings for MODEL and your traffic on this machine.

    Measures the step time and replays the traffic in virtual time with each candidate. If one is predicted to be better
    than the current settings, runs both for real, without the pauses between requests, and recommends it if it
    measures better. Without a file, the traffic is the newest jobs of the history.

    A line may have prompt instead of prompt_tokens, and max_tokens instead of output_tokens.

    \b
    A line of the file:
        {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 60, "max_tokens": 256}

    \b
    Example:
        worker tune ./Qwen3-0.6B traffic.jsonl --ttft-target 1 --tpot-target 0.05
    """
    from sluice.worker.tune.command import TuneOptions, run_tune

    options = TuneOptions(**_taken(given, TuneOptions))
    config = _config_of(config_file, given, model__path=model)
    say(run_tune(config, os.environ, options, lambda line: say(line, err=True)))


@main.command()
@click.option("--iterations", "has_all", is_flag=True, help="Print every iteration, including those without a change.")
@_value("--simulate", "traffic", _FILE, "FILE", "Replay this traffic in virtual time instead, with the given settings.")
@_value(
    "--step-ms", "step_ms", _POSITIVE, "MS", "With --simulate: duration of a step without its tokens.", default=10.0
)
@_value("--token-ms", "token_ms", Number(0), "MS", "With --simulate: time that each token adds.", default=0.1)
@_options("metrics.host", "metrics.port", "batching", "model.num_blocks", "model.block_size", "model.max_model_len")
def trace(
    has_all: bool, traffic: Path | None, step_ms: float, token_ms: float, config_file: Path | None, **given: object
) -> None:
    """Print iterations of a worker's engine: which sequences join, run, leave, are preempted or wait.

    Follows a worker of this host until Ctrl-C. Without --iterations, those in which no sequence joins, leaves or is
    preempted are omitted. With --simulate, the engine runs here in virtual time, over steps of a given duration; the
    file has the format of `worker tune`.

    A sequence is named by its request and its choice.

    \b
    A sequence
        joins      name tokens from start in blocks: the tokens before start came from the prefix cache
        runs       the same, for a sequence that already held blocks
        leaves     name reason
        preempted  it lost its blocks and waits again
        waits

    \b
    Examples:
        worker trace --iterations
        worker trace --simulate traffic.jsonl --max-num-seqs 4 --num-blocks 64
    """
    config = _config_of(config_file, given)
    if traffic is None:
        from sluice.worker.iterations.live import live_iterations

        for line in live_iterations(config.metrics, has_all=has_all):
            say(line)
        return
    from sluice.engine.scheduling.timing.step_time import StepTime
    from sluice.worker.iterations.simulated import simulated_iterations

    step_time = StepTime(fixed_s=step_ms / 1e3, token_s=token_ms / 1e3)
    simulated_iterations(
        config, traffic, step_time, lambda step: say(str(step)) if has_all or step.has_changes else None
    )


@main.command()
@_value("--every", "every_s", Number(0.1, 60), "SECONDS", "Read the queue this often.", default=1.0)
@click.option("--once", "is_once", is_flag=True, help="Print the state once, without keys.")
@_options(*_QUEUE, "redis.timeout_s")
def top(every_s: float, is_once: bool, config_file: Path | None, **given: object) -> None:
    """Show the workers of a queue, or of several, live.

    Keys select, sort and filter workers, and ask one of this host to take no more jobs (quiet), to take them again
    (resume), or to finish its jobs and end (drain). The parent of several workers does not restart a drained one.

    \b
    Example:
        worker top --queue default
    """
    from sluice.worker.top.command import run_top

    run_top(_config_of(config_file, given), os.environ, every_s=every_s, is_once=is_once)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_options(*_QUEUE, "redis.timeout_s")
def status(as_json: bool, config_file: Path | None, **given: object) -> None:
    """List the live workers of a queue, or of several.

    \b
    Example:
        worker status --queue default --json
    """
    from sluice.protocol.redis.urls import redacted
    from sluice.worker.endpoints import find_redis
    from sluice.worker.status import jobs_of_earlier_format, living_workers, table_of

    config = _config_of(config_file, given)
    url = find_redis(config, os.environ).url
    workers = living_workers(config, url)
    where = f"{config.queue.title} at {redacted(url)}"
    for sentence in jobs_of_earlier_format(config, url):
        say(f"warning: {sentence}", err=True)
    say(json.dumps(workers, indent=2) if as_json else table_of(workers, where))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every disagreement.")
@click.option("--repair", is_flag=True, help="Repair what can be repaired, and report it.")
@_value(
    "--journal",
    "journal",
    _FILE,
    "FILE",
    "Look up every job that this journal of `producer submit` lists as acknowledged.",
)
@_value("--file", "file", _FILE, "FILE", "The bulk file of the journal. --repair submits lost jobs from it again.")
@click.option("--history/--no-history", "has_history", default=True, help="Compare with the history. Default: yes.")
@_value("--pause-s", "pause_s", click.FLOAT, "SECONDS", "Pause between the two passes.", default=2.0)
@_value("--history-s", "history_s", click.FLOAT, "SECONDS", "Time to wait for the recorder.", default=30.0)
@_options(*_QUEUE, "redis.timeout_s", *_HISTORY, "callbacks.retention_days")
def audit(as_json: bool, config_file: Path | None, **given: Any) -> NoReturn:  # noqa: ANN401  # as click passes them
    """Check that submitted = done + failed + cancelled + expired + queued + running, on a live queue.

    Compares the queue, the history and (with --journal) a producer's journal in two passes. What both passes see is a
    disagreement. The report names each job, what each source has, and what to do.

    \b
    Exit codes:
        0  all sources agree
        1  there are disagreements, repaired or not
        2  wrong settings
        3  a server is unreachable

    \b
    Examples:
        worker audit --queue default
        worker audit --repair --file a.jsonl --journal ~/.local/state/sluice/journals/SERVER/default/nightly.journal

    SERVER is the value of the key {QUEUE:0}:2:server, and nightly the name of the batch.
    """
    from sluice.worker.audit.command import AuditOptions, run_audit
    from sluice.worker.audit.report import json_of, table_of

    options = AuditOptions(**_taken(given, AuditOptions))
    report = run_audit(_config_of(config_file, given), os.environ, options)
    say(json_of(report) if as_json else table_of(report))
    sys.exit(ExitCode.BROKEN if report.findings else ExitCode.DONE)


@main.command()
@_value(
    "--wait",
    "wait_s",
    Number(0, 86_400),
    "SECONDS",
    "Wait for a database that does not answer, at most this long.",
    default=60.0,
)
@_options(*_HISTORY)
def migrate(wait_s: float, config_file: Path | None, **given: object) -> NoReturn:
    """Migrate the history's tables to this release.

    A worker migrates SQLite when it starts. PostgreSQL is migrated by this command only. The exit code is 2 if the
    database refuses, and 3 if it does not answer in time.

    \b
    Example:
        worker migrate --database-url postgresql+psycopg://sluice@db/sluice
    """
    from sluice.worker.endpoints import database_url_of
    from sluice.worker.recorder.migrate import main as run_migrate

    url = database_url_of(_config_of(config_file, given), os.environ)
    sys.exit(run_migrate(url, wait_s=wait_s, say=click.echo))


@main.command()
@click.option(
    "--queue", "names", metavar="NAME", multiple=True, help="A queue to move; repeatable. Default: the worker's."
)
@_value(
    "--wait",
    "wait_s",
    Number(0, 86_400),
    "SECONDS",
    "Go on until workers of the earlier version have ended, at most this long.",
    default=0.0,
)
@_options("redis.url", "redis.timeout_s", "queue.partitions")
def migrate_queue(names: tuple[str, ...], wait_s: float, config_file: Path | None, **given: object) -> NoReturn:
    """Move jobs of an earlier version to the format of this one.

    Moves waiting and delayed jobs, failed ones, results, batches and settings, in slices, while workers of both
    versions run. Clients of the earlier version can submit no more from the first call on. Jobs that its workers run
    stay with them. Stopped at any point, it continues when it is run again.

    \b
    Exit codes:
        0  nothing is left in the format of the earlier version
        2  wrong settings, or jobs that cannot be moved
        3  workers of the earlier version still run, or Redis does not answer: run it again

    \b
    Examples:
        worker migrate-queue --queue chat --queue mail
        worker migrate-queue --wait 600
    """
    from sluice.worker.queue_migration import run_migration

    config = _config_of(config_file, given)
    sys.exit(run_migration(config, os.environ, names or config.queue.names, wait_s=wait_s, say=say))


@main.command()
@click.option(
    "--until-eof", is_flag=True, help="Stop when standard input ends. `worker start` starts the recorder with it."
)
@_options(*_QUEUE, *_HISTORY, "history.keep_prompts", "history.otlp_traces_endpoint", "log")
def record(until_eof: bool, config_file: Path | None, **given: object) -> NoReturn:
    """Record jobs in the history.

    `worker start` runs this as a child process.

    \b
    Example:
        worker record --redis-url redis://queue:6379/0 --database-url postgresql+psycopg://sluice@db/sluice
    """
    from sluice.worker.recorder.recorder import run_recorder

    sys.exit(run_recorder(_config_of(config_file, given), os.environ, until_eof=until_eof))


@main.command()
@click.option(
    "--until-eof", is_flag=True, help="Stop when standard input ends. `worker start` starts callbacks with it."
)
@_options(*_QUEUE, "redis.patience_s", *_HISTORY, "callbacks", "log")
def callbacks(until_eof: bool, config_file: Path | None, **given: object) -> NoReturn:
    """Deliver webhooks, export batches and apply retention. Run the HTTP gateway's batches.

    `worker start` runs this as a child process where it has started the queue's server.

    Set the keys that sign webhooks as SLUICE_CALLBACKS_SECRET or as `[callbacks] secret` in the file. There is no flag,
    because other users of this machine can read command lines.

    \b
    Example:
        worker callbacks --redis-url redis://queue:6379/0 --retention-days 30
    """
    from sluice.worker.callbacks.command import run_callbacks

    sys.exit(run_callbacks(_config_of(config_file, given), os.environ, until_eof=until_eof))


@main.command()
@click.argument("tenant", required=False)
@click.option(
    "--batches", "are_batches", is_flag=True, help="Print the secret for webhooks of batches, which have no tenant."
)
@_options()
def webhook_secret(tenant: str | None, are_batches: bool, config_file: Path | None) -> None:
    """Print the secret with which TENANT verifies its webhooks.

    It derives from the keys of `worker callbacks` (SLUICE_CALLBACKS_SECRET, or `[callbacks] secret` in the file). While
    you rotate those, it has one part for each key, separated by spaces; `verify_webhook` accepts it unchanged.

    \b
    Example:
        worker webhook-secret acme
    """
    from sluice.protocol.errors import InvalidJob
    from sluice.protocol.job_ids import check_tenant
    from sluice.protocol.webhooks import tenant_secrets

    if are_batches == (tenant is not None):
        raise click.UsageError("give a tenant or --batches")
    if tenant is not None:
        try:
            check_tenant(tenant)
        except InvalidJob as error:
            raise click.UsageError(str(error)) from error
    secret = _config_of(config_file, {}).callbacks.secret
    if secret is None:
        raise ConfigError(["SLUICE_CALLBACKS_SECRET: there is no key to derive the tenant's secret from"])
    say(tenant_secrets(secret, tenant or ""))
