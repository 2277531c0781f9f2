"""Outputs of prompts without a queue: plain values. Fields have vLLM's names where it has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sluice.engine.request import FinishReason, SampledLogprobs
from sluice.protocol.errors import Copyable
from sluice.protocol.jobs import PromptLike
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import ParsedOutput, parse_output


class PromptFailed(Copyable):
    """A prompt has no complete output; `code` is a constant word for programs (docs/reference/errors.md)."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutput:
    """The output that one step added to one choice of one prompt."""

    prompt_index: int
    """Index of the prompt in the call."""

    index: int
    """Number of the choice."""

    text: str = ""
    """Newly visible text. It may lag behind the tokens (possible stop strings, incomplete characters)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    """`stop`, `length` or `error`, in the last piece of the choice."""

    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice; None for the model's own end."""

    format: str = ""
    """How the choice's text marks its parts. `sluice.protocol.outputs.parser.OutputParser` takes pieces apart."""

    error: PromptFailed | None = None
    request_output: "RequestOutput | None" = None
    """The whole output of the prompt, with its last piece."""


@dataclass(frozen=True, kw_only=True)  # without slots: what was parsed is kept
class CompletionOutput:
    """One choice of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    format: str = ""
    """How the text marks its parts (`sluice.protocol.outputs`); empty for no marks."""

    @cached_property
    def parsed(self) -> ParsedOutput:
        """The text taken apart: `content`, `reasoning`, and the `calls` of functions."""
        return parse_output(OutputFormat.read(self.format), self.text)

    @classmethod
    def of(cls, pieces: Sequence[StreamOutput]) -> "CompletionOutput":
        """Join the pieces of a choice, the last of which has its end."""
        last = pieces[-1]
        has_logprobs = any(piece.logprobs is not None for piece in pieces)
        return cls(
            index=last.index,
            text="".join([piece.text for piece in pieces]),
            token_ids=tuple([token_id for piece in pieces for token_id in piece.token_ids]),
            logprobs=tuple([token for piece in pieces for token in piece.logprobs or ()]) if has_logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            format=last.format,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The output of one prompt."""

    prompt: PromptLike
    prompt_token_ids: tuple[int, ...]
    """Empty if the prompt could not be encoded."""

    outputs: tuple[CompletionOutput, ...]
    """One for each of the `n` choices. Those of a failed prompt have the output until the failure."""

    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""

    error: PromptFailed | None = None
    """Why the prompt failed; the others of the call are not affected."""

    prompt_logprobs: tuple[SampledLogprobs, ...] | None = None
    """Of each token of the prompt, if `prompt_logprobs` asks for them. That of the first, which nothing predicts, is 0.
    """

    embedding: list[float] | None = None
    """The vector of the prompt, if `embed` asks for it, or with `classify` the scores of its classes."""

    @property
    def text(self) -> str:
        """Text of the first choice, as the model wrote it.

        Raises:
            PromptFailed: there is no complete output.
        """
        if self.error is not None:
            raise self.error
        return self.outputs[0].text

    @property
    def parsed(self) -> ParsedOutput:
        """The text of the first choice taken apart: `content`, `reasoning`, and the `calls` of functions.

        Raises:
            PromptFailed: there is no complete output.
        """
        if self.error is not None:
            raise self.error
        return self.outputs[0].parsed
