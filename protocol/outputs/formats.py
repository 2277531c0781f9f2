"""The formats in which models write calls and thoughts, by name. No I/O.

The worker knows the format of its model. It writes the name on the channel, with the first tokens, and into the result,
so that every reader takes the same text apart in the same way (`parser`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

CallFormat = Literal["", "hermes", "llama3", "mistral"]
"""How a call is written:

- `hermes` (Hermes, Qwen): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere, any number;
- `llama3`: the whole text is `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or not; several are separated by
  semicolons;
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, at the end.
"""

ReasoningFormat = Literal["", "think", "open_think"]
"""`think`: the text may begin with `<think>…</think>`. `open_think`: it begins within, since the prompt has `<think>`.
"""

CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)[1:]
_REASONING_FORMATS: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)[1:]

THINK, THOUGHT = "<think>", "</think>"
HERMES_CALL, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS = "[TOOL_CALLS]"

_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": (HERMES_CALL, HERMES_END),
    "llama3": (PYTHON_TAG,),
    "mistral": (MISTRAL_CALLS,),
    "think": (THINK, THOUGHT),
    "open_think": (THOUGHT,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How a text marks calls and thoughts."""

    calls: CallFormat = ""
    reasoning: ReasoningFormat = ""

    def __str__(self) -> str:
        """Return the name: those of its parts."""
        return "+".join(filter(None, (self.reasoning, self.calls)))

    @classmethod
    def read(cls, name: str) -> "OutputFormat":
        """Return the format of a name. Unknown parts, of a newer worker, mark nothing."""
        parts = name.split("+")
        calls: list[CallFormat] = [known for known in CALL_FORMATS if known in parts]
        reasoning: list[ReasoningFormat] = [known for known in _REASONING_FORMATS if known in parts]
        return cls(calls=calls[0] if calls else "", reasoning=reasoning[0] if reasoning else "")

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that a text may have."""
        return _MARKS.get(self.reasoning, ()) + _MARKS.get(self.calls, ())


PLAIN = OutputFormat()
"""Marks nothing: all text is content."""
