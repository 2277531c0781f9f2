"""Write the table of `docs/reference/bounds.md` from the bounds that the code declares.

python -m tools.bounds_page
"""

from pathlib import Path

from sluice.protocol.bounds import BOUNDS, Bound

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "bounds.md"
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
HEAD = "| what | per | default | set by | answer beyond it | metric | notes |\n|---|---|---|---|---|---|---|\n"


def row(bound: Bound) -> str:
    """Format one bound as a row of the table."""
    default = "none" if bound.default is None else f"{bound.default:,}"
    set_by = "fixed" if bound.set_by is None else f"`{bound.flag}` of `{bound.set_by.rpartition(' ')[0]}`"
    code = "" if bound.code is None else f" `{bound.code}`"
    answer = "none" if bound.status is None else f"{bound.status}{code}"
    metric = "" if bound.metric is None else f"`{bound.metric}`"
    cells = (bound.what, bound.per, default, set_by, answer, metric, bound.note)
    return f"| {' | '.join(cells)} |\n"


def page(text: str) -> str:
    """Return the page with its table replaced by the current one."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + HEAD + "".join(map(row, BOUNDS)) + END + rest.split(END)[1]


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
