"""Render chat messages with a model folder's template, in a sandbox. Knows no tokenizer and no queue.

The environment matches `apply_chat_template` of transformers: sandboxed Jinja with trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %}`.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context

from sluice.producer.contract.wire import Message
from sluice.worker.errors import INVALID_REQUEST, ConfigError, JobRejected

MAX_PRODUCT = 1_000_000
"""Maximum length of a sequence that a template makes by multiplication, and largest product of numbers."""


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks training targets. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse up to `{% endgeneration %}` and return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox for untrusted templates that also bounds products and forbids powers."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Multiply within bounds.

        Raises:
            jinja2.exceptions.SecurityError: the product would exceed `MAX_PRODUCT`, or the operator is a power.
        """
        if operator == "**" or _size_of(left) * _size_of(right) > MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size_of(value: object) -> float:
    """Return the size of a factor: the absolute value of a number, or the length of a sequence."""
    return abs(value) if isinstance(value, (int, float)) else len(value) if isinstance(value, Sized) else 1.0


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    own: dict[str, Any] = {"raise_exception": _refuse}  # jinja2 types its own globals only
    environment.globals.update(own)
    return environment


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, now_ms: int) -> str:
        """Render a chat as a prompt for the model's answer. `strftime_now` uses `now_ms`.

        Raises:
            JobRejected: the template refuses these messages or fails on them.
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
    """Compile a template.

    Raises:
        ConfigError: `source` is not valid Jinja.
    """
    try:
        return ChatTemplate(_environment().from_string(source), special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"the model's chat template is not valid: {error} (line {error.lineno})"]) from error
