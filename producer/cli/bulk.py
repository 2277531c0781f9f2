"""The command `producer submit`."""

import errno
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import cast, get_args

import click

from sluice.producer import config
from sluice.producer.arguments import after as waits_for
from sluice.producer.bulk.run import BulkCounts, BulkRun, BulkSettings, Listener, default_batch
from sluice.producer.cli.common import (
    Values,
    connection_options,
    database_option,
    durability_option,
    is_watched,
    note,
    option,
    options_of,
    producer_of,
    sampling_options,
)
from sluice.producer.cli.hints import suggested
from sluice.producer.client import Producer
from sluice.producer.errors import ProducerError
from sluice.producer.operations.control import server_id
from sluice.protocol.bulk_files.input import STDIN, is_stream
from sluice.protocol.bulk_files.journal import journal_path
from sluice.protocol.chains.chain import OnFailure, When
from sluice.protocol.host.state_folder import state_dir
from sluice.protocol.host.terminal import say
from sluice.protocol.openai_format.requests import LINE_ENDPOINTS, Endpoint
from sluice.protocol.redis.embedded import Embedded

SHOWN_BAD_LINES = 10

NOT_SUGGESTED = ("batch", "is_waiting", "output", "is_again")
"""Options of `submit` that the command for its results has of its own, or must not have."""


class OutOfSpace(ProducerError):
    """A file of the run cannot be written: the disk is full."""


@click.command()
@click.argument("file", metavar="FILE.jsonl|-")
@click.option("--wait", "is_waiting", is_flag=True, help="Wait for every job, then print a summary.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write OpenAI batch output lines to this file; needs --wait.",
)
@click.option(
    "--errors",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write bad and failed lines to this file. Default: OUTPUT.errors.jsonl, or stderr.",
)
@click.option("--ordered", "is_ordered", is_flag=True, help="Write output in the order of the input.")
@click.option("--stream", is_flag=True, help="Publish every token at once; the summary then has ITL.")
@click.option("--strict", "is_strict", is_flag=True, help="Submit nothing if any line is bad.")
@click.option("--again", "is_again", is_flag=True, help="Run the file again as new jobs, and overwrite the output.")
@click.option("--after", metavar="JOB", multiple=True, help="Start no job before this one has ended. Repeatable.")
@option("--when", click.Choice(get_args(When)), None, "Whether all of them must end, or any one.", default="all")
@option(
    "--on-failure",
    click.Choice(get_args(OnFailure)),
    None,
    "Whether only one that is done counts, and a failure cancels the jobs, or every end counts.",
    default="cancel",
)
@click.option("--batch", metavar="NAME", help="Name of the batch. Default: derived from its path.")
@click.option("--endpoint", type=click.Choice(LINE_ENDPOINTS), help="Endpoint of lines without a url.")
@click.option("--model", metavar="NAME", help="Model that the workers must serve. Lines may name no other.")
@sampling_options
@durability_option
@database_option
@connection_options
def submit(file: str, **values: object) -> None:
    """Submit every line of a JSONL file as a job.

    Lines are plain, `{"prompt": …}` or `{"messages": …}` or `{"token_ids": …}` with options inline, or OpenAI batch
    lines for /v1/chat/completions and /v1/completions. gzip and zstandard are decompressed; `-` is standard input. A
    bad line is reported with its number and does not stop the rest. Options on the command line are defaults of the
    lines.

    Running the same file again submits no job twice: after Ctrl-C, repeat the command. For standard input and pipes,
    this needs --batch.

    With --after, the jobs are blocked until other jobs have ended, whose outputs their prompts may use:
    {{outputs[0]}} is the text of the first. `producer chains` lists what is blocked.

    \b
    Examples:
        producer submit prompts.jsonl --max-tokens 64
        producer submit batch.jsonl.gz --wait -o out.jsonl --errors errors.jsonl
    """
    is_nameless = is_stream(file) and values["batch"] is None
    settings = _settings(file, values)
    _check_files(settings)
    begin_s = time.monotonic()
    has_url = config.redis_url(cast("str | None", values["url"])) is not None
    with producer_of(values) as producer, _listener() as listener:
        settings = replace(settings, journal=None if is_nameless else _journal(producer, settings.batch))
        run = _carried_out(producer, settings, listener)
    _report(run, settings, duration_s=time.monotonic() - begin_s)
    if not has_url:
        note(
            f"Queue {producer.target.name!r} is on the embedded server at {Embedded(state_dir()).url}: neither "
            "--redis-url nor SLUICE_REDIS_URL is given"
        )
    sys.exit(1 if run.counts.bad or run.summary.failed or run.summary.missing else 0)


def _settings(file: str, values: Values) -> BulkSettings:
    output, errors, batch = values.pop("output"), values.pop("errors"), values.pop("batch")
    model, endpoint = values.pop("model"), values.pop("endpoint")
    after, when, on_failure = values.pop("after"), values.pop("when"), values.pop("on_failure")
    return BulkSettings(
        path=file,
        batch=batch or default_batch(file),
        endpoint=cast("Endpoint | None", endpoint),
        model=model,
        after=waits_for(*after, when=when, on_failure=on_failure) if after else None,
        defaults=options_of(values),
        is_again=values.pop("is_again"),
        is_strict=values.pop("is_strict"),
        is_waiting=values.pop("is_waiting"),
        is_ordered=values.pop("is_ordered"),
        output=output,
        errors=errors or (output.with_name(f"{output.name}.errors.jsonl") if output else None),
        database_url=config.database_url(values["database_url"]),
    )


def _journal(producer: Producer, batch: str) -> Path:
    """Return the path of the batch's journal for this server."""
    folder = state_dir() / "journals"
    path = folder / journal_path(producer.run(server_id(producer.target)), producer.target.name, batch)
    if not path.exists() and any(folder.glob(f"*/{path.parent.name}/{path.name}")):
        note(
            f"Batch {batch} was submitted to another server, or this one has lost its data: every line is submitted "
            "whose result is not in the output."
        )
    return path


def _carried_out(producer: Producer, settings: BulkSettings, listener: Listener) -> BulkRun:
    try:
        with BulkRun.opened(producer, settings, listener) as run:
            _carry_out(run, settings)
            return run
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        files = " or ".join(str(path) for path in (settings.output, settings.errors, settings.journal) if path)
        message = f"{error.strerror}: {files} cannot be written. Free space, then run the same command again."
        raise OutOfSpace(message) from error


def _carry_out(run: BulkRun, settings: BulkSettings) -> None:
    try:
        run.submit()
        if settings.is_waiting:
            run.wait()
    except KeyboardInterrupt:
        num_jobs = run.counts.accepted + run.counts.before
        note(
            f"{num_jobs} jobs of batch {settings.batch} are submitted and continue. Run it again to submit the others."
        )
        raise


def _report(run: BulkRun, settings: BulkSettings, *, duration_s: float) -> None:
    counts = run.counts
    shown = run.first_bad[:SHOWN_BAD_LINES] if settings.errors is None else []
    for bad in shown:
        note(f"line {bad.number}: {bad.message}")
    if shown and counts.bad > len(shown):
        note(f"and {counts.bad - len(shown)} more")
    if counts.bad:
        where = f", in {settings.errors}" if settings.errors else ""
        note(f"{counts.bad} of {counts.lines} lines are bad{where}")
    note(
        f"{counts.accepted} jobs submitted, {counts.before + counts.written_before} submitted before; "
        f"batch {settings.batch}"
    )
    if settings.is_waiting:
        if counts.written_before:
            note(f"{counts.written_before} lines had been written before and are not in these figures")
        for line in run.summary.lines(duration_s):
            say(line)
        _report_files(run, settings)
    elif not is_stream(settings.path):
        note(f"Next: {_command_for_results(settings)}")


def _command_for_results(settings: BulkSettings) -> str:
    """Return the command that waits for the same jobs: options such as --temperature are part of their identity."""
    own = (settings.path, "--batch", settings.batch, "--wait", "-o", "out.jsonl")
    return suggested("producer submit", *own, keep=lambda name: name not in NOT_SUGGESTED)


def _report_files(run: BulkRun, settings: BulkSettings) -> None:
    """Say why lines failed, which files were written, and how to try again."""
    for reason in run.summary.reason_lines():
        note(reason)
    if settings.output is not None:
        note(f"Outputs: {settings.output}")
    if run.summary.reasons and settings.errors is not None:
        note(f"Errors: {settings.errors}")
    if run.counts.bad or run.summary.failed:
        _report_how_to_retry(run, settings)
    if run.summary.missing:
        _report_missing(run)


def _report_how_to_retry(run: BulkRun, settings: BulkSettings) -> None:
    note(
        "To try again, correct the lines and run the same command: it submits the corrected lines only, and then the "
        "file of errors has only what still fails."
    )
    if not run.summary.failed:
        return
    requeue = suggested("producer requeue", "--batch", settings.batch, "--yes")
    note(
        f"If the lines are right, first send their jobs back: {requeue}. To run every line as a new job, add --again, "
        "which overwrites these files."
    )


def _report_missing(run: BulkRun) -> None:
    problem = f" ({run.history_problem})" if run.history_problem else ""
    keep = suggested("producer queues set", "--result-ttl", "TIME")
    note(
        f"{run.summary.missing} results are missing, for example {run.summary.missing_example}: their data has "
        f"expired from the queue, and the history does not have them{problem}."
    )
    note(
        "To look in another history, run the same command with --database-url. To run every line as a new job, add "
        f"--again. To keep results longer: {keep}."
    )


def _check_files(settings: BulkSettings) -> None:
    """Check that the input exists, and that the outputs are two other files that can be continued by another run.

    Raises:
        click.UsageError: a file is missing, standard output or a device, or it has two uses.
    """
    if settings.output is not None and not settings.is_waiting:
        raise click.UsageError("-o needs --wait: output is written when jobs end.")
    if settings.path != STDIN and not Path(settings.path).exists():
        raise click.UsageError(f"there is no file {settings.path!r}.")
    outputs = [path for path in (settings.output, settings.errors) if path is not None]
    for path in outputs:
        if str(path) == "-" or (path.exists() and not path.is_file()):
            how = "Outputs are appended as jobs end, and read again by the next run"
            raise click.UsageError(f"{str(path)!r} is not a regular file. {how}: name a file.")
    used = outputs if settings.path == STDIN else [Path(settings.path), *outputs]
    if any(_is_same_file(*pair) for pair in combinations(used, 2)):
        raise click.UsageError("the input, -o and --errors need different files.")


def _is_same_file(path: Path, other: Path) -> bool:
    are_there = path.exists() and other.exists()
    return path.samefile(other) if are_there else path.resolve() == other.resolve()


@contextmanager
def _listener() -> Generator[Listener]:
    """Show a progress bar if stderr is a terminal."""
    if not is_watched():
        yield lambda _counts: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("submitting", total=None, rate="")
        begin_s = time.monotonic()

        def show(counts: BulkCounts) -> None:
            sent = counts.accepted + counts.before
            elapsed_s = max(time.monotonic() - begin_s, 1e-9)
            if counts.full is not None:
                progress.update(task, description="queue full, waiting", completed=sent)
            elif counts.ended:
                rate = f"{counts.ended / elapsed_s:.0f}/s"
                progress.update(task, description="generating", completed=counts.ended, total=sent, rate=rate)
            else:
                progress.update(task, description="submitting", completed=sent, rate=f"{sent / elapsed_s:.0f}/s")

        yield show
