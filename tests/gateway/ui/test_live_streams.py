"""What live streams cost, and how many there may be."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import monotonic
from typing import TypeVar

import httpx
import pytest

from sluice.gateway.native.records import Records
from sluice.gateway.queues import Queues
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.ui.live import MAX_STREAMS, RETRY_S
from sluice.gateway.ui.read.jobs import JobReader, Watched
from sluice.gateway.ui.read.surveys import Surveys
from sluice.history.queries import History
from sluice.producer import Producer
from sluice.protocol.wire import JobId
from tests.gateway.ui.conftest import IDLE, Browser, Site
from tests.gateway.ui.test_job_pages import submitted, until
from tests.servers import RedisServer

Result = TypeVar("Result")
MOST_CALLS_PER_S = 1.0
"""Calls of scripts for a job that waits: a look every two seconds, and the share of what all pages read together."""


class CountedRecords(Records):
    """A history that counts how often it is read."""

    num_reads = 0

    async def read(self, query: Callable[[History], Result]) -> Result:
        """Count, and read."""
        self.num_reads += 1
        return await super().read(query)


def stream(stack: ExitStack, browser: Browser, path: str = "/ui/events") -> httpx.Response:
    """Open a live stream until the end of the test."""
    return stack.enter_context(browser.http.stream("GET", path))


def calls(site: Site) -> int:
    """How many scripts the server has run."""
    with site.server.client() as client:
        return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


@pytest.mark.slow
class TestGivenAKeyWithAsManyStreamsAsItMayHave:
    def test_when_it_opens_another_then_it_is_429_until_one_is_closed(self, site: Site) -> None:
        browser, other = site.visitor("crowd"), site.visitor("crowd")
        with ExitStack() as stack:
            first, *_ = [stream(stack, browser) for _ in range(MAX_STREAMS)]

            refused, of_another_key = browser.get("/ui/events"), stream(stack, other)

            assert (refused.status_code, refused.headers["retry-after"]) == (429, str(RETRY_S))
            assert of_another_key.status_code == 200
            first.close()
            until(lambda: browser.http.head("/ui/events").status_code == 200)


@pytest.mark.slow
class TestGivenAStream:
    @pytest.mark.parametrize("path", ["/ui/events", "/ui/jobs/JOB/events"])
    def test_when_only_its_headers_are_asked_for_then_they_are_the_answer(self, site: Site, path: str) -> None:
        browser = site.visitor()

        answer = browser.http.head(path.replace("JOB", submitted(site, queue=IDLE)), timeout=10)

        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.slow
class TestGivenManyPagesOfJobsThatWait:
    def test_when_they_are_watched_then_each_costs_less_than_a_call_a_second(self, site: Site) -> None:
        jobs, browser, clock = [submitted(site, queue=IDLE) for _ in range(20)], site.visitor(), site.visitor()
        with ExitStack() as stack:
            lines = stream(stack, clock).iter_lines()
            idle = rate(site, lines)
            pages = [stream(stack, browser, f"/ui/jobs/{job_id}/events").iter_lines() for job_id in jobs]
            assert [next(page) for page in pages] == ["event: parts"] * len(jobs)

            watched = rate(site, lines)

        assert watched - idle < MOST_CALLS_PER_S * len(jobs)


def rate(site: Site, lines: Iterator[str]) -> float:
    """Calls a second, while a page is sent three times."""
    began_s, before, num_sent = monotonic(), calls(site), 0
    while num_sent < 3:
        num_sent += next(lines) == "event: parts"
    return (calls(site) - before) / (monotonic() - began_s)


class TestGivenAWatchedJob:
    async def test_when_nothing_changes_then_the_history_is_not_read(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        settings = GatewaySettings(redis_url=valkey.url, database_url=sqlite_url)
        records = CountedRecords(sqlite_url)
        with Producer(valkey.url) as producer:
            job = producer.submit("hello", max_tokens=5)
            async with Queues(settings) as queues:
                reader = JobReader(queues, Surveys(queues), records)
                watched = Watched(reader, queues.first, await reader.find(job.id), lag_s=0)

                numbers = [await reads(watched, records), await reads(watched, records)]
                producer.cancel(job)
                numbers += [await reads(watched, records), await reads(watched, records)]
        records.close()

        assert numbers == [0, 0, 1, 0]
        assert watched.facts.state == "cancelled"


class TestGivenAJobOnAPartitionThatNoWorkerServes:
    async def test_when_it_is_looked_for_then_it_is_found_without_a_survey(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        settings = GatewaySettings(redis_url=valkey.url, database_url=sqlite_url)
        records = Records(sqlite_url)
        with Producer(valkey.url, partitions=3) as producer:
            job = producer.submit("hello", job_id=JobId("2.default.far"))
            async with Queues(settings) as queues:
                found = await JobReader(queues, Surveys(queues), records).find(job.id)
        records.close()

        assert found.state == "queued"
        assert found.now is not None
        assert found.now.waits_for is None


async def reads(watched: Watched, records: CountedRecords) -> int:
    """How often a look reads the history."""
    before = records.num_reads
    await watched.look()
    return records.num_reads - before
