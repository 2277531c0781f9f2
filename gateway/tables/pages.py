"""Pages of rows, newest first or oldest first, from a cursor on: `after`, `limit` and `order` of OpenAI's lists.

Clients send the id of the last row that they have, which may be deleted by then. So an id has the time of its row, and
with it its place in the list.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from starlette.requests import Request

from sluice.gateway.errors import HttpError, bad_request
from sluice.protocol.openai_format.bodies import Object

ID = re.compile(r"[a-z]+[-_](?P<created_ms>[0-9a-f]{12})[0-9a-f]{20}")
OLD_ID = re.compile(r"[a-z]+[-_][0-9a-f]{24}")
"""Ids of earlier releases are random as a whole."""

Order = Literal["asc", "desc"]


class PageSize(NamedTuple):
    """How many rows a page has: if its request does not say, and at most."""

    default: int
    most: int


FILES_PAGE, SHORT_PAGE = PageSize(100, 10_000), PageSize(20, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A page."""

    tenant: str
    after: str | None = None
    """Id of the last row of the page before."""

    limit: int
    order: Order = "desc"


def read_page(request: Request, tenant: str, size: PageSize) -> PageRequest:
    """Read the page that a request asks for.

    Raises:
        HttpError: `limit` or `order` is wrong.
    """
    asked = request.query_params
    limit, order = asked.get("limit", str(size.default)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= size.most):
        raise bad_request(f"limit must be a whole number in [1, {size.most}], got {limit[:64]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {order[:64]!r}", param="order")
    return PageRequest(tenant=tenant, after=asked.get("after"), limit=int(limit), order=order)


def new_name(created_ms: int) -> str:
    """Draw what follows the prefix of the id of a row: its time and 80 random bits."""
    return f"{created_ms:012x}{token_hex(10)}"


def is_id(text: str) -> bool:
    """Return whether a text looks like an id of ours. Others are not looked up: databases refuse some texts."""
    return ID.fullmatch(text) is not None or OLD_ID.fullmatch(text) is not None


class Place(NamedTuple):
    """The place of a row in a list."""

    created_ms: int
    id: str


def page(
    connection: sa.Connection, table: sa.Table, wanted: PageRequest, *also: sa.ColumnElement[bool]
) -> tuple[list[RowMapping], bool]:
    """Return the rows of a page, and whether there are more. The table has tenant, created_ms and id.

    A row that was deleted has kept its place. The id of another tenant's row is as one that never was.

    Raises:
        HttpError: the cursor is not an id, or its row has been deleted.
    """
    columns = (table.c.created_ms, table.c.id)
    is_own = table.c.tenant == wanted.tenant
    query = sa.select(*table.columns).where(is_own, *also)
    if wanted.after is not None:
        at = _place_of(wanted.after) or _place_of_old(connection, table, wanted)
        # Any: SQLAlchemy's comparison of tuples takes a tuple
        place, bound = sa.tuple_(*columns), cast("Any", sa.tuple_(*map(sa.literal, at)))
        query = query.where(place < bound if wanted.order == "desc" else place > bound)
    ordered = query.order_by(*(column.desc() if wanted.order == "desc" else column for column in columns))
    rows = list(connection.execute(ordered.limit(wanted.limit + 1)).mappings())
    return rows[: wanted.limit], len(rows) > wanted.limit


def _place_of(row_id: str) -> Place | None:
    found = ID.fullmatch(row_id)
    return None if found is None else Place(int(found["created_ms"], 16), row_id)


def _place_of_old(connection: sa.Connection, table: sa.Table, wanted: PageRequest) -> Place:
    is_it = (table.c.tenant == wanted.tenant, table.c.id == wanted.after)
    query = sa.select(table.c.created_ms, table.c.id).where(*is_it)
    row = connection.execute(query).one_or_none() if is_id(wanted.after or "") else None
    if row is None:
        raise unknown_cursor()
    return Place(row.created_ms, row.id)


def unknown_cursor() -> HttpError:
    """Return the error for an `after` that has no place in the list: an empty page would look like its end."""
    return bad_request("after must be the id of the last item of the previous page", param="after")


def list_body(items: Sequence[Object], *, has_more: bool) -> Object:
    """Format a page."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}
