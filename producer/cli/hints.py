"""The options that the running command was given, for the commands that it suggests."""

import shlex
from collections.abc import Callable, Iterator
from typing import cast

import click
from click.core import ParameterSource

from sluice.protocol.redis.urls import redacted

CONNECTION = ("url", "queue", "partitions")
"""The parameters that `connection_options` adds."""

MAY_HAVE_PASSWORDS = ("url", "database_url")


def suggested(command: str, *arguments: str, keep: Callable[[str], bool] = CONNECTION.__contains__) -> str:
    """Return a command line to copy, quoted for a shell, with options that the running command was given.

    Options from the environment are left out, because the environment is the same for the next command. Passwords in
    the URLs of servers are replaced by ***.

    Args:
        command: The words of the command.
        arguments: Its own arguments and options.
        keep: Whether to keep an option that was given, by the name of its parameter. Default: those that locate the
            queue.
    """
    return f"{command} {shlex.join([*arguments, *_given(click.get_current_context(), keep)])}"


def _given(context: click.Context, keep: Callable[[str], bool]) -> Iterator[str]:
    for option in context.command.params:
        name = str(option.name)
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_given and keep(name):
            yield from _words(option, context.params[name])


def _words(option: click.Option, given: object) -> Iterator[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        yield flag
        return
    for value in cast("tuple[object, ...]", given) if option.multiple else (given,):
        yield flag
        yield redacted(str(value)) if option.name in MAY_HAVE_PASSWORDS else str(value)
