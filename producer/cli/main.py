"""The `producer` command. Each subcommand calls the client and prints."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from sluice.producer import config
from sluice.producer.cli.common import (
    EXIT_CODES,
    Values,
    connection_options,
    database_option,
    is_watched,
    json_option,
    note,
    option,
    options_of,
    producer_of,
    sampling_options,
    show_json,
)
from sluice.producer.cli.durations import TIME
from sluice.producer.cli.hints import suggested
from sluice.producer.client import Producer
from sluice.producer.errors import (
    BadOffset,
    InvalidJob,
    InvalidSetting,
    JobNotDone,
    JobNotFound,
    ProducerError,
    QueueUnreachable,
    ResultExpired,
    ResultTimeout,
)
from sluice.producer.operations.follow import StreamEvent
from sluice.producer.operations.submission import Receipt
from sluice.protocol.host.terminal import say
from sluice.protocol.wire import ChoiceResult, JobId, JobResult, TokenLogprobs
from sluice.version import installed_version

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class AskTimeout(ProducerError):
    """The job of `producer ask` did not end in time and was cancelled."""


_HOMES = {
    "batches": "control",
    "cancel": "control",
    "chains": "control",
    "delete": "history",
    "follow": "follow",
    "jobs": "history",
    "queues": "queues",
    "requeue": "control",
    "schedules": "schedules",
    "server": "queues",
    "submit": "bulk",
    "tenants": "queues",
}
"""The module of each command that is not here. It is imported with its command, so that others start sooner."""

_OF_GATEWAY = ("keys", "prices", "serve")


class _Commands(click.Group):
    """The commands here, those of `_HOMES`, and the gateway's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *_HOMES, *_OF_GATEWAY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing its module if it is elsewhere."""
        if cmd_name in _HOMES:
            return getattr(import_module(f"sluice.producer.cli.{_HOMES[cmd_name]}"), cmd_name)
        if cmd_name in _OF_GATEWAY:
            # The command line is put together here: the client imports nothing else of the gateway.
            from sluice.gateway.cli import keys, prices, serve

            return {"keys": keys.keys, "prices": prices.prices, "serve": serve.serve}[cmd_name]
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXIT_CODES
)
@click.version_option(installed_version(), prog_name="producer")
def cli() -> None:
    """Submit jobs for LLM generation to a queue, and follow them.

    Without --redis-url, producer and worker use an embedded valkey-server on a unix socket in your state folder, which
    they start if needed. `worker start` in one terminal and `producer ask` in another need no configuration.

    A TIME is a number with the unit s, m, h or d, such as 90s, 5m, 12h or 30d, or a number of seconds.
    """


@cli.command()
@click.argument("prompt")
@click.option(
    "--chat/--no-chat",
    "is_chat",
    default=None,
    help="Send PROMPT as a user message, or as text to continue. Default: a message if the model has a chat template.",
)
@click.option("--system", metavar="TEXT", help="Put a system message before the prompt; implies --chat.")
@click.option("--model", metavar="NAME", help="Model that the workers must serve.")
@option("--timeout", TIME, None, "Cancel the job after this time. Default: never.", name="timeout_s")
@option("--block", TIME, None, "Wait up to this time if the queue is full.", name="block_s", default="0")
@json_option
@sampling_options
@connection_options
def ask(
    prompt: str,
    *,
    is_chat: bool | None,
    system: str | None,
    as_json: bool,
    timeout_s: float | None,
    block_s: float,
    **values: object,
) -> None:
    """Submit PROMPT and print its completion as it is generated.

    `-` reads the prompt from standard input. Press Ctrl-C to cancel the job.

    \b
    Example:
        producer ask "Name three rivers." --max-tokens 40
    """
    if system and is_chat is False:
        raise click.UsageError("--system needs a chat: leave out --no-chat.")
    text = _from_stdin() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text}] if is_chat or system else []
    options = options_of(values)
    options["as_chat"] = is_chat is None
    with producer_of(values) as producer:
        job = producer.submit(None if messages else text, messages=messages or None, wait_s=block_s, **options)
        try:
            if as_json:
                show_json(_result_object(job.id, producer.result(job, timeout_s)))
            else:
                _print_events(producer, job, timeout_s)
        except ResultTimeout as error:
            producer.cancel(job, reason="the client gave up")
            raise AskTimeout(f"job {job.id} has not ended after {timeout_s:g} s and is cancelled") from error
        except KeyboardInterrupt:
            producer.cancel(job, reason="the client gave up")
            note(f"job {job.id} is cancelled")
            raise
        except QueueUnreachable:
            note(f"job {job.id} continues. Read it later: {suggested('producer stream', job.id)}")
            raise


def _from_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidJob(f"standard input is not UTF-8 at byte {error.start}") from error


def _print_events(producer: Producer, job: Receipt, timeout_s: float | None) -> None:
    last = None
    for event in producer.stream(job, timeout_s=timeout_s):
        say(event.text, nl=False)
        last = event
    say("")
    if is_watched() and last is not None:
        note(f"job {job.id}: {last.offset} tokens, {last.end.finish_reason if last.end else '?'}")


@cli.command()
@click.argument("job")
@click.option(
    "--offset",
    metavar="POSITION",
    default="0",
    help="Start after this position: the cursor of an event, or a number of tokens.",
)
@click.option("--choice", metavar="INDEX", type=click.IntRange(0), default=0, help="Index of the choice, from 0.")
@json_option
@connection_options
def stream(job: str, *, offset: str, choice: int, as_json: bool, **values: object) -> None:
    """Print the output of JOB, from its start or a position on, until its end.

    The cursor of an event (--json prints it) resumes exactly after that event, as long as the output is kept. A number
    of tokens begins with the event that has the next token, which may start before it. It works while the job runs and
    as long after as its channel is kept, 10 minutes by default. Ctrl-C does not stop the job.

    \b
    Example:
        producer stream 0.default.1f0c6a --offset 120:514
    """
    with producer_of(values) as producer:
        try:
            for event in producer.stream(job, offset, choice=choice):
                if as_json:
                    show_json(_event_object(event))
                else:
                    say(event.text, nl=False)
        except (JobNotFound, ResultExpired) as error:
            raise _expired(error, job, f"Look in the history: {suggested('producer result', job)}") from error
        if not as_json:
            say("")


@cli.command()
@click.argument("job")
@click.option(
    "--timeout", "timeout_s", type=TIME, help="Stop waiting after this time; the job continues. Default: wait forever."
)
@json_option
@database_option
@connection_options
def result(job: str, *, timeout_s: float | None, as_json: bool, database_url: str | None, **values: object) -> None:
    """Wait for JOB to end and print its output. If the queue no longer has the job, the history is read.

    \b
    Example:
        producer result 0.default.1f0c6a --json
    """
    queue = str(values["queue"])
    with producer_of(values) as producer:
        try:
            output = producer.result(job, timeout_s)
        except (JobNotFound, ResultExpired) as error:
            output = _recorded(error, job, queue, config.database_url(database_url))
    if as_json:
        show_json(_result_object(job, output))
        return
    for choice in output.choices:
        say(choice.text)


def _recorded(error: JobNotFound | ResultExpired, job: str, queue: str, database_url: str) -> JobResult:
    """Return the output that the history has of a job.

    Raises:
        JobFailed, JobCancelled, JobExpired: the job ended otherwise.
        JobNotFound, ResultExpired: the history does not have it either.
    """
    # Imported here so that a result of the queue is printed sooner.
    from sluice.producer.bulk.recorded import RecordedOutcomes

    with RecordedOutcomes(database_url, queue) as recorded:
        outcome = recorded.find(JobId(job))
    if outcome is None:
        searched = f"was not searched: {recorded.problem}" if recorded.problem else "does not have its output either."
        raise _expired(error, job, f"The history {searched}") from error
    if outcome.error is not None or outcome.result is None:
        raise outcome.error or error
    return outcome.result


def _expired(error: JobNotFound | ResultExpired, job: str, advice: str) -> ProducerError:
    """Return the error of a job that the queue does not have, or not its output, with what to do."""
    if isinstance(error, JobNotFound):
        return JobNotFound(JobId(job), advice=advice)
    return ResultExpired(f"job {job} has ended, but its output has expired from the queue. {advice}")


def _result_object(job_id: str, output: JobResult) -> Values:
    choices = [
        {
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            **_parsed(choice),
            **_logprobs(choice.logprobs),
        }
        for choice in output.choices
    ]
    return {"id": job_id, "model": output.model, "choices": choices, "usage": output.usage}


def _parsed(choice: ChoiceResult) -> Values:
    if not choice.format:
        return {}
    from sluice.protocol.openai_format.tools import parsed_object

    return {"parsed": parsed_object(choice)}


def _event_object(event: StreamEvent) -> Values:
    names = ("job_id", "choice", "start", "token_ids", "text", "time_ms", "end", "cursor")
    return {name: getattr(event, name) for name in names} | _logprobs(event.logprobs)


def _logprobs(logprobs: Sequence[TokenLogprobs] | None) -> Values:
    if logprobs is None:
        return {}
    from sluice.protocol.openai_format.logprobs import logprobs_to_json

    return {"logprobs": logprobs_to_json(logprobs)}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. An error becomes one sentence on stderr and an exit code (see `EXIT_CODES`)."""
    try:
        code = cli.main(arguments, prog_name="producer", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Discard what Python would still flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except (KeyboardInterrupt, click.Abort):
        note("interrupted")
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = MISUSED
    except (InvalidJob, InvalidSetting, BadOffset) as error:
        code = _say(error, MISUSED)
    except (JobNotDone, ProducerError, OSError) as error:
        code = _say(error, FAILED)
    sys.exit(code)


def _say(error: Exception, code: int) -> int:
    note(f"producer: {error}")
    return code
