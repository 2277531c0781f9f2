"""Messages between the worker and the process of its engine: pickles over a private socket.

| from | message | when |
|---|---|---|
| worker | `Setup` | at once |
| worker | `Load` | once its own checks have passed |
| engine | `EngineFacts`, or `LoadFailed` | then |
| worker | `Orders` | when there is anything to order |
| engine | `StepReport` | at first, and after each step |
| engine | `EngineBroken` | when it cannot continue; then it ends |

Either side ends when the other closes the socket, which the system does for a process that is killed.
"""

import pickle
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

from sluice.engine.interface import EngineStats
from sluice.engine.request import Finish, PromptRead, Request, Room, SampledLogprobs, SequenceStats, TokenDelta
from sluice.engine.watching import Iteration
from sluice.worker.config import WorkerConfig

T = TypeVar("T")


class Setup(NamedTuple):
    """The first message: which model, on which device."""

    config: WorkerConfig
    worker_id: str
    """For the log."""


class Load(NamedTuple):
    """Load the model: all checks have passed."""


class LoadFailed(NamedTuple):
    """Why the model cannot be loaded."""

    problems: tuple[str, ...]
    are_settings: bool
    """Whether the settings are wrong, so that another attempt would not help."""


class Orders(NamedTuple):
    """Orders for the engine before its next step, in this order."""

    added: tuple[Request, ...] = ()
    aborted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    is_watched: bool | None = None
    """Whether to describe iterations from now on; None: as before."""

    look_ahead_s: float = 0.0
    """See `Engine.look_ahead`."""


PackedDelta = tuple[
    str,
    int,
    int,
    tuple[int, ...],
    str,
    tuple[SampledLogprobs, ...] | None,
    Finish | None,
    PromptRead | None,
    SequenceStats | None,
]
"""A `TokenDelta` as a plain tuple, which is pickled faster. The statistics are in the first and in the last delta
of a choice, where the worker reads them."""

_BETWEEN = SequenceStats(num_prompt_tokens=0)


class StepReport(NamedTuple):
    """The output of a step, and the state of the engine after it."""

    deltas: list[PackedDelta]
    room: Room
    num_orders: int
    """Orders that it has taken since the start."""

    num_added: int
    """Requests that it has taken since the start: those that `room` counts."""

    is_idle: bool
    """Whether it waits for orders."""

    stalled: list[str]
    stats: EngineStats
    iterations: tuple[Iteration, ...]


def send(connection: Connection, message: object) -> None:
    """Send a message.

    Raises:
        OSError: the other process has ended.
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection, *kinds: type[T]) -> T:
    """Wait for the next message, which is of one of these kinds.

    Raises:
        EOFError: the other process has ended.
    """
    try:
        message = pickle.loads(connection.recv_bytes())
    except OSError as error:  # it was killed, perhaps during a message
        raise EOFError from error
    assert isinstance(message, kinds), f"a message of the kind {type(message).__name__}"
    return message


def packed(delta: TokenDelta) -> PackedDelta:
    """Pack a delta as a plain tuple; `unpacked` reverses it."""
    request_id, choice, start, token_ids, text, stats, logprobs, finish, prompt = delta
    is_between = finish is None and start != stats.num_resumed_tokens
    return request_id, choice, start, token_ids, text, logprobs, finish, prompt, None if is_between else stats


def unpacked(delta: PackedDelta) -> TokenDelta:
    """Return the delta that was packed; without its statistics, if it is neither a first nor a last one."""
    request_id, choice, start, token_ids, text, logprobs, finish, prompt, stats = delta
    return TokenDelta(request_id, choice, start, token_ids, text, stats or _BETWEEN, logprobs, finish, prompt)
