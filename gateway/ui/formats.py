"""Formatting of numbers, times and text on pages. No I/O."""

import json
import time
from datetime import UTC, datetime

from sluice.producer.timeline.durations import DASH, UNITS

PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
UNSEEN = (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters without a Unicode picture, and those that change the direction of text."""

SHOWN = PICTURES | dict.fromkeys(UNSEEN, 0xFFFD)
"""Replacements of control characters by visible characters."""


def count(value: float | None) -> str:
    """Format a whole number with thin groups: 12,345."""
    return DASH if value is None else f"{value:,.0f}"


def compact(value: float | None) -> str:
    """Format a large number in at most five characters: 12.3k."""
    if value is None:
        return DASH
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def ago(at_ms: int | None) -> str:
    """Format how long ago a time was, in its largest unit."""
    if at_ms is None:
        return DASH
    age_s = int(max(0.0, time.time() - at_ms / 1000))
    size, unit = next((entry for entry in UNITS if age_s >= entry[0]), (1, "s"))
    return f"{age_s // size} {unit} ago"


def moment(at_ms: int | None) -> str:
    """Format a time, in UTC."""
    return DASH if at_ms is None else f"{_utc(at_ms):%Y-%m-%d %H:%M:%S} UTC"


def clock(at_ms: int | None) -> str:
    """Format a time of a day, in UTC."""
    return DASH if at_ms is None else f"{_utc(at_ms):%H:%M:%S}"


def percent(share: float | None) -> str:
    """Format a share: 12 %."""
    return DASH if share is None else f"{100 * share:.0f} %"


def money(value: float | None, currency: str | None) -> str:
    """Format a cost."""
    if value is None:
        return DASH
    text = f"{value:,.2f}" if abs(value) >= 1 else f"{value:,.4f}".removesuffix("00")
    return f"{text} {currency or ''}".rstrip()


def plain(value: object) -> str:
    """Format an option: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def sentence(text: str) -> str:
    """Return a message as a sentence."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def visible(value: object) -> object:
    """Return a text with its control characters replaced by visible ones; return any other value unchanged.

    Markup is returned unchanged, too: the values in it have been replaced already.
    """
    return value.translate(SHOWN) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _utc(at_ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)
