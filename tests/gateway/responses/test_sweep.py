"""Rows of responses whose jobs ended while no gateway looked: a real queue, a real worker, and the table."""

from collections.abc import Generator

import pytest
from sqlalchemy.engine import Engine

from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo, response_end
from sluice.gateway.responses import sweep
from sluice.gateway.responses.ends import GRACE_MS
from sluice.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.gateway.responses.sweep import sweep_responses
from sluice.gateway.tables.database import Database
from sluice.producer import Producer
from sluice.protocol.clock import wall_ms
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, Usage
from tests.history import events as e
from tests.history.test_rows import write
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


class Site:
    """A table of responses and the queue of their jobs. Changes with both."""

    def __init__(self, store: ResponseStore, producer: Producer, urls: tuple[str, str]) -> None:
        self.store, self.producer, self._urls = store, producer, urls

    def add(self, name: str, *, age_ms: int = 0, expires_in_ms: int = 60_000) -> str:
        """Write a row, as before a submit."""
        info = ResponseInfo(job_id=JobId(f"0.acme.{name}"), created_ms=wall_ms() - age_ms, model="null", options={})
        expires_ms = wall_ms() + expires_in_ms
        self.store.add(StoredResponse(info=info, tenant="acme", queue="default", expires_ms=expires_ms))
        return info.id

    def submit(self, name: str, max_tokens: int = 8) -> JobId:
        """Submit its job."""
        return self.producer.submit("once", tenant="acme", job_id=JobId(f"0.acme.{name}"), max_tokens=max_tokens).id

    def sweep(self, after: str = "", *, for_s: float = 10) -> str:
        """Do what `worker callbacks` does every few seconds."""
        url, database_url = self._urls
        return sweep_responses(url, "default", database_url, after=after, for_s=for_s)

    def end(self, response_id: str) -> ResponseEnd | None:
        """The stored end."""
        found = self.store.get(response_id, "acme")
        assert found is not None
        return found.end


@pytest.fixture
def site(queue_server: RedisServer, sqlite_url: str) -> Generator[Site]:
    """An empty table."""
    with Database(sqlite_url) as database, Producer(queue_server.url) as producer:
        yield Site(ResponseStore(database), producer, (queue_server.url, sqlite_url))


class TestGivenAnOpenResponse:
    def test_when_its_job_is_done_then_its_output_is_stored_and_outlives_the_queues(self, site: Site) -> None:
        name = site.add("done")
        result = site.producer.result(site.submit("done"))

        site.sweep()
        site.producer.delete(["0.acme.done"])
        site.sweep()

        expected = response_end(JobState.DONE, "length", (result.text, ""), result.usage, (None, None))
        assert site.end(name) == expected

    def test_when_its_job_was_cancelled_then_that_is_stored_with_its_output(self, site: Site) -> None:
        name, job = site.add("cancelled"), site.submit("cancelled", max_tokens=8_000)
        events = site.producer.stream_many([job])
        first = next(events)
        site.producer.cancel(job)
        text = first.text + "".join(event.text for event in events)

        site.sweep()

        assert site.end(name) == ResponseEnd(status="cancelled", text=text)

    def test_when_its_job_runs_then_it_stays_open(self, site: Site) -> None:
        name, job = site.add("running"), site.submit("running", max_tokens=8_000)

        site.sweep()

        assert site.end(name) is None
        site.producer.cancel(job)

    def test_when_it_expires_then_it_is_deleted(self, site: Site) -> None:
        name = site.add("expired", expires_in_ms=-1)

        site.sweep()

        assert site.store.open_after("default", "", 9) == []
        assert site.store.get(name, "acme") is None


class TestGivenMoreOpenResponsesThanASweepHasTimeFor:
    def test_when_sweeps_go_on_behind_each_other_then_all_are_settled(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweep, "PAGE", 1)
        made = [site.add(f"old-{number}", age_ms=GRACE_MS + 1) for number in range(3)]

        places = [site.sweep(for_s=0)]
        while places[-1]:
            places.append(site.sweep(places[-1], for_s=0))

        assert places == [*sorted(made), ""]
        assert [site.end(name) for name in made] == [LOST] * 3

    def test_when_many_expired_then_a_sweep_deletes_some(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sweep, "DELETED_AT_ONCE", 1)
        for number in range(3):
            site.add(f"gone-{number}", expires_in_ms=-1)

        site.sweep(for_s=0)

        assert [site.store.delete_expired(1) for _ in range(3)] == [1, 1, 0]


class TestGivenAJobWhoseChannelCannotBeRead:
    def test_when_it_is_swept_then_it_stays_open_and_the_others_are_settled(
        self, site: Site, queue_server: RedisServer
    ) -> None:
        unread, other, expired = site.add("a-unread"), site.add("z-done"), site.add("gone", expires_in_ms=-1)
        site.producer.result(site.submit("z-done"))
        job = site.submit("a-unread", max_tokens=8_000)
        events = site.producer.stream_many([job])
        next(events)
        site.producer.cancel(job)
        list(events)
        with queue_server.client() as redis:
            redis.delete(QueueKeys("default").result(job))
            redis.xadd(QueueKeys("default").channel(job), {"e": b"\xff"}, id="99999999-0")

        site.sweep()

        assert site.end(unread) is None
        assert site.end(other) is not None
        assert expired not in [one.info.id for one in site.store.open_after("default", "", 9)]


class TestGivenAResponseWhoseGatewayWasKilledBeforeTheSubmit:
    def test_when_it_is_new_then_it_stays_open(self, site: Site) -> None:
        name = site.add("new")

        site.sweep()

        assert site.end(name) is None

    def test_when_it_is_old_then_it_has_failed(self, site: Site) -> None:
        name = site.add("old", age_ms=GRACE_MS + 1)

        site.sweep()

        assert site.end(name) == LOST

    def test_when_its_job_turns_up_after_all_then_its_real_end_counts(self, site: Site) -> None:
        name = site.add("late", age_ms=GRACE_MS + 1)
        site.sweep()
        real = ResponseEnd(status="completed", text="hello")

        site.store.finish({name: real})
        site.store.finish({name: LOST})

        assert site.end(name) == real


class TestGivenJobsThatOnlyTheHistoryHas:
    def test_when_one_is_done_then_its_output_is_stored(self, site: Site, sqlite_history: Engine) -> None:
        name = site.add("recorded")
        write(
            sqlite_history,
            [e.submitted("0.acme.recorded"), e.ended("0.acme.recorded", result=e.result("hello"))],
            queue="default",
        )

        site.sweep()

        usage = Usage(prompt_tokens=11, output_tokens=2)
        assert site.end(name) == response_end(JobState.DONE, "stop", ("hello", ""), usage, (None, None))

    def test_when_one_failed_then_that_is_stored(self, site: Site, sqlite_history: Engine) -> None:
        name = site.add("broken")
        failed = e.ended("0.acme.broken", state=b"failed", error=b"it broke", error_code=b"prompt_too_long")
        write(sqlite_history, [e.submitted("0.acme.broken"), failed], queue="default")

        site.sweep()

        error = {"code": "invalid_prompt", "message": "it broke"}
        assert site.end(name) == ResponseEnd(status="failed", error=error)

    def test_when_the_output_was_not_kept_then_it_is_lost(self, site: Site, sqlite_history: Engine) -> None:
        name = site.add("unkept", age_ms=GRACE_MS + 1)
        write(sqlite_history, [e.submitted("0.acme.unkept"), e.ended("0.acme.unkept")], queue="default")

        site.sweep()

        assert site.end(name) == LOST
