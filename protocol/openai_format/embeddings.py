"""Parse requests for embeddings in OpenAI's format, and format their answers. No I/O."""

from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sluice.protocol import limits
from sluice.protocol.jobs import Options, PromptLike
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.refusals import RequestRefused
from sluice.protocol.openai_format.requests import (
    EMBEDDINGS,
    PROMPT,
    Harmless,
    ReadRequest,
    read_parameters,
    read_passed,
)
from sluice.protocol.wire import JobResult, Usage

PASSED = frozenset({"model", "dimensions", "metadata", "priority", "add_special_tokens"})
"""Parameters passed on unchanged: OpenAI's, and those of jobs."""

IGNORED = frozenset({"input", "encoding_format", "user"})
"""Parameters that do not affect the vectors, or are read elsewhere."""

HARMLESS: Harmless = {"truncate_prompt_tokens": lambda _: False}
FORMATS = ("float", "base64")
NAMES: Mapping[str, str] = {PROMPT: "input"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    """A request for vectors of one input or more, each of which is a job."""

    inputs: tuple[PromptLike, ...]
    options: Options
    """Options of each job."""

    is_base64: bool

    @property
    def model(self) -> str | None:
        """The requested model."""
        return self.options.get("model")

    @property
    def prompts(self) -> Sequence[PromptLike]:
        """The prompts of the jobs."""
        return self.inputs

    def body(self, results: Sequence[JobResult], _name: str, model: str) -> Object:
        """Format the vectors of the inputs, in their order."""
        return embeddings_body(results, model, is_base64=self.is_base64)


def read_embeddings(body: object) -> EmbeddingsRequest:
    """Parse a request.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    parameters = read_parameters(body)
    inputs = _inputs(parameters.get("input"))
    options = {"embed": True, **read_passed(parameters, PASSED, IGNORED, HARMLESS)}
    encoding = parameters.get("encoding_format", "float")
    if encoding not in FORMATS:
        message = f"encoding_format must be one of {' and '.join(FORMATS)}"
        raise RequestRefused("invalid_request", message, "encoding_format")
    return EmbeddingsRequest(inputs=inputs, options=cast("Options", options), is_base64=encoding == "base64")


def read_embedding_line(body: object) -> ReadRequest:
    """Parse a request in a line of a file.

    Raises:
        RequestRefused: as `read_embeddings`.
    """
    request = read_embeddings(body)
    prompt, *others = request.inputs
    is_plain = not (others or request.is_base64)
    many = None if is_plain else request
    return ReadRequest(endpoint=EMBEDDINGS, prompt=prompt, options=request.options, names=NAMES, many=many)


def _inputs(given: object) -> tuple[PromptLike, ...]:
    """Return the inputs: text, token ids, or a list of either."""
    is_one = not isinstance(given, list) or not given or type(cast("list[object]", given)[0]) is int
    inputs: list[object] = [given] if is_one else cast("list[object]", given)
    if len(inputs) > limits.MAX_INPUTS:
        message = f"input has at most {limits.MAX_INPUTS} texts, got {len(inputs)}"
        raise RequestRefused("invalid_request", message, "input")
    if not all(map(_is_input, inputs)):
        message = "input must be text or a list of token ids, or a list of these; none may be empty"
        raise RequestRefused("invalid_request", message, "input")
    return tuple(cast("list[PromptLike]", inputs))


def _is_input(one: object) -> bool:
    if isinstance(one, list):
        items = cast("list[object]", one)
        return bool(items) and all(type(item) is int for item in items)
    return isinstance(one, str) and bool(one)


def embeddings_body(results: Sequence[JobResult], model: str, *, is_base64: bool) -> Object:
    """Format the vectors of a request's inputs, in their order."""
    vectors = [result.choices[0].vector or b"" for result in results]
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": b64encode(vector).decode() if is_base64 else array("f", vector).tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": prompt_usage([result.usage for result in results]),
    }


def prompt_usage(usages: Sequence[Usage]) -> Object:
    """Format the token counts of jobs that generate nothing."""
    num_tokens = sum(usage.prompt_tokens for usage in usages)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embedding_body(_name: str, result: JobResult, model: str) -> Object:
    """Format the vector of a line's only input."""
    return embeddings_body([result], model, is_base64=False)
