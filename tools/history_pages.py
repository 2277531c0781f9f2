"""Write the declarations of the history's database into `docs/reference/history.md`.

    python -m tools.history_pages

That is the options of its URL, and its tables, views and columns.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from sluice.history.database_urls import POSTGRES_OPTIONS
from sluice.history.tables import Group, metadata
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
        has_groups = any(Group in column.info for column in table.columns)
        head = "| column | type | set by | meaning |" if has_groups else "| column | type | meaning |"
        yield f"### `{table.name}`\n\n{_sentence(table.comment)}.\n\n{head}\n{re.sub('[^|]+', '---', head)}"
        for column in table.columns:
            key = "key: " if column.primary_key else ""
            set_by = f" {_set_by(column)} |" if has_groups else ""
            yield f"| `{column.name}` | {_type(column)} |{set_by} {key}{_escaped(column.comment)} |"
        yield ""


def _set_by(column: "sa.Column[object]") -> str:
    if column.info.get("is_measured"):
        return "end"
    if (group := column.info.get(Group)) is not None:
        return group.value
    return "computed" if column.computed is not None else "deletion" if column.nullable else "any event"


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
