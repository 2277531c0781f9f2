"""Schedules over HTTP: each tenant has its own, and a worker runs them."""

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from time import monotonic
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from sluice.gateway.schedules import MAX_LISTED
from sluice.history.tables import audit_log
from sluice.producer import Producer
from sluice.protocol.bounds import SCHEDULES, TENANT_SCHEDULED_JOBS, TENANT_SCHEDULES
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import DEFAULT_MAX_TOKENS
from sluice.protocol.schedules.schedule import MAX_JOBS, Schedule, ScheduleKeys, pack_schedule, read_jobs
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


RARE = Schedule(name="any", cron="0 0 29 2 *")


@pytest.fixture(autouse=True)
def removed(native: Native) -> Generator[None]:
    """No schedule is left."""
    yield
    for client in (native.acme, native.globex):
        for schedule in client.get("/schedules").json()["data"]:
            client.delete(f"/schedules/{schedule['name']}")


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def kept(native: Native, schedules: Mapping[str, Schedule]) -> Generator[None]:
    """Write schedules, by their ids, as the queue keeps them; and remove them."""
    keys = ScheduleKeys(QueueKeys("default"))
    with native.server.client() as client:
        client.hset(keys.schedules, mapping={id_: pack_schedule(schedule) for id_, schedule in schedules.items()})
        yield
        client.hdel(keys.schedules, *schedules)


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

    def test_when_its_key_has_a_limit_of_tokens_then_its_jobs_state_what_counts(self, native: Native) -> None:
        with closing(native.client("submit", tpm=1000)) as limited:
            limited.post("/schedules", json={**DAILY, "jobs": [{"prompt": "one"}]}).raise_for_status()

        with native.server.client() as client:
            stored = client.hget(ScheduleKeys(QueueKeys("default")).jobs, "acme.report")
        (new,) = read_jobs(stored, Schedule(name="report", tenant="acme", cron="@daily"), 0)
        assert decode_spec(new.spec).options.max_tokens == DEFAULT_MAX_TOKENS

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
        crons = {f"acme.s{number:03}": f"{number % 60} {number // 60} 29 2 mon#5" for number in range(MAX_LISTED + 50)}
        yield from kept(native, {id_: Schedule(name="any", cron=cron) for id_, cron in crons.items()})

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
        body = {**DAILY, "jobs": [{"prompt": "one"}]}
        with closing(native.client("submit", rpm=1)) as limited:
            wrong = limited.post("/schedules", json={**body, "cron": "soon"})
            first = limited.post("/schedules", json=body)
            second = limited.post("/schedules", json=body)

        assert (wrong.status_code, first.status_code) == (400, 201)
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert code_of(second) == (429, "rate_limit_exceeded")


class TestGivenAKeyWithLimits:
    """Of five requests and 1,000 tokens a minute."""

    @pytest.fixture
    def limited(self, native: Native) -> Generator[httpx.Client]:
        with closing(native.client("submit", rpm=5, tpm=1000)) as client:
            yield client

    def test_when_a_run_of_all_schedules_has_more_jobs_than_it_may_send_then_it_is_400(
        self, native: Native, limited: httpx.Client
    ) -> None:
        three = [{"prompt": "one", "max_tokens": 3}] * 3
        native.acme.post("/schedules", json={**DAILY, "name": "other", "jobs": three}).raise_for_status()

        refused = limited.post("/schedules", json={**DAILY, "jobs": three})
        added = limited.post("/schedules", json={**DAILY, "jobs": three[:2]})
        replaced = limited.post("/schedules", json={**DAILY, "jobs": three[:2]})

        assert code_of(refused) == (400, "request_too_large")
        assert "has 6 requests; the API key's limit is 5 a minute" in refused.text
        assert (added.status_code, replaced.status_code) == (201, 201)

    def test_when_a_run_has_more_tokens_then_it_is_400(self, limited: httpx.Client) -> None:
        refused = limited.post("/schedules", json={**DAILY, "jobs": [{"prompt": "one"}] * 4})

        assert code_of(refused) == (400, "request_too_large")
        assert "has 1028 tokens; the API key's limit is 1000 a minute" in refused.text


class TestGivenATenantWithAlmostAsManySchedulesAsItMayHave:
    """One fewer. They are for leap days."""

    @pytest.fixture(autouse=True)
    def almost(self, native: Native) -> Generator[None]:
        yield from kept(native, {f"acme.s{number}": RARE for number in range(TENANT_SCHEDULES.most - 1)})

    def test_when_several_are_added_at_once_then_one_is(self, native: Native) -> None:
        def add(number: int) -> tuple[int, str]:
            answer = native.acme.post("/schedules", json={**DAILY, "name": f"new{number}"})
            return (201, "") if answer.status_code == 201 else code_of(answer)

        with ThreadPoolExecutor(8) as threads:
            answers = sorted(threads.map(add, range(8)))

        assert answers == [(201, ""), *[(409, "too_many_schedules")] * 7]

    def test_when_it_has_all_then_it_may_replace_one_and_another_tenant_may_add_one(self, native: Native) -> None:
        last, more = {**DAILY, "name": "a"}, {**DAILY, "name": "b"}

        answers = [native.acme.post("/schedules", json=body) for body in (last, more, last)]

        assert [answer.status_code for answer in answers] == [201, 409, 201]
        assert "the tenant has 100 schedules in this queue, and may have 100: remove one" in answers[1].text
        assert native.globex.post("/schedules", json=more).status_code == 201


class TestGivenATenantWithAlmostAsManyScheduledJobsAsItMayHave:
    """Less than a full schedule is left."""

    @pytest.fixture(autouse=True)
    def almost(self, native: Native) -> Generator[None]:
        full = replace(RARE, num_jobs=MAX_JOBS)
        yield from kept(native, {f"acme.s{number}": full for number in range(TENANT_SCHEDULED_JOBS.most // MAX_JOBS)})

    def test_when_more_are_added_then_it_is_409(self, native: Native) -> None:
        num_left = TENANT_SCHEDULED_JOBS.most % MAX_JOBS
        jobs = [{"prompt": "one"}] * (num_left + 1)

        refused = native.acme.post("/schedules", json={**DAILY, "jobs": jobs})
        added = native.acme.post("/schedules", json={**DAILY, "jobs": jobs[1:]})

        assert code_of(refused) == (409, "too_many_scheduled_jobs")
        assert "one run of each schedule of the tenant has 2501 jobs, and may have 2500" in refused.text
        assert added.status_code == 201


class TestGivenAQueueWithAsManySchedulesAsItMayHave:
    """The rules of another tenant, most of which no run needs to read."""

    @pytest.fixture
    def keys(self, native: Native) -> Generator[ScheduleKeys]:
        keys = ScheduleKeys(QueueKeys("default"))
        with native.server.client() as client:
            names = [f"crowd.s{number}" for number in range(SCHEDULES.most)]
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
