"""Turn requests into tokens, one step at a time. Read `LLMEngine.step` first."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.executor import Executor, TextDecoder
from engine.request import Request, Room, TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine is doing now, for metrics and status."""

    num_running: int
    num_waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    """Slots of blocks held by running sequences (cached but unreferenced blocks count as free)."""

    num_preemptions: int
    """Since the engine was made; so are the next four."""

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class LLMEngine:
    """The engine: `add`, `abort`, `step`. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        executor: Executor,
        decoder: TextDecoder,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None: ...

    def validate(self, request: Request) -> None:
        """Check that `request` can ever run here. Touches no state: any thread may call it.

        Raises:
            RequestRejected: it cannot; the message has the numbers that say why.
        """
        ...

    def add(self, requests: Iterable[Request]) -> None:
        """Let `requests` wait for their first step.

        Never raises for a bad request, and never harms the others: its rejection is among the next step's deltas.
        A request whose id is already known replaces the older one, which yields nothing more.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each unfinished choice yields an ABORTED delta in the next step. Unknown ids are ignored."""
        ...

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests at once: they yield nothing more (their lease was lost). Unknown ids are ignored."""
        ...

    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence by one step and return what it yielded.

        Raises:
            EngineBroken: the device is lost; nothing more can run in this process.
        """
        ...

    def room(self) -> Room:
        """What can be added so that it starts in the next steps. All zero while anything waits or is preempted."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do and nothing to say."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def describe(self) -> list[str]:
        """One line for each sequence: what it is doing (for SIGUSR1)."""
        ...

    def check_invariants(self) -> None:
        """Check the books of blocks and sequences; for tests and debugging.

        Raises:
            AssertionError: they do not balance.
        """
        ...
