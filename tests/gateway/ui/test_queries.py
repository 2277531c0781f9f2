"""What pages read from SQL, on both databases."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from secrets import token_hex

import pytest
import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.gateway.ui.read.batches import ErrorGroup, errors_of, one_batch
from sluice.gateway.ui.read.batchlist import BatchList
from sluice.gateway.ui.read.day import HOURS, DayUsage
from sluice.gateway.ui.read.joblist import JobListQuery, page_of_jobs
from sluice.gateway.ui.read.latencies import counts_of_tenant, ttft_by_queue
from sluice.gateway.ui.read.usage import Price, prices_now, set_price, ttft_by_tenant, usage_in_hour
from sluice.history.tables import HOUR_MS, batches, jobs


@dataclass(frozen=True)
class Recorded:
    """A history with three jobs of two tenants, in one batch of a queue of their own, whose name their model has."""

    database: Database
    queue: str
    hour_ms: int
    """In which its jobs ended."""

    @property
    def conditions(self) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        """What selects its jobs, and its batch."""
        return jobs.c.queue == self.queue, batches.c.queue == self.queue

    def price(self, since_ms: int, amount: float) -> Price:
        """A price of that model."""
        return Price(model=self.queue, since_ms=since_ms, input=amount, cached=0.5, output=2.0, currency="EUR")


@pytest.fixture
def recorded(history_url: str) -> Generator[Recorded]:
    """Both databases in turn."""
    queue, now_ms = f"q{token_hex(4)}", round(time.time() * 1000)
    common: dict[str, object] = {
        "queue": queue,
        "partition": 0,
        "version": 3,
        "batch": "b",
        "model": queue,
        "prompt_tokens": 1_000_000,
        "submitted_ms": now_ms - 3000,
        "first_token_ms": now_ms - 2000,
        "finished_ms": now_ms - 1000,
    }
    own: list[dict[str, object]] = [
        {"tenant": "a", "state": "done", "output_tokens": 2_000_000, "error": None, "error_code": None},
        {"tenant": "a", "state": "failed", "output_tokens": 0, "error": "no", "error_code": "broken"},
        {"tenant": "z", "state": "done", "output_tokens": 1, "error": None, "error_code": None},
    ]
    rows = [{**common, **one, "id": f"0.{one['tenant']}.{queue}{number}"} for number, one in enumerate(own)]
    with Database(history_url) as database:
        with database.transaction() as connection:
            connection.execute(sa.insert(jobs), rows)
            connection.execute(batches.insert().values(queue=queue, id="b", created_ms=now_ms - 3000))
        yield Recorded(database, queue, (now_ms - 1000) - (now_ms - 1000) % HOUR_MS)


class TestGivenJobsOfTwoTenants:
    async def test_when_a_tenant_reads_then_all_figures_are_its_own(self, recorded: Recorded) -> None:
        database, queue = recorded.database, recorded.queue
        set_price(database, recorded.price(0, 1.0))

        usage = usage_in_hour(database, [queue], recorded.hour_ms)
        [batch], _ = await BatchList(database, [queue]).get("a", wait_s=60)

        figures = {name: (one.jobs, one.tokens, one.costs, one.unpriced) for name, one in usage.items()}
        assert figures["a"] == (2, 4_000_000, (("EUR", 6.0),), ())
        assert (batch.size, batch.ended, batch.share) == (2, 2, 1.0)
        assert errors_of(database, queue, "b", "a") == [ErrorGroup(name="broken", jobs=1, example="no", column="error")]
        assert errors_of(database, queue, "b", "z") == []
        assert one_batch(database, queue, "b", "nobody") is None
        assert counts_of_tenant(database, "a", [queue]) == {"done": 1, "failed": 1}
        listed, _ = page_of_jobs(database, JobListQuery(queues=[queue], tenant="a"))
        assert [one.tenant for one in listed] == ["a", "a"]

    async def test_when_their_model_has_no_price_then_their_tokens_are_unpriced(self, recorded: Recorded) -> None:
        hour = usage_in_hour(recorded.database, [recorded.queue], recorded.hour_ms)
        day, _ = await DayUsage(recorded.database, [recorded.queue]).get(wait_s=60)

        assert hour == day
        assert (day["a"].costs, day["a"].unpriced) == ((), ((recorded.queue, 4_000_000),))
        assert (day["a"] + day["z"]).unpriced == ((recorded.queue, 5_000_001),)

    async def test_when_all_are_read_then_no_other_queue_is_counted(self, recorded: Recorded) -> None:
        database, queue, other = recorded.database, recorded.queue, f"{recorded.queue}-other"

        assert {*usage_in_hour(database, [queue], recorded.hour_ms)} == {"a", "z"}
        assert usage_in_hour(database, [other], recorded.hour_ms) == {}
        assert await BatchList(database, [other]).get(None) == ([], 0)
        assert page_of_jobs(database, JobListQuery(queues=[other]))[0] == []
        latencies = ttft_by_queue(database, [queue, other])
        assert (latencies[queue].p50_s, latencies[other].p50_s) == (1.0, None)
        assert {name: one.p95_s for name, one in ttft_by_tenant(database, [queue], None).items()} == {"a": 1, "z": 1}

    async def test_when_batches_are_listed_again_then_only_those_that_changed_are_counted(
        self, recorded: Recorded
    ) -> None:
        found, (is_own, is_batch) = BatchList(recorded.database, [recorded.queue]), recorded.conditions
        first, _ = await found.get("a", wait_s=60)
        with recorded.database.transaction() as connection:
            connection.execute(jobs.update().where(is_own).values(tenant="a"))
        kept, _ = await found.get("a", wait_s=60)
        with recorded.database.transaction() as connection:
            connection.execute(batches.update().where(is_batch).values(refreshed_ms=7, done=2, failed=1))

        counted, _ = await found.get("a", wait_s=60)
        of_all, _ = await found.get(None)

        assert [[line.size for line in lines] for lines in (first, kept, counted, of_all)] == [[2], [2], [3], [3]]

    async def test_when_a_page_cannot_wait_then_it_says_how_many_batches_are_missing(self, recorded: Recorded) -> None:
        found = BatchList(recorded.database, [recorded.queue])

        assert await found.get("z", wait_s=0) == ([], 1)

        lines, num_left = await found.get("z", wait_s=60)
        assert ([line.size for line in lines], num_left) == ([1], 0)

    async def test_when_the_day_is_read_again_then_only_the_newest_hours_are_counted(self, recorded: Recorded) -> None:
        day = DayUsage(recorded.database, [recorded.queue])
        first, hours_left = await day.get(wait_s=60)
        with recorded.database.transaction() as connection:
            is_own = jobs.c.queue == recorded.queue
            connection.execute(jobs.update().where(is_own, jobs.c.tenant == "z").values(tenant="y"))
            connection.execute(jobs.update().where(is_own).values(finished_ms=jobs.c.finished_ms - 4 * HOUR_MS))

        kept, _ = await day.get(wait_s=60)

        assert (hours_left, {name: one.jobs for name, one in first.items()}) == (0, {"a": 2, "z": 1})
        assert kept == first
        assert {*(await DayUsage(recorded.database, [recorded.queue]).get(wait_s=60))[0]} == {"a", "y"}

    async def test_when_a_page_cannot_wait_then_it_says_how_many_hours_are_missing(self, recorded: Recorded) -> None:
        day = DayUsage(recorded.database, [recorded.queue])

        found, hours_left = await day.get(wait_s=0)

        assert (found, hours_left) == ({}, HOURS)
        assert (await day.get(wait_s=60))[1] == 0

    def test_when_a_price_is_set_again_then_the_newest_is_shown(self, recorded: Recorded) -> None:
        for since_ms, amount in ((5, 1.0), (9, 3.0), (9, 4.0)):
            set_price(recorded.database, recorded.price(since_ms, amount))

        found = [one for one in prices_now(recorded.database) if one.model == recorded.queue]
        assert [(one.since_ms, one.input) for one in found] == [(9, 4.0)]
