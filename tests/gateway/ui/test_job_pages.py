"""The list of jobs and the page of one: what they show, to whom, and what their buttons do."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from html import unescape
from typing import Any, ClassVar
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa

from sluice.history.tables import audit_log
from sluice.producer import Producer
from tests.gateway.gateway_process import new_key
from tests.gateway.ui.conftest import IDLE, Browser, Site
from tests.gateway.ui.test_sign_in import rows

pytestmark = pytest.mark.slow
HOSTILE = "<script>alert(1)</script> \x1b[31mred\x1b[0m \x00\x9b1m \u202e \" ' & </pre>"
ACTING = {chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202E)}


def submitted(site: Site, tenant: str = "acme", queue: str = "default", **options: object) -> str:
    """Submit a job, and return its id."""
    with Producer(site.server.url, queue=queue) as producer:
        return producer.submit("hello", tenant=tenant, **{"max_tokens": 5, **options}).id  # pyright: ignore[reportArgumentType] (options of several types)


def until(found: Callable[[], bool]) -> None:
    """Wait for something."""
    deadline_s = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def listed(browser: Browser, query: str = "") -> list[str]:
    """The ids on a page of jobs."""
    return re.findall(r'<a href="/ui/jobs/([^"/]+)" title', browser.get(f"/ui/jobs{query}").text)


class TestGivenJobsOfTwoTenants:
    def test_when_each_lists_jobs_then_it_sees_its_own_alone(self, site: Site) -> None:
        acme, globex = site.visitor("acme"), site.visitor("globex")
        mine, theirs = submitted(site, "acme"), submitted(site, "globex")

        until(lambda: mine in listed(acme) and theirs in listed(globex))

        assert theirs not in listed(acme, "?tenant=globex")
        assert mine not in listed(globex, "?tenant=acme")

    def test_when_a_job_of_the_other_is_asked_for_then_it_is_as_an_unknown_one(self, site: Site) -> None:
        acme = site.visitor("acme")
        theirs, unknown = submitted(site, "globex", queue=IDLE), f"0.acme.{uuid4().hex}"

        answers = [
            [acme.get(f"/ui/jobs/{one}"), acme.get(f"/ui/jobs/{one}/events"), acme.post(f"/ui/jobs/{one}/cancel")]
            for one in (theirs, unknown)
        ]

        assert [[answer.status_code for answer in of_one] for of_one in answers] == [[404, 404, 404]] * 2
        assert all(theirs not in answer.text for answer in answers[0])
        with Producer(site.server.url, queue=IDLE) as producer:
            assert producer.status(theirs).state == "queued"


class TestGivenABlockedJob:
    def test_when_its_page_is_opened_then_it_says_for_which_job_it_waits(self, site: Site) -> None:
        parent = submitted(site, queue=IDLE)
        child = submitted(site, queue=IDLE, after=[parent])

        text = unescape(site.visitor().get(f"/ui/jobs/{child}").text)

        assert f"job {child} is blocked: it waits for {parent} to be done" in text
        assert 'class="state is-blocked"' in text


class TestGivenAWaitingJob:
    def test_when_its_page_is_opened_then_hostile_text_is_only_text(self, site: Site) -> None:
        with Producer(site.server.url, queue=IDLE) as producer:
            job = producer.submit(HOSTILE, tenant="acme", batch="b.1", metadata={"<b>": "<i>"})

        text = site.visitor().get(f"/ui/jobs/{job.id}").text

        assert "<script>alert" not in text
        assert "<b>" not in text
        assert not ACTING & {*text}
        shown = HOSTILE.replace("\x1b", "\u241b").replace("\0", "\u2400")
        assert shown.replace("\x9b", "\ufffd").replace("\u202e", "\ufffd") in unescape(text)

    def test_when_it_is_cancelled_then_it_is_and_the_audit_log_says_who(self, site: Site) -> None:
        browser, job_id = site.visitor(), submitted(site, queue=IDLE)

        answer = browser.post(f"/ui/jobs/{job_id}/cancel")

        assert answer.headers["location"] == f"/ui/jobs/{job_id}?said=cancelled"
        assert "The job is cancelled." in browser.get(answer.headers["location"]).text
        query = sa.select(audit_log.c.action, audit_log.c.tenant, audit_log.c.queue, audit_log.c.outcome)
        found = rows(site.database_url, query.where(audit_log.c.target == job_id))
        assert found == [("cancel", "acme", IDLE, "cancelled")]

    def test_when_the_key_lacks_control_then_it_cannot_be_cancelled(self, site: Site) -> None:
        browser, job_id = site.visitor(scopes=("read",)), submitted(site, queue=IDLE)

        answer = browser.post(f"/ui/jobs/{job_id}/cancel")

        assert answer.status_code == 403
        assert "/cancel" not in browser.get(f"/ui/jobs/{job_id}").text
        with Producer(site.server.url, queue=IDLE) as producer:
            assert producer.status(job_id).state == "queued"

    def test_when_it_is_copied_then_the_call_asks_for_the_same(self, site: Site) -> None:
        job_id = submitted(site, queue=IDLE, temperature=0.25, stop=["\n"])

        text = unescape(site.visitor().get(f"/ui/jobs/{job_id}").text)

        assert '"prompt": "hello"' in text
        assert "temperature=0.25," in text
        assert r'<dt>stop</dt><dd>["\n"]</dd>' in text
        assert f"/jobs?queue={IDLE}" in text

    def test_when_its_batch_is_the_tenants_then_the_command_names_it_without_the_tenant(self, site: Site) -> None:
        with Producer(site.server.url, queue=IDLE) as producer:
            job_id = producer.submit("hello", tenant="acme", batch="acme:nightly").id

        command, program = (site.visitor().get(f"/ui/jobs/{job_id}/ask.{kind}").text for kind in ("sh", "py"))

        assert '"batch": "nightly"' in command
        assert "batch='acme:nightly'" in program

    @pytest.mark.parametrize("kind", ["sh", "py"])
    def test_when_its_prompt_is_long_then_the_page_says_so_and_the_file_has_all(self, site: Site, kind: str) -> None:
        prompt = "".join(f"<{number}> 'it''s'\n" for number in range(20_000))
        with Producer(site.server.url, queue=IDLE) as producer:
            job_id = producer.submit(prompt, tenant="acme").id
        browser = site.visitor()

        page, file = browser.get(f"/ui/jobs/{job_id}").text, browser.get(f"/ui/jobs/{job_id}/ask.{kind}")

        assert f'data-copy="as-{kind}"' not in page
        assert page.count("the file has all") == 2
        assert file.headers["content-disposition"] == f'attachment; filename="ask.{kind}"'
        assert (json.dumps(prompt) if kind == "sh" else ascii(prompt)) in file.text

    def test_when_its_command_is_run_then_the_same_is_asked(self, site: Site) -> None:
        with Producer(site.server.url, queue=IDLE) as producer:
            job_id = producer.submit(f"{HOSTILE} $HOME `date` 'BODY'\nBODY\n" * 10_000, tenant="acme").id
        script = site.visitor().get(f"/ui/jobs/{job_id}/ask.sh").text
        key = new_key(site.database_url, "acme")
        until(lambda: site.browser().sign_in(key).status_code == 303)

        environ = {**os.environ, "SLUICE_API_KEY": key}
        ran = subprocess.run(["bash", "-s"], input=script, env=environ, capture_output=True, text=True, check=True)

        with Producer(site.server.url, queue=IDLE) as producer:
            one, other = (producer.status(found).prompt_tokens for found in (job_id, json.loads(ran.stdout)["id"]))
        assert one == other

    def test_when_it_is_forgotten_then_its_stream_ends(self, site: Site) -> None:
        browser, job_id = site.visitor(), submitted(site, queue=IDLE)
        name = job_id.rpartition(".")[2]

        with browser.http.stream("GET", f"/ui/jobs/{job_id}/events", timeout=10) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: parts"
            with site.server.client() as client:
                client.delete(*client.scan_iter(f"*job:acme:{name}*"))
            kinds = [line for line in lines if line.startswith("event: ")]

        assert kinds[-1] == "event: end"


class TestGivenADelayedJob:
    def test_when_the_overview_is_opened_then_its_queue_says_that_it_is_delayed(self, site: Site) -> None:
        admin, queue = site.visitor(), "default"
        job_id = submitted(site, queue=queue, not_before=timedelta(hours=1))

        until(lambda: "all are delayed" in admin.get("/ui/").text)

        with Producer(site.server.url, queue=queue) as producer:
            producer.cancel(job_id)


class TestGivenAJobThatIsDone:
    def test_when_its_page_is_opened_then_it_has_output_usage_and_timeline(self, site: Site) -> None:
        browser, job_id = site.visitor(), submitted(site)
        until(lambda: "Ended by" in browser.get(f"/ui/jobs/{job_id}").text)
        until(lambda: "Attempt 1" in browser.get(f"/ui/jobs/{job_id}").text)

        text = browser.get(f"/ui/jobs/{job_id}").text

        with Producer(site.server.url) as producer:
            output = producer.result(job_id).choices[0].text
        assert output in unescape(text)
        facts = "".join(re.findall(r'<dl class="facts timeline-facts">(.*?)</dl>', text, re.DOTALL))
        assert re.search(
            r"<dt>Queue</dt><dd>Waited: [\d.]+ m?s</dd>\s*<dt>Attempt 1</dt><dd>.*Generated: .* · done</dd>", facts
        )
        assert 'data-live="' not in text
        assert re.search(r"Output tokens</dt><dd>5", text)

    def test_when_its_stream_is_read_then_it_has_all_text_and_ends(self, site: Site) -> None:
        browser, job_id = site.visitor(), submitted(site, max_tokens=40)

        with browser.http.stream("GET", f"/ui/jobs/{job_id}/events") as answer:
            kinds = [line for line in answer.iter_lines() if line.startswith("event: ")]

        assert kinds.count("event: output") >= 1
        assert kinds[-1] == "event: end"

    def test_when_the_position_is_none_then_it_is_400(self, site: Site) -> None:
        answer = site.visitor().get(f"/ui/jobs/{submitted(site)}/events?after=1,2,3")

        assert answer.status_code == 400


class TestGivenAJobThatCallsFunctions:
    TOOL: ClassVar[Mapping[str, object]] = {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9}},
            "required": ["numbers"],
            "additionalProperties": False,
        },
    }

    def asked(self, site: Site, queue: str = "default") -> str:
        """Submit a chat that calls `add`, after one that did."""
        earlier = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"numbers": [71]}'}}
        messages: list[Mapping[str, object]] = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [earlier]},
            {"role": "tool", "tool_call_id": "call_1", "content": "71"},
        ]
        options: dict[str, Any] = {"tools": [{"type": "function", "function": self.TOOL}], "tool_choice": "required"}
        with Producer(site.server.url, queue=queue) as producer:
            return producer.submit(messages=messages, tenant="acme", seed=7, **options).id

    def parts(self, site: Site, job_id: str, after: str = "") -> tuple[list[str], list[Any]]:
        """The positions of the outputs of a job's stream, and what they add."""
        with site.visitor().http.stream("GET", f"/ui/jobs/{job_id}/events", params={"after": after}) as answer:
            lines = list(answer.iter_lines())
        found = [place for place, line in enumerate(lines) if line == "event: output"]
        data = [json.loads(lines[place + 2].removeprefix("data: ")) for place in found]
        return [lines[place + 1].removeprefix("id: ") for place in found], data

    def test_when_its_page_is_opened_then_it_has_the_calls_and_the_text(self, site: Site) -> None:
        browser, job_id = site.visitor(), self.asked(site)
        with Producer(site.server.url) as producer:
            [choice] = producer.result(job_id).choices
        until(lambda: "Ended by" in browser.get(f"/ui/jobs/{job_id}").text)

        text = unescape(browser.get(f"/ui/jobs/{job_id}").text)

        assert choice.parsed.calls
        for call in choice.parsed.calls:
            assert f'aria-label="Call of {call.name}">{call.arguments}</pre>' in text
        assert f'aria-label="Output">{choice.text}</pre>' in text

    def test_when_its_stream_is_read_from_anywhere_then_parts_and_text_are_the_whole(self, site: Site) -> None:
        job_id = self.asked(site)
        with Producer(site.server.url) as producer:
            [choice] = producer.result(job_id).choices

        positions, whole = self.parts(site, job_id)

        assert "".join(one["text"] for one in whole) == choice.text
        assert _calls(whole) == [(call.name, call.arguments) for call in choice.parsed.calls]
        for number, position in enumerate(positions, 1):
            _, rest = self.parts(site, job_id, position)
            assert _calls([*whole[:number], *rest]) == _calls(whole)
            assert "".join(one["text"] for one in [*whole[:number], *rest]) == choice.text

    def test_when_a_position_has_no_characters_then_it_is_400(self, site: Site) -> None:
        answer = site.visitor().get(f"/ui/jobs/{self.asked(site)}/events?after=3")

        assert answer.status_code == 400

    def test_when_its_command_is_run_then_the_same_is_asked(self, site: Site) -> None:
        page = unescape(site.visitor().get(f"/ui/jobs/{self.asked(site, IDLE)}").text)

        command = page[page.index("<<'BODY'\n") : page.index("\nBODY\n")].removeprefix("<<'BODY'\n")

        body = json.loads(command)
        assert body["tools"] == [{"type": "function", "function": self.TOOL}]
        assert body["tool_choice"] == "required"
        assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"numbers": [71]}'
        assert body["messages"][2]["tool_call_id"] == "call_1"
        assert 'add({"numbers": [71]})' in page


def _calls(outputs: Sequence[Any]) -> list[tuple[str, str]]:
    """The calls that the parts of a page make."""
    calls: list[tuple[str, str]] = []
    for part in (part for output in outputs for part in output["parts"]):
        if part["kind"] == "call":
            calls.append((part["text"], ""))
        elif part["kind"] == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part["text"])
    return calls


class TestGivenAddressesThatAreWrong:
    def test_when_jobs_are_filtered_then_wrong_filters_are_ignored(self, site: Site) -> None:
        browser = site.visitor()

        answers = [
            browser.get(f"/ui/jobs?{query}")
            for query in ("after=x", "after=99999999999999999999:a", "state=<b>", "priority=-1", "span=year&batch=%00")
        ]

        assert [answer.status_code for answer in answers] == [200] * 5

    def test_when_an_id_is_none_then_it_is_404(self, site: Site) -> None:
        assert site.visitor().get("/ui/jobs/nonsense").status_code == httpx.codes.NOT_FOUND
