"""The text of a terminal after a program's output. Knows the control sequences that rich emits, and no others."""

import re
from dataclasses import dataclass, field

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


@dataclass(frozen=True, slots=True)
class Style:
    """How a character is shown."""

    color: str = ""
    is_bold: bool = False
    is_dim: bool = False
    is_italic: bool = False

    def changed(self, codes: list[str]) -> "Style":
        """Apply the codes of one SGR sequence."""
        match codes:
            case ["38", "5", color]:
                return Style(color, self.is_bold, self.is_dim, self.is_italic)
            case ["1"]:
                return Style(self.color, True, self.is_dim, self.is_italic)
            case ["2"]:
                return Style(self.color, self.is_bold, True, self.is_italic)
            case ["3"]:
                return Style(self.color, self.is_bold, self.is_dim, True)
            case [color] if color in {"31", "32", "33", "34", "35", "36"}:
                return Style(color, self.is_bold, self.is_dim, self.is_italic)
            case ["0"] | [""]:
                return Style()
            case _:
                raise ValueError(f"unknown style {codes}")


Run = tuple[str, Style]
"""Neighboring characters of one style."""
Line = tuple[Run, ...]


@dataclass(slots=True, eq=False)
class Screen:
    """Every line that was printed, from the first on; the terminal shows the last ones."""

    lines: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = field(default_factory=Style)

    def feed(self, text: str) -> None:
        """Apply a program's output.

        Raises:
            ValueError: it has a control sequence that this screen does not know.
        """
        for codes, command, carriage_return, newline, characters in SEQUENCE.findall(text):
            if characters:
                self._put(characters)
            elif newline:
                self._move_to(self.row + 1)
            elif carriage_return:
                self.column = 0
            else:
                self._obey(command, codes)

    def runs(self, row: int) -> Line:
        """A line as runs of one style, trailing spaces cut."""
        runs: list[Run] = []
        for character, style in self.lines[row]:
            if runs and runs[-1][1] == style:
                runs[-1] = (runs[-1][0] + character, style)
            else:
                runs.append((character, style))
        while runs and not runs[-1][0].strip():
            runs.pop()
        return (*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1])) if runs else ()

    def _put(self, characters: str) -> None:
        line = self.lines[self.row]
        line.extend([(" ", Style())] * (self.column - len(line)))
        line[self.column : self.column + len(characters)] = [(character, self.style) for character in characters]
        self.column += len(characters)

    def _move_to(self, row: int) -> None:
        self.row = max(row, 0)
        while len(self.lines) <= self.row:
            self.lines.append([])

    def _obey(self, command: str, codes: str) -> None:
        match command, codes:
            case "m", _:
                self.style = self.style.changed(codes.split(";"))
            case "A", _:
                self._move_to(self.row - int(codes or 1))
            case "K", "2":
                self.lines[self.row].clear()
            case (("h" | "l"), "?25"):
                pass  # the cursor is not drawn
            case _:
                raise ValueError(f"unknown control sequence {codes}{command}")
