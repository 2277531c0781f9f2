"""Checks of the types and ranges of callers' values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import cast

from sluice.protocol.errors import InvalidJob

MAX_TOKEN_ID = 2**31 - 1
MAX_DIGITS = 18
MAX_PORT = 65_535

Check = tuple[bool, str]
"""Whether a rule holds, and the message if it does not."""


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded as UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(text: str) -> int | None:
    """Return the number that up to 18 decimal digits are, which fits in 64 bits; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def is_integer(value: object) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_truth(value: object) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, as a float, and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def is_token_id(value: object) -> bool:
    """Return whether a value can be a token id: 0 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def is_listing(value: object, is_item: Callable[[object], bool]) -> bool:
    """Return whether a value is a list or tuple whose items all pass `is_item`; a string is not."""
    # The cast only states that the items are not checked yet.
    return isinstance(value, (list, tuple)) and all(map(is_item, cast("Sequence[object]", value)))


def is_bias(value: object) -> bool:
    """Return whether a value maps token ids to numbers."""
    # The cast only states that keys and values are not checked yet.
    return isinstance(value, Mapping) and all(
        is_token_id(key) and is_number(bias) for key, bias in cast("Mapping[object, object]", value).items()
    )


def is_mapping(value: object) -> bool:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def is_short(value: object, max_chars: int) -> bool:
    """Return whether a value is None, or text of 1 to `max_chars` characters."""
    return value is None or (isinstance(value, str) and is_text(value) and 1 <= len(value) <= max_chars)


def raise_first(checks: Iterable[Check]) -> None:
    """Raise `InvalidJob` with the sentence of the first rule that does not hold."""
    for holds, sentence in checks:
        if not holds:
            raise InvalidJob(sentence)
