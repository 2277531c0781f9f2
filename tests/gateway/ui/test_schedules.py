"""The page of schedules: its forms add, pause, resume and remove, and each change has a row in the audit log."""

import re
from html import unescape

import httpx
import pytest
import sqlalchemy as sa

from sluice.history.tables import audit_log
from sluice.producer import Producer
from sluice.producer.operations.schedules import ScheduleView
from sluice.protocol.keys import QueueKeys
from sluice.protocol.schedules.schedule import ScheduleKeys
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.ui.conftest import IDLE, Browser, Site
from tests.gateway.ui.test_job_pages import HOSTILE
from tests.gateway.ui.test_sign_in import rows

pytestmark = pytest.mark.slow
PATH = "/ui/schedules"
NEW = {
    "name": "report",
    "queue": IDLE,
    "cron": "0 9 * * mon-fri",
    "zone": "Europe/Berlin",
    "misfire": "skip",
    "overlap": "allow",
    "kind": "prompt",
    "jobs": "Summarise yesterday.",
}
RUN = r"\d{4}-\d\d-\d\d 09:00"


def kept(site: Site, tenant: str) -> list[ScheduleView]:
    """The schedules of a tenant in the idle queue."""
    with Producer(site.server.url, queue=IDLE) as producer:
        return producer.schedules(tenant=tenant)


def added(site: Site, tenant: str) -> Browser:
    """A visitor whose tenant has a schedule."""
    browser = site.visitor(tenant)
    assert browser.post(PATH, **NEW).headers["location"].startswith(PATH)
    return browser


def change(browser: Browser, do: str, tenant: str, **fields: str) -> tuple[int, str]:
    """Press a button beside the schedule, and return the answer's status and where it leads."""
    answer = browser.post(f"{PATH}/change", do=do, queue=IDLE, tenant=tenant, name="report", **fields)
    return answer.status_code, answer.headers.get("location", "")


def recorded(site: Site, tenant: str) -> list[tuple[object, ...]]:
    """What the audit log has of a tenant besides its sign-ins, oldest first."""
    query = sa.select(audit_log.c.action, audit_log.c.queue, audit_log.c.target, audit_log.c.outcome)
    own = query.where(audit_log.c.tenant == tenant, audit_log.c.action != "sign_in")
    return rows(site.database_url, own.order_by(audit_log.c.at_ms))


class TestGivenTheFormOfASchedule:
    def test_when_it_is_sent_then_the_list_has_it_with_its_next_runs(self, site: Site) -> None:
        browser = site.visitor("adder", scopes=("read", "submit"))

        answer = browser.post(PATH, **NEW)

        text = browser.get(answer.headers["location"]).text
        assert "The schedule is added." in text
        assert '<td class="name">report</td>' in text
        assert len(re.findall(RUN, text)) == 3
        [view] = kept(site, "adder")
        assert (view.cron, view.zone, view.misfire, view.overlap) == (NEW["cron"], NEW["zone"], "skip", "allow")
        assert recorded(site, "adder") == [
            ("add_schedule", IDLE, "adder.report 0 9 * * mon-fri Europe/Berlin", "done"),
        ]

    def test_when_its_jobs_are_lines_then_each_is_a_job(self, site: Site) -> None:
        lines = '{"prompt": "one", "max_tokens": 3}\r\n\r\n{"prompt": "two"}\r\n'

        site.visitor("liner").post(PATH, **NEW | {"kind": "lines of a bulk file", "jobs": lines})

        assert [view.num_jobs for view in kept(site, "liner")] == [2]

    def test_when_a_browser_sends_a_prompt_of_lines_then_it_is_kept_as_written(self, site: Site) -> None:
        site.visitor("writer").post(PATH, **NEW | {"jobs": "Summarise:\r\n- yesterday"})

        with site.server.client() as client:
            packed = client.hget(ScheduleKeys(QueueKeys(IDLE)).jobs, "writer.report")
        assert b"Summarise:\n- yesterday" in packed

    def test_when_its_next_runs_are_asked_for_then_they_are_shown_and_nothing_is_added(self, site: Site) -> None:
        answer = site.visitor("planner", scopes=("read", "submit")).post(PATH, **NEW, preview="1")

        assert answer.status_code == 200
        assert len(re.findall(RUN, answer.text)) == 3
        assert "<option selected>skip</option>" in answer.text
        assert 'value="Europe/Berlin"' in answer.text
        assert (kept(site, "planner"), recorded(site, "planner")) == ([], [])

    @pytest.mark.parametrize(
        ("wrong", "status", "said"),
        [
            ({"name": "a.b"}, 400, "A schedule's name is 1 to 40 letters"),
            ({"cron": "soon"}, 400, "'soon' is not a cron rule such as"),
            ({"zone": "Mars/Olympus"}, 400, "There is no time zone 'Mars/Olympus'"),
            ({"misfire": "never"}, 400, "Misfire must be one of latest, all, skip"),
            ({"overlap": "never"}, 400, "Overlap must be one of allow, skip"),
            ({"queue": "none"}, 404, "The gateway does not serve this queue."),
            ({"jobs": ""}, 400, "prompt"),
            ({"kind": "lines", "jobs": " "}, 400, "A schedule has 1 to 256 jobs, got 0."),
            ({"kind": "lines", "jobs": '{"prompt": "one"}\n{"prompt": 2}'}, 400, "Line 2: "),
            ({"kind": "lines", "jobs": '{"prompt": "one"}\n' * 257}, 400, "A schedule has at most 256 jobs"),
            ({"kind": "lines", "jobs": '{"prompt": "a", "tenant": "globex"}'}, 400, "must be one of its tenant, 'err"),
            ({"kind": "lines", "jobs": '{"prompt": "a", "idempotency_key": "k"}'}, 400, "A scheduled job has neither"),
        ],
    )
    def test_when_it_is_refused_then_it_says_why_and_keeps_what_was_written(
        self, site: Site, wrong: dict[str, str], status: int, said: str
    ) -> None:
        written = NEW | {"name": "kept", "jobs": f"{HOSTILE}\nWhy?"} | wrong

        answer = site.visitor("erring").post(PATH, **written)

        text = unescape(answer.text)
        assert (answer.status_code, said in text) == (status, True)
        assert f">\n{written['jobs']}</textarea>" in text
        assert all(f'value="{written[name]}"' in text for name in ("name", "cron", "zone"))
        assert (kept(site, "erring"), recorded(site, "erring")) == ([], [])

    def test_when_the_key_lacks_submit_then_it_is_403_and_there_is_no_form(self, site: Site) -> None:
        browser = site.visitor("reader", scopes=("read", "control"))

        assert browser.post(PATH, **NEW).status_code == 403
        assert "Add a schedule" not in browser.get(PATH).text

    def test_when_it_names_another_tenant_then_the_schedule_is_the_keys(self, site: Site) -> None:
        site.visitor("namer").post(PATH, **NEW, tenant="named")

        assert (len(kept(site, "namer")), kept(site, "named")) == (1, [])


class TestGivenAScheduleOfATenant:
    def test_when_it_is_paused_and_resumed_then_the_list_and_the_audit_log_say_so(self, site: Site) -> None:
        browser = added(site, "pauser")

        paused = change(browser, "pause", "pauser")
        shown = browser.get(paused[1]).text
        resumed = change(browser, "resume", "pauser")

        assert (paused, resumed) == ((303, f"{PATH}?said=schedule_pause"), (303, f"{PATH}?said=schedule_resume"))
        assert 'aria-label="Resume report"' in shown
        assert [view.paused for view in kept(site, "pauser")] == [False]
        assert recorded(site, "pauser")[1:] == [
            ("pause_schedule", IDLE, "pauser.report", "done"),
            ("resume_schedule", IDLE, "pauser.report", "done"),
        ]

    def test_when_it_is_removed_then_that_is_confirmed_first(self, site: Site) -> None:
        browser = added(site, "remover")

        asked = browser.post(f"{PATH}/change", do="remove", queue=IDLE, tenant="remover", name="report")

        assert "Remove report?" in asked.text
        assert len(kept(site, "remover")) == 1
        hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', asked.text))
        browser.http.post(f"{PATH}/change", data={**hidden, "do": "remove"}, headers={"origin": site.url})
        assert kept(site, "remover") == []
        assert recorded(site, "remover")[1:] == [("remove_schedule", IDLE, "remover.report", "done")]

    @pytest.mark.parametrize("do", ["pause", "resume", "remove"])
    def test_when_another_tenant_changes_it_then_it_is_as_an_unknown_one(self, site: Site, do: str) -> None:
        if not kept(site, "owner"):
            added(site, "owner")
        burglar = site.visitor("burglar")

        assert change(burglar, do, "owner", confirmed="1")[0] == 404
        assert change(burglar, do, "burglar", confirmed="1")[0] == 404
        assert [view.paused for view in kept(site, "owner")] == [False]
        assert recorded(site, "burglar") == []
        # An operator sees it, without buttons.
        assert "owner" in burglar.get(PATH).text
        assert 'name="tenant" value="owner"' not in burglar.get(PATH).text

    def test_when_the_key_lacks_control_then_it_is_403_and_there_are_no_buttons(self, site: Site) -> None:
        added(site, "tied")
        browser = site.visitor("tied", scopes=("read", "submit"))

        assert change(browser, "pause", "tied")[0] == 403
        assert f"{PATH}/change" not in browser.get(PATH).text

    def test_when_the_change_is_none_then_it_is_refused(self, site: Site) -> None:
        assert change(added(site, "chooser"), "delete", "chooser")[0] == 400


def sent(gateway: GatewayProcess, path: str, fields: dict[str, str]) -> httpx.Response:
    """Send a form of the page of a gateway without keys."""
    with gateway.http() as http:
        [csrf] = {*re.findall(r'name="csrf" value="([^"]+)"', http.get(PATH).text)}
        origin = str(http.base_url).rstrip("/")
        return http.post(path, data={"csrf": csrf, **fields}, headers={"origin": origin})


class TestGivenAGatewayWithoutKeys:
    """Everybody on this machine may do everything."""

    def test_when_a_tenant_is_chosen_then_its_schedule_is_added_and_removed(self, site: Site, sqlite_url: str) -> None:
        chosen = {"queue": IDLE, "tenant": "chosen", "name": "report"}
        with gateway_process(site.server.url, "--queue", IDLE, database_url=sqlite_url) as gateway:
            added = sent(gateway, PATH, NEW | chosen)
            names = [view.name for view in kept(site, "chosen")]
            removed = sent(gateway, f"{PATH}/change", {**chosen, "do": "remove", "confirmed": "1"})

        assert (added.status_code, names) == (303, ["report"])
        assert (removed.status_code, kept(site, "chosen")) == (303, [])
        query = sa.select(audit_log.c.action, audit_log.c.tenant, audit_log.c.target).order_by(audit_log.c.at_ms)
        assert rows(sqlite_url, query) == [
            ("add_schedule", None, "chosen.report 0 9 * * mon-fri Europe/Berlin"),
            ("remove_schedule", None, "chosen.report"),
        ]


class TestGivenAnAuditLogThatCannotBeWritten:
    def test_when_schedules_are_changed_then_nothing_is_and_the_form_says_so(self, site: Site) -> None:
        with Producer(site.server.url, queue=IDLE) as producer:
            producer.add_schedule("old", ["hello"], cron="@daily", tenant="unlogged")
        with gateway_process(site.server.url, "--queue", IDLE) as gateway:
            answer = sent(gateway, PATH, NEW | {"tenant": "unlogged"})
            changes = [
                sent(gateway, f"{PATH}/change", {"queue": IDLE, "tenant": "unlogged", "name": "old", **fields})
                for fields in ({"do": "pause"}, {"do": "remove", "confirmed": "1"})
            ]

        assert answer.status_code == 503
        assert "lacks the tables of this release" in answer.text
        assert f">\n{NEW['jobs']}</textarea>" in answer.text
        assert [change.status_code for change in changes] == [503, 503]
        assert [(view.name, view.paused) for view in kept(site, "unlogged")] == [("old", False)]
