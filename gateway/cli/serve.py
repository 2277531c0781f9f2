"""`producer serve`: the HTTP gateway."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # values of settings are of several types

import click

from sluice.gateway.settings import DECLARED, SETTINGS, GatewaySettings, ServedQueue
from sluice.producer import config
from sluice.producer.cli.common import database_option, note, partitions_option, server_option
from sluice.producer.cli.hints import suggested
from sluice.producer.errors import InvalidSetting
from sluice.protocol.host.state_folder import files_url as find_files_url
from sluice.protocol.queue_shares import QueueShare
from sluice.protocol.settings import FC, config_option, flag_of


def own_options(command: FC) -> FC:
    """Add a flag for each setting that only the gateway has, and one for the configuration file."""
    for setting in reversed(SETTINGS):
        command = flag_of(setting, setting.name)(command)
    return config_option("gateway")(command)


@click.command()
@own_options
@click.option(
    "--model",
    "models",
    metavar="MODEL=QUEUE",
    multiple=True,
    help="Send requests for this model to this queue even before a worker serves it. May be repeated.",
)
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
    help="Queue to serve. May be repeated: a request goes to the one whose workers serve its model. The weights of a "
    "worker's setting are ignored.",
)
@server_option
def serve(
    *,
    url: str | None,
    queues: tuple[str, ...],
    partitions: int | None,
    models: tuple[str, ...],
    database_url: str | None,
    config_file: Path | None,
    **flags: object,
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
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"{error.name} is missing; install the gateway: pip install 'sluice-llm[gateway]'"
        ) from error
    names = [QueueShare.read(text).name for text in queues]
    settings = GatewaySettings(
        redis_url=url,
        queues=tuple(ServedQueue(name, partitions) for name in names),
        model_queues=tuple(_model_queue(text) for text in models),
        database_url=config.database_url(database_url),
        **_own_values(config_file, flags),
    )

    def report(url: str, has_keys: bool) -> None:
        served = f"queue{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
        note(f"producer: serving {served} {'with' if has_keys else 'without'} API keys on {url}")

    run(settings, report, suggested("producer keys create", "--tenant", "NAME", keep="database_url".__eq__))


def _own_values(config_file: Path | None, flags: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of the settings that only the gateway has, by name."""
    given = DECLARED.read(
        os.environ,
        file=config_file,
        flags={f"gateway.{name}": value for name, value in flags.items() if value is not None},
    )
    if given.problems:
        raise InvalidSetting("; ".join(given.problems))
    values = given.of("gateway")
    return {**values, "files_url": find_files_url(values.get("files_url"))}


def _model_queue(text: str) -> tuple[str, str]:
    model, _, queue = text.rpartition("=")  # a model's name may have an equals sign, too
    if not model or not queue:
        raise InvalidSetting(f"--model must be MODEL=QUEUE, got {text!r}")
    return model, queue
