"""Drive the engine for the calls of `LLM`: open prompts as there is room, step, and hand each call its output.

Steps are the service's own (`LLMEngine.advance`). A call may begin while another one is half read: each step serves
both.
"""

import os
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from sluice.engine.errors import RequestRejected
from sluice.engine.request import FinishReason, PromptRead, Request, TokenDelta
from sluice.protocol.clock import wall_ms
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import PromptLike, as_prompt
from sluice.protocol.messages import JobSpec, check_prompt
from sluice.worker.errors import INVALID_REQUEST, JobRejected
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.model.translate import code_of
from sluice.worker.offline.outputs import CompletionOutput, PromptFailed, RequestOutput, StreamOutput
from sluice.worker.signals import interrupts_held


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePrompt:
    """One prompt of a call."""

    index: int
    prompt: PromptLike
    spec: JobSpec
    seed: int | None


class _OpenPrompt:
    """A prompt and its output so far. Mutable."""

    def __init__(self, prompt: OfflinePrompt, token_ids: tuple[int, ...], output_format: str = "") -> None:
        self.num_open = prompt.spec.options.n
        self.num_cached_tokens = 0
        self._read = PromptRead()
        self._prompt = prompt
        self._token_ids = token_ids
        self._format = output_format
        self._choices: list[list[StreamOutput]] = [[] for _ in range(self.num_open)]
        self._error: PromptFailed | None = None

    def add(self, piece: StreamOutput) -> StreamOutput:
        """Keep a piece, and return it; the last one with the whole output."""
        self._choices[piece.index].append(piece)
        self._error = self._error or piece.error
        if piece.finish_reason is None:
            return piece
        self.num_open -= 1
        return piece if self.num_open else replace(piece, request_output=self._output())

    def _output(self) -> RequestOutput:
        return RequestOutput(
            prompt=self._prompt.prompt,
            prompt_token_ids=self._token_ids,
            outputs=tuple(map(CompletionOutput.of, self._choices)),
            num_cached_tokens=self.num_cached_tokens,
            error=self._error,
            prompt_logprobs=self._read.logprobs,
            embedding=None if self._read.embedding is None else list(array("f", self._read.embedding)),
        )

    def piece_of(self, delta: TokenDelta) -> StreamOutput:
        """Translate what the engine yielded for this prompt."""
        self.num_cached_tokens = delta.stats.num_cached_tokens
        self._read = delta.prompt or self._read
        piece = StreamOutput(
            prompt_index=self._prompt.index,
            index=delta.choice,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            format=self._format,
        )
        if (finish := delta.finish) is None:
            return piece
        error = None if finish.error is None else PromptFailed(finish.failure.value, finish.error)
        return replace(piece, finish_reason=finish.reason, stop_reason=finish.stop, error=error)


@dataclass(slots=True, eq=False)
class _Run:
    """One call: its future prompts, open prompts and unread output. Mutable."""

    prompts: Iterator[OfflinePrompt]
    open: dict[str, _OpenPrompt] = field(default_factory=dict[str, _OpenPrompt])
    pieces: deque[StreamOutput] = field(default_factory=deque[StreamOutput])

    @property
    def num_sequences(self) -> int:
        return sum(prompt.num_open for prompt in self.open.values())


class Runs:
    """The engine and the calls that it serves. Not thread-safe, as the engine."""

    def __init__(self, model: LocalModel, *, max_num_seqs: int) -> None:
        self._engine = model.engine
        self._translator = model.translator
        self._max_open = 2 * max_num_seqs
        """Sequences of a call that the engine knows: those that run, and as many to follow them."""

        self._ids = count()
        self._by_request: dict[str, _Run] = {}
        self._left: list[Iterable[str]] = []
        """Requests of calls whose reader stopped, to be dropped before the next step."""

    def run(self, prompts: Iterator[OfflinePrompt]) -> Generator[StreamOutput]:
        """Generate; yield the output as steps produce it. Prompts are read as there is room for them.

        Prompts that are open when the reader stops are dropped before the next step.
        """
        run = _Run(prompts)
        try:
            while self._fill(run) or run.pieces:
                if not run.pieces:
                    self._advance()
                while run.pieces:
                    yield run.pieces.popleft()
        finally:
            # The garbage collector closes an abandoned stream at any instruction, also of a step of another call.
            self._left.append(run.open)

    def _fill(self, run: _Run) -> bool:
        """Open prompts while there is room; return whether any is open."""
        room = self._max_open - run.num_sequences
        while room > 0 and (prompt := next(run.prompts, None)) is not None:
            self._open(run, prompt)
            room -= prompt.spec.options.n
        return bool(run.open)

    def _open(self, run: _Run, prompt: OfflinePrompt) -> None:
        try:
            request, output_format = self._request(prompt)
        except InvalidJob as error:
            self._reject(run, prompt, PromptFailed(INVALID_REQUEST, str(error)))
        except RequestRejected as error:
            self._reject(run, prompt, PromptFailed(code_of(error), str(error)))
        except JobRejected as error:
            self._reject(run, prompt, PromptFailed(error.code, str(error)))
        else:
            with interrupts_held():
                run.open[request.id] = _OpenPrompt(prompt, request.prompt_token_ids, output_format)
                self._by_request[request.id] = run
                self._engine.add([request])

    def _request(self, prompt: OfflinePrompt) -> tuple[Request, str]:
        """Return the request of a prompt, and how its text will mark its parts."""
        content = as_prompt(prompt.prompt)
        check_prompt(content)
        options, encoded = prompt.spec.options, self._translator.encoded(content, prompt.spec, now_ms=wall_ms())
        resolved = self._translator.resolve(options, len(encoded.token_ids))
        request = Request(
            id=str(next(self._ids)),
            prompt_token_ids=encoded.token_ids,
            is_chat=encoded.is_chat,
            sampling=encoded.sampling(options, resolved, _seed_of(prompt)),
            grammar=encoded.grammar,
            embed=self._translator.embed_of(options),
            num_choices=options.n,
        )
        self._engine.validate(request)
        return request, str(encoded.output_format)

    def _reject(self, run: _Run, prompt: OfflinePrompt, error: PromptFailed) -> None:
        rejected = _OpenPrompt(prompt, ())
        for index in range(prompt.spec.options.n):
            piece = StreamOutput(prompt_index=prompt.index, index=index, finish_reason=FinishReason.ERROR, error=error)
            run.pieces.append(rejected.add(piece))

    def _advance(self) -> None:
        if 0 < (wait_s := self._engine.idle_s) < inf:
            time.sleep(wait_s)  # a discipline gathers a batch
        with interrupts_held():
            self._drop_left()
            for delta in self._engine.advance():
                self._hand_out(delta)

    def _hand_out(self, delta: TokenDelta) -> None:
        run = self._by_request[delta.request_id]
        opened = run.open[delta.request_id]
        run.pieces.append(opened.add(opened.piece_of(delta)))
        if not opened.num_open:
            del run.open[delta.request_id], self._by_request[delta.request_id]

    def _drop_left(self) -> None:
        while self._left:
            request_ids = self._left.pop()
            self._engine.drop(request_ids)
            for request_id in request_ids:
                del self._by_request[request_id]


def _seed_of(prompt: OfflinePrompt) -> int:
    return int.from_bytes(os.urandom(8)) if prompt.seed is None else prompt.seed
