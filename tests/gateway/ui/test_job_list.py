"""Pages of a long list: each job once, and no page takes long."""

import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.gateway.ui.read.joblist import PAGE_JOBS, JobListQuery, page_of_jobs, read_query
from sluice.history.database import open_database
from sluice.history.filters import JobFilter, JobPlace
from sluice.history.tables import jobs

NUM_JOBS = 100_000
LIMIT_S = 0.1
STATES = ("done",) * 97 + ("failed", "cancelled", "running")


def fill(url: str, number: int) -> None:
    """Write as many jobs."""
    engine = open_database(url, is_writer=True)
    rows: list[dict[str, object]] = [
        {
            "id": f"0.t{one % 20}.{one:08x}",
            "queue": "q",
            "partition": 0,
            "tenant": f"t{one % 20}",
            "submitted_ms": 1_700_000_000_000 + one // 3,
            "version": 1,
            "state": STATES[one % 100],
            "error_code": "engine_error" if STATES[one % 100] == "failed" else None,
            "priority": 9 if one % 1000 == 0 else 0,
            "batch": f"b{one % 50}",
            "options": {"max_tokens": 256, "temperature": 1.0, "stop": []},
            "metadata": {"user": "17"},
        }
        for one in range(number)
    ]
    with engine.begin() as connection:
        connection.execute(sa.insert(jobs), rows)
    engine.dispose()


def all_pages(database: Database, query: JobListQuery, most: int = 10_000) -> tuple[list[str], float]:
    """The ids of all pages, and the longest time of one."""
    found, slowest_s = list[str](), 0.0
    for _ in range(most):
        began_s = time.perf_counter()
        lines, following = page_of_jobs(database, query)
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
        found += [line.id for line in lines]
        if following is None:
            break
        query = replace(query, after=JobPlace.read(following))
    return found, slowest_s


class TestGivenMoreJobsThanAPageHas:
    def test_when_all_pages_are_read_then_each_job_is_on_one(self, sqlite_url: str) -> None:
        fill(sqlite_url, 3 * PAGE_JOBS + 7)

        with Database(sqlite_url) as database:
            found, _ = all_pages(database, JobListQuery(queues=["q"]))

        assert len(found) == len({*found}) == 3 * PAGE_JOBS + 7


class TestGivenJobsOfSeveralKinds:
    @pytest.mark.parametrize(
        "asked",
        [
            {"state": "failed"},
            {"tenant": "t7"},
            {"priority": "9"},
            {"batch": "b3"},
            {"error": "engine_error"},
            {"state": "failed", "batch": "b47", "tenant": "t17"},
        ],
        ids=" ".join,
    )
    def test_when_an_address_has_filters_then_the_list_has_those_jobs_alone(
        self, sqlite_url: str, asked: dict[str, str]
    ) -> None:
        fill(sqlite_url, 1100)
        columns = {"error": "error_code"}

        with Database(sqlite_url) as database:
            found, _ = page_of_jobs(database, read_query(asked, ["q"], None))

        assert found != []
        for name, value in asked.items():
            assert {str(getattr(line, columns.get(name, name))) for line in found} == {value}

    def test_when_a_time_is_asked_for_then_older_jobs_are_not_listed(self, sqlite_url: str) -> None:
        fill(sqlite_url, 10)
        change = jobs.update().where(jobs.c.id == "0.t3.00000003").values(submitted_ms=round(time.time() * 1000))
        engine = open_database(sqlite_url, is_writer=True)
        with engine.begin() as connection:
            connection.execute(change)
        engine.dispose()

        with Database(sqlite_url) as database:
            found, _ = page_of_jobs(database, read_query({"span": "hour"}, ["q"], None))

        assert [line.id for line in found] == ["0.t3.00000003"]

    def test_when_an_address_has_a_state_that_the_history_never_has_then_it_is_ignored(self) -> None:
        assert read_query({"state": "blocked"}, ["q"], None).state is None


class TestGivenAQueueWithEveryJob:
    @pytest.mark.parametrize(
        ("asked", "index"),
        [
            (JobFilter(), "jobs_by_queue"),
            (JobFilter(state="failed"), "jobs_by_state"),
            (JobFilter(tenant="t7", after=JobPlace(1, "")), "jobs_by_tenant"),
            (JobFilter(error_code="engine_error"), "jobs_by_error"),
            (JobFilter(batch="b3", state="done", tenant="t7"), "jobs_by_batch"),
            (JobFilter(batch=("b3", "b4"), tenant="t7"), "jobs_by_batch"),
        ],
        ids=str,
    )
    def test_when_jobs_are_filtered_then_the_index_of_the_filter_is_searched(
        self, sqlite_url: str, asked: JobFilter, index: str
    ) -> None:
        engine = open_database(sqlite_url)
        queries = [replace(asked, queue=queues).newest_first([jobs.c.id]) for queues in ("q", ["q"], ["q", "other"])]
        statements = [query.compile(engine, compile_kwargs={"literal_binds": True}) for query in queries]

        with engine.connect() as connection:
            plans = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {one}").all()[0][3] for one in statements]
        engine.dispose()

        assert [plan for plan in plans if not plan.startswith(f"SEARCH jobs USING INDEX {index}")] == []


@pytest.mark.long
class TestGivenAHundredThousandJobs:
    def test_when_they_are_paged_by_any_filter_then_no_page_takes_long(self, sqlite_url: str) -> None:
        fill(sqlite_url, NUM_JOBS)
        filters: list[dict[str, object]] = [
            *({}, {"tenant": "t7"}, {"state": "failed"}, {"state": "running", "tenant": "t19"}),
            *({"priority": 9}, {"batch": "b3"}, {"error": "engine_error"}, {"error": "none"}, {"tenant": "nobody"}),
        ]

        with Database(sqlite_url) as database:
            all_pages(database, JobListQuery(queues=["q"]), most=1)
            took_s = {
                str(one): min(all_pages(database, JobListQuery(queues=["q"], **one), most=5)[1] for _ in range(3))  # pyright: ignore[reportArgumentType] (filters of several types)
                for one in filters
            }

        assert {name: took for name, took in took_s.items() if took > LIMIT_S} == {}
