"""Translate jobs of the queue to requests of the engine. Runs outside the loop and has no state.

Text and chats become token ids; token ids pass through. An invalid job raises `JobRejected` with a code for programs
and a message for people.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from sluice.engine.errors import InvalidGrammar, OptionRefused, PromptTooLong, RequestRejected
from sluice.engine.executor import ModelLimits
from sluice.engine.request import (
    CLASSES,
    LAST_TOKEN,
    NO_TARGETS,
    Embed,
    Grammar,
    LatencyTargets,
    Request,
    Room,
    Sampling,
)
from sluice.engine.sampling import SamplingFields
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.limits import MAX_TOKENS
from sluice.protocol.outputs.formats import PLAIN, OutputFormat
from sluice.protocol.sampling import NEUTRAL, JobOptions, ResolvedOptions
from sluice.protocol.wire import (
    JobSpec,
    Message,
    Prompt,
    WireError,
    decode_prompt,
    decode_resolved,
    decode_spec,
)
from sluice.worker.errors import INVALID_REQUEST, JobDeclined, JobRejected
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.model.chat_template import ChatTemplate
from sluice.worker.model.output_formats import format_of_answer
from sluice.worker.model.sampling_defaults import NOTHING_STATED, resolve
from sluice.worker.model.tool_grammars import answer_grammar
from sluice.worker.model.tool_prompts import JobTools, render_chat

PAIR = ("query", "document")
"""Names of the messages of a job that scores how well two texts belong together."""


class Encoder(Protocol):
    """An encoder of text as token ids."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


PairEncoder = Callable[[str, str], list[int]]
"""An encoder of two texts, with the special tokens between and around them."""


class Translation(NamedTuple):
    """What a job becomes."""

    request: Request
    resolved: ResolvedOptions
    output_format: str
    """How its text will mark its parts."""


class TextEncoder(Protocol):
    """A tokenizer, as far as prompts need it."""

    @property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can stand for; None if nothing bounds them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""
        ...


def bounded_encoder(tokenizer: TextEncoder, limits: ModelLimits) -> Encoder:
    """Return an encoder that refuses text before it is tokenized if no tokenization can fit the model's context.

    Tokenizing megabytes takes seconds of a core, whatever becomes of the job.
    """
    if tokenizer.max_token_bytes is None:
        return tokenizer.encode

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        _check_size(text, tokenizer, limits)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return encode


def bounded_pair_encoder(encode_pair: PairEncoder, tokenizer: TextEncoder, limits: ModelLimits) -> PairEncoder:
    """Return an encoder of two texts that refuses what `bounded_encoder` would refuse."""

    def encode(first: str, second: str) -> list[int]:
        _check_size(first + second, tokenizer, limits)
        return encode_pair(first, second)

    return encode


def _check_size(text: str, tokenizer: TextEncoder, limits: ModelLimits) -> None:
    if tokenizer.max_token_bytes is None:
        return
    max_bytes = limits.max_model_len * tokenizer.max_token_bytes
    # A character has at most four bytes of UTF-8, so most texts need not be encoded to be measured.
    if 4 * len(text) > max_bytes and (num_bytes := len(text.encode())) > max_bytes:
        raise PromptTooLong(
            f"prompt is {num_bytes} bytes of text; the {limits.max_model_len} tokens that this model reads hold at "
            f"most {max_bytes}. Shorten the prompt or use a model with a longer context."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt for the engine, and how the text that follows it is written."""

    token_ids: tuple[int, ...]
    is_chat: bool = False
    output_format: OutputFormat = PLAIN
    grammar: Grammar | None = None
    shows_special_tokens: bool = False

    def sampling(self, options: JobOptions, resolved: ResolvedOptions, seed: int) -> Sampling:
        """Return the sampling options of the engine."""
        made = sampling_of(options, resolved, seed)
        return replace(made, skip_special_tokens=False) if self.shows_special_tokens else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """A maker of requests for one model. Thread-safe."""

    encode: Encoder
    template: ChatTemplate | None
    encode_pair: PairEncoder | None = None
    """None: one text follows the other."""

    validate: Callable[[Request], None]
    """Raises if the engine can never run a request."""

    model: str
    """Name by which producers may request this model."""

    adapters: frozenset[str] = frozenset()
    """Names of its adapters, each of which they may request as a model."""

    defaults: JobOptions = NOTHING_STATED
    """The model's, for options that a request does not state."""

    end_token_ids: frozenset[int] = frozenset()
    """The model's."""

    embed: Embed = LAST_TOKEN
    """How the model's vectors are made."""

    output_format: OutputFormat = PLAIN
    """How the model marks calls of tools and its reasoning."""

    mark_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """The marks of that format that are special tokens."""

    generates: bool = True
    """Whether the model has an output head."""

    lacking: frozenset[str] = frozenset()
    """The queue's features that the engine does not have."""

    max_job_tokens: int = MAX_TOKENS
    """Most tokens of prompt and output together that this worker can run."""

    def translate(self, job: HeldJob, targets: LatencyTargets = NO_TARGETS) -> Translation:
        """Return the request of a job, with the tokens that earlier attempts published, and what it is sampled with.

        Raises:
            JobRejected: the job cannot run.
            JobDeclined: this engine cannot run it; another may.
        """
        if job.spec is None:
            raise JobRejected(INVALID_REQUEST, "the job's options cannot be read")
        try:
            self._check_model(job.spec)
            self._check_features(job.spec)
            self._check_output(job.spec.options)
            translation = self._translated(job, job.spec, decode_prompt(job.leased.payload), targets)
            self.validate(translation.request)
        except WireError as error:
            raise JobRejected(INVALID_REQUEST, f"the job cannot be read: {error}") from error
        except RequestRejected as error:
            kind = JobDeclined if isinstance(error, OptionRefused) else JobRejected
            raise kind(code_of(error), str(error)) from error
        return translation

    def _check_model(self, spec: JobSpec) -> None:
        if spec.model is not None and spec.model != self.model and spec.model not in self.adapters:
            known = ", ".join(repr(name) for name in (self.model, *sorted(self.adapters)))
            message = f"the job asks for the model {spec.model!r}; this queue serves {known}"
            raise JobRejected("model_mismatch", message)

    def _check_features(self, spec: JobSpec) -> None:
        missing = self.lacking.intersection(spec.options.features) if self.lacking else ()
        if missing:
            raise OptionRefused(f"the engine of this worker does not have {' and '.join(sorted(missing))}")

    def _translated(self, job: HeldJob, spec: JobSpec, prompt: Prompt, targets: LatencyTargets) -> Translation:
        leased = job.leased
        progress = tuple(choice.as_progress() for choice in job.choices)
        encoded = self.encoded(prompt, spec, now_ms=leased.submitted_ms, began_as=job.format)
        resolved = self._resolved(job, spec.options, len(encoded.token_ids))
        has_progress = any(part.token_ids or part.is_finished for part in progress)
        request = Request(
            id=job.request_id,
            prompt_token_ids=encoded.token_ids,
            is_chat=encoded.is_chat,
            sampling=encoded.sampling(spec.options, resolved, leased.seed),
            grammar=encoded.grammar,
            embed=self.embed_of(spec.options),
            num_choices=leased.choices,
            priority=leased.priority,
            # A tenant shares cached blocks with no other.
            cache_salt=split_job_id(job.id)[1],
            adapter=spec.model if spec.model is not None and spec.model in self.adapters else "",
            progress=progress if has_progress else (),
            targets=targets,
        )
        return Translation(request, resolved, str(encoded.output_format))

    def _resolved(self, job: HeldJob, options: JobOptions, num_prompt_tokens: int) -> ResolvedOptions:
        """Return the options under which an earlier attempt published tokens; without one, resolve them now."""
        if not job.num_published or job.leased.resolved is None:
            return self.resolve(options, num_prompt_tokens)
        resolved = decode_resolved(job.leased.resolved)
        if options.max_tokens is not None:
            return resolved
        # That worker may have had more room than this one. Published output stays.
        room = max(self.max_job_tokens - num_prompt_tokens, 1 + max(choice.published for choice in job.choices))
        return replace(resolved, max_tokens=min(resolved.max_tokens, room))

    def resolve(self, options: JobOptions, num_prompt_tokens: int) -> ResolvedOptions:
        """Return the sampling options of a new request with a prompt of this length."""
        room = self.max_job_tokens - num_prompt_tokens
        return resolve(options, self.defaults, self.end_token_ids, room=room)

    def _check_output(self, options: JobOptions) -> None:
        if not (self.generates or options.makes_vector):
            message = f"the model {self.model!r} has no output head: it embeds or classifies, and generates no text"
            raise JobRejected(INVALID_REQUEST, message)

    def embed_of(self, options: JobOptions) -> Embed | None:
        """Return what vector a job asks for; None if it asks for text."""
        if options.classify:
            return CLASSES
        return replace(self.embed, dimensions=options.dimensions) if options.embed else None

    def is_chat(self, prompt: Prompt, spec: JobSpec) -> bool:
        """Return whether the chat template renders a prompt."""
        if isinstance(prompt, str):
            return spec.as_chat and self.template is not None
        return bool(prompt) and isinstance(prompt[0], Message)

    def encoded(self, prompt: Prompt, spec: JobSpec, *, now_ms: int, began_as: str | None = None) -> TokenizedPrompt:
        """Encode a prompt, and say how the text that follows it is written.

        Args:
            prompt: The prompt.
            spec: The job's.
            now_ms: What a chat template may show as the current date.
            began_as: The format of the output that an earlier attempt has published; None if there is none.

        Raises:
            JobRejected: the model cannot take such a prompt.
            PromptTooLong: the text cannot fit its context.
            OptionRefused: the job has tools, and the model no format for calls.
        """
        if isinstance(prompt, str) and self.is_chat(prompt, spec):
            prompt = (Message(role="user", content=prompt),)
        if prompt and isinstance(prompt[0], Message):
            messages = tuple(part for part in prompt if isinstance(part, Message))
            if spec.options.classify and [part.name for part in messages] == [*PAIR]:
                return TokenizedPrompt(token_ids=tuple(self._pair_ids(*messages)))
            return self._encoded_chat(messages, spec, now_ms, began_as)
        if spec.tools:
            raise JobRejected(INVALID_REQUEST, "a prompt with tools must be messages, which the chat template renders")
        token_ids = (
            self.encode(prompt, add_special_tokens=spec.add_special_tokens)
            if isinstance(prompt, str)
            else [part for part in prompt if isinstance(part, int)]
        )
        return TokenizedPrompt(token_ids=tuple(token_ids), grammar=grammar_of(spec.options))

    def _pair_ids(self, first: Message, second: Message) -> list[int]:
        """Encode two texts as the tokenizer encodes a pair."""
        if self.encode_pair is None:
            parts = [self.encode(part.content, add_special_tokens=False) for part in (first, second)]
            return [token_id for part in parts for token_id in part]
        return self.encode_pair(first.content, second.content)

    def _encoded_chat(
        self, messages: tuple[Message, ...], spec: JobSpec, now_ms: int, began_as: str | None
    ) -> TokenizedPrompt:
        if self.template is None:
            raise JobRejected(INVALID_REQUEST, f"the model {self.model!r} has no chat template: send text instead")
        tools = JobTools.of(spec)
        known = self.output_format if began_as is None else OutputFormat.read(began_as)
        if tools.functions and not known.calls:
            raise OptionRefused(f"how the model {self.model!r} writes calls of tools is not known (--tool-format)")
        text = render_chat(self.template, messages, tools, known.calls or self.output_format.calls, now_ms=now_ms)
        output_format = (
            known if began_as is not None else format_of_answer(known, text, has_tools=bool(tools.functions))
        )
        grammar = answer_grammar(output_format, tools, grammar_of(spec.options), self.mark_ids)
        return TokenizedPrompt(
            # Chat templates write the begin-of-sequence token themselves.
            token_ids=tuple(self.encode(text, add_special_tokens=False)),
            is_chat=True,
            output_format=output_format,
            grammar=grammar,
            # Otherwise, marks that are special tokens would be left out of the text.
            shows_special_tokens=not self.mark_ids.keys().isdisjoint(output_format.marks),
        )


# Cached because jobs often share a spec, and decoding it is the most expensive part of taking a small job.
@lru_cache(maxsize=64)
def read_spec(spec: bytes) -> JobSpec | None:
    """Decode a job's spec; None if it cannot be decoded."""
    try:
        return decode_spec(spec)
    except (WireError, ValueError):
        return None


def sampling_of(options: JobOptions, resolved: ResolvedOptions, seed: int) -> Sampling:
    """Convert a job's options to those of the engine."""
    # Any: of several types. Read at once: it is done for each job.
    values: dict[str, Any] = dict(zip(_SAMPLING, _of_options(options), strict=True))
    values.update(zip(NEUTRAL, _of_resolved(resolved), strict=True))
    values["prompt_logprobs"] = options.read_logprobs
    # The model's default or the room may be less than the request's least.
    values["min_tokens"] = min(options.min_tokens, resolved.max_tokens)
    return Sampling(**values, end_token_ids=frozenset(resolved.end_token_ids), seed=seed)


def grammar_of(options: JobOptions) -> Grammar | None:
    """Return what the output of a job must match, if anything."""
    # Any: the kinds of both are the same words, which a test compares.
    pairs: list[tuple[Any, str]] = list(options.structured.items())
    return Grammar(kind=pairs[0][0], text=pairs[0][1]) if pairs else None


_SAMPLING = [field.name for field in fields(SamplingFields)]
_of_options, _of_resolved = attrgetter(*_SAMPLING), attrgetter(*NEUTRAL)


def room_of(job: HeldJob, *, reserve_tokens: int) -> Room:
    """Estimate the room of a leased job: its prompt, its published tokens, and a bounded share of further output."""
    num_prompt_tokens, num_published = job.leased.prompt_tokens, job.num_published
    max_tokens = job.spec.options.planned_tokens if job.spec else reserve_tokens
    rests = [max(0, max_tokens - choice.published) for choice in job.choices if not choice.has_end]
    return Room(
        kv_tokens=num_prompt_tokens + num_published + sum([min(rest, reserve_tokens) for rest in rests]),
        prefill_tokens=num_prompt_tokens + num_published,
        sequences=len(rests),
    )


def code_of(error: RequestRejected) -> str:
    """Return the code of a rejection: its class name in snake case, or `invalid_request` for general classes."""
    if type(error) in (RequestRejected, InvalidGrammar):
        return INVALID_REQUEST
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
