"""The steps of operations, which the links run. No I/O.

Every operation is a generator that decides, without I/O, what to send and what to raise (sans I/O). It yields steps
(`Ask`, one pipelined round trip; `Read`; `Sleep`), receives the result of each or the exception that it raised, and
returns the result of the operation. Some also yield events for the caller between their steps.

An `Ask` is sent again after a lost connection unless it sets `is_repeatable=False`. Most commands are idempotent: reads
change nothing, a submit contains its ids, and cancelling a cancelled job returns its state.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar, cast

from sluice.protocol.redis.execution import Command, Reply

Result = TypeVar("Result")

Entries: TypeAlias = list[tuple[str, bytes]]
"""Entry ids and encoded `ChannelEntry` values, in order."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Commands of one pipelined round trip. The result is a list of one reply for each."""

    commands: tuple[Command, ...]
    is_repeatable: bool = True
    """Whether the commands may be sent again if the connection is lost before the reply."""

    is_lenient: bool = False
    """Whether an error of one command is returned as its reply, as a ProducerError, instead of being raised."""

    deadline_s: float | None = None
    """Monotonic time after which the commands are not sent again, and soon after which ResultTimeout is raised."""


class Read(NamedTuple):
    """A blocking read of channels after the given entry ids. The result is a list of (channel, entries)."""

    cursors: Mapping[str, str]
    block_ms: int
    deadline_s: float | None = None
    """As in `Ask`."""

    @property
    def ask(self) -> Ask:
        """The XREAD command; `channel_entries` parses its reply."""
        return Ask((xread(self.cursors, block_ms=self.block_ms),), deadline_s=self.deadline_s)


@dataclass(frozen=True, slots=True)
class Sleep:
    """A wait."""

    seconds: float


Step: TypeAlias = Ask | Read | Sleep
"""A step that a link performs for an operation."""

STEPS = (Ask, Read, Sleep)

Operation: TypeAlias = Generator[Step, list[Reply], Result]
"""An operation that returns a result."""


def driven(steps: Generator[tuple[Command, ...], Sequence[Reply], Result]) -> Operation[Result]:
    """Run a generator of commands, to which the error of one command is its reply."""
    try:
        commands = next(steps)
        while True:
            commands = steps.send((yield Ask(commands, is_lenient=True)))
    except StopIteration as stop:
        return stop.value


def first_ask(operation: Operation[Result]) -> Ask:
    """Start an operation whose first step is a round trip; return that step, to be sent ahead of earlier replies."""
    step = next(operation)
    assert isinstance(step, Ask)
    return step


READ_COUNT = 512
"""Most entries of one channel in one read."""


def xread(cursors: Mapping[str, str], *, block_ms: int | None) -> Command:
    """Build an XREAD of the entries after the given ids. It blocks for at most `block_ms`; None does not block."""
    block: Command = () if block_ms is None else ("BLOCK", block_ms)
    return ("XREAD", "COUNT", READ_COUNT, *block, "STREAMS", *cursors.keys(), *cursors.values())


# ---------------------------------------------------------------- replies of channels


def channel_entries(reply: Reply) -> Iterator[tuple[str, Entries]]:
    """Yield (key, [(entry id, encoded ChannelEntry)]) from the reply of an XREAD."""
    # [[key, [[id, [field, value]], …]], …], or nil.
    for key, entries in cast("list[tuple[bytes, Reply]]", reply or []):
        yield key.decode(), channel_rows(entries)


def channel_rows(reply: Reply) -> Entries:
    """Return (entry id, encoded ChannelEntry) pairs from the reply of an XRANGE."""
    return [(entry_id.decode(), fields[1]) for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", reply)]


def is_end_id(entry_id: str) -> bool:
    """Return whether an entry ends its channel: the id of an end is `<offset>-<1 + requeues>`."""
    return not entry_id.endswith("-0")
