"""The interface of an engine: what the worker's loop asks of it. Knows no tensors, no queue, no wire format.

`LLMEngine` implements it. So do an engine whose steps are computed in another process, and adapters of other engines.
`python -m sluice.engine.conformance` checks an implementation.

One thread, the loop's, owns an engine and calls its members, unless their description says "any thread". Orders (`add`,
`abort`, `drop`) count from the next `advance` on. Each choice of a request yields deltas whose tokens follow each other
without a gap, and exactly one with a `finish`, unless its request is dropped or replaced.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sluice.engine.request import Request, Room, TokenDelta
from sluice.engine.watching import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Current state of an engine, for metrics and status."""

    num_places: int
    """Sequences that can run at once (`max_num_seqs`)."""

    num_running: int
    num_waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    """Slots of blocks held by running sequences (cached but unreferenced blocks count as free).

    With window groups, the tokens that this memory would hold for all layers.
    """

    num_preemptions: int
    """Since the engine was created, as are the next nine."""

    num_steps: int
    num_rows: int
    """Sequences that these steps computed, added up."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_output_tokens: int
    num_drafted_tokens: int
    """Guesses that steps have verified."""

    num_accepted_tokens: int
    """Output tokens that were guessed right."""

    num_failed_attempts: int
    """Attempts at a step, or at a part of one, that raised."""

    last_failure: str | None
    """Message of the last failed attempt."""


class Engine(Protocol):
    """What computes the tokens of requests, many at once."""

    def validate(self, request: Request) -> None:
        """Check that a request can ever run here. Any thread.

        Raises:
            RequestRejected: it cannot; the message is a sentence for its producer.
        """
        ...

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests for their first step.

        A request with `progress` continues after the tokens of an earlier attempt. A rejected one raises nothing and
        ends with the reason ERROR. One whose id is known replaces the older request, which yields nothing more.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each unfinished choice yields a delta with the reason ABORTED. Unknown ids are ignored."""
        ...

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests, whose leases are lost: they yield nothing more. Unknown ids are ignored.

        An engine in another process may still return what was on its way.
        """
        ...

    def advance(self) -> list[TokenDelta]:
        """Compute a step, or take the output of one; return the output since the last call.

        It is empty if there is nothing to compute or to take.

        Raises:
            EngineBroken: nothing more can run in this engine.
        """
        ...

    def look_ahead(self, seconds: float) -> None:
        """Set for how long ahead `room` may count places that become free for certain: what a pull takes."""
        ...

    def room(self) -> Room:
        """Return what can start within the next steps.

        While a sequence waits for more than such a place, that is nothing, or what running sequences of a lower class
        would give up.
        """
        ...

    @property
    def num_uncounted(self) -> int:
        """Requests that were added and that `room` does not count yet; 0 unless another process computes."""
        ...

    def stalled(self) -> list[str]:
        """Return the ids of requests that were preempted and that have had no place for seconds."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds until `advance` has something to do: 0 if it has now, infinity while no request is known."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of prompt and output together. Any thread."""
        ...

    @property
    def most_offered_tokens(self) -> int:
        """Cache tokens of the largest request that an idle engine has room for. Any thread."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Its current state. Any thread."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Describe each iteration to `watcher` from now on; None ends it. Any thread.

        The loop's thread calls the watcher.
        """
        ...

    def describe(self) -> list[str] | None:
        """Return one line per sequence, from any thread or signal handler; None if another process logs them."""
        ...
