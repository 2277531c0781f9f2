"""The output of one choice, and how much of it its channel has: deltas in, entries out, and entries in to resume.

What the channel lacks is one slice of the output. So output merges while a round trip is in flight or Redis is
unreachable, and "send again from N" is a slice with another start. Knows no scripts and no engine state.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter

from sluice.engine import request
from sluice.engine.request import ChoiceProgress, TokenDelta
from sluice.protocol.errors import Copyable
from sluice.protocol.states import JobState
from sluice.protocol.wire import ChannelEntry, End, TokenLogprobs, encode_entry
from sluice.worker.config import CHECKPOINT_S
from sluice.worker.jobs.reader_waits import ReaderWaits

MAX_ENTRY_TOKENS = 2048
"""Maximum tokens in one entry; after a long outage of Redis, several are needed."""

CHECKPOINT_TOKENS = 64
"""A job that is not streamed publishes an entry after this many tokens, and at every multiple of `CHECKPOINT_S`: that
of all jobs, so that one round trip takes them all."""


@dataclass(slots=True, eq=False)
class ChannelOutput:
    """All output of one choice, of all attempts. Grows with each step."""

    token_ids: list[int] = field(default_factory=list[int])
    pieces: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Pieces of text, each with the number of tokens after which it was visible; ascending."""

    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """One per token; empty if the job did not ask for them."""

    tail: str = ""
    """Text that only the end released."""

    end: End | None = None
    published: int = 0
    """Tokens that the queue has acknowledged."""

    has_end: bool = False
    """Whether the queue has acknowledged the end."""

    may_have_end: bool = False
    """Whether the queue may have the end though it has not acknowledged it."""

    gaps_ms: list[float] = field(default_factory=list[float])
    """Times between one token and the next, also from an attempt's last token to the next attempt's first."""

    num_earlier_gaps: int = 0
    """How many of them are of earlier attempts."""

    waits: ReaderWaits = field(default_factory=ReaderWaits)
    """How long readers waited for its entries."""

    last_s: float | None = None
    """When the last token of this attempt was drawn, on the monotonic clock."""

    last_ms: int = 0
    """When the last token was drawn, on the server's clock."""

    format: str = ""
    """How the text marks its parts. The first entry states it."""

    sent_s: float | None = None
    """When the last entry was made, or the first token drawn, on the monotonic clock."""

    def extend(self, delta: TokenDelta, *, now_s: float, now_ms: int) -> None:
        """Append what a step added, except its end."""
        assert delta.start == len(self.token_ids), f"a delta from {delta.start} after {len(self.token_ids)} tokens"
        num_new = len(delta.token_ids)
        if num_new:
            self._note_time(num_new, now_s, now_ms)
            self.last_ms = now_ms
            self.token_ids.extend(delta.token_ids)
            if delta.text:
                self.pieces.append((len(self.token_ids), delta.text))
            if delta.logprobs is not None:
                self.logprobs.extend(map(logprobs_of, delta.logprobs))
        else:
            self.tail += delta.text

    def _note_time(self, num_new: int, now_s: float, now_ms: int) -> None:
        if self.last_s is not None:
            self.gaps_ms.extend([(now_s - self.last_s) * 1000 / num_new] * num_new)
        elif self.token_ids:
            # The first tokens of this attempt: its readers waited since the last entry of the attempt before.
            self.gaps_ms.append(max(0, now_ms - self.last_ms))
            self.waits.expect(now_s - self.gaps_ms[-1] / 1000)
        self.last_s = now_s

    def finish(self, end: End, *, now_ms: int) -> None:
        """Set the end that the engine reported; the first end stands."""
        if len(self.token_ids) < self.published:
            # Lost tokens were generated again, and the output ended before the last token that readers have.
            message = f"channel lost at {len(self.token_ids)}: generating it again ended before token {self.published}"
            end = End(state=JobState.FAILED, error=message, error_code="channel_lost", usage=end.usage)
        self.close(end, now_ms=now_ms)

    def close(self, end: End, *, now_ms: int) -> None:
        """Set an end; the first end stands."""
        if self.end is None:
            self.end = end
            self.last_ms = self.last_ms or now_ms

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join([text for _, text in self.pieces]) + self.tail

    @property
    def has_updates(self) -> bool:
        """Whether the channel lacks tokens or the end."""
        return len(self.token_ids) > self.published or (self.end is not None and not self.has_end)

    def reach_checkpoint(self, now_s: float) -> bool:
        """Return whether a choice that is not streamed should be published now; if so, start the next interval."""
        if self.sent_s is None:
            self.sent_s = now_s
        num_unsent = len(self.token_ids) - self.published
        is_time = now_s // CHECKPOINT_S > self.sent_s // CHECKPOINT_S
        if self.end is None and num_unsent < CHECKPOINT_TOKENS and not is_time:
            return False
        self.sent_s = now_s
        if self.published:
            self.waits.expect(now_s)
        return True

    @property
    def num_next_tokens(self) -> int:
        """Tokens in the next entry: those that the channel lacks, at most `MAX_ENTRY_TOKENS`."""
        num_lacking = len(self.token_ids) - self.published
        return max(0, num_lacking) if num_lacking <= MAX_ENTRY_TOKENS else self._first_tokens()

    def _first_tokens(self) -> int:
        """Return how many tokens to send of more than an entry takes: up to the end of a step's output.

        The text of a step is sent with its last token. A takeover after a part of its tokens would lose their text.
        """
        most = self.published + MAX_ENTRY_TOKENS
        num_pieces = bisect_right(self.pieces, most, key=itemgetter(0))
        end = self.pieces[num_pieces - 1][0] if num_pieces else 0
        return end - self.published if end > self.published else MAX_ENTRY_TOKENS

    def encode_next(self) -> bytes:
        """Return the next entry, which starts at `published`, encoded."""
        start, stop = self.published, self.published + self.num_next_tokens
        return encode_entry(
            start=start,
            token_ids=self.token_ids[start:stop],
            text=self._text_between(start, stop),
            logprobs=self.logprobs[start:stop] if self.logprobs else None,
            time_ms=self.last_ms,
            format="" if start else self.format,
        )

    @property
    def fits_an_entry(self) -> bool:
        """Whether the next entry has all missing tokens, so that the end may follow it."""
        return len(self.token_ids) - self.published <= MAX_ENTRY_TOKENS

    def encode_end(self, end: End) -> bytes:
        """Return the last entry, encoded: this end, and the text that only the end released."""
        offset = max(len(self.token_ids), self.published)
        return encode_entry(start=offset, token_ids=(), text=self.tail, time_ms=self.last_ms, end=end)

    def _text_between(self, start: int, stop: int) -> str:
        texts: list[str] = []
        for offset, text in reversed(self.pieces):
            if offset <= start:
                break
            if offset <= stop:
                texts.append(text)
        return "".join(reversed(texts))

    def acknowledge(self, offset: int, *, has_end: bool, now_s: float) -> None:
        """Record that the channel has all tokens before `offset`, and whether it has the end."""
        if offset > self.published:
            self.waits.end(now_s)
        self.published = offset
        self.has_end = has_end
        self.may_have_end = False

    def resend_from(self, offset: int) -> None:
        """Publish again from `offset`, and the end: the queue has neither."""
        self.published = offset
        self.has_end = self.may_have_end = False

    def doubt_end(self) -> None:
        """Record that the queue may have the end or not: it is sent now, or the queue has lost its last writes."""
        self.has_end, self.may_have_end = False, True

    def longest_gap_ms(self, now_s: float) -> float | None:
        """Return the longest time that readers waited in this attempt, if the unpublished output reaches them now."""
        waited_s = self.waits.longest_at(now_s) if self.num_next_tokens else self.waits.longest_s
        gaps_ms = self.gaps_ms[self.num_earlier_gaps :]
        if waited_s is not None:
            gaps_ms.append(waited_s * 1000)
        return max(gaps_ms, default=None)

    def as_progress(self) -> ChoiceProgress:
        """Return the tokens for the engine to replay instead of generating them."""
        return ChoiceProgress(token_ids=tuple(self.token_ids), is_finished=self.has_end)

    def replay(self, entry: ChannelEntry) -> None:
        """Append one entry that an earlier attempt published.

        Raises:
            ChannelLost: Tokens before this entry are missing.
        """
        if entry.start != len(self.token_ids):
            raise ChannelLost(len(self.token_ids))
        num_new = len(entry.token_ids)
        if num_new and self.token_ids:
            gap_ms = entry.time_ms - self.last_ms
            self.gaps_ms.extend([gap_ms / num_new] * num_new)
            self.num_earlier_gaps = len(self.gaps_ms)
            self.waits.replay(gap_ms)
        self.token_ids.extend(entry.token_ids)
        self.logprobs.extend(entry.logprobs or ())
        if num_new and entry.text:
            self.pieces.append((len(self.token_ids), entry.text))
        elif entry.text:
            self.tail += entry.text
        self.last_ms = entry.time_ms
        self.end = entry.end
        self.format = self.format or entry.format


def logprobs_of(token: request.SampledLogprobs) -> TokenLogprobs:
    """Translate the engine's log-probabilities at one token."""
    return TokenLogprobs(
        chosen=token.chosen, top=token.top, token=token.token, top_tokens=token.top_tokens, offset=token.offset
    )


class ChannelLost(Copyable):
    """Published tokens are missing on the channel, from `offset`."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        super().__init__(f"channel lost at {offset}")
