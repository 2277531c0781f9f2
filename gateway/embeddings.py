"""The route that embeds texts: /v1/embeddings. Each input is a job."""

import json

from starlette.requests import Request
from starlette.responses import Response

from sluice.gateway.connections.encoding import encoded_answer
from sluice.gateway.errors import CLIENT_LEFT_STATUS
from sluice.gateway.generation import ERRORS, TEXT_PROMPT
from sluice.gateway.many_jobs import ManyJobs
from sluice.gateway.openapi.options import KEY, options_schema
from sluice.gateway.openapi.routes import JSON, Answer, route
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, object_schema
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.requests import read_json
from sluice.gateway.settings import GatewaySettings
from sluice.protocol import limits
from sluice.protocol.openai_format.embeddings import FORMATS, NAMES, PASSED, embeddings_body, read_embeddings
from sluice.protocol.openai_format.requests import EMBEDDINGS
from sluice.protocol.wire import JobResult

INPUT: Schema = {
    "anyOf": [*TEXT_PROMPT["anyOf"], {**list_of(TEXT_PROMPT), "minItems": 1, "maxItems": limits.MAX_INPUTS}]
}
_OPTIONAL = {**options_schema(PASSED), "encoding_format": {"enum": list(FORMATS)}, "user": TEXT}
REQUEST = {JSON: object_schema("EmbeddingsRequest", optional=tuple(_OPTIONAL), input=INPUT, **_OPTIONAL)}
VECTOR: Schema = {"anyOf": [list_of({"type": "number"}), TEXT]}
ANSWER = Answer(
    description="The vectors of the inputs, in their order.",
    content={
        JSON: object_schema(
            "Embeddings",
            object={"const": "list"},
            data=list_of(object_schema("Embedding", object={"const": "embedding"}, index=NUMBER, embedding=VECTOR)),
            model=TEXT,
            usage=object_schema("PromptUsage", prompt_tokens=NUMBER, total_tokens=NUMBER),
        )
    },
)


class EmbeddingRoutes:
    """The route of requests for vectors. Its jobs are cancelled when their client has left."""

    def __init__(self, queues: Queues, rates: KeyRates, settings: GatewaySettings) -> None:
        self._settings, self._jobs = settings, ManyJobs(queues, rates, settings)

    @route(f"POST {EMBEDDINGS}", ANSWER, tag="openai", scope="submit", errors=ERRORS, parameters=(KEY,), body=REQUEST)
    async def embed(self, request: Request) -> Response:
        """Embed texts."""
        parsed = read_embeddings(await read_json(request, self._settings.max_body_bytes))
        answers = await self._jobs.answers(request, parsed.inputs, parsed.options, NAMES)
        if answers is None:
            return Response(status_code=CLIENT_LEFT_STATUS)
        response = await _encoded(answers.results, parsed.model or "", is_base64=parsed.is_base64)
        response.headers.update(answers.headers)
        return response


async def _encoded(results: list[JobResult], model: str, *, is_base64: bool) -> Response:
    num_bytes = sum(len(result.choices[0].vector or b"") for result in results)

    def encode() -> bytes:
        body = embeddings_body(results, results[0].model or model, is_base64=is_base64)
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    return await encoded_answer(num_bytes, encode)
