"""Parse command lines of `worker` and `producer` without running them."""

import shlex

import click

from sluice.producer.cli.main import cli as producer
from sluice.worker.cli import main as worker

PROGRAMS = {"producer": producer, "worker": worker}


def below(command: click.Command) -> dict[str, click.Command]:
    """Return the commands of a group by name; none of what is not a group."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: one for name, one in found.items() if one is not None}


def parse(line: str) -> None:
    """Check a command line's names of commands and options, but not its values.

    Raises:
        click.UsageError: there is no such command or option.
    """
    program, *arguments = shlex.split(line)
    command: click.Command = PROGRAMS[program]
    context = click.Context(command, info_name=program)
    while isinstance(command, click.Group) and arguments:
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(arguments))
