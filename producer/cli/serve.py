"""`producer serve`: the HTTP gateway."""

import click

from sluice.producer.cli.common import connection_options, note
from sluice.producer.errors import InvalidSetting


@click.command()
@click.option(
    "--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Loopback address to listen on."
)
@click.option("--port", metavar="PORT", type=int, default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--request-limit",
    "request_limit_s",
    metavar="SECONDS",
    type=float,
    default=600.0,
    show_default=True,
    help="Cancel the job of a request that takes longer.",
)
@connection_options
def serve(
    *, host: str, port: int, request_limit_s: float, url: str | None, queue: str, partitions: int, **_others: object
) -> None:
    """Serve OpenAI's API over HTTP, on this machine.

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
        redis_url=url, queue=queue, partitions=partitions, host=host, port=port, request_limit_s=request_limit_s
    )
    run(settings, lambda url: note(f"producer: serving queue {queue!r} on {url}"))
