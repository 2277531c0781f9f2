"""Render chat messages with a model folder's template, in a sandbox. Knows no tokenizer and no queue.

The environment matches `apply_chat_template` of transformers: sandboxed Jinja with trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`, `tools`, and `documents`, which is
None.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from hashlib import blake2b
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context

from sluice.protocol.outputs.formats import MISTRAL_CALLS
from sluice.protocol.wire import Message
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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox for untrusted templates that also bounds products, widths and repetitions, and forbids powers."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Multiply and format within bounds.

        Raises:
            jinja2.exceptions.SecurityError: the result could exceed `MAX_PRODUCT`, or the operator is a power.
        """
        if operator == "%":
            _check_widths(left)
        elif operator == "**" or _size_of(left) * _size_of(right) > MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: object, attribute: str) -> object:
        """Return an attribute; `format` only of a text without large widths."""
        _check_format_method(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> object:
        """Return an item, or an attribute, as in `getattr`."""
        _check_format_method(obj, argument)
        return super().getitem(obj, argument)  # pyright: ignore[reportArgumentType]  # jinja2 passes any key

    def call(self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:  # as in jinja2
        """Call a function or a method, such as `ljust`, with no large number."""
        _check_numbers(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)


_WIDTHS = re.compile(r"\d{7,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A width of over six digits, or one that is given as another argument."""


def _check_widths(text: object) -> None:
    if isinstance(text, str) and _WIDTHS.search(text):
        raise jinja2.exceptions.SecurityError("a width in a format is too large, or not in the format")


def _check_format_method(obj: object, name: object) -> None:
    if name in ("format", "format_map"):
        _check_widths(obj)


def _check_numbers(*arguments: object) -> None:
    if any(isinstance(argument, int) and abs(argument) > MAX_PRODUCT for argument in arguments):
        raise jinja2.exceptions.SecurityError(f"a number over {MAX_PRODUCT} is too large as an argument")


def _bounded(function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter that takes no large number, such as a width, and no large width in a format."""

    # It keeps jinja2's mark for the first argument.
    @wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        _check_numbers(*args[1:], *kwargs.values())
        if function is jinja2.filters.FILTERS["format"]:
            _check_widths(args[0])
        return function(*args, **kwargs)

    return bounded


def _size_of(value: object) -> float:
    """Return the size of a factor: the absolute value of a number, or the length of a sequence."""
    return abs(value) if isinstance(value, (int, float)) else len(value) if isinstance(value, Sized) else 1.0


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    filters: dict[str, Any] = environment.filters  # jinja2 types its own filters only
    filters["tojson"] = _to_json
    filters.update({name: _bounded(function) for name, function in filters.items()})
    own: dict[str, Any] = {"raise_exception": _refuse}  # jinja2 types its own globals only
    environment.globals.update(own)
    return environment


_CANNOT_RENDER = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(MemoryError, RecursionError),
)


_ANSWER = "answer-7f3a"

_DEVELOPER = re.compile("""['"]developer['"]""")
"""The role, as a template compares it."""

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    source: str = ""
    """The template as it is written."""

    def render(self, messages: Sequence[Message], *, now_ms: int, tools: Sequence[Mapping[str, object]] = ()) -> str:
        """Render a chat as a prompt for the model's answer. `strftime_now` uses `now_ms`.

        Raises:
            JobRejected: the template refuses these messages or fails on them.
        """
        try:
            return self._rendered(messages, now_ms=now_ms, asks_for_answer=True, tools=tools)
        except TemplateRefusal as refusal:
            raise JobRejected(INVALID_REQUEST, f"the model's chat template refuses these messages: {refusal}") from None
        except _CANNOT_RENDER as error:
            reason = str(error) or type(error).__name__
            raise JobRejected(
                INVALID_REQUEST, f"the model's chat template cannot render these messages: {reason}"
            ) from error

    @property
    def takes_tools(self) -> bool:
        """Whether it shows tools, and the messages about them."""
        return _TOOLS.search(self.source) is not None

    @property
    def probe(self) -> str:
        """A rendered question with its answer; empty if the template does not render such a chat."""
        chat = (Message(role="user", content="question"), Message(role="assistant", content=_ANSWER))
        try:
            return self._rendered(chat, now_ms=0, asks_for_answer=False)
        except (TemplateRefusal, *_CANNOT_RENDER):
            return ""

    def text_after_answer(self) -> str:
        """Return what the template writes after an assistant's message at the end of a chat: its end token, if any."""
        before, _, after = self.probe.rpartition(_ANSWER)
        return after.lstrip() if before else ""

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        now_ms: int,
        asks_for_answer: bool,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        now = datetime.fromtimestamp(now_ms / 1000, tz=UTC)

        def strftime_now(form: str) -> str:
            _check_widths(form)
            return now.strftime(form)

        return self.template.render(
            messages=list(map(self._as_dict, messages)),
            # Their schemas have no objects of Python's, of which a template could use attributes.
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=asks_for_answer,
            strftime_now=strftime_now,
            **self.special_tokens,
        )

    def _as_dict(self, message: Message) -> dict[str, object]:
        has_developers = _DEVELOPER.search(self.source) is not None
        role = "system" if message.role == "developer" and not has_developers else message.role
        calls = [
            {
                "id": self._call_id(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": call.values},
            }
            for call in message.tool_calls
        ]
        optional = {
            "name": message.name,
            "reasoning_content": message.reasoning,
            "tool_calls": calls or None,
            "tool_call_id": message.tool_call_id and self._call_id(message.tool_call_id),
        }
        return {"role": role, "content": message.content, **{name: part for name, part in optional.items() if part}}

    def _call_id(self, given: str) -> str:
        """Return the id of a call in the form that the template demands: Mistral's take nine letters and digits."""
        if MISTRAL_CALLS not in self.source or re.fullmatch("[a-zA-Z0-9]{9}", given):
            return given
        return blake2b(given.encode(), digest_size=5).hexdigest()[:9]


def compile_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Compile a template.

    Raises:
        ConfigError: `source` is not valid Jinja.
    """
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"the model's chat template is not valid: {error} (line {error.lineno})"]) from error
    return ChatTemplate(template, special_tokens, source)
