"""Take the text of a choice apart as it arrives: thoughts, content, and calls with their arguments. No I/O.

What is returned after N characters depends on these characters alone, not on how they were split. So a reader of the
whole text, of the stream from its beginning, and one that resumes amid have the same parts, each of them known at the
same character. Any text has parts: what is not a call is content.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sluice.protocol.outputs.call_scanner import CallScanner
from sluice.protocol.outputs.formats import (
    HERMES_CALL,
    HERMES_END,
    MISTRAL_CALLS,
    PYTHON_TAG,
    THINK,
    THOUGHT,
    OutputFormat,
)

MAX_HELD_SPACE = 256
"""White space before a mark is dropped up to this length. A longer one is shown."""

PartKind = Literal["reasoning", "content", "call", "arguments"]


class Part(NamedTuple):
    """What some characters added."""

    kind: PartKind
    text: str
    """More thoughts, content or arguments; of a `call`, the name of the function."""

    at: int
    """The number of characters of the choice's text with which this is known."""

    begin: int
    """The number with which its first character is known."""

    call: int = 0
    """The number of the call in the choice, from 0."""


@dataclass(slots=True, eq=False)
class _OpenPart:
    """The last part, which grows with what follows. Mutable."""

    kind: PartKind
    pieces: list[str]
    at: int
    begin: int
    call: int

    def whole(self) -> Part:
        """Return it as it is now."""
        return Part(self.kind, "".join(self.pieces), self.at, self.begin, self.call)


class FunctionCall(NamedTuple):
    """A function that an output calls."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it: it begins with a brace and ends with the one that closes it. What is
    between is not checked, and is valid if a grammar has constrained the output. It may end amid if `max_tokens` cut
    the output off.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOutput:
    """A whole text, taken apart."""

    content: str
    reasoning: str | None
    calls: tuple[FunctionCall, ...]


_Follows = Callable[[str], None]
"""What a mark begins; it takes the mark, with the white space before it."""


class OutputParser:
    """The parts of one choice so far. Mutable."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        self._at = 0
        self._parts: list[_OpenPart] = []
        self._num_calls = 0
        self._held = ""
        """Of a stretch of text: characters that may belong to a mark, and white space before them."""

        self._is_text = True
        """Whether this is a stretch of text, and not a call."""

        self._kind: PartKind = "content"
        """Of the stretch of text."""

        self._is_begun = False
        """Whether it has shown anything."""

        self._keeps_space = True
        """Whether white space at its beginning is shown."""

        self._raw: list[str] = []
        """The characters of calls, until the first one is known to be one."""

        self._scanner: CallScanner | None = None
        """Of the present call; None between calls."""

        thoughts: Mapping[str, _Follows] = {THINK: self._think} if output_format.reasoning == "think" else {}
        self._at_begin: Mapping[str, _Follows] = {**thoughts, **self._marks_at_begin()}
        self._anywhere: Mapping[str, _Follows] = self._marks_anywhere()
        self._plain = _others(self._anywhere)
        if output_format.reasoning == "open_think":
            self._think("")

    def push(self, text: str) -> list[Part]:
        """Take more text, and return what it added."""
        place = 0
        while place < len(text):
            num_taken = self._take_plain(text, place)
            if not num_taken:
                num_taken = 1
                self._at += 1
                (self._take_text if self._is_text else self._take_call)(text[place])
            place += num_taken
        return self._taken()

    def finish(self) -> list[Part]:
        """Return what was held back: the text is over. A call that was cut off before its name is content."""
        if self._scanner is not None and self._scanner.name and not self._scanner.is_known:
            self._begin_call(self._scanner.name)
        self._show(self._held or "".join(self._raw))
        self._held = ""
        self._raw.clear()
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = [part.whole() for part in self._parts], []
        return parts

    def _add(self, kind: PartKind, text: str, begin: int | None = None) -> None:
        begin = self._at if begin is None else begin
        if self._parts and self._parts[-1].kind == kind != "call":
            last = self._parts[-1]
            last.pieces.append(text)
            last.at = self._at
        else:
            self._parts.append(_OpenPart(kind, [text], self._at, begin, max(0, self._num_calls - 1)))

    # ------------------------------------------------------------ text

    def _marks_at_begin(self) -> Mapping[str, _Follows]:
        """Return the marks that count only at the beginning of the content."""
        return {PYTHON_TAG: self._call, "{": self._call_with_brace} if self._format.calls == "llama3" else {}

    def _marks_anywhere(self) -> Mapping[str, _Follows]:
        """Return the marks that count anywhere in the content."""
        return dict.fromkeys(_CALL_MARKS.get(self._format.calls, ()), self._call)

    def _think(self, _mark: str) -> None:
        self._begin_text("reasoning", {THOUGHT: self._answer})

    def _answer(self, _mark: str = "") -> None:
        self._begin_text("content", self._marks_anywhere(), self._marks_at_begin())

    def _begin_text(
        self, kind: PartKind, anywhere: Mapping[str, _Follows], at_begin: Mapping[str, _Follows] | None = None
    ) -> None:
        self._kind, self._anywhere, self._at_begin = kind, anywhere, at_begin or {}
        self._plain = _others(anywhere)
        self._is_text, self._held, self._is_begun, self._keeps_space = True, "", False, False
        self._raw.clear()

    def _take_plain(self, text: str, place: int) -> int:
        """Show characters that begin no mark at once, as `_take_text` does one by one; return how many there were."""
        if not self._is_text or not self._is_begun or (self._held and not self._held.isspace()):
            return 0
        found = self._plain.match(text, place)
        num_plain = found.end() - place if found else 0
        run = text[place : place + num_plain]
        shown = (self._held + run).rstrip() if self._anywhere else run
        num_held = len(self._held) + num_plain - len(shown)
        if not num_plain or num_held > MAX_HELD_SPACE:
            return 0
        self._held = (self._held + run)[len(shown) :]
        at = self._at
        if shown:
            self._at += num_plain - num_held
            # Held white space is known with the first character after it.
            lead = num_plain - len(run.lstrip()) if self._anywhere else 0
            self._add(self._kind, shown, at + 1 + lead)
        self._at = at + num_plain
        return num_plain

    def _take_text(self, character: str) -> None:
        self._held += character
        if not self._is_begun and self._take_at_begin():
            return
        if not self._anywhere:
            self._show_held()
            return
        for size in range(len(self._held), 0, -1):
            end = self._held[-size:].lstrip()
            if follows := self._anywhere.get(end):
                marked = self._held[-size:]
                self._show(self._held[:-size])
                follows(marked)
                return
            if (not end and size <= MAX_HELD_SPACE) or (end and _may_become(end, self._anywhere)):
                self._show(self._held[:-size])
                self._held = self._held[-size:]
                return
        self._show_held()

    def _show_held(self) -> None:
        self._show(self._held)
        self._held = ""

    def _take_at_begin(self) -> bool:
        """Return whether what is held is a mark that may begin the text, or could become one."""
        begin = self._held.lstrip()
        if follows := self._at_begin.get(begin):
            follows(self._held)
            return True
        has_marks = bool(self._anywhere or self._at_begin)
        if not begin:
            return has_marks and len(self._held) <= MAX_HELD_SPACE
        return _may_become(begin, self._at_begin)

    def _show(self, text: str) -> None:
        if not self._is_begun and not self._keeps_space:
            text = text.lstrip()
        if text:
            self._is_begun = True
            self._add(self._kind, text)

    # ------------------------------------------------------------ calls

    def _call(self, mark: str) -> None:
        """Begin the calls that follow a mark."""
        self._is_text, self._held, self._raw, self._scanner = False, "", [mark], None

    def _call_with_brace(self, brace: str) -> None:
        self._call(brace[:-1])
        self._take_call(brace[-1])

    def _take_call(self, character: str) -> None:
        if self._raw or self._scanner is not None:
            self._raw.append(character)
        if self._scanner is None:
            between, end = _BETWEEN[self._format.calls]
            if character.isspace() or character in between:
                return
            if character == end:
                self._answer()
                return
            self._scanner, self._raw = CallScanner(), self._raw or [character]
        self._scan(self._scanner, character)

    def _scan(self, scanner: CallScanner, character: str) -> None:
        was_known = scanner.is_known
        arguments = scanner.take(character)
        if scanner.is_wrong:
            self._give_up(character, "" if was_known else "".join(self._raw[:-1]))
            return
        if scanner.is_known and not was_known:
            self._begin_call(scanner.name)
        elif was_known:
            self._raw.clear()
        if arguments:
            self._add("arguments", arguments)
        if scanner.is_over:
            self._end_call()

    def _begin_call(self, name: str) -> None:
        self._raw.clear()
        self._num_calls += 1
        self._add("call", name)

    def _give_up(self, character: str, before: str) -> None:
        """Show what was taken for a call as content. Its last character may begin a mark."""
        keeps_space = self._is_begun or (self._keeps_space and not self._num_calls)
        self._scanner = None
        self._answer()
        self._keeps_space = keeps_space
        self._show(before)
        self._take_text(character)

    def _end_call(self) -> None:
        self._scanner = None
        self._raw.clear()
        if self._format.calls == "hermes":
            self._begin_text("content", {HERMES_END: self._answer, HERMES_CALL: self._call})


_CALL_MARKS: Mapping[str, tuple[str, ...]] = {"hermes": (HERMES_CALL,), "mistral": (MISTRAL_CALLS,)}

_BETWEEN: Mapping[str, tuple[str, str | None]] = {"hermes": ("", None), "llama3": (";", None), "mistral": ("[,", "]")}
"""By format: the characters before a call, besides white space, and the one that ends all calls."""


def _may_become(text: str, marks: Iterable[str]) -> bool:
    return any(mark.startswith(text) for mark in marks)


def _others(marks: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of characters with which no mark begins."""
    first = re.escape("".join({mark[0] for mark in marks}))
    return re.compile(f"[^{first}]+" if first else ".+", re.DOTALL)


def parse_output(output_format: OutputFormat, text: str) -> ParsedOutput:
    """Take a whole text apart."""
    parser = OutputParser(output_format)
    return joined([*parser.push(text), *parser.finish()])


def joined(parts: Iterable[Part]) -> ParsedOutput:
    """Join parts."""
    texts: dict[PartKind, list[str]] = {"reasoning": [], "content": []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            names.append(part.text)
            arguments.append([])
        elif part.kind == "arguments":
            arguments[part.call].append(part.text)
        else:
            texts[part.kind].append(part.text)
    calls = tuple(FunctionCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    reasoning = "".join(texts["reasoning"]) if texts["reasoning"] else None
    return ParsedOutput(content="".join(texts["content"]), reasoning=reasoning, calls=calls)
