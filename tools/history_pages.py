"""Write the declarations of the history's database into `docs/reference/history.md`.

    python -m tools.history_pages

That is the options of its URL, and its tables, views and columns.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from sluice.history.database_urls import POSTGRES_OPTIONS
from sluice.history.tables import metadata
from sluice.history.views import views

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "history.md"
END = "<!-- end -->\n"


def page(text: str) -> str:
    """Return the page with its tables replaced by the current ones."""
    for name, lines in (("options", _options()), ("tables", _columns(metadata)), ("views", _columns(views))):
        begin = f"<!-- {name}: written by tools.history_pages -->\n"
        before, rest = text.split(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1]
    return text


def _options() -> Iterator[str]:
    yield "| option | values | meaning |\n|---|---|---|"
    for name, option in POSTGRES_OPTIONS.items():
        yield f"| `{name}` | {option.accepts} | {option.meaning} |"
    yield ""


def _columns(declared: sa.MetaData) -> Iterator[str]:
    for table in declared.tables.values():
        yield f"### `{table.name}`\n\n{_sentence(table.comment)}.\n\n| column | type | meaning |\n|---|---|---|"
        for column in table.columns:
            key = "key: " if column.primary_key else ""
            yield f"| `{column.name}` | {_type(column)} | {key}{_escaped(column.comment)} |"
        yield ""


def _type(column: "sa.Column[object]") -> str:
    if isinstance(column.type, sa.JSON):
        return "JSON"
    names = {"BigInteger": "integer", "Integer": "integer", "Double": "number", "Text": "text", "Boolean": "boolean"}
    return names.get(type(column.type).__name__, "bytes")


def _sentence(comment: str | None) -> str:
    text = comment or ""
    return _escaped(text[:1].upper() + text[1:])


def _escaped(comment: str | None) -> str:
    """Show names of tables, columns and JSON as code."""
    text = (comment or "").replace("|", "\\|")
    return re.sub(r"(?<![\w`])([a-z0-9]+(?:_[a-z0-9]+)+|\[?\{.*?\}\]?|\[\[?.*?\]\]?)(?![\w`])", r"`\1`", text)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
