"""The times of a cron rule in a time zone. croniter finds the matching wall-clock times; daylight saving is done here.

- In the gap of spring, a wall-clock time that does not exist becomes the first moment after the gap, once.
- In the overlap of autumn, a wall-clock time that happens twice runs the first time.
- A rule for every hour runs by real time: it skips what does not exist, and runs twice what happens twice.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sluice.protocol.checks import is_text
from sluice.protocol.errors import InvalidSchedule, InvalidSetting

if TYPE_CHECKING:
    from types import ModuleType

MAX_CRON_CHARS = 256
NUM_FIELDS = 5
MAX_SHIFT = timedelta(hours=3)
"""Longest overlap of two offsets that is looked for."""

FIRST_WINDOW = timedelta(hours=1)
"""Where the newest times of a rule are looked for first. Each further look goes back eight times as far."""

NUM_KEPT = 2048
"""Rules whose checks are kept, and as many whose next times are: of a rare rule they take over 10 ms."""

_HASHED = re.compile(r"[hr](\(.*)?(/.*)?", re.IGNORECASE)
"""Fields that croniter fills by a hash or at random: each process would find other times."""

_ALL_HOURS = [*range(24)]


@dataclass(frozen=True, slots=True)
class CronRule:
    """A rule of five fields, such as `0 9 * * mon-fri`, or a name such as `@hourly`, in a time zone.

    Raises:
        InvalidSchedule: the text or the zone is not valid, or it has no times.
        InvalidSetting: croniter is not installed.
    """

    text: str
    zone: str = "UTC"
    zone_info: ZoneInfo = field(init=False, repr=False, compare=False)
    _is_hourly: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_text(self.text) or len(self.text) > MAX_CRON_CHARS:
            raise InvalidSchedule(f"a cron rule is text of at most {MAX_CRON_CHARS} characters, got {self.text!r:.100}")
        object.__setattr__(self, "zone_info", _zone_of(self.zone))
        object.__setattr__(self, "_is_hourly", _is_hourly(self.text))

    def times_after(self, after: datetime) -> Iterator[datetime]:
        """Yield the times after a moment, in order, in UTC."""
        last, repeated = after, deque[datetime]()
        for moments in filter(None, map(self._moments, self._walls_after(after))):
            # The second moments of an overlap come after all first ones, in the same order.
            due = [repeated.popleft() for _ in range(bisect_left(repeated, moments[0]))]
            repeated.extend(moments[1:])
            for moment in (*due, moments[0]):
                if moment > last:
                    last = moment
                    yield moment

    def next_runs(self, after: datetime, count: int) -> tuple[datetime, ...]:
        """Return the next times after a moment, in the rule's zone. Those of one minute are computed once."""
        return _next_runs(self, after.replace(second=0, microsecond=0), count)

    def newest(self, after: datetime, until: datetime, most: int) -> list[datetime]:
        """Return the newest times in (after, until], at most `most`, oldest first."""
        window = FIRST_WINDOW
        while True:
            begin = max(after, until - window)
            found = [*takewhile(lambda moment: moment <= until, self.times_after(begin))]
            if len(found) >= most or begin == after:
                return found[-most:]
            window *= 8

    def _walls_after(self, after: datetime) -> Iterator[datetime]:
        """Yield the matching wall-clock times, without zone, from the first that may be after a moment."""
        local = after.astimezone(self.zone_info)
        later = (after + MAX_SHIFT).astimezone(self.zone_info)
        shift = max(timedelta(), _offset(local) - _offset(later))  # the hour before an overlap happens again
        walls = _iterator(self.text, local.replace(tzinfo=None) - shift)
        while True:
            try:
                wall = walls.get_next(datetime)
            except ValueError as error:
                raise _invalid(self.text, error) from error
            yield wall

    def _moments(self, wall: datetime) -> list[datetime]:
        """Return the moments at which the rule runs for a wall-clock time: none, one or two."""
        first = wall.replace(tzinfo=self.zone_info).astimezone(UTC)
        second = wall.replace(tzinfo=self.zone_info, fold=1).astimezone(UTC)
        if first > second:  # a gap: `fold=0` has the offset before it, and so the later moment
            return [] if self._is_hourly else [_end_of_gap(second, first, self.zone_info)]
        return [first, second] if second > first and self._is_hourly else [first]


def _offset(local: datetime) -> timedelta:
    return local.utcoffset() or timedelta()


def _end_of_gap(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the first second with the later offset, which lies between two moments."""
    low, high = int(before.timestamp()), int(after.timestamp())
    later = _offset(after.astimezone(zone))
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(datetime.fromtimestamp(middle, zone)) == later:
            high = middle
        else:
            low = middle
    return datetime.fromtimestamp(high, UTC)


def _zone_of(name: object) -> ZoneInfo:
    try:
        return ZoneInfo(name if isinstance(name, str) and is_text(name) else "")
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidSchedule(
            f"there is no time zone {name!r:.100}: give a name such as Europe/Berlin, and install the system's tzdata "
            "or the package tzdata if it lacks them"
        ) from error


@lru_cache(maxsize=NUM_KEPT)
def _next_runs(rule: CronRule, after: datetime, count: int) -> tuple[datetime, ...]:
    return tuple(moment.astimezone(rule.zone_info) for moment in islice(rule.times_after(after), count))


@lru_cache(maxsize=NUM_KEPT)
def _is_hourly(text: str) -> bool:
    """Check a rule; return whether it matches in every hour of a day.

    Raises:
        InvalidSchedule: it is not valid.
        InvalidSetting: croniter is not installed.
    """
    fields = text.split()
    is_name = len(fields) == 1 and fields[0].startswith("@")
    if not is_name and len(fields) != NUM_FIELDS:
        raise _invalid(text, "it needs minute, hour, day, month and weekday")
    if any(_HASHED.fullmatch(part) for whole in fields for part in whole.split(",")):
        raise _invalid(text, "H and R are not supported, because each process would find other times")
    croniter = _croniter().croniter
    try:
        hours = croniter.expand(text)[0][1]
        croniter(text, datetime.now(UTC)).get_next(datetime)  # some match no day, such as 30 February
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _invalid(text, error) from error
    return hours in (["*"], _ALL_HOURS)


def _invalid(text: str, reason: object) -> InvalidSchedule:
    return InvalidSchedule(f"{text!r} is not a cron rule such as '0 9 * * mon-fri': {reason}")


def _iterator(text: str, after: datetime) -> Any:  # noqa: ANN401  # croniter has no types
    return _croniter().croniter(text, after)


def _croniter() -> "ModuleType":
    """Import croniter, which a client without schedules does not need.

    Raises:
        InvalidSetting: it is not installed.
    """
    try:
        import croniter
    except ImportError as error:
        raise InvalidSetting("schedules need croniter: pip install 'sluice-llm[schedules]'") from error
    return croniter
