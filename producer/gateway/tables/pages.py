"""Pages of rows, newest first or oldest first, from a cursor on: `after`, `limit` and `order` of OpenAI's lists."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from starlette.requests import Request

from sluice.producer.gateway.errors import bad_request
from sluice.producer.openai.bodies import Object

ID = re.compile(r"[a-z]+[-_][0-9a-f]{24}")
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A page."""

    tenant: str
    after: str | None = None
    """Id of the last row of the page before."""

    limit: int
    order: Order = "desc"


def read_page(request: Request, *, tenant: str, default_limit: int, max_limit: int) -> PageRequest:
    """Read the page that a request asks for.

    Raises:
        HttpError: `limit` or `order` is wrong.
    """
    asked = request.query_params
    limit, order = asked.get("limit", str(default_limit)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= max_limit):
        raise bad_request(f"limit must be a whole number in [1, {max_limit}], got {limit[:64]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {order[:64]!r}", param="order")
    return PageRequest(tenant=tenant, after=asked.get("after"), limit=int(limit), order=order)


def is_id(text: str) -> bool:
    """Return whether a text looks like an id of ours. Others are not looked up: databases refuse some texts."""
    return ID.fullmatch(text) is not None


def page(
    connection: sa.Connection, table: sa.Table, wanted: PageRequest, *also: sa.ColumnElement[bool]
) -> tuple[list[RowMapping], bool]:
    """Return the rows of a page, and whether there are more. The table has tenant, created_ms and id.

    An unknown cursor is that of another tenant, or of a row that was deleted: the page is empty.
    """
    place = sa.tuple_(table.c.created_ms, table.c.id)
    is_own = table.c.tenant == wanted.tenant
    query = sa.select(*table.columns).where(is_own, *also)
    if wanted.after is not None:
        if not is_id(wanted.after):
            return [], False
        at = connection.execute(
            sa.select(table.c.created_ms, table.c.id).where(is_own, table.c.id == wanted.after)
        ).one_or_none()
        if at is None:
            return [], False
        # Any: SQLAlchemy's comparison of tuples takes a tuple
        bound: Any = sa.tuple_(sa.literal(at.created_ms), sa.literal(at.id))
        query = query.where(place < bound if wanted.order == "desc" else place > bound)
    columns = (table.c.created_ms, table.c.id)
    ordered = query.order_by(*(column.desc() if wanted.order == "desc" else column for column in columns))
    rows = list(connection.execute(ordered.limit(wanted.limit + 1)).mappings())
    return rows[: wanted.limit], len(rows) > wanted.limit


def list_body(items: Sequence[Object], *, has_more: bool) -> Object:
    """Format a page."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}
