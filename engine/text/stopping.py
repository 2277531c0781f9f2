"""Detect stop strings in a choice's text, also across tokens. Knows no tokens and no steps.

Visible text depends only on the text: all of it but the longest end that could still become a stop string.
"""

from functools import lru_cache


class StopStrings:
    """Stop strings, prepared to be matched. `prepared` shares them."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        """Ends that must be held back: every proper prefix of a stop string."""

        self.first_characters = frozenset(stop[0] for stop in stops)
        self.max_held = max(map(len, stops), default=1) - 1


@lru_cache(maxsize=16)
def prepared(stops: tuple[str, ...]) -> StopStrings:
    """Return stop strings, prepared once for all choices of a request and for other requests with the same ones."""
    return StopStrings(stops)


class StopMatcher:
    """A detector of the stop strings of one choice. Mutable."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, *, may_stop: bool) -> str:
        """Take one token's text and return the text that became visible.

        If several stop strings complete, the one that ends first counts; among equals, the one listed first. A stop
        string that completed before this piece does not count: it was too early to stop.

        Args:
            piece: the text that the token added, possibly empty.
            may_stop: whether a stop string that ends in `piece` counts.
        """
        if not self._held and self._stops.first_characters.isdisjoint(piece):
            # Fast path, a fourth of the time: in most pieces no stop string begins.
            return piece
        text = self._held + piece
        begin = self._find(text) if may_stop and piece else None
        if begin is not None:
            self._held = ""
            return text[:begin]
        visible = len(text) - self._num_held(text)
        self._held = text[visible:]
        return text[:visible]

    def release(self) -> str:
        """Return the text held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        best_end, best_begin = len(text) + 1, None
        for stop in self._stops.stops:
            begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0 and begin + len(stop) < best_end:
                best_end, best_begin = begin + len(stop), begin
                self.matched = stop
        return best_begin

    def _num_held(self, text: str) -> int:
        for length in range(min(self._stops.max_held, len(text)), 0, -1):
            if text[-length:] in self._stops.beginnings:
                return length
        return 0
