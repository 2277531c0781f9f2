"""`producer serve`: the HTTP gateway."""

from typing import cast

import click

from sluice.producer import config
from sluice.producer.cli.common import Values, connection_options, database_option, note
from sluice.producer.errors import InvalidSetting


@click.command()
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", metavar="PORT", type=int, default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--require-keys",
    "is_key_required",
    is_flag=True,
    help="Do not start without an active API key, and serve no request without one. Default: on loopback addresses, "
    "requests need a key as soon as there is one.",
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
    metavar="SECONDS",
    type=float,
    default=600.0,
    show_default=True,
    help="Cancel the job of a request that takes longer.",
)
@click.option(
    "--return-limit",
    "return_limit_s",
    metavar="SECONDS",
    type=float,
    default=30.0,
    show_default=True,
    help="Cancel the job of a request with an Idempotency-Key this long after its last client has left.",
)
@database_option
@connection_options
def serve(*, url: str | None, queue: str, database_url: str | None, **values: object) -> None:
    """Serve OpenAI's API over HTTP.

    Requests need an API key of `producer keys create`. While there is none, it listens on this machine only.

    \b
    Example:
        producer serve --port 8000
        curl http://127.0.0.1:8000/v1/models
    """
    try:
        from sluice.producer.gateway.server import serve as run
        from sluice.producer.gateway.settings import GatewaySettings
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"{error.name} is missing; install the gateway: pip install 'sluice-llm[gateway]'"
        ) from error
    settings = GatewaySettings(
        redis_url=url, queue=queue, database_url=config.database_url(database_url), **cast("Values", values)
    )

    def report(url: str, has_keys: bool) -> None:
        note(f"producer: serving queue {queue!r} {'with' if has_keys else 'without'} API keys on {url}")

    run(settings, report)
