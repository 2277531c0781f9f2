"""Pages of rows, newest or oldest first, after a cursor.

The cursor is the id of the last row that the client has, which may have been deleted since. So an id contains the time
of its row, and thereby its place in the list.
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
    """A request for one page of a tenant's rows."""

    tenant: str
    after: str | None = None
    """Id of the last row of the previous page."""

    limit: int
    order: Order = "desc"


def new_name(created_ms: int) -> str:
    """Return the part of a new row's id after its prefix: its time and 80 random bits."""
    return f"{created_ms:012x}{token_hex(10)}"


def is_id(text: str) -> bool:
    """Return whether a text has the form of an id. Others are not looked up, because databases refuse some texts."""
    return ID.fullmatch(text) is not None


class RowPlace(NamedTuple):
    """The place of a row in a list."""

    created_ms: int
    id: str


def page(
    connection: sa.Connection, table: sa.Table, request: PageRequest, *also: sa.ColumnElement[bool]
) -> tuple[list[RowMapping], bool]:
    """Return the rows of a page, and whether there are more. The table must have tenant, created_ms and id.

    The id of a deleted row is a valid cursor. The id of another tenant's row has the same effect as an unknown id.

    Raises:
        RequestRefused: the cursor is not an id.
    """
    columns = (table.c.created_ms, table.c.id)
    is_own = table.c.tenant == request.tenant
    query = sa.select(*table.columns).where(is_own, *also)
    if request.after is not None:
        at = _place_of(request.after)
        # Any: SQLAlchemy's comparison of tuples takes a tuple
        place, bound = sa.tuple_(*columns), cast("Any", sa.tuple_(*map(sa.literal, at)))
        query = query.where(place < bound if request.order == "desc" else place > bound)
    ordered = query.order_by(*(column.desc() if request.order == "desc" else column for column in columns))
    rows = list(connection.execute(ordered.limit(request.limit + 1)).mappings())
    return rows[: request.limit], len(rows) > request.limit


def _place_of(row_id: str) -> RowPlace:
    match = ID.fullmatch(row_id)
    if match is None:
        raise unknown_cursor()
    return RowPlace(int(match["created_ms"], 16), row_id)


def unknown_cursor() -> RequestRefused:
    """Return the error for an invalid `after`: an empty page would look like the end of the list."""
    message = "after must be the id of the last item of the previous page"
    return RequestRefused("invalid_request", message, "after")
