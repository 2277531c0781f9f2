"""Jobs that wait for others over HTTP: each tenant for its own."""

from typing import Any

import pytest

from tests.gateway.native.conftest import IDLE, Native
from tests.gateway.native.jobs import ended, submitted, unknown_to

pytestmark = pytest.mark.slow


class TestGivenAJobOfATenant:
    def test_when_another_waits_for_it_then_it_runs_with_its_output(self, native: Native) -> None:
        parent = submitted(native.acme, max_tokens=3)
        child = submitted(native.acme, prompt="{{outputs[0]}} and on", max_tokens=3, after=[parent])

        text = ended(native.acme, parent)["choices"][0]["text"]
        ended(native.acme, child)

        facts = native.acme.get(f"/jobs/{child}").json()["now"]
        assert facts["prompt_tokens"] >= len(text.split())

    def test_when_another_is_blocked_then_it_is_shown_so_and_can_be_cancelled(self, native: Native) -> None:
        parent = submitted(native.acme, prompt="wait", not_before=600)
        answer = native.acme.post("/jobs", json={"prompt": "child", "after": [parent], "on_failure": "release"})

        child = answer.json()["id"]
        shown = native.acme.get(f"/jobs/{child}").json()
        cancelled = native.acme.post(f"/jobs/{child}/cancel").json()["state"]

        assert (answer.status_code, answer.json()["state"], shown["state"]) == (201, "blocked", "blocked")
        assert cancelled == "asked"
        assert ended(native.acme, child)["state"] == "cancelled"
        native.acme.post(f"/jobs/{parent}/cancel").raise_for_status()

    @pytest.mark.parametrize(
        "fields",
        [
            {"after": "0.acme.a"},
            {"after": []},
            {"after": [1]},
            {"when": "all"},
            {"after": ["0.acme.a"], "when": "never"},
        ],
    )
    def test_when_a_field_is_wrong_then_it_is_400(self, native: Native, fields: dict[str, Any]) -> None:
        answer = native.acme.post("/jobs", json={"prompt": "child", **fields})

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")

    def test_when_another_tenant_waits_for_it_then_it_is_refused_as_for_an_unknown_one(self, native: Native) -> None:
        parents = submitted(native.acme), unknown_to("acme")

        answers = [native.globex.post("/jobs", json={"prompt": "child", "after": [parent]}) for parent in parents]

        assert [answer.status_code for answer in answers] == [400, 400]
        texts = [answer.text.replace(parent, "") for answer, parent in zip(answers, parents, strict=True)]
        assert texts[0] == texts[1]

    def test_when_it_is_in_another_queue_then_it_is_unknown(self, native: Native) -> None:
        parent = submitted(native.acme)

        answer = native.acme.post(f"/jobs?queue={IDLE}", json={"prompt": "child", "after": [parent]})

        assert answer.status_code == 400
        assert "which queue 'idle' does not have" in answer.json()["error"]["message"]
