"""The times of cron rules, as UTC, on both days of the year on which clocks change."""

from datetime import UTC, datetime
from itertools import islice, pairwise

import pytest

from sluice.protocol.errors import InvalidSchedule
from sluice.protocol.schedules import rule
from sluice.protocol.schedules.rule import CronRule

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def at(text: str) -> datetime:
    """A moment of 2026 in UTC, as `03-29 01:00`."""
    return datetime.fromisoformat(f"2026-{text}:00+00:00")


def times(rule: CronRule, after: str, count: int) -> list[str]:
    """The next times after a moment."""
    return [moment.strftime("%m-%d %H:%M") for moment in islice(rule.times_after(at(after)), count)]


class TestGivenTheDayInSpring:
    """In Berlin 02:00 to 03:00 on 29 March does not exist (01:00 UTC), in New York on 8 March (07:00 UTC)."""

    @pytest.mark.parametrize(
        ("zone", "after", "expected"),
        [
            (BERLIN, "03-28 00:00", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
            (NEW_YORK, "03-07 00:00", ["03-07 07:30", "03-08 07:00", "03-09 06:30"]),
        ],
    )
    def test_when_a_time_does_not_exist_then_it_is_the_first_moment_after_the_gap(
        self, zone: str, after: str, expected: list[str]
    ) -> None:
        rule = CronRule("30 2 * * *", zone)

        assert times(rule, after, 3) == expected

    def test_when_several_times_are_in_the_gap_or_at_its_end_then_they_are_one(self) -> None:
        rule = CronRule("0,20,40 2,3 * * *", BERLIN)

        assert times(rule, "03-29 00:00", 3) == ["03-29 01:00", "03-29 01:20", "03-29 01:40"]

    @pytest.mark.parametrize(("zone", "day", "first"), [(BERLIN, "03-29", 0), (NEW_YORK, "03-08", 6)])
    def test_when_the_rule_is_for_every_hour_then_it_runs_each_hour_of_real_time(
        self, zone: str, day: str, first: int
    ) -> None:
        rule = CronRule("15 * * * *", zone)

        assert times(rule, f"{day} {first:02}:00", 4) == [f"{day} {first + hour:02}:15" for hour in range(4)]


class TestGivenTheDayInAutumn:
    """In Berlin 02:00 to 03:00 on 25 October happens twice (00:00 and 01:00 UTC), in New York 01:00 to 02:00 on
    1 November (05:00 and 06:00 UTC).
    """

    @pytest.mark.parametrize(
        ("zone", "cron", "after", "expected"),
        [
            (BERLIN, "30 2 * * *", "10-24 00:00", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
            (NEW_YORK, "30 1 * * *", "10-31 00:00", ["10-31 05:30", "11-01 05:30", "11-02 06:30"]),
        ],
    )
    def test_when_a_time_happens_twice_then_it_runs_the_first_time(
        self, zone: str, cron: str, after: str, expected: list[str]
    ) -> None:
        assert times(CronRule(cron, zone), after, 3) == expected

    @pytest.mark.parametrize("after", ["10-25 00:30", "10-25 00:45", "10-25 01:15", "10-25 01:30", "10-25 01:45"])
    def test_when_the_first_time_is_over_then_the_second_does_not_run(self, after: str) -> None:
        assert times(CronRule("30 2 * * *", BERLIN), after, 1) == ["10-26 01:30"]

    @pytest.mark.parametrize(("zone", "day", "first"), [(BERLIN, "10-24", 22), (NEW_YORK, "11-01", 4)])
    def test_when_the_rule_is_for_every_hour_then_it_runs_each_hour_of_real_time(
        self, zone: str, day: str, first: int
    ) -> None:
        rule, begin = CronRule("*/30 * * * *", zone), at(f"{day} {first:02}:59")

        found = [*islice(rule.times_after(begin), 10)]

        assert {int((later - one).total_seconds()) for one, later in pairwise(found)} == {1800}

    @pytest.mark.parametrize(
        ("after", "expected"),
        [
            ("10-24 23:59", ["10-25 00:30", "10-25 01:30", "10-25 02:30"]),
            ("10-25 00:30", ["10-25 01:30", "10-25 02:30", "10-25 03:30"]),
            ("10-25 00:45", ["10-25 01:30", "10-25 02:30", "10-25 03:30"]),
            ("10-25 01:30", ["10-25 02:30", "10-25 03:30", "10-25 04:30"]),
        ],
    )
    def test_when_looked_for_from_any_moment_then_the_times_are_the_same(self, after: str, expected: list[str]) -> None:
        assert times(CronRule("30 * * * *", BERLIN), after, 3) == expected


class TestGivenARuleWithManyTimes:
    def test_when_the_newest_are_asked_then_they_are_up_to_the_moment_and_oldest_first(self) -> None:
        rule = CronRule("*/10 * * * *")

        found = rule.newest(at("01-01 00:00"), at("03-01 12:00"), 3)

        assert [f"{moment:%m-%d %H:%M}" for moment in found] == ["03-01 11:40", "03-01 11:50", "03-01 12:00"]

    def test_when_there_are_fewer_then_all_are_returned(self) -> None:
        rule = CronRule("0 0 1 * *")

        found = rule.newest(at("01-01 00:00"), at("04-15 00:00"), 100)

        assert found == [datetime(2026, month, 1, tzinfo=UTC) for month in (2, 3, 4)]


class TestGivenAWrongRule:
    @pytest.mark.parametrize(
        ("cron", "reason"),
        [
            ("nonsense", "needs minute, hour, day, month and weekday"),
            ("* * * * * *", "needs minute, hour, day, month and weekday"),
            ("61 * * * *", "out of range"),
            ("0 0 30 2 *", "failed to find next date"),
            ("@reboot", "is not a cron rule"),
            ("R 3 * * *", "H and R are not supported"),
            ("0 H(0-7) * * *", "H and R are not supported"),
            ("0 " * 200, "text of at most"),
        ],
    )
    def test_when_it_is_read_then_a_sentence_says_why(self, cron: str, reason: str) -> None:
        with pytest.raises(InvalidSchedule, match=reason):
            CronRule(cron)

    @pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "/etc/localtime"])
    def test_when_its_zone_is_unknown_then_a_sentence_says_so(self, zone: str) -> None:
        with pytest.raises(InvalidSchedule, match="there is no time zone"):
            CronRule("@daily", zone)


class TestGivenARuleThatWasCheckedBefore:
    """It took croniter milliseconds."""

    def test_when_it_is_read_again_then_it_is_not_checked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = CronRule("59 23 29 2 mon#5", BERLIN)
        runs = first.next_runs(at("01-01 00:00"), 3)
        monkeypatch.setattr(rule, "_croniter", pytest.fail)

        again = CronRule("59 23 29 2 mon#5", BERLIN)

        assert again.next_runs(at("01-01 00:00"), 3) == runs
