"""Who may look at the page: sign-in, cookies, protection of forms, headers."""

import re
import socket
import time
from hashlib import sha256
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa

from sluice.history.database import open_database
from sluice.history.tables import audit_log, page_sessions
from tests.gateway.gateway_process import gateway_process, line_of, new_key, revoke
from tests.gateway.ui.conftest import Site

pytestmark = pytest.mark.slow
SIGN_IN = "/ui/sign-in"


def rows(url: str, query: sa.Select[*tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows of the database."""
    engine = open_database(url)
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(query)]
    engine.dispose()
    return found


class TestGivenAVisitorWithoutASession:
    def test_when_a_page_is_opened_then_the_sign_in_leads_back_to_it(self, site: Site) -> None:
        answer = site.browser().get("/ui/events")

        assert (answer.status_code, answer.headers["location"]) == (303, f"{SIGN_IN}?next=/ui/events")

    def test_when_a_live_stream_is_opened_then_it_is_401(self, site: Site) -> None:
        answer = site.browser().http.get("/ui/events", headers={"accept": "text/event-stream"})

        assert answer.status_code == 401

    @pytest.mark.parametrize("key", ["", "sluice_00_wrong", "x" * 1000])
    def test_when_the_key_is_wrong_then_no_cookie_is_set(self, site: Site, key: str) -> None:
        answer = site.browser().sign_in(key)

        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers

    def test_when_the_key_is_wrong_then_the_audit_log_has_its_id_and_address_alone(self, site: Site) -> None:
        key = new_key(site.database_url, "mistyped")
        key_id = key.split("_")[1]

        # Its own gateway: each writes down a few in a minute.
        with gateway_process(site.server.url, database_url=site.database_url) as gateway, gateway.http() as http:
            http.post(SIGN_IN, data={"key": f"{key}x"}, headers={"origin": str(http.base_url).rstrip("/")})

        query = sa.select(audit_log.c.target, audit_log.c.tenant, audit_log.c.outcome)
        assert rows(site.database_url, query.where(audit_log.c.key_id == key_id)) == [("127.0.0.1", None, "refused")]
        assert key.split("_", 2)[2] not in str(rows(site.database_url, sa.select(*audit_log.columns)))

    def test_when_its_form_is_larger_than_a_key_needs_then_it_is_413(self, site: Site) -> None:
        assert site.browser().sign_in("x" * 100_000).status_code == 413

    def test_when_it_leaves_in_its_form_then_that_is_no_failure(self, site: Site) -> None:
        url, request_id = httpx.URL(site.url), uuid4().hex
        head = f"POST {SIGN_IN} HTTP/1.1\r\nhost: {url.netloc.decode()}\r\norigin: {site.url}\r\n"
        form = (
            f"x-request-id: {request_id}\r\ncontent-type: application/x-www-form-urlencoded\r\ncontent-length: 99\r\n"
        )

        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(f"{head}{form}\r\nkey=".encode())

        assert line_of(site.gateway, request_id)["status"] == 499

    @pytest.mark.parametrize("back", ["https://evil.example/", "//evil.example", "/ui//evil.example", "/ui/\\evil"])
    def test_when_the_way_back_leads_elsewhere_then_it_is_not_taken(self, site: Site, back: str) -> None:
        key = new_key(site.database_url, "acme")
        browser = site.browser()
        form = {"key": key, "next": back}

        while (answer := browser.http.post(SIGN_IN, data=form, headers={"origin": site.url})).status_code != 303:
            pass

        assert answer.headers["location"] == "/ui/"

    def test_when_an_api_key_is_sent_as_a_header_then_the_page_ignores_it(self, site: Site) -> None:
        key = new_key(site.database_url, "acme")

        answer = site.browser().http.get("/ui/", headers={"authorization": f"Bearer {key}"})

        assert answer.status_code == 303


class TestGivenASignIn:
    def test_when_its_cookie_is_read_then_scripts_and_other_sites_do_not_get_it(self, site: Site) -> None:
        browser = site.visitor()

        [cookie] = browser.http.cookies.jar
        assert (cookie.path, cookie.has_nonstandard_attr("HttpOnly")) == ("/ui", True)
        assert cookie.get_nonstandard_attr("SameSite") == "strict"

    def test_when_a_proxy_in_front_ended_tls_then_the_cookie_is_secure(self, site: Site) -> None:
        key, origin = new_key(site.database_url, "acme"), site.url.replace("http:", "https:")
        form, browser = {"key": key}, site.browser()

        while (answer := browser.http.post(SIGN_IN, data=form, headers={"origin": origin})).status_code != 303:
            pass

        assert "; secure" in answer.headers["set-cookie"].lower()

    def test_when_the_database_is_read_then_it_has_only_the_hash(self, site: Site) -> None:
        token = site.visitor().http.cookies["sluice_session"]

        digests = {row[0] for row in rows(site.database_url, sa.select(page_sessions.c.digest))}

        assert sha256(token.encode()).hexdigest() in digests
        assert token not in str(digests)

    def test_when_its_key_is_revoked_then_it_is_over_within_a_second(self, site: Site) -> None:
        key = new_key(site.database_url, "acme", scopes=("read",))
        browser = site.browser()
        while browser.sign_in(key).status_code != 303:
            pass

        revoke(site.database_url, key)
        revoked_s = asked_s = time.monotonic()
        while browser.get("/ui/").status_code == 200:
            assert asked_s - revoked_s < 1.0
            asked_s = time.monotonic()

        assert browser.get("/ui/").headers["location"] == SIGN_IN

    def test_when_its_key_is_revoked_then_its_live_stream_ends(self, site: Site) -> None:
        key = new_key(site.database_url, "acme", scopes=("read",))
        browser = site.browser()
        while browser.sign_in(key).status_code != 303:
            pass

        with browser.http.stream("GET", "/ui/events", headers={"accept": "text/event-stream"}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: parts"
            revoke(site.database_url, key)
            kinds = [line for line in lines if line.startswith("event: ")]

        assert kinds[-1] == "event: over"

    def test_when_it_signs_out_then_its_token_is_worth_nothing(self, site: Site) -> None:
        browser = site.visitor()
        token = browser.http.cookies["sluice_session"]

        browser.post("/ui/sign-out")

        answer = httpx.get(f"{site.url}/ui/", cookies={"sluice_session": token})
        assert answer.status_code == 303

    def test_when_it_signs_out_then_its_live_stream_ends(self, site: Site) -> None:
        browser = site.visitor()
        csrf, cookies = browser.csrf, dict(browser.http.cookies)

        with browser.http.stream("GET", "/ui/events", headers={"accept": "text/event-stream"}, timeout=10) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: parts"
            form, origin = {"csrf": csrf}, {"origin": site.url}
            httpx.post(f"{site.url}/ui/sign-out", data=form, headers=origin, cookies=cookies)
            began_s = time.monotonic()
            kinds: list[str] = []
            while kinds[-1:] != ["event: over"] and time.monotonic() - began_s < 10:
                kinds.append(next(lines))

        assert kinds[-1] == "event: over"

    def test_when_its_key_has_no_scope_but_submit_then_it_can_sign_out(self, site: Site) -> None:
        browser = site.visitor(scopes=("submit",))
        found = re.search(r'name="csrf" value="([^"]+)"', browser.get("/ui/try").text)
        assert found is not None

        browser.http.post("/ui/sign-out", data={"csrf": found[1]}, headers={"origin": site.url})

        assert browser.get("/ui/try").status_code == 303

    def test_when_it_is_made_and_ended_then_the_audit_log_has_both(self, site: Site) -> None:
        browser = site.visitor("audited")
        browser.post("/ui/sign-out")

        query = sa.select(audit_log.c.action, audit_log.c.outcome).where(audit_log.c.tenant == "audited")
        assert rows(site.database_url, query.order_by(audit_log.c.at_ms)) == [("sign_in", "done"), ("sign_out", "done")]


class TestGivenAFormOfAnotherSite:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": "SITE", "sec-fetch-site": "cross-site"},
        ],
        ids=["no origin", "another origin", "null", "cross-site"],
    )
    def test_when_it_is_sent_with_the_cookie_then_it_is_403(self, site: Site, headers: dict[str, str]) -> None:
        browser = site.visitor()
        sent = {name: value.replace("SITE", site.url) for name, value in headers.items()}

        answer = browser.http.post("/ui/sign-out", data={"csrf": browser.csrf}, headers=sent)

        assert answer.status_code == 403
        assert browser.get("/ui/").status_code == 200

    def test_when_its_token_is_that_of_another_session_then_it_is_403(self, site: Site) -> None:
        browser, other = site.visitor(), site.visitor()

        answer = browser.http.post("/ui/sign-out", data={"csrf": other.csrf}, headers={"origin": site.url})

        assert answer.status_code == 403

    def test_when_a_sign_in_comes_from_another_origin_then_it_is_403(self, site: Site) -> None:
        answer = site.browser().http.post(SIGN_IN, data={"key": "k"}, headers={"origin": "https://evil.example"})

        assert answer.status_code == 403


class TestGivenAnyPage:
    @pytest.mark.parametrize("path", ["/ui/", SIGN_IN, "/ui/nothing", "/ui/static/app.css", "/ui/static/live.js"])
    def test_when_it_is_answered_then_only_files_of_the_gateway_may_act(self, site: Site, path: str) -> None:
        answer = site.visitor().get(path)

        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == (
            "nosniff",
            "same-origin",
        )

    @pytest.mark.parametrize("path", ["/ui/", SIGN_IN])
    def test_when_it_is_read_then_it_has_no_inline_script_or_style(self, site: Site, path: str) -> None:
        text = site.visitor().get(path).text

        assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", text) == []

    def test_when_the_key_has_no_admin_then_queues_and_workers_are_not_shown(self, site: Site) -> None:
        text = site.visitor(scopes=("read",)).get("/ui/").text

        assert "Your jobs of the last day" in text
        assert 'id="workers"' not in text
