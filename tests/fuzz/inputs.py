"""Unusual inputs: each is a function of (seed, number) alone, so that any of them can be made again."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

msgpack: Any = untyped_msgpack  # Any: it ships no types

MAX_BYTES = 2048
STRANGE: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, float("nan"), float("inf"),
    1e308, "", "x", "\0", "\u2028", "𝄞", "9" * 5000, b"", b"\xff", [], {}, "stop", "chat", "text", "ids", "user",
)  # fmt: skip
TEXTS = (
    "",
    "0.default.a",
    "0..",
    ".",
    ":",
    "-",
    "{",
    "}",
    "{q:0}",
    "\n",
    "9" * 5000,
    "0" * 70,
    "é",
    "\ud800",
    "a:b:end",
)


def value(random_: random.Random, depth: int = 3) -> object:
    """Any value that msgpack or JSON could hold."""
    kind = random_.randrange(8 if depth else 5)
    if kind < 3:
        return random_.choice(STRANGE)
    if kind == 3:
        return random_.randrange(-300, 300)
    if kind == 4:
        return text(random_)
    if kind < 7:
        return [value(random_, depth - 1) for _ in range(random_.randrange(5))]
    return {key(random_): value(random_, depth - 1) for _ in range(random_.randrange(4))}


def key(random_: random.Random) -> str | int | None:
    """A map's key."""
    return random_.choice(("max_tokens", "stop", "n", "state", "usage", text(random_), random_.randrange(99), None))


def text(random_: random.Random) -> str:
    """Text, some of it strange."""
    if random_.random() < 0.3:
        return random_.choice(TEXTS)
    return "".join(chr(random_.choice((random_.randrange(32, 127), random_.randrange(0x3000)))) for _ in range(9))


def packed(random_: random.Random) -> bytes:
    """A message of some version, of parts that no version has."""
    parts = [random_.choice((1, 1, 1, 1, 2, 0, None)), *[value(random_) for _ in range(random_.randrange(8))]]
    return msgpack.packb(parts, use_bin_type=random_.random() < 0.5, unicode_errors="replace")


def noise(random_: random.Random) -> bytes:
    """Any bytes."""
    return random_.randbytes(random_.randrange(200))


def damaged(random_: random.Random, good: Sequence[bytes]) -> bytes:
    """A good message with a few wounds."""
    data = bytearray(random_.choice(good))
    for _ in range(random_.randrange(1, 5)):
        _wound(random_, data, good)
    return bytes(data[:MAX_BYTES])


def _wound(random_: random.Random, data: bytearray, good: Sequence[bytes]) -> None:
    at = random_.randrange(len(data) + 1)
    match random_.randrange(5):
        case 0 if data:
            data[at % len(data)] = random_.randrange(256)
        case 1:
            del data[at : at + random_.randrange(9)]
        case 2:
            data[at:at] = random_.randbytes(random_.randrange(9))
        case 3:
            data[at:at] = data[: random_.randrange(len(data) + 1)]
        case _:
            other = random_.choice(good)
            data[at:] = other[random_.randrange(len(other) + 1) :]


def message(good: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    """Damaged messages, packed nonsense, and noise."""

    def make(random_: random.Random) -> bytes:
        kind = random_.random()
        if kind < 0.6:
            return damaged(random_, good)
        return packed(random_) if kind < 0.9 else noise(random_)

    return make


def line(good: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    """Lines of JSON, damaged or strange."""

    def make(random_: random.Random) -> bytes:
        kind = random_.random()
        if kind < 0.5:
            return damaged(random_, good)
        if kind < 0.6:
            return b"[" * random_.randrange(3000)
        names = ("custom_id", "method", "url", "body", "prompt", "messages", "max_tokens", "stop", text(random_))
        fields = {random_.choice(names): value(random_) for _ in range(random_.randrange(5))}
        return json.dumps(fields, default=repr, skipkeys=True).encode(errors="replace")

    return make
