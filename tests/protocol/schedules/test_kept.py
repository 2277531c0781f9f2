"""Schedules as the queue keeps them, those of earlier versions too."""

from sluice.protocol.packing import packed
from sluice.protocol.schedules.schedule import Schedule, pack_schedule, read_schedule, read_size

SCHEDULE = Schedule(name="report", tenant="acme", cron="0 9 * * *", zone="Europe/Berlin", num_jobs=3, num_tokens=600)


class TestGivenASchedule:
    def test_when_it_is_read_then_it_is_as_it_was_written(self) -> None:
        data = pack_schedule(SCHEDULE)

        assert read_schedule("acme.report", data) == SCHEDULE
        assert read_size(data) == (3, 600)


class TestGivenAScheduleOfBeforeTokensWereCounted:
    def test_when_it_is_read_then_it_runs_on_and_counts_no_tokens(self) -> None:
        values = {"cron": "0 9 * * *", "zone": "UTC", "misfire": "latest", "overlap": "allow", "num_jobs": 3}
        data = packed([1, {**values, "created_s": 1_700_000_000}])

        schedule = read_schedule("acme.report", data)

        assert (schedule.num_jobs, schedule.num_tokens, schedule.created_s) == (3, 0, 1_700_000_000)
        assert read_size(data) == (3, 0)
