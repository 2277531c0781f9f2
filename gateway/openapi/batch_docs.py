"""The descriptions of the routes of batches."""

from sluice.gateway.openapi.file_docs import NUMBER, TEXT, page_parameters, page_schema
from sluice.gateway.openapi.routes import JSON, Parameter, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, list_of, object_schema, or_null
from sluice.gateway.tables.pages import SHORT_PAGE
from sluice.protocol.openai_format.requests import ENDPOINTS

OPTIONAL_TIME: Schema = or_null(NUMBER)
FAULT = object_schema("BatchError", code=TEXT, message=TEXT, param=or_null(TEXT), line=or_null(NUMBER))
METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
BATCH = object_schema(
    "Batch",
    optional=("warning",),
    id=TEXT,
    object={"const": "batch"},
    endpoint={"enum": list(ENDPOINTS)},
    model=or_null(TEXT),
    errors=or_null(object_schema(object={"const": "list"}, data=list_of(FAULT))),
    input_file_id=TEXT,
    completion_window=TEXT,
    status=TEXT,
    output_file_id=or_null(TEXT),
    error_file_id=or_null(TEXT),
    created_at=NUMBER,
    expires_at=NUMBER,
    in_progress_at=OPTIONAL_TIME,
    finalizing_at=OPTIONAL_TIME,
    completed_at=OPTIONAL_TIME,
    failed_at=OPTIONAL_TIME,
    expired_at=OPTIONAL_TIME,
    cancelling_at=OPTIONAL_TIME,
    cancelled_at=OPTIONAL_TIME,
    request_counts=object_schema(total=NUMBER, completed=NUMBER, failed=NUMBER),
    metadata=or_null(METADATA),
    warning={"type": "string", "description": "What is missing for the batch to go on."},
)
NEW_BATCH = object_schema(
    "NewBatch",
    optional=("metadata",),
    input_file_id=TEXT,
    endpoint={"enum": list(ENDPOINTS)},
    completion_window={"type": "string", "description": "A number of hours or days, such as 24h or 7d."},
    metadata=METADATA,
)
ONE = (Parameter(name="batch_id", place="path", description="Id of a batch."),)
ANSWER = {200: json_answer("The batch.", BATCH)}

CREATE = RouteDoc(tag="batches", summary="Create a batch", answers=ANSWER, errors=(404,), body={JSON: NEW_BATCH})
LIST = RouteDoc(
    tag="batches",
    summary="List batches",
    answers={200: json_answer("One page.", page_schema("Batches", BATCH))},
    parameters=page_parameters(SHORT_PAGE),
)
RETRIEVE = RouteDoc(tag="batches", summary="Describe a batch", answers=ANSWER, errors=(404,), parameters=ONE)
CANCEL = RouteDoc(tag="batches", summary="Cancel a batch", answers=ANSWER, errors=(404, 409), parameters=ONE)
