"""Write what a type checker must read of the sampling options, from their declaration in `protocol/sampling.py`.

    python -m tools.sampling_options

That is `SamplingOptions`, their keyword arguments, at the end of that file; and `engine/sampling.py`, their values for
the engine, which knows no queue. It writes their table in the guide, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import fill

from sluice.protocol.limits import MAX_LOGPROBS, MAX_STRUCTURED_CHARS
from sluice.protocol.sampling import DEFAULTS, NEUTRAL, OPTIONS, JobOptions, sentence_of

ROOT = Path(__file__).parents[1]
CONTRACT, ENGINE = ROOT / "protocol" / "sampling.py", ROOT / "engine" / "sampling.py"
PAGE = ROOT / "docs" / "guide" / "offline.md"
BEGIN = "# Generated below by `python -m tools.sampling_options`.\n"

TABLE, END = "<!-- options: written by tools.sampling_options -->\n", "<!-- end -->\n"

KINDS: Mapping[object, str] = {
    int: "int",
    int | None: "int | None",
    float: "float",
    float | None: "float | None",
    bool: "bool",
    Mapping[int, float]: "Mapping[int, float]",
    Mapping[str, str]: "Mapping[str, str]",
    tuple[str, ...]: "tuple[str, ...]",
    tuple[int, ...]: "tuple[int, ...]",
}
LOOSER = {
    "tuple[str, ...]": "str | Sequence[str]",
    "tuple[int, ...]": "Sequence[int]",
    "Mapping[str, str]": "Mapping[str, object] | None",
}
"""As keyword arguments: any sequence for a tuple, one string for one stop, any JSON for a grammar."""

OF_ENGINE = '''"""The sampling options of a job, as the engine has them.

Written by `python -m tools.sampling_options` from `protocol/sampling.py`, which checks their values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_GRAMMAR_CHARS = {max_grammar_chars:_}
"""Of a grammar, or of each part of one that is composed."""

MAX_LOGPROBS = {max_logprobs}
"""Most alternatives of a token whose log-probabilities are returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """How to choose the next token, and when to stop: each option with its default if no model states one."""
'''
OF_CALLERS = '''

class SamplingOptions(TypedDict, total=False):
    """`JobOptions` as keyword arguments: any sequence for a tuple, one string for one stop."""
'''
OF_REQUESTS = {"n", "structured", "echo", "embed", "classify", "dimensions"}
"""The engine has these beside the sampling options, in `Request`."""


def contract(text: str) -> str:
    """Return the text of `protocol/sampling.py` with its end written again."""
    return text.partition(BEGIN)[0] + BEGIN + OF_CALLERS + "".join(_keywords())


def engine() -> str:
    """Return the text of `engine/sampling.py`."""
    return OF_ENGINE.format(max_grammar_chars=MAX_STRUCTURED_CHARS, max_logprobs=MAX_LOGPROBS) + "".join(_fields())


def page(text: str) -> str:
    """Return the text of the guide with its table written again."""
    before, rest = text.split(TABLE)
    rows = "".join(f"| `{name}` | {sentence_of(name)} |\n" for name in OPTIONS)
    return f"{before}{TABLE}\n| option | |\n|---|---|\n{rows}\n{END}{rest.split(END, 1)[1]}"


def _keywords() -> Iterator[str]:
    for one in fields(JobOptions):
        kind = KINDS[one.type]
        yield f"\n    {one.name}: {LOOSER.get(kind, kind)}\n{_docstring(sentence_of(one.name))}"


def _fields() -> Iterator[str]:
    for one in fields(JobOptions):
        if one.name in OF_REQUESTS:
            continue
        kind = KINDS[one.type]
        default: object = NEUTRAL.get(one.name, DEFAULTS[one.name])
        if one.name in NEUTRAL:
            kind = kind.removesuffix(" | None")
        shown = "field(default_factory=dict[int, float])" if default == {} else repr(default)
        yield f"\n    {one.name}: {kind} = {shown}\n{_docstring(OPTIONS[one.name].sentence)}"


def _docstring(text: str) -> str:
    line = f'    """{text}"""\n'
    if len(line) <= 121:
        return line
    wrapped = fill(f'"""{text}', width=120, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f'{wrapped}\n    """\n'


def main() -> None:
    """Write all."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    CONTRACT.write_text(contract(CONTRACT.read_text(encoding="utf-8")), encoding="utf-8")
    ENGINE.write_text(engine(), encoding="utf-8")


if __name__ == "__main__":
    main()
