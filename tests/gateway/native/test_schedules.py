"""Schedules over HTTP: each tenant has its own, and a worker runs them."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from time import monotonic
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from sluice.gateway.schedules import MAX_LISTED
from sluice.history.tables import audit_log
from sluice.producer import Producer
from sluice.protocol.keys import QueueKeys
from sluice.protocol.schedules.schedule import MAX_SCHEDULES, Schedule, ScheduleKeys, pack_schedule, read_jobs
from sluice.protocol.wire import decode_spec
from tests.gateway.gateway_process import gateway_process
from tests.gateway.native.conftest import Native
from tests.gateway.native.jobs import ended, wait_for
from tests.producer.test_schedules import last_fired

pytestmark = pytest.mark.slow

DAILY: dict[str, Any] = {
    "name": "report",
    "cron": "0 9 * * *",
    "zone": "Europe/Berlin",
    "jobs": [{"prompt": "one", "max_tokens": 3}, {"messages": [{"role": "user", "content": "two"}], "deadline": 600}],
}


@pytest.fixture(autouse=True)
def removed(native: Native) -> Generator[None]:
    """No schedule is left."""
    yield
    for client in (native.acme, native.globex):
        for schedule in client.get("/schedules").json()["data"]:
            client.delete(f"/schedules/{schedule['name']}")


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def recorded(native: Native) -> list[tuple[object, ...]]:
    """The changes of schedules in the audit log: id, action, target, tenant, queue and outcome."""
    names = ("id", "action", "target", "tenant", "queue", "outcome")
    query = sa.select(*(audit_log.c[name] for name in names)).where(audit_log.c.action.like("%_schedule"))
    with sa.create_engine(native.database_url).connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


class TestGivenATenantWithASchedule:
    def test_when_it_is_added_then_its_next_runs_are_shown_in_its_zone(self, native: Native) -> None:
        added = native.acme.post("/schedules", json=DAILY)

        schedule = added.json()
        assert (added.status_code, added.headers["location"]) == (201, "/schedules/report")
        assert (schedule["queue"], schedule["num_jobs"], schedule["misfire"]) == ("default", 2, "latest")
        assert [time[11:16] for time in schedule["next_runs"]] == ["09:00"] * 5
        assert native.acme.get("/schedules/report").json() == schedule
        assert native.acme.get("/schedules").json() == {"data": [schedule], "next": None}

    def test_when_it_is_due_then_a_worker_runs_it_for_the_tenant(self, native: Native) -> None:
        body = {**DAILY, "cron": "* * * * *", "name": "minutes"}
        native.acme.post("/schedules", json=body).raise_for_status()
        with native.server.client() as client:
            last_fired(client, 1, "minutes", tenant="acme")

        wait_for(lambda: native.acme.get("/schedules/minutes").json()["last_run"] is not None)

        run_s = int(datetime.fromisoformat(native.acme.get("/schedules/minutes").json()["last_run"]).timestamp())
        assert len(ended(native.acme, f"0.acme.minutes-{run_s}")["choices"][0]["token_ids"]) == 3

    def test_when_its_key_has_a_limit_of_tokens_then_no_length_is_stated_for_its_jobs(self, native: Native) -> None:
        with closing(native.client("submit", tpm=1000)) as limited:
            limited.post("/schedules", json={**DAILY, "jobs": [{"prompt": "one"}]}).raise_for_status()

        with native.server.client() as client:
            stored = client.hget(ScheduleKeys(QueueKeys("default")).jobs, "acme.report")
        (new,) = read_jobs(stored, Schedule(name="report", tenant="acme", cron="@daily"), 0)
        assert decode_spec(new.spec).options.max_tokens is None

    def test_when_it_is_paused_resumed_and_removed_then_each_answer_says_so(self, native: Native) -> None:
        native.acme.post("/schedules", json=DAILY).raise_for_status()

        paused = native.acme.post("/schedules/report/pause").json()["paused"]
        resumed = native.acme.post("/schedules/report/resume").json()["paused"]
        removed = native.acme.delete("/schedules/report")

        assert (paused, resumed, removed.status_code) == (True, False, 200)
        assert code_of(native.acme.get("/schedules/report")) == (404, "schedule_not_found")

    def test_when_it_is_changed_then_each_change_has_a_row_of_the_audit_log(self, native: Native) -> None:
        known = set(recorded(native))

        native.acme.post("/schedules", json={**DAILY, "name": "logged"}).raise_for_status()
        native.acme.post("/schedules/logged/pause").raise_for_status()
        native.acme.post("/schedules/logged/resume").raise_for_status()
        native.acme.delete("/schedules/logged").raise_for_status()

        common = ("acme", "default", "done")
        assert {row[1:] for row in set(recorded(native)) - known} == {
            ("add_schedule", "acme.logged 0 9 * * * Europe/Berlin", *common),
            ("pause_schedule", "acme.logged", *common),
            ("resume_schedule", "acme.logged", *common),
            ("remove_schedule", "acme.logged", *common),
        }

    def test_when_another_tenant_asks_for_it_then_it_is_as_an_unknown_one(self, native: Native) -> None:
        native.acme.post("/schedules", json=DAILY).raise_for_status()

        answers = [
            native.globex.get("/schedules/report"),
            native.globex.post("/schedules/report/pause"),
            native.globex.post("/schedules/report/resume"),
            native.globex.delete("/schedules/report"),
        ]

        assert [code_of(answer) for answer in answers] == [(404, "schedule_not_found")] * 4
        assert native.globex.get("/schedules").json()["data"] == []
        assert native.acme.get("/schedules/report").json()["paused"] is False

    def test_when_another_tenant_adds_one_of_its_name_then_both_are_there(self, native: Native) -> None:
        native.acme.post("/schedules", json=DAILY).raise_for_status()
        native.globex.post("/schedules", json={**DAILY, "cron": "@hourly"}).raise_for_status()

        crons = [client.get("/schedules/report").json()["cron"] for client in (native.acme, native.globex)]

        assert crons == ["0 9 * * *", "@hourly"]


class TestGivenATenantWithManySchedulesOfRareRules:
    """Each takes milliseconds to read; their times are leap days of more than a century."""

    @pytest.fixture(autouse=True)
    def many(self, native: Native) -> Generator[None]:
        keys = ScheduleKeys(QueueKeys("default"))
        crons = {f"acme.s{number:03}": f"{number % 60} {number // 60} 29 2 mon#5" for number in range(MAX_LISTED + 50)}
        rules = {id_: pack_schedule(Schedule(name="any", cron=cron)) for id_, cron in crons.items()}
        with native.server.client() as client:
            client.hset(keys.schedules, mapping=rules)
            yield
            client.hdel(keys.schedules, *rules)

    def test_when_they_are_listed_then_others_are_answered_meanwhile(self, native: Native) -> None:
        waits_s = list[float]()
        with ThreadPoolExecutor(1) as thread:
            began_s = monotonic()
            listing = thread.submit(native.acme.get, "/schedules")
            while not listing.done():
                asked_s = monotonic()
                native.globex.get("/livez").raise_for_status()
                waits_s.append(monotonic() - asked_s)
            taken_s = monotonic() - began_s

        assert len(listing.result().json()["data"]) == MAX_LISTED
        assert max(waits_s) < taken_s / 2

    def test_when_pages_are_read_then_each_schedule_is_in_one(self, native: Native) -> None:
        names, query = list[str](), dict[str, Any]()
        while query.get("after", "") is not None:
            page = native.acme.get("/schedules", params={"limit": 60, **query}).json()
            names += [schedule["name"] for schedule in page["data"]]
            query["after"] = page["next"]

        assert names == [f"s{number:03}" for number in range(MAX_LISTED + 50)]


class TestGivenAKeyWithOneRequestAMinute:
    def test_when_it_adds_schedules_then_each_that_is_accepted_counts(self, native: Native) -> None:
        with closing(native.client("submit", rpm=1)) as limited:
            wrong = limited.post("/schedules", json={**DAILY, "cron": "soon"})
            first = limited.post("/schedules", json=DAILY)
            second = limited.post("/schedules", json=DAILY)

        assert (wrong.status_code, first.status_code) == (400, 201)
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert code_of(second) == (429, "rate_limit_exceeded")


class TestGivenAQueueWithAsManySchedulesAsItMayHave:
    """The rules of another tenant, most of which no run needs to read."""

    @pytest.fixture
    def keys(self, native: Native) -> Generator[ScheduleKeys]:
        keys = ScheduleKeys(QueueKeys("default"))
        with native.server.client() as client:
            names = [f"crowd.s{number}" for number in range(MAX_SCHEDULES)]
            client.hset(keys.schedules, mapping=dict.fromkeys(names, b""))
            yield keys
            client.hdel(keys.schedules, *names)

    def test_when_one_more_is_added_then_it_is_409_and_says_what_to_do(
        self, native: Native, keys: ScheduleKeys
    ) -> None:
        with native.server.client() as client:
            before = client.hgetall(keys.schedules)

            refused = native.acme.post("/schedules", json=DAILY)

            assert code_of(refused) == (409, "too_many_schedules")
            assert "queue 'default' has 1000 schedules, and may have 1000: remove one" in refused.text
            assert client.hgetall(keys.schedules) == before


class TestGivenAnAuditLogThatCannotBeWritten:
    def test_when_schedules_are_changed_then_it_is_503_and_nothing_is(self, native: Native) -> None:
        with Producer(native.server.url) as producer, gateway_process(native.server.url) as gateway:
            producer.add_schedule("report", ["hello"], cron="@daily")
            with gateway.http() as http:
                answers = [
                    http.post("/schedules", json={**DAILY, "name": "another"}),
                    http.post("/schedules/report/pause"),
                    http.delete("/schedules/report"),
                ]
            left = producer.schedules(tenant="default")
            producer.remove_schedule("report")

        assert [code_of(answer) for answer in answers] == [(503, "history_missing")] * 3
        assert [(view.name, view.paused) for view in left] == [("report", False)]


class TestGivenAWrongSchedule:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"cron": "soon"}, "'soon' is not a cron rule"),
            ({"zone": "Mars/Olympus"}, "there is no time zone"),
            ({"name": "a.b"}, "a schedule's name is"),
            ({"misfire": "never"}, "misfire must be one of"),
            ({"jobs": []}, "jobs must be a list"),
            ({"jobs": None}, "jobs is missing"),
            ({"jobs": [{"prompt": "one", "job_id": "0.acme.a"}]}, "neither job_id nor idempotency_key"),
            ({"jobs": [{"prompt": "one", "after": ["0.acme.a"]}]}, "a scheduled job has no after: each run is"),
            ({"jobs": [{"prompt": "one", "tenant": "globex"}]}, "tenant"),
            ({"tenant": "globex"}, "unknown field 'tenant'"),
        ],
    )
    def test_when_it_is_added_then_it_is_400_with_a_sentence(
        self, native: Native, changes: dict[str, Any], words: str
    ) -> None:
        known = recorded(native)

        answer = native.acme.post("/schedules", json={**DAILY, **changes})

        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert native.acme.get("/schedules").json()["data"] == []
        assert recorded(native) == known


class TestGivenAKeyThatOnlyReads:
    def test_when_it_changes_schedules_then_it_is_403(self, native: Native) -> None:
        native.acme.post("/schedules", json=DAILY).raise_for_status()

        with closing(native.client("read")) as reader:
            answers = [
                reader.post("/schedules", json=DAILY),
                reader.post("/schedules/report/pause"),
                reader.delete("/schedules/report"),
            ]

            assert [answer.status_code for answer in answers] == [403, 403, 403]
            assert reader.get("/schedules/report").status_code == 200
