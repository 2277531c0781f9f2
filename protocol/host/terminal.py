"""Printing of untrusted text: prompts, outputs, reasons, names of models and workers."""

import re
import sys

import click

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, except newline and tab, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """Replace each control character by U+FFFD, so that the text cannot control a terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text: unchanged to a file or a pipe, and `printable` on a terminal."""
    stream = sys.stderr if err else sys.stdout
    click.echo(printable(text) if stream.isatty() else text, nl=nl, err=err)
