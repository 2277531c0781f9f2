"""Pages of rows, newest first or oldest first, from a cursor on.

Clients send the id of the last row that they have, which may be deleted by then. So an id has the time of its row, and
with it its place in the list.
"""

import re
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from sluice.protocol.openai_format.requests import RequestRefused

ID = re.compile(r"[a-z]+[-_](?P<created_ms>[0-9a-f]{12})[0-9a-f]{20}")

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A page."""

    tenant: str
    after: str | None = None
    """Id of the last row of the page before."""

    limit: int
    order: Order = "desc"


def new_name(created_ms: int) -> str:
    """Draw what follows the prefix of the id of a row: its time and 80 random bits."""
    return f"{created_ms:012x}{token_hex(10)}"


def is_id(text: str) -> bool:
    """Return whether a text looks like an id of ours. Others are not looked up: databases refuse some texts."""
    return ID.fullmatch(text) is not None


class RowPlace(NamedTuple):
    """The place of a row in a list."""

    created_ms: int
    id: str


def page(
    connection: sa.Connection, table: sa.Table, wanted: PageRequest, *also: sa.ColumnElement[bool]
) -> tuple[list[RowMapping], bool]:
    """Return the rows of a page, and whether there are more. The table has tenant, created_ms and id.

    A row that was deleted has kept its place. The id of another tenant's row is as one that never was.

    Raises:
        RequestRefused: the cursor is not an id.
    """
    columns = (table.c.created_ms, table.c.id)
    is_own = table.c.tenant == wanted.tenant
    query = sa.select(*table.columns).where(is_own, *also)
    if wanted.after is not None:
        at = _place_of(wanted.after)
        # Any: SQLAlchemy's comparison of tuples takes a tuple
        place, bound = sa.tuple_(*columns), cast("Any", sa.tuple_(*map(sa.literal, at)))
        query = query.where(place < bound if wanted.order == "desc" else place > bound)
    ordered = query.order_by(*(column.desc() if wanted.order == "desc" else column for column in columns))
    rows = list(connection.execute(ordered.limit(wanted.limit + 1)).mappings())
    return rows[: wanted.limit], len(rows) > wanted.limit


def _place_of(row_id: str) -> RowPlace:
    match = ID.fullmatch(row_id)
    if match is None:
        raise unknown_cursor()
    return RowPlace(int(match["created_ms"], 16), row_id)


def unknown_cursor() -> RequestRefused:
    """Return the error for an `after` that has no place in the list: an empty page would look like its end."""
    message = "after must be the id of the last item of the previous page"
    return RequestRefused("invalid_request", message, "after")
