"""Render chat messages with a model folder's own template, in a sandbox. Knows no tokenizer and no queue.

The environment is the one that model folders are written for (transformers' `apply_chat_template`): sandboxed Jinja,
blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from producer.contract.wire import Message
from worker.errors import INVALID_REQUEST, ConfigError, JobRejected


class TemplateRefusal(Exception):
    """The template itself says that these messages cannot be rendered."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model said, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Read up to `{% endgeneration %}` and keep only what is between."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    own: dict[str, Any] = {"raise_exception": _refuse}  # jinja2 types only the globals that it brings itself
    environment.globals.update(own)
    return environment


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, now_ms: int) -> str:
        """The prompt of a chat, up to where the model answers. The template's clock stands at `now_ms`.

        Raises:
            JobRejected: the template refuses these messages, or cannot handle them.
        """
        now = datetime.fromtimestamp(now_ms / 1000, tz=UTC)
        try:
            return self.template.render(
                messages=[_as_dict(message) for message in messages],
                add_generation_prompt=True,
                strftime_now=now.strftime,
                **self.special_tokens,
            )
        except TemplateRefusal as refusal:
            raise JobRejected(INVALID_REQUEST, f"the model's chat template refuses these messages: {refusal}") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise JobRejected(
                INVALID_REQUEST, f"the model's chat template cannot render these messages: {error}"
            ) from error


def _as_dict(message: Message) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain | ({"name": message.name} if message.name is not None else {})


def compile_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Compile the text of a template.

    Raises:
        ConfigError: it is not valid Jinja.
    """
    try:
        return ChatTemplate(_environment().from_string(source), special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"the model's chat template is not valid: {error} (line {error.lineno})"]) from error
