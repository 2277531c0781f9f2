"""`producer serve`: the HTTP gateway."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from sluice.producer import config
from sluice.producer.cli.common import Values, database_option, note, partitions_option, server_option
from sluice.producer.cli.durations import duration_s
from sluice.producer.cli.hints import suggested
from sluice.producer.errors import InvalidSetting
from sluice.protocol.bounds import (
    ADDRESS_CONNECTIONS,
    CONNECTIONS,
    FILE_MIB,
    KEY_READS,
    TENANT_BATCHES,
    TENANT_FILES_MIB,
    TENANT_HELD_MIB,
    TENANT_REQUESTS,
    TENANT_UNREAD_MIB,
    Bound,
)
from sluice.protocol.host.state_folder import files_url as find_files_url

FC = TypeVar("FC", bound=Callable[..., Any])  # Any: as click has it


def bound_option(bound: Bound, help_text: str) -> Callable[[FC], FC]:
    """Return the option that sets a bound."""
    metavar = "MIB" if bound.name.endswith("_mib") else "COUNT"
    return click.option(
        bound.flag, bound.name, metavar=metavar, type=int, default=bound.most, show_default=True, help=help_text
    )


@click.command()
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", metavar="PORT", type=int, default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--require-keys",
    "is_key_required",
    is_flag=True,
    help="Do not start without an active API key, and serve no request without one. Default: on loopback addresses, "
    "requests need a key as soon as one exists.",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate chain, in PEM. Default: plain HTTP.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate, in PEM, without a password.")
@click.option(
    "--cors-origin",
    "cors_origins",
    metavar="ORIGIN",
    multiple=True,
    help="Let pages of this origin read answers. May be repeated. Default: none.",
)
@click.option(
    "--request-limit",
    "request_limit_s",
    metavar="TIME",
    type=duration_s,
    default="600s",
    show_default=True,
    help="Cancel the job of a request that takes longer.",
)
@click.option(
    "--response-days",
    metavar="DAYS",
    type=float,
    default=30.0,
    show_default=True,
    help="Keep responses of /v1/responses for this long.",
)
@click.option(
    "--return-limit",
    "return_limit_s",
    metavar="TIME",
    type=duration_s,
    default="30s",
    show_default=True,
    help="Cancel the job of a request with an Idempotency-Key this long after its last client has left.",
)
@click.option(
    "--read-limit",
    "read_limit_s",
    metavar="TIME",
    type=duration_s,
    default="60s",
    show_default=True,
    help="Abort the connection of a client that leaves its answer unread for this long.",
)
@click.option(
    "--arrival-limit",
    "arrival_limit_s",
    metavar="TIME",
    type=duration_s,
    default="30s",
    show_default=True,
    help="Close the connection of a request that takes longer to arrive, or pauses for longer. Each 16 KiB adds a "
    "second.",
)
@bound_option(CONNECTIONS, "Accept at most this many connections. Further ones get a 503 or are closed.")
@bound_option(
    ADDRESS_CONNECTIONS, "Accept at most this many connections from one address. Further ones are closed unread."
)
@bound_option(TENANT_REQUESTS, "Answer 429 to further requests of a tenant while this many are open.")
@bound_option(TENANT_HELD_MIB, "Answer 429 while bodies of a tenant's requests take this much memory.")
@bound_option(TENANT_UNREAD_MIB, "Answer 429 while more than this of a tenant's answers waits to be read.")
@bound_option(KEY_READS, "Answer 429 to a key after this many reads and refused requests in a minute.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    metavar="ADDRESS",
    multiple=True,
    help="Trust the X-Forwarded-For header of this proxy, an address or a network. May be repeated. Default: none.",
)
@click.option(
    "--drain-limit",
    "drain_s",
    metavar="TIME",
    type=duration_s,
    default="30s",
    show_default=True,
    help="Wait this long after SIGTERM for open answers to end; the others then end with an error.",
)
@click.option(
    "--files-url",
    metavar="URL",
    envvar="SLUICE_FILES_URL",
    show_envvar=True,
    help="Where to keep files: file:///FOLDER, or s3://BUCKET for several hosts. Default: in the state folder.",
)
@bound_option(FILE_MIB, "Refuse uploads of larger files.")
@bound_option(
    TENANT_FILES_MIB,
    "Refuse uploads, batches and stored responses of a tenant whose files and stored responses take this much.",
)
@bound_option(TENANT_BATCHES, "Answer 429 to a new batch of a tenant that has this many unfinished batches.")
@click.option(
    "--model",
    "models",
    metavar="MODEL=QUEUE",
    multiple=True,
    help="Send requests for this model to this queue even before a worker serves it. May be repeated.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="SLUICE_LOG_LEVEL",
    show_envvar=True,
    help="Each request is logged at info.",
)
@click.option(
    "--log-format", type=click.Choice(["auto", "plain", "json"]), default="auto", show_default=True,
    envvar="SLUICE_LOG_FORMAT", show_envvar=True, help="Format of the log; auto: plain on a terminal, JSON elsewhere.",
)  # fmt: skip
@database_option
@partitions_option
@click.option(
    "--queue",
    "queues",
    metavar="NAME",
    multiple=True,
    default=("default",),
    show_default=True,
    envvar="SLUICE_QUEUE",
    show_envvar=True,
    help="Queue to serve. May be repeated: a request goes to the one whose workers serve its model.",
)
@server_option
def serve(
    *,
    url: str | None,
    queues: tuple[str, ...],
    partitions: int | None,
    models: tuple[str, ...],
    database_url: str | None,
    files_url: str | None,
    **values: object,
) -> None:
    """Serve OpenAI's API over HTTP.

    Requests need an API key of `producer keys create`. While there is none, it listens on this machine only.

    \b
    Example:
        producer serve --port 8000
        curl http://127.0.0.1:8000/v1/models
    """
    try:
        from sluice.gateway.server import serve as run
        from sluice.gateway.settings import GatewaySettings, ServedQueue
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"{error.name} is missing; install the gateway: pip install 'sluice-llm[gateway]'"
        ) from error
    settings = GatewaySettings(
        redis_url=url,
        queues=tuple(ServedQueue(name, partitions) for name in queues),
        model_queues=tuple(_model_queue(text) for text in models),
        database_url=config.database_url(database_url),
        files_url=find_files_url(files_url),
        **cast("Values", values),
    )

    def report(url: str, has_keys: bool) -> None:
        names = ", ".join(repr(name) for name in queues)
        what = f"queue {names}" if len(queues) == 1 else f"queues {names}"
        note(f"producer: serving {what} {'with' if has_keys else 'without'} API keys on {url}")

    run(settings, report, suggested("producer keys create", "--tenant", "NAME", keep="database_url".__eq__))


def _model_queue(text: str) -> tuple[str, str]:
    model, _, queue = text.rpartition("=")  # a model's name may have one too
    if not model or not queue:
        raise InvalidSetting(f"--model must be MODEL=QUEUE, got {text!r}")
    return model, queue
