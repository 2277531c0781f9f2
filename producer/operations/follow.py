"""Read the channels of jobs from any position. The generators yield events between their steps. No I/O.

The id of a channel's entry is the number of tokens after it, so a reader's position is the number of tokens it has.
Text lags behind tokens (stop strings, incomplete characters), so a `Cursor` also counts characters; with them, the rest
can be taken from the result after the channel has expired. Reading never restarts a job.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple, TypeAlias, cast

from sluice.producer.errors import BadOffset, ChannelExpired, JobNotFound, ResultExpired
from sluice.producer.operations.control import OverdueJobs
from sluice.producer.operations.countdown import Countdown, within
from sluice.producer.operations.operation import (
    Ask,
    Command,
    Entries,
    Read,
    Reply,
    Step,
    channel_entries,
    channel_rows,
    xread,
)
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import (
    MAX_LOOK_S,
    WAIT_BLOCK_MS,
    ended_badly,
    look,
    silent_look_s,
)
from sluice.producer.operations.views import explain, views
from sluice.protocol.calls import JobView
from sluice.protocol.limits import MAX_TOKENS
from sluice.protocol.states import JobState
from sluice.protocol.waits import Wait, WaitNotifier
from sluice.protocol.wire import (
    ChannelEntry,
    ChoiceResult,
    End,
    JobId,
    JobResult,
    TokenLogprobs,
    decode_entry,
    decode_result,
    decode_spec,
)


class Cursor(NamedTuple):
    """A position in the output of one choice. Its `str()` can serve as the id of a server-sent event."""

    tokens: int
    chars: int | None = None
    """Characters of text before this position; None if unknown (a bare token offset)."""

    is_end: bool = False
    """Whether the reader has seen the end."""

    def __str__(self) -> str:
        return ":".join([str(self.tokens), *([] if self.chars is None else [str(self.chars)]), *["end"] * self.is_end])


_NUMBER = re.compile(r"[0-9]{1,18}")

Place: TypeAlias = int | str | Cursor
"""The `cursor` of the reader's last event, or a bare offset: the number of tokens that it has.

A reader resumes exactly after a cursor. Text cannot be split within an event, so a bare offset within one begins with
that whole event, whose `start` is before the offset.
"""


def cursor_at(place: Place) -> Cursor:
    """Parse a position.

    Raises:
        BadOffset: the position is neither a number of tokens nor the cursor of an event.
    """
    if isinstance(place, Cursor):
        return place
    if isinstance(place, int) and not isinstance(place, bool):
        return _checked(Cursor(place, 0 if place == 0 else None), place)
    parts = place.split(":") if isinstance(place, str) else []
    is_end = len(parts) > 1 and parts[-1] == "end"
    numbers = parts[: len(parts) - is_end]
    if not 1 <= len(numbers) <= 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise BadOffset(f"not a position in a stream: {place!r}. Give a number of tokens, or the cursor of an event.")
    tokens = int(numbers[0])
    chars = int(numbers[1]) if len(numbers) == 2 else 0 if tokens == 0 else None
    return _checked(Cursor(tokens, chars, is_end), place)


def _checked(cursor: Cursor, place: object) -> Cursor:
    if cursor.tokens < 0:
        raise BadOffset(f"an offset must be 0 tokens or more, got {place!r}")
    return cursor


class StreamEvent(NamedTuple):
    """The output that one or more steps added to one choice: an entry of its channel, with job and position."""

    job_id: JobId
    choice: int
    start: int
    """As in `ChannelEntry`; likewise the following fields up to `end`."""

    token_ids: tuple[int, ...]
    text: str
    time_ms: int
    logprobs: tuple[TokenLogprobs, ...] | None
    end: End | None
    format: str
    position: Cursor
    """The position after this event."""

    @property
    def offset(self) -> int:
        """Number of tokens of the choice after this event."""
        return self.position.tokens

    @property
    def cursor(self) -> str:
        """The position as text: pass it to `stream` to resume after this event."""
        return str(self.position)


Follow: TypeAlias = Generator[Step | StreamEvent, list[Reply], None]
"""An operation that yields events between its steps."""


class Reader:
    """A reader of one choice's channel. Changes: it tracks the position."""

    def __init__(self, queue: Queue, job_id: JobId, place: Place = 0, choice: int = 0) -> None:
        self._begin = cursor_at(place)
        self._cursor = self._begin
        self._result_key = queue.keys_of(job_id).result(job_id)
        self.job_id = job_id
        self.choice = choice
        self.key = queue.keys_of(job_id).channel(job_id, choice)
        self.end: End | None = None
        self.is_finished = self._begin.is_end

    @property
    def after(self) -> str:
        """Entry id to read from."""
        return f"{self._cursor.tokens}-0"

    def feed(self, entries: Iterable[ChannelEntry]) -> Iterator[StreamEvent]:
        """Convert entries after the position to events; stop at an entry that begins before it."""
        for entry in entries:
            if entry.start < self._cursor.tokens:
                return
            yield self._event(entry)

    def overlaps(self, entries: Sequence[ChannelEntry]) -> bool:
        """Return whether the first entry begins before the position, because it was rewritten with other bounds."""
        return bool(entries) and entries[0].start < self._cursor.tokens

    def lacks_tokens(self, entries: Sequence[ChannelEntry]) -> bool:
        """Return whether the first entry begins after the position, because the channel lost the tokens in between."""
        return bool(entries) and entries[0].start > self._cursor.tokens

    def reread(self, read: Sequence[ChannelEntry]) -> Iterator[StreamEvent]:
        """Yield the output after the position from the whole channel; for a bare offset, from the event around it.

        Raises:
            BadOffset: the channel was rewritten after the reader began at a bare offset, so the text cannot be split.
        """
        if self._cursor.chars is not None:
            yield self._cut_event(_whole(read), read[-1].time_ms, read[-1].end)
            return
        if self._cursor != self._begin:
            raise BadOffset(
                f"the channel of job {self.job_id} was rewritten, and {self._cursor.tokens} tokens alone do not say "
                "where the rest of the text begins. Stream from an event's cursor, or read the whole result."
            )
        at = next((i for i, entry in enumerate(read) if entry.offset > self._cursor.tokens), len(read) - 1)
        self._cursor = Cursor(read[at].start, sum(len(entry.text) for entry in read[:at]))
        yield from self.feed(read[at:])

    def check(self, view: JobView | None) -> JobView:
        """Check that the job can have reached the position.

        Raises:
            JobNotFound: the job is unknown.
            BadOffset: the job has no such choice or position.
        """
        if view is None:
            raise JobNotFound(self.job_id)
        if not 0 <= self.choice < view.choices:
            raise BadOffset(f"job {self.job_id} has choices 0 to {view.choices - 1}, not {self.choice}")
        published = view.published[self.choice] if self.choice < len(view.published) else 0
        # A reader may be ahead of a server that lost its last second of data, but never beyond max_tokens.
        if self._cursor.tokens > published and (view.state.is_terminal or self._cursor.tokens > _max_tokens(view)):
            raise BadOffset(
                f"job {self.job_id} has {published} tokens; there is nothing after {self._cursor.tokens}. "
                "Give an offset that an event had."
            )
        return view

    def finish(self, view: JobView, data: bytes | None) -> StreamEvent:
        """Return the rest of the output from the result of an ended job whose channel has expired.

        Raises:
            ResultExpired: the result has expired, too.
            ChannelExpired: no result has the rest, or the position is a bare token offset, so the text cannot be split.
        """
        result = decode_result(data) if data is not None else None
        if result is None and view.state is JobState.DONE:
            raise ResultExpired(f"channel and result of job {self.job_id} have expired. Look in the history.")
        choice = _choice(result, self.choice)
        if choice is None:
            self._check_complete(view)
        if choice and self._cursor.chars is None:
            raise ChannelExpired(
                f"the channel of job {self.job_id} has expired, and {self._cursor.tokens} tokens alone do not say "
                "where the rest of the text begins. Stream from an event's cursor, or read the whole result."
            )
        if choice and self._cursor.tokens > len(choice.token_ids):
            raise BadOffset(f"job {self.job_id} has {len(choice.token_ids)} tokens; got offset {self._cursor.tokens}")
        end = End(
            state=view.state,
            finish_reason=choice.finish_reason if choice else view.finish_reason,
            error=view.error,
            error_code=view.error_code,
            usage=result.usage if result else None,
        )
        whole = choice or ChoiceResult(text="", token_ids=(), finish_reason=None)
        return self._cut_event(whole, view.ended_ms or 0, end)

    def _check_complete(self, view: JobView) -> None:
        published = view.published[self.choice] if self.choice < len(view.published) else 0
        if published > self._cursor.tokens or not view.state.is_terminal:
            advice = "" if view.state.is_terminal else " Read its result once it has ended."
            raise ChannelExpired(
                f"job {self.job_id} is {view.state}: its channel has lost the output after token "
                f"{self._cursor.tokens}, and no result has it.{advice}"
            )

    @property
    def result_command(self) -> Command:
        """The command to read the result."""
        return ("GET", self._result_key)

    def _cut_event(self, whole: ChoiceResult, time_ms: int, end: End | None) -> StreamEvent:
        tokens, chars = self._cursor.tokens, self._cursor.chars or 0
        logprobs = whole.logprobs[tokens:] if whole.logprobs else None
        rest = ChannelEntry(
            start=tokens,
            token_ids=whole.token_ids[tokens:],
            text=whole.text[chars:],
            time_ms=time_ms,
            logprobs=logprobs,
            end=end,
            format=whole.format,
        )
        return self._event(rest)

    def _event(self, entry: ChannelEntry) -> StreamEvent:
        chars = None if self._cursor.chars is None else self._cursor.chars + len(entry.text)
        self.end = entry.end
        self.is_finished = entry.end is not None
        self._cursor = Cursor(entry.offset, chars, self.is_finished)
        return StreamEvent(self.job_id, self.choice, *entry, self._cursor)


def _whole(entries: Sequence[ChannelEntry]) -> ChoiceResult:
    logprobs = [lp for entry in entries for lp in entry.logprobs or ()]
    return ChoiceResult(
        text="".join(entry.text for entry in entries),
        token_ids=tuple(token for entry in entries for token in entry.token_ids),
        finish_reason=None,
        logprobs=tuple(logprobs) or None,
        format=entries[0].format if entries else "",
    )


def _choice(result: JobResult | None, choice: int) -> ChoiceResult | None:
    return result.choices[choice] if result is not None and choice < len(result.choices) else None


def _max_tokens(view: JobView) -> int:
    return (decode_spec(view.spec).options.max_tokens or MAX_TOKENS) if view.spec is not None else 0


def choice_readers(
    queue: Queue, job_id: JobId, num_choices: int, places: Sequence[Place] | None = None
) -> list[Reader]:
    """Return a reader of each choice of a job, from its place or from the first token."""
    begins = [0] * num_choices if places is None else places
    return [Reader(queue, job_id, place, choice) for choice, place in zip(range(num_choices), begins, strict=True)]


def follow(
    queue: Queue, readers: Sequence[Reader], timeout_s: float | None = None, *, waits: WaitNotifier | None = None
) -> Follow:
    """Yield the events of any number of channels, over one connection, until all have ended; report long waits.

    Raises:
        JobNotFound, BadOffset, ResultExpired, ChannelExpired: a channel cannot be read from its position.
        ResultTimeout: not all channels have ended within `timeout_s`.
    """
    with (waits or WaitNotifier()).wait() as wait:
        yield from _follow(queue, readers, Countdown(timeout_s), wait)


def _follow(queue: Queue, readers: Sequence[Reader], clock: Countdown, wait: Wait) -> Follow:
    open_readers = {reader.key: reader for reader in readers if not reader.is_finished}
    look_after_s = WAIT_BLOCK_MS / 1000
    overdue = OverdueJobs(queue)
    while open_readers:
        # The state first, so that the channel of a terminal job is complete when it is read.
        checked = yield from _look(queue, open_readers, wait)
        unstarted = _first_channels(queue, open_readers.values(), checked)
        look_in_s = yield from overdue.end(checked)
        look_after_s = min(look_after_s, *_silent_looks_s(checked))
        last_entry_s = clock.passed_s
        overdue_s = last_entry_s + look_in_s
        while open_readers and (left_s := min(last_entry_s + look_after_s, overdue_s) - clock.passed_s) > 0:
            clock.check(f"{len(open_readers)} of {len(readers)} channels")
            places = {**unstarted, **_places(open_readers)}
            reply = yield Read(places, clock.block_ms(min(WAIT_BLOCK_MS, ceil(1000 * left_s))))
            if reply:
                wait.goes_on()
                rows = cast("list[tuple[str, Entries]]", reply)
                yield from _feed(queue, open_readers, [row for row in rows if row[0] in open_readers])
                last_entry_s, look_after_s = clock.passed_s, WAIT_BLOCK_MS / 1000
                if any(key in unstarted for key, _ in rows):
                    break
        look_after_s = min(2 * look_after_s, MAX_LOOK_S)


def _silent_looks_s(job_views: Iterable[JobView]) -> list[float]:
    looks_s = map(silent_look_s, job_views)
    return [MAX_LOOK_S, *(look_s for look_s in looks_s if look_s is not None)]


def stream(
    queue: Queue, readers: Sequence[Reader], timeout_s: float | None = None, *, waits: WaitNotifier | None = None
) -> Follow:
    """Yield the events of choices of one job; then raise unless the job is done.

    Raises:
        JobFailed, JobCancelled, JobExpired: the job ended so.
        JobNotFound, BadOffset, ResultExpired, ChannelExpired, ResultTimeout: as in `follow`.
    """
    yield from within(timeout_s, _stream(queue, readers, timeout_s, waits))


def _stream(queue: Queue, readers: Sequence[Reader], timeout_s: float | None, waits: WaitNotifier | None) -> Follow:
    yield from follow(queue, readers, timeout_s, waits=waits)
    reader = readers[0]
    if reader.end is not None and reader.end.state is not JobState.DONE:
        view, data = yield from look(queue, reader.job_id)
        if view is not None and view.state is reader.end.state:
            raise ended_badly(view, decode_result(data) if data is not None else None)


def _look(
    queue: Queue, open_readers: dict[str, Reader], wait: Wait
) -> Generator[Step | StreamEvent, list[Reply], list[JobView]]:
    """Read and return the state of each job; yield the entries of its channel, or finish it from its result."""
    readers = list(open_readers.values())
    job_views = yield from views(queue, [reader.job_id for reader in readers])
    checked = [reader.check(view) for reader, view in zip(readers, job_views, strict=True)]
    [reply] = yield Ask((xread(_places(open_readers), block_ms=None),))
    found_entries = list(channel_entries(reply))
    yield from _feed(queue, open_readers, found_entries)
    has_entries = {key for key, _ in found_entries}
    if found_entries:
        wait.goes_on()
    elif wait.is_due and not checked[0].state.is_terminal:
        wait.waits_for((yield from explain(queue, checked[0])))
    for reader, view in zip(readers, checked, strict=True):
        if view.state.is_terminal and reader.key not in has_entries:
            yield from _finish(reader, view)
            del open_readers[reader.key]
    return checked


def _first_channels(queue: Queue, readers: Iterable[Reader], checked: Sequence[JobView]) -> dict[str, str]:
    """Return the first channel of each unstarted job, besides those of its readers, since it may have the only end."""
    unstarted = {view.id for view in checked if not view.attempt and view.choices > 1}
    jobs = {reader.job_id for reader in readers if reader.job_id in unstarted}
    return {queue.keys_of(job_id).channel(job_id): "0-0" for job_id in jobs}


def _finish(reader: Reader, view: JobView) -> Follow:
    """Yield the rest from the result, which is not read while the job runs, because it may be incomplete."""
    [data] = (yield Ask((reader.result_command,))) if view.state.is_terminal else [None]
    yield reader.finish(view, cast("bytes | None", data))


def _feed(queue: Queue, open_readers: dict[str, Reader], rows: Sequence[tuple[str, Entries]]) -> Follow:
    for key, entries in rows:
        reader, read = open_readers[key], _decoded(entries)
        if reader.lacks_tokens(read):
            [view] = yield from views(queue, [reader.job_id])
            yield from _finish(reader, reader.check(view))
        elif reader.overlaps(read):
            [whole] = yield Ask((("XRANGE", key, "-", entries[-1][0]),))
            yield from reader.reread(_decoded(channel_rows(whole)))
        else:
            yield from reader.feed(read)
        if reader.is_finished:
            del open_readers[key]


def _decoded(entries: Entries) -> list[ChannelEntry]:
    return [decode_entry(data) for _, data in entries]


def _places(open_readers: dict[str, Reader]) -> dict[str, str]:
    return {key: reader.after for key, reader in open_readers.items()}
