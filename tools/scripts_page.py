"""Write the table of `docs/reference/scripts.md` from the headers of the scripts.

python -m tools.scripts_page
"""

import re
from dataclasses import dataclass
from pathlib import Path

from sluice.protocol import limits, scripts

FOLDER = Path(scripts.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.lua") if not path.stem.startswith("lib"))
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "scripts.md"
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
HEAD = "| script | at most | reads | writes |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class Header:
    """What a script says of itself in its first comment."""

    reads: frozenset[str]
    writes: frozenset[str]
    bound: str
    """What one call examines at most, with the names of limits."""


def header_of(name: str) -> Header:
    """Read the header of a script.

    Raises:
        KeyError: it has no line of that kind.
    """
    comment = (FOLDER / f"{name}.lua").read_text(encoding="utf-8").split("\n\n")[0]
    # A line that continues another is indented.
    lines = dict(re.findall(r"^-- (\w+): (.*)\.$", comment.replace("\n--   ", " "), re.MULTILINE))
    return Header(_keys(lines["Reads"]), _keys(lines["Writes"]), lines["Bound"])


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split(", ")) - {"nothing"}


def row(name: str) -> str:
    """Format the header of one script as a row of the table."""
    header = header_of(name)
    bound = re.sub(r"LIMITS\.(\w+)", lambda match: f"{vars(limits)[match[1]]:,}", header.bound)
    keys = (" ".join(f"`{key}`" for key in sorted(of)) for of in (header.reads, header.writes))
    return f"| [{name}](../../protocol/scripts/{name}.lua) | {bound} | {' | '.join(keys)} |\n"


def page(text: str) -> str:
    """Return the page with its table replaced by the current one."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + HEAD + "".join(map(row, NAMES)) + END + rest.split(END)[1]


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
