"""Lists of OpenAI's API: the parameters `after`, `limit` and `order`, and the body of a page."""

from collections.abc import Sequence

from starlette.requests import Request

from sluice.gateway.openapi.routes import Parameter, choice, text, whole_number
from sluice.gateway.openapi.schemas import FLAG, TEXT, Schema, list_of, object_schema, or_null
from sluice.gateway.tables.pages import Order, PageRequest
from sluice.protocol.openai_format.bodies import Object

ORDERS: tuple[Order, Order] = ("asc", "desc")
AFTER = text("after", "Id of the last item of the previous page.")
ORDER: Parameter[Order] = choice("order", "By time of creation.", ORDERS, default="desc")
FILES_LIMIT = whole_number("limit", "Maximum number of items on a page.", default=100, least=1, most=10_000)
SHORT_LIMIT = whole_number("limit", "Maximum number of items on a page.", default=20, least=1, most=100)


def read_page(request: Request, tenant: str, limit: Parameter[int]) -> PageRequest:
    """Read the page that a request asks for.

    Raises:
        HttpError: `limit` or `order` is wrong.
    """
    return PageRequest(tenant=tenant, after=AFTER.read(request), limit=limit.read(request), order=ORDER.read(request))


def list_body(items: Sequence[Object], *, has_more: bool) -> Object:
    """Format a page."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}


def page_schema(title: str, item: Schema) -> Schema:
    """Return the schema of a page."""
    return object_schema(
        title,
        object={"const": "list"},
        data=list_of(item),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )
