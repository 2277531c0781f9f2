"""The dead set, batches, tenants with their costs, and questions from the page."""

import re
from html import unescape

import pytest

from sluice.history import tables
from sluice.producer import Producer
from sluice.producer.operations.dead import DeadFilter
from tests.gateway.gateway_process import write
from tests.gateway.ui.conftest import IDLE, Browser, Site
from tests.gateway.ui.test_job_pages import HOSTILE, listed, until

pytestmark = pytest.mark.slow
GONE = "gone"
"""A model that no worker serves: its jobs fail, and a requeue may mend them."""


def failed(site: Site, tenant: str, count: int) -> list[str]:
    """Submit jobs for that model, and wait for their end."""
    with Producer(site.server.url) as producer:
        jobs = [producer.submit("hello", model=GONE, tenant=tenant, max_tokens=5).id for _ in range(count)]
        until(lambda: {*jobs} <= {view.id for view in producer.dead(DeadFilter(tenant=tenant))})
    return list(map(str, jobs))


def dead(site: Site, tenant: str) -> set[str]:
    """The dead jobs of a tenant."""
    with Producer(site.server.url) as producer:
        return {str(view.id) for view in producer.dead(DeadFilter(tenant=tenant))}


def seen_until(browser: Browser) -> str:
    """What the form of the only group says of the time at which it was read."""
    [until_ms] = re.findall(r'name="until" value="(\d+)"', browser.get("/ui/dead").text)
    return str(until_ms)


class TestGivenDeadJobs:
    def test_when_the_page_is_opened_then_they_are_grouped_by_error(self, site: Site) -> None:
        failed(site, "grouped", 2)

        text = site.visitor("grouped").get("/ui/dead").text

        assert re.findall(r"<h2>(\w+)</h2>", text) == ["model_mismatch"]
        assert "2 jobs in default" in text

    def test_when_some_are_deleted_then_the_others_stay(self, site: Site) -> None:
        jobs, browser = failed(site, "deleter", 3), site.visitor("deleter")

        answer = browser.post("/ui/dead", do="delete", queue="default", job=jobs[:2], confirmed="1")

        assert answer.headers["location"].endswith("said=dead_deleted")
        assert dead(site, "deleter") == {jobs[2]}

    def test_when_one_is_ticked_beside_all_then_only_that_one_is_deleted(self, site: Site) -> None:
        jobs, browser = failed(site, "ticker", 2), site.visitor("ticker")

        fields = {"do": "delete", "queue": "default", "code": "model_mismatch", "all": "1", "confirmed": "1"}
        browser.post("/ui/dead", **fields, until=seen_until(browser), job=jobs[:1])

        assert dead(site, "ticker") == {jobs[1]}

    def test_when_all_of_a_group_are_requeued_then_they_run_again(self, site: Site) -> None:
        jobs, browser = failed(site, "requeuer", 2), site.visitor("requeuer")

        group = {"code": "model_mismatch", "all": "1", "until": seen_until(browser)}
        answer = browser.post("/ui/dead", do="requeue", queue="default", **group)

        assert answer.headers["location"].endswith("said=dead_requeued")
        with Producer(site.server.url) as producer:
            until(lambda: all(producer.status(one).requeues == 1 for one in jobs))

    def test_when_all_are_deleted_then_the_number_is_confirmed_first(self, site: Site) -> None:
        jobs, browser = failed(site, "confirmer", 2), site.visitor("confirmer")
        fields = {"do": "delete", "queue": "default", "code": "model_mismatch", "all": "1"}
        fields["until"] = seen_until(browser)

        asked = browser.post("/ui/dead", **fields)

        assert asked.status_code == 200
        assert "Delete 2 jobs?" in asked.text
        assert "model_mismatch" in asked.text
        assert dead(site, "confirmer") == {*jobs}
        hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', asked.text)
        sent = {**dict(hidden), "do": "delete"}
        browser.http.post("/ui/dead", data=sent, headers={"origin": site.url})
        assert dead(site, "confirmer") == set()

    @pytest.mark.parametrize("action", ["requeue", "delete"])
    def test_when_another_dies_after_the_page_was_read_then_all_does_not_mean_it(self, site: Site, action: str) -> None:
        tenant = f"later-{action}"
        seen, browser = failed(site, tenant, 2), site.visitor(tenant)
        until_ms = seen_until(browser)
        [unseen] = failed(site, tenant, 1)

        fields = {"code": "model_mismatch", "all": "1", "until": until_ms, "confirmed": "1"}
        browser.post("/ui/dead", do=action, queue="default", **fields)

        with Producer(site.server.url) as producer:
            assert producer.status(unseen).requeues == 0
            until(lambda: unseen in dead(site, tenant))
            if action == "requeue":
                assert [producer.status(one).requeues for one in seen] == [1, 1]
            else:
                assert dead(site, tenant) == {unseen}

    def test_when_another_tenants_are_selected_then_nothing_happens(self, site: Site) -> None:
        jobs = failed(site, "victim", 1)

        answer = site.visitor("thief").post("/ui/dead", do="delete", queue="default", job=jobs)

        assert answer.headers["location"].endswith("said=dead_none")
        assert dead(site, "victim") == {*jobs}
        assert jobs[0] not in site.visitor("thief").get("/ui/dead").text

    def test_when_there_is_none_then_the_page_says_what_it_is_for(self, site: Site) -> None:
        assert "Nothing is dead." in site.visitor("nobody").get("/ui/dead").text


class TestGivenABatch:
    def test_when_two_tenants_share_its_name_then_each_sees_its_own_jobs(self, site: Site) -> None:
        with Producer(site.server.url) as producer:
            for tenant in ("first", "first", "second"):
                producer.submit("hello", tenant=tenant, batch="shared", max_tokens=2)
        first, second = site.visitor("first"), site.visitor("second")

        until(lambda: "2 of 2 jobs have ended" in first.get("/ui/batches/default/shared").text)
        until(lambda: "1 of 1 jobs have ended" in second.get("/ui/batches/default/shared").text)

        until(lambda: "shared" in first.get("/ui/batches").text)
        assert "shared" not in site.visitor("third").get("/ui/batches").text
        assert site.visitor("third").get("/ui/batches/default/shared").status_code == 404

    def test_when_jobs_ended_without_an_error_then_its_link_lists_them(self, site: Site) -> None:
        job_id, path, browser = "0.stopper.1", f"/ui/batches/{IDLE}/stopped", site.visitor("stopper")
        row = {"id": job_id, "queue": IDLE, "partition": 0, "tenant": "stopper", "version": 3, "state": "cancelled"}
        write(site.database_url, tables.jobs.insert().values(**row, batch="stopped", submitted_ms=1, finished_ms=2))

        [link] = re.findall(r'<td class="name"><a href="/ui/jobs([^"]+)">cancelled</a>', browser.get(path).text)

        assert listed(browser, unescape(link)) == [job_id]

    def test_when_a_page_of_a_batch_is_unknown_then_it_is_404(self, site: Site) -> None:
        browser = site.visitor()

        paths = ("/ui/batches/default/none", "/ui/batches/none/none", "/ui/batches/default/none/output.jsonl")
        assert [browser.get(path).status_code for path in paths] == [404, 404, 404]


class TestGivenAPrice:
    def test_when_jobs_end_afterwards_then_their_cost_is_shown(self, site: Site) -> None:
        admin, tenant = site.visitor("operator"), site.visitor("payer", scopes=("read",))
        admin.post("/ui/prices", model="null", input="1000000", cached="0", output="1000000", currency="eur")

        with Producer(site.server.url) as producer:
            usage = producer.result(producer.submit("hello", tenant="payer", max_tokens=3)).usage

        expected = f"{usage.prompt_tokens - usage.cached_tokens + usage.output_tokens:,.2f} EUR"
        until(lambda: expected in tenant.get("/ui/tenants").text)

    def test_when_a_key_without_admin_sets_one_then_it_is_403(self, site: Site) -> None:
        browser = site.visitor(scopes=("read", "submit", "control"))

        answer = browser.post("/ui/prices", model="m", input="1", cached="1", output="1", currency="USD")

        assert answer.status_code == 403

    def test_when_it_is_wrong_then_it_is_refused(self, site: Site) -> None:
        browser, right = site.visitor(), {"model": "m", "input": "1", "cached": "1", "output": "1", "currency": "USD"}

        wrong = [{"model": ""}, {"input": "nan"}, {"output": "-1"}, {"cached": "x"}, {"currency": "dollars"}]

        assert [browser.post("/ui/prices", **(right | one)).status_code for one in wrong] == [400] * 5


class TestGivenLimitsOfATenant:
    def test_when_they_are_set_then_the_page_shows_at_once_what_is_left(self, site: Site) -> None:
        admin = site.visitor("operator")
        admin.get("/ui/tenants")

        answer = admin.post("/ui/limits", tenant="bound", queue="default", max_running="3", tokens_per_minute="9000")

        text = admin.get(answer.headers["location"]).text
        assert "0 of 3 running" in text
        assert "9,000 of 9,000 tokens left" in text
        answer = admin.post("/ui/limits", tenant="bound", queue="default", max_running="", tokens_per_minute="")
        assert "of 3 running" not in admin.get(answer.headers["location"]).text

    def test_when_a_key_without_admin_sets_them_then_it_is_403(self, site: Site) -> None:
        browser = site.visitor(scopes=("read", "submit", "control"))

        assert browser.post("/ui/limits", tenant="t", queue="default", max_running="3").status_code == 403

    def test_when_they_are_wrong_then_they_are_refused(self, site: Site) -> None:
        browser, right = site.visitor(), {"tenant": "t", "queue": "default", "max_running": "1"}

        wrong = [{"tenant": ""}, {"tenant": "T"}, {"max_running": "-1"}, {"max_running": "x"}]
        wrong += [{"tokens_per_minute": "0"}, {"max_running": "9" * 17}]

        assert [browser.post("/ui/limits", **(right | one)).status_code for one in wrong] == [400] * 6
        assert browser.post("/ui/limits", **(right | {"queue": "none"})).status_code == 404


class TestGivenATenantWithoutAdmin:
    def test_when_a_tenant_looks_then_it_sees_no_others(self, site: Site) -> None:
        text = site.visitor("alone", scopes=("read",)).get("/ui/tenants").text

        assert re.findall(r"/ui/jobs\?tenant=(\w+)", text) == ["alone"]


class TestGivenSchedulesOfTwoTenants:
    @pytest.fixture(autouse=True)
    def added(self, site: Site) -> None:
        with Producer(site.server.url) as producer:
            for tenant in ("early", "late"):
                producer.add_schedule(f"of-{tenant}", [HOSTILE], cron="30 6 * * *", tz="Europe/Berlin", tenant=tenant)
            producer.pause_schedule("of-late", tenant="late")

    def test_when_a_tenant_looks_then_it_sees_its_own_with_its_next_runs(self, site: Site) -> None:
        text = site.visitor("early", scopes=("read",)).get("/ui/schedules").text

        assert "of-late" not in text
        assert len(re.findall(r"\d{4}-\d\d-\d\d 06:30", text)) == 3

    def test_when_an_operator_looks_then_it_sees_all_and_what_is_paused(self, site: Site) -> None:
        text = site.visitor("operator").get("/ui/schedules").text

        assert re.findall(r'<td class="name">(of-\w+)</td>', text) == ["of-early", "of-late"]
        assert ">paused</td>" in text


class TestGivenAQuestion:
    def test_when_it_is_asked_then_its_job_answers_and_is_found_again(self, site: Site) -> None:
        browser = site.visitor("asker")

        answer = browser.post("/ui/try", prompt="Why?", model="null", max_tokens="7", temperature="0")

        job_id = answer.headers["location"].removeprefix("/ui/jobs/")
        until(lambda: job_id in browser.get("/ui/try").text)
        assert job_id in listed(browser, "?batch=page")
        assert job_id not in site.visitor("other").get("/ui/try").text
        assert "as_chat=True," in browser.get(f"/ui/jobs/{job_id}").text

    def test_when_a_field_is_wrong_then_it_is_refused(self, site: Site) -> None:
        browser, right = site.visitor(), {"prompt": "Why?", "model": "null", "max_tokens": "7", "temperature": "0"}

        wrong = [{"prompt": " "}, {"max_tokens": "0"}, {"temperature": "9"}, {"max_tokens": "many"}]

        assert [browser.post("/ui/try", **(right | one)).status_code for one in wrong] == [400] * 4

    @pytest.mark.parametrize(
        ("wrong", "status", "said"),
        [
            ({"max_tokens": "0"}, 400, "Most tokens must be a number from 1 to"),
            ({"model": "gone"}, 404, "is not served; served: null"),
        ],
        ids=["number", "model"],
    )
    def test_when_it_is_refused_then_the_form_keeps_what_was_written(
        self, site: Site, wrong: dict[str, str], status: int, said: str
    ) -> None:
        asked = {"prompt": f"{HOSTILE}\nWhy?", "model": "null", "max_tokens": "7", "temperature": "0.25"} | wrong

        answer = site.visitor().post("/ui/try", **asked)

        text = unescape(answer.text)
        assert (answer.status_code, said in text) == (status, True)
        assert f">\n{asked['prompt']}</textarea>" in text
        assert f'value="{asked["max_tokens"]}"' in text
        assert f'value="{asked["temperature"]}"' in text

    def test_when_the_key_lacks_submit_then_it_is_403(self, site: Site) -> None:
        browser = site.visitor(scopes=("read",))

        assert browser.get("/ui/try").status_code == 403
        assert IDLE not in browser.get("/ui/").text
