"""An engine under test, and its driver: it adds requests, advances, and folds deltas into outputs."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from sluice.engine.interface import Engine
from sluice.engine.request import ChoiceProgress, Finish, PromptRead, Request, SampledLogprobs, Sampling, TokenDelta

PATIENCE_S = 60.0
"""A request that has not ended after this long counts as starved."""

POLL_S = 0.0005


_OWN = ("id", "num_choices", "priority", "progress", "grammar", "embed", "adapter")
"""Options of requests that are no sampling options."""


class Violation(AssertionError):
    """The engine does not do what the interface says."""


class LeftOut(Exception):
    """A check cannot be made with this engine or its model."""


class TimedOut(Violation):
    """The engine does not do it within `PATIENCE_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test, idle at first."""

    engine: Engine
    vocab_size: int
    eos_token_ids: frozenset[int]
    refused_options: frozenset[str] = frozenset()
    """Sampling options, `num_choices` or `grammar`, that it refuses; their checks are left out."""

    adapter: str = ""
    """An adapter that it has; empty if it has none."""

    break_steps_of: Callable[[str], None] | None = None
    """Let each step with the request of this id raise from now on. None: such faults cannot be made."""

    close: Callable[[], None] = lambda: None


@dataclass(slots=True, eq=False)
class Output:
    """Everything that an engine returned of one choice."""

    num_resumed: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[SampledLogprobs] = field(default_factory=list[SampledLogprobs])
    finish: Finish | None = None
    prompt: PromptRead | None = None
    first_scheduled_s: float | None = None
    """When it was, on the engine's clock."""

    def extend(self, delta: TokenDelta) -> None:
        """Append a delta.

        Raises:
            Violation: it does not follow the deltas before it.
        """
        name = f"{delta.request_id}, choice {delta.choice}"
        if self.finish is not None:
            raise Violation(f"{name}: a delta follows the one with its finish")
        expected = self.num_resumed + len(self.token_ids)
        if delta.start != expected:
            raise Violation(f"{name}: a delta starts at token {delta.start}, not at {expected}")
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or ()
        self.finish = delta.finish
        self.first_scheduled_s = delta.stats.first_scheduled_s
        if delta.prompt is not None:
            if self.prompt is not None:
                raise Violation(f"{name}: its prompt is returned twice")
            self.prompt = delta.prompt


class Driver:
    """Drives one engine. Names of requests are never used twice, unless a check asks for it."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.engine = subject, subject.engine
        self._names = count()
        self._random = Random(20)
        self._tokens = sorted(set(range(subject.vocab_size)) - subject.eos_token_ids)
        self.outputs: dict[tuple[str, int], Output] = {}
        """By request and choice: the output since the request was added last."""

    def prompt(self, num_tokens: int = 12) -> tuple[int, ...]:
        """Draw a prompt without end-of-sequence tokens."""
        return tuple(self._random.choices(self._tokens, k=num_tokens))

    def request(self, prompt: tuple[int, ...] | None = None, **options: Any) -> Request:  # noqa: ANN401
        """Return a request of a new name; options that are not its own are sampling options.

        By default it is greedy, and goes on for 16 tokens, without a grammar after the model's end-of-sequence token,
        too.
        """
        own = {name: options.pop(name) for name in _OWN if name in options}
        defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": "grammar" not in own}
        sampling = Sampling(**defaults | options)
        own.setdefault("id", f"check-{next(self._names)}")
        return Request(prompt_token_ids=self.prompt() if prompt is None else prompt, sampling=sampling, **own)

    def add(self, *requests: Request) -> None:
        """Add requests."""
        for request in requests:
            progress = request.progress or (ChoiceProgress(),) * max(1, request.num_choices)
            for choice, before in enumerate(progress):
                self.outputs[request.id, choice] = Output(num_resumed=len(before.token_ids))
        self.engine.add(requests)

    def advance(self) -> list[TokenDelta]:
        """Advance once, and keep what was returned.

        Raises:
            Violation: a delta is of an unknown request, or does not follow the ones before it.
        """
        deltas = self.engine.advance()
        for delta in deltas:
            output = self.outputs.get((delta.request_id, delta.choice))
            if output is None:
                raise Violation(f"a delta of {delta.request_id}, choice {delta.choice}, which was never added")
            output.extend(delta)
        if not deltas:
            time.sleep(POLL_S)  # an engine in another process computes meanwhile
        return deltas

    def advance_until(self, is_reached: Callable[[], bool], event: str) -> None:
        """Advance until a condition holds.

        Raises:
            TimedOut: it does not.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_reached():
            if time.monotonic() > deadline_s:
                raise TimedOut(f"after {PATIENCE_S:g} s: not yet that {event}")
            self.advance()

    def advance_times(self, num_steps: int) -> None:
        """Advance until output was returned this many times, or nothing is left to compute."""
        deadline_s = time.monotonic() + PATIENCE_S
        while num_steps > 0 and not self.is_idle and time.monotonic() < deadline_s:
            num_steps -= bool(self.advance())

    def finish(self, *requests: Request) -> list[Output]:
        """Advance until these requests have ended; return the outputs of their choices, in order."""
        outputs = [self.outputs[request.id, choice] for request in requests for choice in range(request.num_choices)]
        self.advance_until(lambda: all(output.finish is not None for output in outputs), "all requests have ended")
        return outputs

    def run(self, *requests: Request) -> list[Output]:
        """Add requests and advance until they have ended."""
        self.add(*requests)
        return self.finish(*requests)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to compute, and knows it."""
        stats = self.engine.stats
        is_counted = self.engine.num_uncounted == 0 and stats.num_running == stats.num_waiting == 0
        return is_counted and self.engine.idle_s == float("inf")

    def settle(self) -> None:
        """Advance until the engine is idle.

        Raises:
            Violation: it does not become idle, though every request has ended or was dropped.
        """
        # An engine in another process has carried out all earlier orders once it returns this one's output.
        self.run(self.request(max_tokens=1))
        self.advance_until(lambda: self.is_idle, "the engine is idle")

    def drop(self, requests: Iterable[Request]) -> None:
        """Drop requests: what they returned so far is all they may return."""
        self.engine.drop([request.id for request in requests])


def expect(condition: bool, sentence: str) -> None:  # reads as `assert`
    """Raise unless a condition holds.

    Raises:
        Violation: it does not.
    """
    if not condition:
        raise Violation(sentence)
