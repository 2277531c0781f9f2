"""Parse requests to rerank documents, in the form of Jina and Cohere, and format their answers. No I/O."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import cast

from sluice.protocol import limits
from sluice.protocol.jobs import Options, PromptLike
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.refusals import RequestRefused
from sluice.protocol.openai_format.requests import (
    PROMPT,
    RERANK,
    Harmless,
    ReadRequest,
    read_flag,
    read_parameters,
    read_passed,
)
from sluice.protocol.wire import JobResult

PASSED = frozenset({"model", "metadata", "priority"})
IGNORED = frozenset({"query", "documents", "top_n", "return_documents", "user"})
HARMLESS: Harmless = {"truncate_prompt_tokens": lambda _: False, "max_tokens_per_doc": lambda _: False}
NAMES: Mapping[str, str] = {PROMPT: "documents"}
MOST_CLASSES = 2
"""Of a reranker: one is the relevance, of two the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """A request for the relevance of documents to a query. Each document is a job."""

    query: str
    documents: tuple[str, ...]
    options: Options
    """Options of each job."""

    top_n: int
    has_documents: bool
    """Whether the answer repeats them."""

    @property
    def model(self) -> str | None:
        """The requested model."""
        return self.options.get("model")

    @property
    def prompts(self) -> list[PromptLike]:
        """The prompts of the jobs: pairs of texts."""
        return [[_message("query", self.query), _message("document", document)] for document in self.documents]

    def body(self, results: Sequence[JobResult], name: str, model: str) -> Object:
        """Format the documents, the most relevant first.

        Raises:
            RequestRefused: the model has more than two classes, so that none is the relevance.
        """
        return rerank_body(self, results, name, model)


def _message(name: str, content: str) -> dict[str, str]:
    return {"role": "user", "name": name, "content": content}


def read_rerank(body: object) -> RerankRequest:
    """Parse a request.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    parameters = read_parameters(body)
    options = {"classify": True, **read_passed(parameters, PASSED, IGNORED, HARMLESS)}
    query, documents = parameters.get("query"), _documents(parameters.get("documents"))
    if not isinstance(query, str) or not query:
        raise RequestRefused("invalid_request", "query must be text", "query")
    top_n = parameters.get("top_n", len(documents))
    if type(top_n) is not int or top_n < 1:
        raise RequestRefused("invalid_request", "top_n must be a whole number of 1 or more", "top_n")
    return RerankRequest(
        query=query,
        documents=documents,
        options=cast("Options", options),
        top_n=top_n,
        has_documents=read_flag(parameters, "return_documents", is_default=True),
    )


def read_rerank_line(body: object) -> ReadRequest:
    """Parse a request in a line of a batch's file.

    Raises:
        RequestRefused: as `read_rerank`.
    """
    request = read_rerank(body)
    return ReadRequest(endpoint=RERANK, prompt=request.prompts[0], options=request.options, names=NAMES, many=request)


def _documents(given: object) -> tuple[str, ...]:
    listed = cast("list[object]", given) if isinstance(given, list) else []
    if not 1 <= len(listed) <= limits.MAX_INPUTS:
        message = f"documents must be a list of 1 to {limits.MAX_INPUTS} texts"
        raise RequestRefused("invalid_request", message, "documents")
    texts = [cast("dict[str, object]", one).get("text") if isinstance(one, dict) else one for one in listed]
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestRefused("invalid_request", "each document must be text, or an object with `text`", "documents")
    return tuple(cast("list[str]", texts))


def rerank_body(request: RerankRequest, results: Sequence[JobResult], name: str, model: str) -> Object:
    """Format the documents of a request, the most relevant first.

    Raises:
        RequestRefused: the model has more than two classes, so that none is the relevance.
    """
    relevances = [_relevance(array("f", result.choices[0].vector or b"")) for result in results]
    order = sorted(range(len(relevances)), key=lambda index: (-relevances[index], index))
    num_tokens = sum(result.usage.prompt_tokens for result in results)
    return {
        "id": f"rerank-{name}",
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": [
            {
                "index": index,
                **({"document": {"text": request.documents[index]}} if request.has_documents else {}),
                "relevance_score": relevances[index],
            }
            for index in order[: request.top_n]
        ],
    }


def _relevance(scores: Sequence[float]) -> float:
    """Return the probability that a document is relevant: of one class by the logistic function, of two the second."""
    if not 1 <= len(scores) <= MOST_CLASSES:
        message = (
            f"the model has {len(scores)} classes; one that reranks has one, or two of which the second is relevance"
        )
        raise RequestRefused("unsupported", message, "model")
    score = scores[0] if len(scores) == 1 else scores[1] - scores[0]
    # Without overflow on either side.
    return 1 / (1 + exp(-score)) if score >= 0 else exp(score) / (1 + exp(score))
