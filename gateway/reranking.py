"""The route that ranks documents by their relevance to a query: /v1/rerank. Each document is a job."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.errors import CLIENT_LEFT_STATUS
from sluice.gateway.generation import ERRORS
from sluice.gateway.many_jobs import ManyJobs
from sluice.gateway.openapi.options import KEY, options_schema
from sluice.gateway.openapi.routes import JSON, Answer, route
from sluice.gateway.openapi.schemas import FLAG, NUMBER, TEXT, Schema, list_of, object_schema
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.requests import read_json
from sluice.gateway.settings import GatewaySettings
from sluice.protocol import limits
from sluice.protocol.openai_format.requests import RERANK
from sluice.protocol.openai_format.reranking import NAMES, PASSED, read_rerank

_TEXT: Schema = {**TEXT, "minLength": 1}
_DOCUMENT: Schema = {"anyOf": [_TEXT, object_schema("RerankDocument", text=_TEXT)]}
_OPTIONAL = {
    **options_schema(PASSED),
    "top_n": {"type": "integer", "minimum": 1},
    "return_documents": FLAG,
    "user": TEXT,
}
REQUEST = {
    JSON: object_schema(
        "RerankRequest",
        optional=tuple(_OPTIONAL),
        query=_TEXT,
        documents={**list_of(_DOCUMENT), "minItems": 1, "maxItems": limits.MAX_INPUTS},
        **_OPTIONAL,
    )
}
ANSWER = Answer(
    description="The documents, the most relevant first.",
    content={
        JSON: object_schema(
            "Reranked",
            id=TEXT,
            model=TEXT,
            usage=object_schema(prompt_tokens=NUMBER, total_tokens=NUMBER),
            results=list_of(
                object_schema(
                    "Ranked",
                    optional=("document",),
                    index=NUMBER,
                    relevance_score={"type": "number"},
                    document=object_schema(text=TEXT),
                )
            ),
        )
    },
)


class RerankRoutes:
    """The route of requests to rerank. Its jobs are cancelled when their client has left."""

    def __init__(self, queues: Queues, rates: KeyRates, settings: GatewaySettings) -> None:
        self._settings, self._jobs = settings, ManyJobs(queues, rates, settings)

    @route(f"POST {RERANK}", ANSWER, tag="openai", scope="submit", errors=ERRORS, parameters=(KEY,), body=REQUEST)
    async def rerank(self, request: Request) -> Response:
        """Rank documents by their relevance to a query."""
        parsed = read_rerank(await read_json(request, self._settings.max_body_bytes))
        answers = await self._jobs.answers(request, parsed.prompts, parsed.options, NAMES)
        if answers is None:
            return Response(status_code=CLIENT_LEFT_STATUS)
        model = answers.results[0].model or parsed.model or ""
        body = parsed.body(answers.results, request.state.job_id, model)
        return JSONResponse(body, headers=dict(answers.headers))
