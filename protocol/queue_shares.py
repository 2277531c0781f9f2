"""The queues of `SLUICE_QUEUE`, each NAME or NAME:WEIGHT. Workers use the weights; gateway and client the names."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.limits import MAX_QUEUE_NAME_CHARS, MAX_WEIGHT


@dataclass(frozen=True, slots=True)
class QueueShare:
    """A queue that a worker serves, and its weight among them.

    Raises:
        InvalidSetting: the name cannot be part of a key, or the weight is out of its range.
    """

    name: str
    weight: int = 1

    def __post_init__(self) -> None:
        if not is_queue_name(self.name):
            raise InvalidSetting(
                f"expected 1 to {MAX_QUEUE_NAME_CHARS} characters without braces, colons or spaces, got {self.name!r}"
            )
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise InvalidSetting(f"the weight of a queue is 1 to {MAX_WEIGHT:g}, got {self.weight}")

    @classmethod
    def read(cls, text: str) -> Self:
        """Read NAME or NAME:WEIGHT.

        Raises:
            InvalidSetting: the text is neither.
        """
        name, colon, weight = text.partition(":")
        if colon and not (weight.isascii() and weight.isdecimal() and len(weight) < 10):
            raise InvalidSetting(f"expected NAME or NAME:WEIGHT, where the weight is a whole number, got {text!r}")
        return cls(name, int(weight or 1))


def is_queue_name(name: str) -> bool:
    """Return whether a queue can have this name: it is a part of keys, and of lists separated by spaces."""
    return 0 < len(name) <= MAX_QUEUE_NAME_CHARS and not set(name) & set("{}: \n\r\t")


def read_shares(texts: Iterable[str]) -> tuple[QueueShare, ...]:
    """Read the queues of a setting.

    Raises:
        InvalidSetting: one cannot be read, one is named twice, or there is none.
    """
    shares = tuple(map(QueueShare.read, texts))
    names = [share.name for share in shares]
    if not names:
        raise InvalidSetting("expected at least one queue")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidSetting(f"expected each queue once, got {', '.join(twice)} more than once")
    return shares
