"""The pages in a real browser: they work, stand still, and can be used by everybody."""

import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # pyright: ignore[reportMissingTypeStubs] (it has none)
from playwright.sync_api import expect

from sluice.gateway.ui.live import RETRY_S
from sluice.producer import Producer
from sluice.protocol.limits import MAX_TENANT_CHARS
from sluice.protocol.schedules.schedule import MAX_NAME_CHARS
from tests.gateway.gateway_process import new_key
from tests.gateway.ui.browser.conftest import NARROW, WIDE, Chromium, Scheme, Window
from tests.gateway.ui.conftest import ALL, IDLE, Browser, Site
from tests.gateway.ui.test_job_pages import listed, until
from tests.gateway.ui.test_live_streams import stream
from tests.gateway.ui.test_other_pages import GONE, dead, failed

pytestmark = pytest.mark.browser
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}
PAGES = ("/ui/", "/ui/jobs", "/ui/batches", "/ui/dead", "/ui/schedules", "/ui/tenants", "/ui/try")
BATCHES = (f"/ui/batches/{IDLE}/looked-at", "/ui/batches/default/broken")
MAX_SHIFT = 0.01
STREAM = "eventsource"
MOST_TABS = 30
FOCUS = """
(() => {
  const one = document.activeElement;
  const name = (one.getAttribute("aria-label") || one.textContent).trim();
  return { name, outline: getComputedStyle(one).outlineStyle };
})()
"""
LOOKER = f"looker-with-a-name-{'x' * (MAX_TENANT_CHARS - 19)}"
WIDTH = """
[document.documentElement, ...document.querySelectorAll(".scroll, pre")].map((one) => one.scrollWidth - one.clientWidth)
"""
"""How much wider the content of a page, and of each part that may scroll, is than its place."""


def violations(window: Window) -> list[str]:
    """What axe-core finds."""
    axe: Any = Axe()  # Any: it is untyped
    found = axe.run(window.page, options=RULES).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


def tab_to(window: Window, name: str, key: str = "Tab") -> None:
    """Press a key until an element of this name has the focus, which is seen."""
    focus: Any = {}  # Any: of JavaScript
    for _ in range(MOST_TABS):
        window.page.keyboard.press(key)
        focus = window.page.evaluate(FOCUS)
        if focus["name"] == name:
            break
    assert (focus["name"], focus["outline"]) == (name, "solid")


def is_listed(browser: Browser, job_id: str) -> bool:
    """Whether the history has a job."""
    return job_id in listed(browser)


def signed_in(window: Window, site: Site, tenant: str, scopes: tuple[str, ...] = ALL) -> Browser:
    """Sign in with a new key, and return another browser with it; the gateway reads the keys twice a second."""
    key, other = new_key(site.database_url, tenant, scopes=scopes), site.browser()
    while other.sign_in(key).status_code != 303:
        pass
    window.sign_in(site.url, key)
    return other


class TestGivenTheOverview:
    @pytest.mark.slow
    def test_when_it_is_opened_then_it_is_live_and_nothing_is_wrong(self, site: Site, chromium: Chromium) -> None:
        with chromium.window() as window:
            signed_in(window, site, "acme")

            expect(window.page.locator("#live")).to_have_text("live")
            expect(window.page.locator("#workers tbody tr")).not_to_have_count(0)
            expect(window.page.locator("#series canvas")).to_have_count(1)

            assert violations(window) == []
            assert window.shifted <= MAX_SHIFT
            assert window.faults == []


@pytest.mark.long
class TestGivenEveryPage:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
    def test_when_it_is_opened_then_it_stands_still_and_everybody_can_use_it(
        self, site: Site, chromium: Chromium, scheme: Scheme, size: tuple[int, int]
    ) -> None:
        failed(site, LOOKER, 2)
        with Producer(site.server.url) as producer:
            producer.submit("hello", model=GONE, tenant=LOOKER, batch="broken")
            name, zone = "n" * MAX_NAME_CHARS, "America/Argentina/ComodRivadavia"
            producer.add_schedule(name, ["hello"], cron="*/30 8-18 1 * mon-fri", tz=zone, tenant=LOOKER)
        until(lambda: "model_mismatch" in site.visitor(LOOKER).get("/ui/batches/default/broken").text)
        with Producer(site.server.url, queue=IDLE) as producer:
            job_id = producer.submit("<b>hello</b>", tenant=LOOKER, batch="looked-at").id
        with chromium.window(size, scheme) as window:
            window.page.goto(f"{site.url}/ui/sign-in")
            found = {"/ui/sign-in": violations(window)}
            signed_in(window, site, LOOKER)
            for path in (*PAGES, f"/ui/jobs/{job_id}", *BATCHES, "/ui/none"):
                window.page.goto(f"{site.url}{path}")
                window.page.wait_for_timeout(1500)
                for summary in window.page.locator("summary").all():
                    summary.click()
                found[path] = violations(window)
                assert window.shifted <= MAX_SHIFT, path
                assert max(window.page.evaluate(WIDTH)) == 0, path

            assert {path: faults for path, faults in found.items() if faults} == {}
            # Chromium says of each answer that is no success that it could not be loaded.
            assert [one for one in window.faults if "404" not in one] == []

    def test_when_the_page_is_hidden_then_its_only_connection_is_closed(self, site: Site, chromium: Chromium) -> None:
        opened, closed = list[str](), list[str]()
        with chromium.window() as window:
            window.page.on("request", lambda one: opened.append(one.url) if one.resource_type == STREAM else None)
            window.page.on("requestfailed", lambda one: closed.append(one.url) if one.resource_type == STREAM else None)
            signed_in(window, site, "acme")
            expect(window.page.locator("#live")).to_have_text("live")
            assert opened == [f"{site.url}/ui/events"]
            hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
            tell = "document.dispatchEvent(new Event('visibilitychange'));"

            window.page.evaluate(hide % "true" + tell)
            expect(window.page.locator("#live")).to_have_text("paused")
            assert closed == opened
            window.page.evaluate(hide % "false" + tell)

            expect(window.page.locator("#live")).to_have_text("live")
            assert len(opened) == 2


@pytest.mark.long
class TestGivenAKeyboardAlone:
    def test_when_it_is_used_then_a_dead_job_is_found_and_requeued(self, site: Site, chromium: Chromium) -> None:
        [job_id], key = failed(site, "typist", 1), new_key(site.database_url, "typist", scopes=ALL)
        while site.browser().sign_in(key).status_code != 303:
            pass
        with chromium.window() as window:
            window.page.goto(f"{site.url}/ui/sign-in")
            window.page.keyboard.type(key)
            window.page.keyboard.press("Enter")
            window.page.wait_for_url(f"{site.url}/ui/")
            tab_to(window, "Skip to the content")
            tab_to(window, "Dead set")
            window.page.keyboard.press("Enter")
            window.page.wait_for_url(f"{site.url}/ui/dead")
            tab_to(window, "Select jobs")
            window.page.keyboard.press("Enter")
            tab_to(window, f"Select job {job_id}")
            window.page.keyboard.press("Space")
            tab_to(window, "Requeue", "Shift+Tab")
            window.page.keyboard.press("Enter")

            expect(window.page.get_by_role("status")).to_have_text("The selected jobs wait again.")
        with Producer(site.server.url) as producer:
            assert producer.status(job_id).requeues == 1


@pytest.mark.long
class TestGivenAKeyWithTooManyLivePages:
    def test_when_another_is_opened_then_it_is_paused_until_one_is_closed(self, site: Site, chromium: Chromium) -> None:
        with chromium.window() as window:
            other = signed_in(window, site, "crowded")
            window.page.goto("about:blank")
            with ExitStack() as stack:
                while other.http.head("/ui/events").status_code == 200:
                    stream(stack, other)
                window.page.goto(f"{site.url}/ui/")
                expect(window.page.locator("#live")).to_have_text("paused: too many pages are open")

            expect(window.page.locator("#live")).to_have_text("live", timeout=3000 * RETRY_S)


@pytest.mark.long
class TestGivenTwoTenants:
    def test_when_each_signs_in_then_neither_sees_the_jobs_of_the_other(self, site: Site, chromium: Chromium) -> None:
        with Producer(site.server.url) as producer:
            jobs = {name: producer.submit("hello", tenant=name, batch=f"of-{name}").id for name in ("north", "south")}
        for name, job_id in jobs.items():
            until(partial(is_listed, site.visitor(name), job_id))
        with chromium.window() as north, chromium.window() as south:
            for window, own, other in ((north, "north", "south"), (south, "south", "north")):
                signed_in(window, site, own)
                window.page.goto(f"{site.url}/ui/jobs")
                expect(window.page.locator(f'a[href="/ui/jobs/{jobs[own]}"]')).to_have_count(1)
                expect(window.page.locator(f'a[href="/ui/jobs/{jobs[other]}"]')).to_have_count(0)
                window.page.goto(f"{site.url}/ui/batches")
                expect(window.page.get_by_text(f"of-{other}")).to_have_count(0)
                window.page.goto(f"{site.url}/ui/jobs/{jobs[other]}")
                expect(window.page.get_by_role("heading", name="Not found")).to_be_visible()


@pytest.mark.long
class TestGivenADeadJob:
    def test_when_it_is_ticked_and_requeued_then_it_alone_runs_again(self, site: Site, chromium: Chromium) -> None:
        first, second = failed(site, "ticker", 2)
        with chromium.window() as window:
            signed_in(window, site, "ticker")
            window.page.get_by_role("link", name="Dead set").click()
            window.page.get_by_text("Select jobs").click()
            window.page.get_by_label(f"Select job {first}").check()
            expect(window.page.locator("[data-all]")).not_to_be_checked()

            window.page.get_by_role("button", name="Requeue").click()

            expect(window.page.get_by_role("status")).to_have_text("The selected jobs wait again.")
            assert window.faults == []
        with Producer(site.server.url) as producer:
            assert [producer.status(one).requeues for one in (first, second)] == [1, 0]
        assert second in dead(site, "ticker")


@pytest.mark.long
class TestGivenAQuestion:
    def test_when_its_visitor_leaves_and_rejoins_then_the_whole_answer_is_there(
        self, site: Site, chromium: Chromium
    ) -> None:
        with chromium.window() as window:
            signed_in(window, site, "curious")
            window.page.get_by_role("link", name="Try it").click()
            window.page.get_by_label("Question").fill("Why <script>alert(1)</script>?")
            window.page.goto(f"{site.url}/ui/")
            window.page.get_by_role("link", name="Try it").click()
            expect(window.page.get_by_label("Question")).to_have_value("Why <script>alert(1)</script>?")
            window.page.get_by_label("Most tokens").fill("200")
            window.page.get_by_role("button", name="Ask").click()
            window.page.wait_for_url(re.compile(r"/ui/jobs/"))
            job_url = window.page.url

            window.page.goto(f"{site.url}/ui/try")
            expect(window.page.get_by_label("Question")).to_have_value("")
            window.page.goto(job_url)

            expect(window.page.locator("#state .state")).to_have_text("done", timeout=20_000)
            with Producer(site.server.url) as producer:
                text = producer.result(job_url.rpartition("/")[2], timeout_s=20).choices[0].text
            expect(window.page.locator("#choice-0")).to_have_text(text, use_inner_text=False)
            assert window.faults == []


@pytest.mark.long
class TestGivenTheFormOfASchedule:
    def test_when_it_is_filled_then_the_schedule_is_added_paused_and_removed(
        self, site: Site, chromium: Chromium
    ) -> None:
        with chromium.window() as window:
            signed_in(window, site, "planner")
            window.page.get_by_role("link", name="Schedules").click()
            window.page.get_by_label("Name").fill("report")
            window.page.get_by_label("Queue").select_option(IDLE)
            window.page.get_by_label("Cron rule").fill("0 9 * *")
            window.page.get_by_label("Time zone").fill("Europe/Berlin")
            window.page.get_by_label("Jobs of a run").fill("Summarise:\n- yesterday")
            window.page.get_by_role("button", name="Add schedule").click()
            expect(window.page.get_by_role("alert")).to_contain_text("'0 9 * *' is not a cron rule")
            expect(window.page.get_by_label("Jobs of a run")).to_have_value("Summarise:\n- yesterday")
            expect(window.page.get_by_label("Name")).to_be_focused()
            window.page.get_by_label("Cron rule").fill("0 9 * * mon")
            window.page.get_by_role("button", name="Show next runs").click()
            expect(window.page.get_by_role("status")).to_contain_text("It will run next at")
            window.page.get_by_role("button", name="Add schedule").click()
            expect(window.page.get_by_role("status")).to_contain_text("The schedule is added.")

            window.page.get_by_role("button", name="Pause report").click()
            expect(window.page.get_by_role("status")).to_contain_text("The schedule is paused.")
            with Producer(site.server.url, queue=IDLE) as producer:
                [view] = producer.schedules(tenant="planner")
            assert (view.cron, view.zone, view.paused) == ("0 9 * * mon", "Europe/Berlin", True)
            window.page.get_by_role("button", name="Remove report").click()
            expect(window.page.get_by_role("heading", name="Remove report?")).to_be_visible()
            assert violations(window) == []
            window.page.get_by_role("button", name="Remove the schedule").click()

            expect(window.page.get_by_role("status")).to_contain_text("The schedule is removed.")
            # Chromium says of each answer that is no success that it could not be loaded.
            assert [one for one in window.faults if "400" not in one] == []
        with Producer(site.server.url, queue=IDLE) as producer:
            assert producer.schedules(tenant="planner") == []


@pytest.mark.long
class TestGivenTheFormOfLimits:
    def test_when_it_is_filled_and_emptied_then_the_tenant_is_limited_and_no_longer(
        self, site: Site, chromium: Chromium
    ) -> None:
        def limit(jobs: str, tokens: str) -> None:
            window.page.get_by_label("Tenant", exact=True).fill("tenant-with-limits")
            window.page.get_by_label("Queue").select_option(IDLE)
            window.page.get_by_label("Jobs at once").fill(jobs)
            window.page.get_by_label("Tokens a minute").fill(tokens)
            window.page.get_by_role("button", name="Set limits").click()
            expect(window.page.get_by_role("status")).to_contain_text("The limits are set.")

        with chromium.window() as window, Producer(site.server.url, queue=IDLE) as producer:
            signed_in(window, site, "operator")
            window.page.get_by_role("link", name="Tenants").click()
            limit("3", "9000")
            row = window.page.get_by_role("row", name="tenant-with-limits")
            expect(row).to_contain_text("0 of 3 running")
            expect(row).to_contain_text("9,000 of 9,000 tokens left")

            limit("", "")

            assert [view.limits for view in producer.queue()] == [()]
            expect(row).to_have_count(0)
            assert window.faults == []
