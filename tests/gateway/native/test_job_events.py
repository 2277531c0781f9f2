"""The events of a job: each token once, from any position, at any gateway, and an honest end."""

import pytest

from tests.gateway.gateway_process import gateway_process, new_key
from tests.gateway.native.conftest import Native
from tests.gateway.native.jobs import ended, events_of, parsed, submitted, texts, tokens, unknown_to

pytestmark = pytest.mark.slow


class TestGivenAJobOfThreeChoices:
    def test_when_its_events_are_read_then_they_are_its_result(self, native: Native) -> None:
        job = submitted(native.acme, n=3, seed=4)

        events = events_of(native.acme, job)

        result = ended(native.acme, job)
        assert texts(events, 3) == [choice["text"] for choice in result["choices"]]
        assert tokens(events, 3) == [choice["token_ids"] for choice in result["choices"]]
        assert (events[-1].kind, events[-1].data["usage"]) == ("end", result["usage"])
        assert [choice["finish_reason"] for choice in events[-1].data["choices"]] == ["length"] * 3

    def test_when_they_are_resumed_after_each_of_them_then_the_rest_comes_once(self, native: Native) -> None:
        job = submitted(native.acme, n=3, seed=5, max_tokens=6)
        events = events_of(native.acme, job)

        for at, event in enumerate(events[:-1], 1):
            rest = events_of(native.acme, job, event.id)

            assert texts(events[:at] + rest, 3) == texts(events, 3)
            assert tokens(events[:at] + rest, 3) == tokens(events, 3)
            assert rest[-1] == events[-1]

    def test_when_the_last_event_was_seen_then_a_browser_is_told_not_to_return(self, native: Native) -> None:
        job = submitted(native.acme)
        last = events_of(native.acme, job)[-1]

        answer = native.acme.get(f"/jobs/{job}/events", headers={"last-event-id": last.id or ""})

        assert (last.id, answer.status_code) == ("end", 204)


class TestGivenARunningJob:
    def test_when_its_reader_goes_to_another_gateway_then_each_token_comes_once(self, native: Native) -> None:
        job = submitted(native.acme, n=2, max_tokens=150)
        key = new_key(native.database_url, "acme")
        with gateway_process(native.server.url, database_url=native.database_url) as other, other.http(key) as client:
            with native.acme.stream("GET", f"/jobs/{job}/events") as answer:
                seen = [next(events) for events in [parsed(answer.iter_raw())] for _ in range(20)]

            rest = events_of(client, job, seen[-1].id)

        result = ended(native.acme, job)
        assert tokens(seen + rest, 2) == [choice["token_ids"] for choice in result["choices"]]

    def test_when_it_is_cancelled_then_the_stream_ends_with_an_error(self, native: Native) -> None:
        job = submitted(native.acme, max_tokens=4000)
        with native.acme.stream("GET", f"/jobs/{job}/events") as answer:
            events = parsed(answer.iter_raw())
            next(events)

            native.acme.post(f"/jobs/{job}/cancel")
            *_, last = events

        again = events_of(native.acme, job, "0:0:end")
        assert [(event.kind, event.data["error"]["code"]) for event in (last, *again)] == [("error", "cancelled")] * 2

    @pytest.mark.parametrize("last", ["", "0,0", "x", "1:2:3:4", "9999:1", "0\u00e4", "-1", "0:0\r"])
    def test_when_the_position_is_none_of_it_then_it_is_refused(self, native: Native, last: str) -> None:
        job = submitted(native.acme)

        answer = native.acme.get(f"/jobs/{job}/events", params={"after": last})

        assert answer.status_code == (200 if last == "" else 400)


class TestGivenAnUnknownJob:
    def test_when_its_events_are_read_then_it_is_404(self, native: Native) -> None:
        answer = native.acme.get(f"/jobs/{unknown_to('acme')}/events")

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
