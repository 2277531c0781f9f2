"""The OpenAPI document is that of the routes, and real answers are as it says."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.requests import Request
from starlette.routing import Route

from sluice.gateway.access import is_page
from sluice.gateway.app import create_router
from sluice.gateway.errors import HttpError
from sluice.gateway.keyring import Keyring
from sluice.gateway.openapi.options import options_schema
from sluice.gateway.openapi.routes import ApiRoute, Parameter
from sluice.gateway.settings import GatewaySettings
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import OPTION_NAMES, template
from tests.gateway.native.conftest import Native
from tests.gateway.native.jobs import ended, events_of, recorded, submitted, unknown_to
from tests.gateway.native.test_native_jobs import EVERY_OPTION

NOWHERE = "sqlite:////nowhere/keys.db"

Json = dict[str, Any]

TEXTS = (
    *("", "x", "0", "1", "-1", "007", "19", "20", "100", "101", "1000", "1001", "10000", "10001", str(10**9), "1" * 19),
    *(
        "0.5",
        "1.",
        "5e-1",
        "1e3",
        "1e10",
        "nan",
        "inf",
        "true",
        "false",
        "True",
        "asc",
        "desc",
        "done",
        "queued",
        "ASC",
        "\u0663",
        "1_0",
        " 1",
    ),
)


def parameters_of(route: ApiRoute) -> Sequence[Parameter[Any]]:
    """What a route reads of the query and of headers."""
    return route.description.parameters


def takes(parameter: Parameter[Any], text: str) -> bool:
    """Whether a request may have it so."""
    field = (parameter.name.lower().encode(), text.encode())
    is_header = parameter.place == "header"
    query = b"" if is_header else urlencode({parameter.name: text}).encode()
    scope = {"type": "http", "headers": [field] if is_header else [], "query_string": query}
    try:
        parameter.read(Request(scope))
    except HttpError as error:
        return (error.status, error.param) != (400, parameter.name)
    return True


def accepts(parameter: Parameter[Any], text: str) -> bool:
    """Whether the schema accepts what the text is in JSON."""
    kinds = {"integer": r"[0-9]{1,18}", "number": r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", "boolean": "true|false"}
    pattern = kinds.get(parameter.schema.get("type", ""))
    value: object = text
    if pattern is not None:
        if not re.fullmatch(pattern, text):
            return False
        value = {"true": True, "false": False}.get(text) if text in ("true", "false") else float(text)
    return Draft202012Validator(parameter.schema).is_valid(value)  # pyright: ignore[reportUnknownMemberType]


class Document:
    """The document that a gateway serves, with which answers are compared."""

    def __init__(self, text: Json) -> None:
        self.json = text

    def fault(self, route: str, status: int, value: Any, media: str = "application/json") -> str | None:
        """How a value differs from what a route answers, None if it does not."""
        return self._fault(self._answer(route, status)["content"][media]["schema"], value)

    def event_fault(self, route: str, kind: str, value: Any) -> str | None:
        """Likewise for the data of an event."""
        return self._fault(self._answer(route, 200)["x-events"][kind], value)

    def request_fault(self, route: str, value: Any) -> str | None:
        """Likewise for the body of a request."""
        method, path = route.split(" ")
        body = self.json["paths"][path][method.lower()]["requestBody"]
        return self._fault(body["content"]["application/json"]["schema"], value)

    def _answer(self, route: str, status: int) -> Json:
        method, path = route.split(" ")
        return self.json["paths"][path][method.lower()]["responses"][str(status)]

    def _fault(self, schema: Json, value: Any) -> str | None:
        # Closed, so that a field that is not described is a fault.
        whole = closed({**schema, "components": self.json["components"]})
        found = next(Draft202012Validator(whole).iter_errors(value), None)  # pyright: ignore[reportUnknownMemberType]
        return None if found is None else f"{found.json_path}: {found.message}"


def closed(part: Any) -> Any:
    """A schema that accepts no other properties than it names."""
    if isinstance(part, list):
        return [closed(one) for one in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    schema: Json = {name: closed(value) for name, value in cast("Json", part).items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **schema} if is_object else schema


@pytest.fixture(scope="module")
def document(native: Native) -> Document:
    """The document that the gateway serves."""
    return Document(native.acme.get("/openapi.json").json())


class TestGivenTheApplication:
    def test_when_its_routes_are_compared_with_the_document_then_they_are_the_same(self, document: Document) -> None:
        app = create_router(GatewaySettings(redis_url="redis://127.0.0.1:1", database_url=NOWHERE), Keyring(NOWHERE))

        served = {
            (method.lower(), route.path_format)
            # A mount has no methods, and fails. The page is for people: it has no description.
            for route in cast("list[Route]", [one for one in app.routes if not is_page(cast("Route", one).path)])
            for method in route.methods or ()
            if method != "HEAD"
        }

        described = {(method, path) for path, methods in document.json["paths"].items() for method in methods}
        assert served == described

    @pytest.mark.long
    def test_when_the_document_is_checked_then_it_is_openapi(self, document: Document) -> None:
        validate(document.json)

    def test_when_a_parameter_is_read_then_it_takes_what_its_schema_accepts(self) -> None:
        app = create_router(GatewaySettings(redis_url="redis://127.0.0.1:1", database_url=NOWHERE), Keyring(NOWHERE))
        parameters = {
            id(one): one for route in app.routes if isinstance(route, ApiRoute) for one in parameters_of(route)
        }

        differing = [
            (one.name, text) for one in parameters.values() for text in TEXTS if takes(one, text) != accepts(one, text)
        ]

        assert len(parameters) >= 15
        assert differing == []

    @pytest.mark.parametrize(
        ("name", "bounds"),
        [
            (name, (schema["minimum"], schema["maximum"]))
            for name, schema in options_schema(OPTION_NAMES).items()
            if {"minimum", "maximum"} <= schema.keys()
        ],
    )
    def test_when_an_option_has_bounds_then_the_queue_has_the_same(
        self, name: str, bounds: tuple[float, float]
    ) -> None:
        others = {"max_tokens": {"echo": True}, "dimensions": {"embed": True}}.get(name, {"max_tokens": 10**6})
        for bound, beyond in zip(bounds, (-1, 1), strict=True):
            template({**others, name: bound})  # pyright: ignore[reportArgumentType]  # a name of an option
            with pytest.raises(InvalidJob):
                template({**others, name: bound + beyond})  # pyright: ignore[reportArgumentType]  # likewise

    def test_when_a_job_has_every_option_then_the_document_accepts_it(self, document: Document) -> None:
        assert document.request_fault("POST /jobs", {"prompt": "once", **EVERY_OPTION}) is None
        assert document.request_fault("POST /jobs", {"prompt": "once", "tenant": "x"}) is not None
        assert document.request_fault("POST /jobs", {"prompt": "once", "token_ids": [1]}) is not None


@pytest.mark.slow
class TestGivenRealAnswers:
    def test_when_native_routes_answer_then_it_is_as_described(self, native: Native, document: Document) -> None:
        job = submitted(native.acme, n=2, logprobs=1, batch=f"b{uuid4().hex}", max_tokens=3)
        ended(native.acme, job)
        recorded(native.acme, job)

        answers = {
            "GET /jobs": native.acme.get("/jobs", params={"limit": 2}),
            "GET /jobs/{job_id}": native.acme.get(f"/jobs/{job}"),
            "GET /jobs/{job_id}/result": native.acme.get(f"/jobs/{job}/result"),
            "POST /jobs/{job_id}/cancel": native.acme.post(f"/jobs/{job}/cancel"),
            "GET /queues": native.acme.get("/queues"),
            "GET /queues/{queue}": native.acme.get("/queues/default"),
            "GET /queues/{queue}/scale": native.acme.get("/queues/default/scale"),
            "GET /tenants": native.acme.get("/tenants"),
            "GET /v1/models": native.acme.get("/v1/models"),
            "GET /v1/models/{model}": native.acme.get("/v1/models/null"),
            "GET /livez": native.acme.get("/livez"),
            "GET /readyz": native.acme.get("/readyz"),
        }

        faults = {route: document.fault(route, answer.status_code, answer.json()) for route, answer in answers.items()}
        assert faults == dict.fromkeys(answers)

    def test_when_a_job_is_submitted_twice_then_it_is_as_described(self, native: Native, document: Document) -> None:
        body = {"prompt": "once", "max_tokens": 2, "idempotency_key": uuid4().hex}

        answers = [native.acme.post("/jobs", json=body) for _ in range(2)]

        assert [answer.status_code for answer in answers] == [201, 200]
        assert [document.fault("POST /jobs", one.status_code, one.json()) for one in answers] == [None, None]

    def test_when_events_are_sent_then_they_are_as_described(self, native: Native, document: Document) -> None:
        done = events_of(native.acme, submitted(native.acme, logprobs=1, max_tokens=2))
        failed = events_of(native.acme, submitted(native.acme, prompt="word " * 20_000))

        route = "GET /jobs/{job_id}/events"
        faults = [document.event_fault(route, event.kind, event.data) for event in done + failed]
        assert [event.kind for event in (done[-1], failed[-1])] == ["end", "error"]
        assert faults == [None] * len(faults)

    @pytest.mark.parametrize("route", ["POST /v1/chat/completions", "POST /v1/completions"])
    def test_when_text_is_generated_then_it_is_as_described(
        self, native: Native, document: Document, route: str
    ) -> None:
        is_chat = "chat" in route
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": "hello"}
        body = {**prompt, "max_tokens": 3, "model": "null"}
        assert document.request_fault(route, body) is None

        answer = native.acme.post(route.split(" ")[1], json=body)
        streamed = native.acme.post(route.split(" ")[1], json={**body, "stream": True})

        assert document.fault(route, 200, answer.json()) is None
        *chunks, last, _ = streamed.text.split("\n\n")
        assert last == "data: [DONE]"
        parsed = [data_of(chunk) for chunk in chunks]
        assert [document.event_fault(route, "", chunk) for chunk in parsed] == [None] * len(chunks)

    def test_when_files_and_batches_are_used_then_it_is_as_described(self, native: Native, document: Document) -> None:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "once"}}
        uploaded = native.acme.post("/v1/files", files={"file": json.dumps(line)}, data={"purpose": "batch"})
        file = uploaded.json()["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
        created = native.acme.post("/v1/batches", json=wanted)
        batch = created.json()["id"]

        answers = {
            "POST /v1/files": uploaded,
            "GET /v1/files": native.acme.get("/v1/files"),
            "GET /v1/files/{file_id}": native.acme.get(f"/v1/files/{file}"),
            "POST /v1/batches": created,
            "GET /v1/batches": native.acme.get("/v1/batches"),
            "GET /v1/batches/{batch_id}": native.acme.get(f"/v1/batches/{batch}"),
            "POST /v1/batches/{batch_id}/cancel": native.acme.post(f"/v1/batches/{batch}/cancel"),
        }
        refused = native.acme.delete(f"/v1/files/{file}")

        faults = {route: document.fault(route, 200, answer.json()) for route, answer in answers.items()}
        assert faults == dict.fromkeys(answers)
        assert document.fault("DELETE /v1/files/{file_id}", refused.status_code, refused.json()) is None

    def test_when_responses_are_used_then_it_is_as_described(self, native: Native, document: Document) -> None:
        body = {"model": "null", "input": "hello", "max_output_tokens": 3}
        assert document.request_fault("POST /v1/responses", body) is None
        one = "/v1/responses/{response_id}"

        created = native.acme.post("/v1/responses", json={**body, "background": True})
        own = f"/v1/responses/{created.json()['id']}"
        answers = {
            "POST /v1/responses": created,
            f"GET {one}": native.acme.get(own),
            f"GET {one}/input_items": native.acme.get(f"{own}/input_items"),
            f"POST {one}/cancel": native.acme.post(f"{own}/cancel"),
            f"DELETE {one}": native.acme.delete(own),
        }
        streamed = native.acme.post("/v1/responses", json={**body, "stream": True}).text
        events = [data_of(event.partition("\n")[2]) for event in streamed.split("\n\n") if event]

        faults = {route: document.fault(route, answer.status_code, answer.json()) for route, answer in answers.items()}
        assert faults == dict.fromkeys(answers)
        kinds = [cast("Json", event)["type"] for event in events]
        of_events = [
            document.event_fault("POST /v1/responses", kind, event) for kind, event in zip(kinds, events, strict=True)
        ]
        assert of_events == [None] * len(kinds)
        assert kinds[-1] == "response.incomplete"

    def test_when_requests_are_wrong_then_errors_are_as_described(self, native: Native, document: Document) -> None:
        unknown = unknown_to("acme")
        waiting = submitted(native.acme, not_before=600)
        answers = {
            "GET /jobs": native.acme.get("/jobs", params={"limit": "x"}),
            "POST /jobs": native.acme.post("/jobs", content=b"{"),
            "GET /jobs/{job_id}": native.acme.get(f"/jobs/{unknown}"),
            "GET /jobs/{job_id}/result": native.acme.get(f"/jobs/{waiting}/result"),
            "POST /jobs/{job_id}/requeue": native.acme.post(f"/jobs/{waiting}/requeue"),
            "GET /queues/{queue}": native.acme.get("/queues/x"),
        }

        faults = {route: document.fault(route, answer.status_code, answer.json()) for route, answer in answers.items()}
        assert faults == dict.fromkeys(answers)
        assert [answer.status_code for answer in answers.values()] == [400, 400, 404, 409, 409, 404]


def data_of(chunk: str) -> object:
    """The data of one event."""
    return json.loads(chunk.removeprefix("data: "))
