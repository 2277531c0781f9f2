"""The descriptions of the routes of files."""

from sluice.gateway.openapi.routes import Answer, Parameter, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, list_of, object_schema, or_null
from sluice.gateway.tables.pages import FILES_PAGE, PageSize

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}

FILE = object_schema(
    "File",
    id=TEXT,
    object={"const": "file"},
    bytes=NUMBER,
    created_at=NUMBER,
    filename=TEXT,
    purpose=TEXT,
    status={"const": "processed"},
)
FORM = object_schema("Upload", file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
DELETED = object_schema("DeletedFile", id=TEXT, object={"const": "file"}, deleted={"const": True})
ONE = (Parameter(name="file_id", place="path", description="Id of a file."),)


def page_parameters(size: PageSize) -> tuple[Parameter, ...]:
    """Return the parameters of a list."""
    limit: Schema = {**NUMBER, "minimum": 1, "maximum": size.most, "default": size.default}
    order: Schema = {"enum": ["asc", "desc"], "default": "desc"}
    return (
        Parameter(name="after", place="query", description="Id of the last item of the previous page."),
        Parameter(name="limit", place="query", description="Maximum number of items on a page.", schema=limit),
        Parameter(name="order", place="query", description="By time of creation.", schema=order),
    )


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


UPLOAD = RouteDoc(
    tag="batches",
    summary="Store a file",
    answers={200: json_answer("The file.", FILE)},
    body={"multipart/form-data": FORM},
)
LIST = RouteDoc(
    tag="batches",
    summary="List files",
    answers={200: json_answer("One page.", page_schema("Files", FILE))},
    parameters=(
        *page_parameters(FILES_PAGE),
        Parameter(name="purpose", place="query", description="Only files with this purpose."),
    ),
)
RETRIEVE = RouteDoc(
    tag="batches",
    summary="Describe a file",
    answers={200: json_answer("The file.", FILE)},
    errors=(404,),
    parameters=ONE,
)
DELETE = RouteDoc(
    tag="batches",
    summary="Delete a file",
    answers={200: json_answer("It is deleted.", DELETED)},
    errors=(404, 409),
    parameters=ONE,
)
CONTENT = RouteDoc(
    tag="batches",
    summary="Download a file",
    answers={200: Answer(description="Its content.", content={"application/octet-stream": {}})},
    errors=(404,),
    parameters=ONE,
)
