"""The timeline of a job as a picture: bars and marks in percent of its time. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice.history.phases import phases_of
from sluice.producer.timeline.durations import seconds

LANE_PX, AXIS_PX = 44, 26
MAX_TICKS = 5
LEAST_WIDTH = 0.4
STEPS = (1, 2, 5)
WHYS = {
    "given_back": "worker gave it back",
    "declined": "left for another engine",
    "farewell": "worker left",
    "death": "worker died",
    "lost_reply": "worker did not get it",
    "retry": "failed, tried again",
    "suspect": "to run alone",
    "requeue": "requeued",
    "audit": "no worker had it",
}
"""Descriptions of why an attempt ended before its job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A time span on a lane."""

    lane: int
    start: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point in time on a lane."""

    lane: int
    at: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A time on the scale."""

    at: float
    text: str
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePicture:
    """A timeline."""

    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]

    @property
    def height(self) -> int:
        """Height in pixels."""
        return LANE_PX * len(self.lanes) + AXIS_PX


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a job."""

    number: int
    start_ms: int
    end_ms: int | None
    outcome: str | None
    why: str | None
    seen_ms: int | None = None
    """The last heartbeat of its worker, if the worker died."""

    preemptions: Sequence[tuple[int, int | None]] = ()
    """The first preemptions: begin, and when the sequence ran again."""

    @property
    def reason(self) -> str | None:
        """Description of why the attempt ended; None if unknown."""
        return None if self.why is None else WHYS.get(self.why, self.why.replace("_", " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of a job, from the queue and the history."""

    state: str
    submitted_ms: int
    scheduled_ms: int | None
    first_token_ms: int | None
    ended_ms: int | None
    attempts: tuple[Attempt, ...]
    preemptions: int


class TimeScale:
    """The conversion of times to percent of a time span."""

    def __init__(self, begin_ms: int, end_ms: int) -> None:
        self.begin_ms, self.total_ms = begin_ms, max(1, end_ms - begin_ms)

    def at(self, at_ms: int) -> float:
        """Return the position of a time, in percent."""
        return round(min(100.0, max(0.0, 100 * (at_ms - self.begin_ms) / self.total_ms)), 3)

    def ticks(self) -> Iterator[Tick]:
        """Yield a few round times."""
        total_s, step_s = self.total_ms / 1000, 0.001
        while total_s / step_s > MAX_TICKS:
            step_s = _next_step(step_s)
        for number in range(int(total_s / step_s) + 1):
            at = round(100 * number * step_s / total_s, 3)
            yield Tick(
                at=at, text=seconds(number * step_s), anchor="start" if at < 9 else "end" if at > 91 else "middle"
            )


def picture(times: Times, now_ms: int) -> TimelinePicture:
    """Draw the times of a job."""
    latest_ms = max([attempt.end_ms or attempt.start_ms for attempt in times.attempts], default=times.submitted_ms)
    scale = TimeScale(times.submitted_ms, max(times.ended_ms or now_ms, latest_ms, times.submitted_ms + 1))
    is_over = times.ended_ms is not None
    bars, marks = [*_waits(times, scale, now_ms)], list[Mark]()
    for lane, attempt in enumerate(times.attempts, start=1):
        following_ms = times.attempts[lane].start_ms if lane < len(times.attempts) else None
        end_ms = attempt.end_ms or following_ms or times.ended_ms or now_ms
        bars += _bars_of(times, attempt, end_ms, lane, scale)
        if attempt.outcome == "returned" or following_ms is not None:
            title = f"Handed over: {attempt.reason or WHYS['death']}"
            marks.append(Mark(lane=lane, at=scale.at(end_ms), kind="death", title=title))
    if is_over:
        kind = "end-done" if times.state == "done" else "end-bad"
        marks.append(
            Mark(lane=len(times.attempts), at=scale.at(times.ended_ms or now_ms), kind=kind, title=times.state)
        )
    return TimelinePicture(lanes=tuple(_names(times)), bars=tuple(bars), marks=tuple(marks), ticks=tuple(scale.ticks()))


def _names(times: Times) -> Iterator[str]:
    yield "Queue"
    for attempt in times.attempts:
        note = ""
        if attempt is times.attempts[-1] and times.preemptions:
            note = f", preempted {'once' if times.preemptions == 1 else f'{times.preemptions} times'}"
        yield f"Attempt {attempt.number}{note}"


def _waits(times: Times, scale: TimeScale, now_ms: int) -> Iterator[Bar]:
    begin_ms = times.submitted_ms
    for number, attempt in enumerate(times.attempts):
        if attempt.start_ms > begin_ms:
            title = "Waited" if number == 0 else "Waited for another worker"
            yield _bar(scale, begin_ms, attempt.start_ms, 0, "queue", title)
        begin_ms = attempt.end_ms or attempt.start_ms
        if attempt.end_ms is None and attempt is not times.attempts[-1]:
            begin_ms = times.attempts[number + 1].start_ms
    is_waiting = times.state == "queued" or not times.attempts
    if is_waiting and (times.ended_ms or now_ms) > begin_ms:
        yield _bar(
            scale, begin_ms, times.ended_ms or now_ms, 0, "queue", "Waits" if times.ended_ms is None else "Waited"
        )


def _bars_of(times: Times, attempt: Attempt, end_ms: int, lane: int, scale: TimeScale) -> Iterator[Bar]:
    """Yield bars for the phases of an attempt, its preemptions, and the time in which its worker was dead."""
    phases = phases_of(
        attempt.start_ms,
        end_ms,
        # Unknown while the job has no token: a running attempt is drawn as computing its prompt.
        scheduled_ms=attempt.start_ms if times.scheduled_ms is None else times.scheduled_ms,
        first_token_ms=times.first_token_ms,
        last_token_ms=None,
        seen_ms=attempt.seen_ms,
    )
    if phases.pulled_ms > attempt.start_ms:
        yield _bar(scale, attempt.start_ms, phases.pulled_ms, lane, "queue", "Waited in its worker")
    has_prefill = phases.prefilled_ms > phases.pulled_ms
    if has_prefill or phases.alive_ms == attempt.start_ms:
        yield _bar(scale, phases.pulled_ms, phases.prefilled_ms, lane, "prefill", "Computed the prompt")
    if phases.alive_ms > phases.prefilled_ms:
        label = "Generated" if has_prefill else "Resumed after the last token"
        yield _bar(scale, phases.prefilled_ms, phases.alive_ms, lane, "decode", label)
    for begin_ms, again_ms in attempt.preemptions:
        if begin_ms < phases.alive_ms:
            until_ms = min(phases.alive_ms, again_ms or phases.alive_ms)
            yield _bar(scale, max(begin_ms, attempt.start_ms), until_ms, lane, "preempted", "Preempted")
    if phases.alive_ms < end_ms:
        yield _bar(scale, phases.alive_ms, end_ms, lane, "lost", "Its worker was lost")


def _bar(scale: TimeScale, begin_ms: int, end_ms: int, lane: int, kind: str, label: str) -> Bar:
    start = scale.at(begin_ms)
    width = max(LEAST_WIDTH, round(scale.at(end_ms) - start, 3))
    return Bar(
        lane=lane,
        start=min(start, 100 - width),
        width=width,
        kind=kind,
        title=f"{label}: {seconds((end_ms - begin_ms) / 1000)}",
    )


def _next_step(step_s: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is larger."""
    size = 0.001
    while True:
        for step in STEPS:
            if step * size > step_s * 1.01:
                return step * size
        size *= 10
