"""Submit, list, show, cancel and requeue jobs over HTTP."""

from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from sluice.history.tables import audit_log
from sluice.producer import Producer, QueueSettings
from sluice.protocol.jobs import OPTION_NAMES
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.native.conftest import IDLE, Native
from tests.gateway.native.jobs import ended, recorded, submitted, unknown_to, wait_for

pytestmark = pytest.mark.slow

EVERY_OPTION: dict[str, Any] = {
    "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"3": 1.5},
    "stop": ["x"], "stop_token_ids": [7], "ignore_eos": False, "logprobs": 2, "n": 2, "skip_special_tokens": False,
    "structured": {"regex": "[a-z]+"},
    "add_special_tokens": False, "as_chat": True, "model": "null", "stream": True, "awaited": True,
    "seed": 2**64 - 1, "priority": 3,
    "ttl_s": 600, "deadline": 600.5, "not_before": "2020-01-31T12:00:00Z", "idempotency_key": "k", "batch": "b",
    "metadata": {"a": "b"}, "traceparent": "00-1-2-01", "callback_url": "https://example.com/", "job_id": "0.acme.mine",
}  # fmt: skip

OF_OTHER_JOBS = frozenset(
    {
        *("embed", "dimensions", "classify", "echo", "prompt_logprobs"),  # a prompt is read
        *("tools", "tool_choice", "parallel_tool_calls"),  # a chat without `structured`
    }
)
"""Options that contradict some of these."""


class TestGivenANewJob:
    @pytest.mark.parametrize(
        "prompt", [{"prompt": "once"}, {"token_ids": [1, 2]}, {"messages": [{"role": "user", "content": "hello"}]}]
    )
    def test_when_it_is_submitted_then_it_runs_for_the_keys_tenant(
        self, native: Native, prompt: dict[str, Any]
    ) -> None:
        answer = native.acme.post("/jobs", json={**prompt, "max_tokens": 4})

        job = answer.json()["id"]
        assert (answer.status_code, answer.headers["location"]) == (201, f"/jobs/{job}")
        assert job.split(".")[1] == "acme"
        assert len(ended(native.acme, job)["choices"][0]["token_ids"]) == 4

    def test_when_it_has_every_option_then_each_is_taken(self, native: Native) -> None:
        assert set(EVERY_OPTION) == OPTION_NAMES - {"tenant"} - OF_OTHER_JOBS

        answer = native.acme.post("/jobs", json={"prompt": "once", **EVERY_OPTION})

        assert (answer.status_code, answer.json()["id"]) == (201, "0.acme.mine")
        shown = native.acme.get("/jobs/0.acme.mine").json()["now"]
        assert (shown["seed"], shown["priority"], shown["choices"], shown["batch"]) == (str(2**64 - 1), 3, 2, "b")

    def test_when_its_batch_is_closed_then_it_is_409(self, native: Native) -> None:
        batch = f"b{uuid4().hex}"
        submitted(native.acme, batch=batch, max_tokens=2)
        with Producer(native.server.url) as producer:
            producer.close_batch(f"acme:{batch}")

        answer = native.acme.post("/jobs", json={"prompt": "once", "batch": batch})

        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "batch_closed")

    @pytest.mark.parametrize("batch", ["", "b" * 60, "a b"])
    def test_when_its_batch_is_no_name_with_its_tenant_then_it_is_refused(self, native: Native, batch: str) -> None:
        answer = native.acme.post("/jobs", json={"prompt": "once", "batch": batch})

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")

    def test_when_the_same_key_is_sent_again_then_the_first_job_is_returned(self, native: Native) -> None:
        headers = {"idempotency-key": uuid4().hex}
        body = {"prompt": "once", "max_tokens": 4}

        first, again = (native.acme.post("/jobs", json=body, headers=headers) for _ in range(2))
        other = native.acme.post("/jobs", json={**body, "prompt": "twice"}, headers=headers)
        foreign = native.globex.post("/jobs", json=body, headers=headers)

        assert (first.status_code, again.status_code, other.status_code, foreign.status_code) == (201, 200, 422, 201)
        assert first.json()["id"] == again.json()["id"] != foreign.json()["id"]

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"tenant": "globex"}, "unknown_parameter"),
            ({"colour": "red"}, "unknown_parameter"),
            ({"job_id": "0.globex.x"}, "invalid_request"),
            ({"job_id": "7.acme.x"}, "invalid_request"),
            ({"token_ids": [1]}, "invalid_request"),
            ({"deadline": "2030-01-01"}, "invalid_request"),
            ({"deadline": True}, "invalid_request"),
            ({"deadline": -1}, "invalid_request"),
            ({"not_before": 1e300}, "invalid_request"),
            ({"ttl_s": 0}, "invalid_request"),
            ({"max_tokens": 10**400}, "invalid_request"),
            ({"n": 65}, "invalid_request"),
            ({"logit_bias": {"x": 1}}, "invalid_request"),
        ],
    )
    def test_when_a_field_is_wrong_then_it_is_refused(self, native: Native, fields: Any, code: str) -> None:
        answer = native.acme.post("/jobs", json={"prompt": "once", **fields})

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)

    @pytest.mark.parametrize("content", [b'{"prompt": "x", "deadline": NaN}', b"[]", b"{}", b'{"deadline": 1e999}'])
    def test_when_the_body_is_no_job_then_it_is_refused(self, native: Native, content: bytes) -> None:
        assert native.acme.post("/jobs", content=content).status_code == 400

    def test_when_its_times_are_given_then_it_waits_and_expires(self, native: Native) -> None:
        soon = (datetime.now(UTC) + timedelta(seconds=0.2)).isoformat()
        waiting = submitted(native.acme, not_before=600)
        expiring = submitted(native.acme, not_before=600, deadline=soon)

        assert ended(native.acme, expiring)["state"] == "expired"
        assert native.acme.get(f"/jobs/{waiting}/result").status_code == 409
        assert native.acme.post(f"/jobs/{waiting}/cancel").json() == {"id": waiting, "state": "cancelled"}

    def test_when_it_names_a_queue_that_is_not_served_then_it_is_404(self, native: Native) -> None:
        answer = native.acme.post("/jobs", params={"queue": "other"}, json={"prompt": "once"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "queue_not_found")


class TestGivenABatchOfATenant:
    """acme has submitted all of its jobs; another tenant knows its name."""

    @pytest.fixture
    def batch(self, native: Native) -> str:
        name = f"b{uuid4().hex}"
        ended(native.acme, submitted(native.acme, batch=name, max_tokens=2))
        return name

    @pytest.mark.parametrize("foreign", ["{}", "acme:{}"])
    def test_when_another_tenant_names_it_then_it_still_completes(
        self, native: Native, batch: str, foreign: str
    ) -> None:
        name = foreign.format(batch)
        with Producer(native.server.url) as producer:
            waiting = submitted(native.globex, batch=name, not_before=600)
            producer.close_batch(f"acme:{batch}")

            assert producer.batch(f"acme:{batch}").completed_ms is not None
        assert native.globex.get(f"/jobs/{waiting}").json()["now"]["batch"] == name
        submitted(native.globex, batch=name)

    def test_when_a_backend_adds_to_its_own_then_both_are_listed_by_the_name(self, native: Native, batch: str) -> None:
        with Producer(native.server.url) as producer:
            producer.submit("once", batch=batch, tenant="acme", max_tokens=2)

        rows = wait_for(lambda: found if len(found := listed(native.acme, batch=batch)) == 2 else None)

        assert {row["batch"] for row in rows} == {batch}
        assert {recorded(native.acme, row["id"])["history"]["batch"] for row in rows} == {batch}


class TestGivenEndedJobs:
    def test_when_they_are_listed_in_pages_then_each_comes_once(self, native: Native) -> None:
        batch = f"b{uuid4().hex}"
        jobs = {submitted(native.acme, batch=batch, max_tokens=2) for _ in range(5)}
        submitted(native.globex, batch=batch, max_tokens=2)
        wait_for(lambda: len(listed(native.acme, batch=batch)) == 5)

        pages = list(pages_of(native.acme, batch=batch, limit=2))

        assert [len(page) for page in pages] == [2, 2, 1]
        assert {row["id"] for page in pages for row in page} == jobs
        assert listed(native.acme, batch=batch, state="failed") == []
        assert listed(native.acme, batch=batch, since=0) == []

    @pytest.mark.parametrize(
        "query", [{"limit": "0"}, {"limit": "1001"}, {"state": "x"}, {"after": "x"}, {"since": "-1"}, {"since": "nan"}]
    )
    def test_when_a_filter_is_wrong_then_it_is_refused(self, native: Native, query: dict[str, str]) -> None:
        assert native.acme.get("/jobs", params=query).status_code == 400

    def test_when_the_queue_has_forgotten_one_then_the_history_shows_it(self, native: Native) -> None:
        job = submitted(native.acme, max_tokens=2)
        before = recorded(native.acme, job)
        with Producer(native.server.url) as producer:
            assert producer.delete([job]) == [True]

        shown = native.acme.get(f"/jobs/{job}").json()

        assert (before["now"]["output_tokens"], shown["now"]) == (2, None)
        assert {name: shown[name] for name in ("state", "history")} == {"state": "done", "history": before["history"]}
        assert shown["timeline"][0]["event"] == "submitted"
        assert native.acme.get(f"/jobs/{job}/result").status_code in (200, 410, 404)

    def test_when_one_is_cancelled_or_requeued_then_it_stays_as_it_is(self, native: Native) -> None:
        job = submitted(native.acme, max_tokens=2)
        ended(native.acme, job)

        assert native.acme.post(f"/jobs/{job}/cancel").json()["state"] == "done"
        assert native.acme.post(f"/jobs/{job}/requeue").json()["error"]["code"] == "not_requeued"

    def test_when_names_of_machines_are_sought_in_answers_then_they_are_not_there(self, native: Native) -> None:
        job = submitted(native.acme, max_tokens=2)
        recorded(native.acme, job)
        with Producer(native.server.url) as producer:
            [[incarnation, about]] = producer.queue()[0].workers.items()

        text = native.acme.get(f"/jobs/{job}").text + native.acme.get("/jobs").text

        assert incarnation not in text
        assert about["host"] not in text


def listed(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:  # Any: JSON
    return client.get("/jobs", params=query).json()["data"]


def pages_of(client: httpx.Client, **query: Any) -> Generator[list[dict[str, Any]]]:  # Any: JSON
    following: str | None = ""
    while following is not None:
        page = client.get("/jobs", params={**query, **({"after": following} if following else {})}).json()
        yield page["data"]
        following = page["next"]


class TestGivenAFailedJob:
    def test_when_it_is_requeued_then_it_waits_again(self, native: Native) -> None:
        with Producer(native.server.url) as producer:
            job = producer.submit("word", tenant="acme", model="gone").id
        failed = ended(native.acme, job)

        answer = native.acme.post(f"/jobs/{job}/requeue")

        assert (failed["state"], failed["error"]["code"]) == ("failed", "model_mismatch")
        assert answer.json() == {"id": job, "state": "queued"}

    def test_when_its_prompt_is_too_long_then_it_cannot_be_requeued(self, native: Native) -> None:
        job = submitted(native.acme, prompt="word " * 20_000)
        failed = ended(native.acme, job)

        answer = native.acme.post(f"/jobs/{job}/requeue")

        assert (failed["state"], failed["error"]["code"]) == ("failed", "prompt_too_long")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_requeued")


class TestGivenAJobThatNobodyHas:
    @pytest.mark.parametrize("job", ["x", "0.acme", "0.acme.%0d%0ax", "0.acme.x{", "..%2f..", "9.acme.x", "%00", "*"])
    @pytest.mark.parametrize("route", ["GET ", "GET /result", "GET /events", "POST /cancel", "POST /requeue"])
    def test_when_it_is_asked_for_then_it_is_404(self, native: Native, job: str, route: str) -> None:
        method, _, rest = route.partition(" ")

        answer = native.acme.request(method, f"/jobs/{job}{rest}")

        assert answer.status_code == 404

    def test_when_there_is_no_history_then_jobs_are_shown_but_not_listed(
        self, native: Native, bare: GatewayProcess
    ) -> None:
        with bare.http() as client:
            job = submitted(client)

            assert client.get(f"/jobs/{job}").json()["history"] is None
            assert client.get(f"/jobs/{unknown_to('default')}").status_code == 404
            refused = client.get("/jobs")

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "history_unavailable")
        assert "nowhere" not in refused.text


@pytest.fixture
def bare(native: Native) -> Generator[GatewayProcess]:
    """A gateway without a database."""
    with gateway_process(native.server.url) as made:
        yield made


class TestGivenAKeyWithoutAScope:
    @pytest.mark.parametrize(
        ("scopes", "route"),
        [
            ("read,control,admin,metrics", "POST /jobs"),
            ("submit,control,admin,metrics", "GET /jobs"),
            ("submit,control,admin,metrics", "GET /jobs/0.acme.x"),
            ("submit,control,admin,metrics", "GET /jobs/0.acme.x/result"),
            ("submit,control,admin,metrics", "GET /jobs/0.acme.x/events"),
            ("submit,read,admin,metrics", "POST /jobs/0.acme.x/cancel"),
            ("submit,read,admin,metrics", "POST /jobs/0.acme.x/requeue"),
            ("submit,read,control,metrics", "GET /queues"),
            ("submit,read,control,metrics", "GET /queues/default"),
            ("submit,read,control,metrics", "GET /tenants"),
            ("metrics", "GET /queues"),
            ("metrics", "GET /jobs"),
            ("metrics", "POST /jobs"),
            ("submit,read,control,admin", "GET /metrics"),
            ("submit,read,control,admin", "GET /queues/default/scale"),
        ],
    )
    def test_when_it_is_used_then_it_is_403(self, keys: dict[str, httpx.Client], scopes: str, route: str) -> None:
        answer = keys[scopes].request(*route.split(" "))

        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")


class TestGivenAKeyForMetricsAlone:
    @pytest.mark.parametrize("path", ["/metrics", "/queues/default/scale"])
    def test_when_it_scrapes_then_it_is_answered(self, keys: dict[str, httpx.Client], path: str) -> None:
        assert keys["metrics"].get(path).status_code == 200

    def test_when_it_scrapes_then_no_tenant_is_named_unless_it_may_list_them(
        self, native: Native, keys: dict[str, httpx.Client]
    ) -> None:
        job_id = native.globex.post("/jobs", params={"queue": IDLE}, json={"prompt": "once"}).json()["id"]

        sets = ("metrics", "read,control,admin,metrics")
        named = {scopes: 'tenant="globex"' in keys[scopes].get("/metrics").text for scopes in sets}

        native.globex.post(f"/jobs/{job_id}/cancel")
        assert named == {"metrics": False, "read,control,admin,metrics": True}


@pytest.fixture(scope="module")
def keys(native: Native) -> Generator[dict[str, httpx.Client]]:
    """A client for each set of scopes that lacks one."""
    every = ("submit", "read", "control", "admin", "metrics")
    sets = ["metrics", *(",".join(one for one in every if one != lacking) for lacking in every)]
    made = {scopes: native.client(*scopes.split(",")) for scopes in sets}
    yield made
    for client in made.values():
        client.close()


class TestGivenAQueue:
    def test_when_queues_are_listed_then_their_totals_are_shown(self, native: Native) -> None:
        queue, idle = native.acme.get("/queues").json()["data"]
        shown = native.acme.get("/queues/default").json()

        assert (idle["queue"], idle["workers"]) == (IDLE, 0)
        assert (queue["queue"], queue["workers"], shown["workers"], len(shown["partitions"])) == ("default", 1, 1, 1)
        assert native.acme.get("/queues/other").status_code == 404

    def test_when_the_scale_of_one_is_asked_for_then_it_is_shown(self, native: Native) -> None:
        shown = native.acme.get(f"/queues/{IDLE}/scale", params={"within_s": 2.5, "min": 2, "max": 3}).json()

        assert (shown["queue"], shown["workers"], shown["rate_source"]) == (IDLE, 0, "unknown")
        assert (shown["within_s"], shown["min_workers"], shown["max_workers"]) == (2.5, 2, 3)
        assert shown["wanted_workers"] == 2
        assert native.acme.get("/queues/other/scale").status_code == 404

    @pytest.mark.parametrize("wrong", [{"within_s": 0}, {"within_s": "x"}, {"max": -1}, {"min": 3, "max": 2}])
    def test_when_a_parameter_of_the_scale_is_wrong_then_it_is_400(self, native: Native, wrong: dict[str, str]) -> None:
        for path in (f"/queues/{IDLE}/scale", "/metrics"):
            assert native.acme.get(path, params=wrong).status_code == 400

    def test_when_metrics_are_scraped_then_prometheus_can_read_them(self, native: Native) -> None:
        answer = native.acme.get("/metrics", params={"min": 1})

        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        wanted = {sample.labels["queue"]: sample.value for sample in families["sluice_scale_wanted_workers"].samples}
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert wanted.keys() == {"default", IDLE}
        assert wanted[IDLE] >= 1

    def test_when_tenants_wait_in_a_fair_queue_then_their_shares_are_shown(self, native: Native) -> None:
        with Producer(native.server.url, queue=IDLE) as producer:
            producer.configure(QueueSettings(mode="fair", weights={"acme": 3, "idle": 2}))
        for client in (native.acme, native.globex):
            assert client.post("/jobs", params={"queue": IDLE}, json={"prompt": "once"}).json()["queue"] == IDLE

        found = native.acme.get("/tenants", params={"queue": IDLE}).json()["data"]

        shares = [(one["tenant"], one["waiting"], one["weight"], one["share"]) for one in found]
        assert shares == [("acme", 1, 3.0, 0.75), ("globex", 1, 1.0, 0.25), ("idle", 0, 2.0, None)]

    def test_when_limits_of_a_tenant_are_set_then_they_are_shown_and_recorded(self, native: Native) -> None:
        path, queue = "/tenants/limited/limits", {"queue": IDLE}

        answer = native.acme.post(path, params=queue, json={"max_running": 2, "tokens_per_minute": 500})

        (tenant,) = answer.json()["data"]
        names = ("max_running", "running", "tokens_per_minute", "tokens_left", "is_at_limit")
        assert [tenant[name] for name in names] == [2, 0, 500, 500, False]
        with Producer(native.server.url, queue=IDLE) as producer:
            (view,) = producer.queue()
        assert [limit.tenant for limit in view.limits] == ["limited"]
        with sa.create_engine(native.database_url).connect() as connection:
            rows = connection.execute(sa.select(audit_log.c.target, audit_log.c.queue, audit_log.c.outcome)).all()
        assert ("limited max_running=2 tokens_per_minute=500", IDLE, "done") in [tuple(row) for row in rows]
        assert native.acme.post(path, params=queue, json={}).json()["data"] == []

    @pytest.mark.parametrize(
        "body",
        [[], {"max_running": -1}, {"max_running": 1.5}, {"max_running": True}, {"tokens_per_minute": 0}, {"other": 1}],
    )
    def test_when_limits_are_wrong_then_they_are_refused(self, native: Native, body: object) -> None:
        assert native.acme.post("/tenants/limited/limits", params={"queue": IDLE}, json=body).status_code == 400

    def test_when_a_key_without_admin_sets_limits_then_it_is_403(self, native: Native) -> None:
        client = native.client("submit", "read", "control")
        answer = client.post("/tenants/acme/limits", json={"max_running": 9})
        client.close()

        assert answer.status_code == 403

    def test_when_a_job_is_in_the_second_one_then_it_is_found(self, native: Native) -> None:
        job = native.acme.post("/jobs", params={"queue": IDLE}, json={"prompt": "once"}).json()["id"]

        assert native.acme.get(f"/jobs/{job}").json()["queue"] == IDLE
        assert native.acme.get(f"/jobs/{job}", params={"queue": "default"}).status_code == 404
        assert native.acme.post(f"/jobs/{job}/cancel").json()["state"] == "cancelled"
