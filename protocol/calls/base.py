"""`Call`, a script call with its reply parser, and the parsers that several calls share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from sluice.protocol import limits

Reply = TypeVar("Reply")
Item = TypeVar("Item")
Raw = Any  # a script's reply has no type until it is parsed
Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class FromNow:
    """A time relative to now. The server adds its clock, so the wall clock of this host does not matter."""

    ms: int
    since_s: float = field(default_factory=monotonic, compare=False)

    def left_ms(self) -> int:
        """Return the milliseconds until this time; 0 if it has passed."""
        return max(0, self.ms - round((monotonic() - self.since_s) * 1000))


@dataclass(frozen=True, slots=True)
class Call(Generic[Reply]):
    """A script call with the parser of its reply."""

    script: str
    """File name in `scripts/`, without extension."""

    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Raw], Reply]


def read_truths(reply: Raw) -> list[bool]:
    return [bool(item) for item in reply]


def read_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")  # another program may have written it


def read_number(text: str | bytes) -> int:
    """Parse a count; 0 if it is not valid, since another program may have written it."""
    try:
        return int(text)
    except ValueError:
        return 0


def read_stream_id(stream_id: str) -> tuple[int, int]:
    """Convert the id of a stream's entry, `<first>-<second>` or `<first>`, to numbers in the order of the stream."""
    first, _, second = stream_id.partition("-")
    return int(first), int(second or 0)


def check_slice(items: Sequence[Item]) -> Sequence[Item]:
    """Check the number of items of one call, which are jobs or their entries; return the items.

    Raises:
        ValueError: there are too many.
    """
    if len(items) > limits.SLICE_JOBS:
        raise ValueError(f"{len(items)} jobs in one call; at most {limits.SLICE_JOBS}")
    return items


def read_words(reply: Raw) -> list[str]:
    return [item.decode(errors="replace") for item in reply]  # another program may have written the state


def read_nothing(reply: Raw) -> None:
    return None


def read_map(reply: Raw) -> dict[str, str]:
    """Parse a map from a flat list: name, value, name, value and so on."""
    words = [item.decode(errors="replace") for item in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
