"""What the overview says of queues and workers."""

import time
from typing import Any

from sluice.gateway.ui.read.overview import MANY_EVENTS, Alert, Memory, Trends, overview
from sluice.gateway.ui.templates import fragment
from sluice.protocol.calls import QueueView
from sluice.protocol.workers import NUM_SAMPLES, samples_of


def view(**facts: Any) -> QueueView:
    """A queue with these facts, otherwise empty."""
    empty: dict[str, Any] = {
        "waiting_jobs": 0,
        "waiting_tokens": 0,
        "waiting_bytes": 0,
        "running_jobs": 0,
        "worker_deaths": 0,
        "oldest_ms": None,
        "is_paused": False,
        "totals": {},
        "dead": 0,
        "suspects": 0,
        "outbox_entries": 0,
        "callback_entries": 0,
        "workers": {},
        "lanes": (),
        "settings": {},
        "server_ms": 1000,
    }
    return QueueView(**(empty | facts))


def alerts(*views: QueueView, memory: Memory | None = None) -> list[Alert]:
    """The alerts of a queue as it is seen, again and again."""
    trends = Trends()
    return [alert for one in views for alert in overview({"chat": [one]}, {}, memory, trends).alerts]


class TestGivenAQueue:
    def test_when_all_is_well_then_there_is_no_alert(self) -> None:
        assert alerts(view(), view(workers={"w": {}}, waiting_jobs=3), memory=Memory(used_bytes=1, max_bytes=10)) == []

    def test_when_jobs_wait_without_a_worker_then_it_says_how_to_start_one(self) -> None:
        [alert] = alerts(view(waiting_jobs=3))

        assert (alert.kind, alert.title) == ("bad", "No worker serves queue chat.")
        assert "worker start --queue chat" in alert.text

    def test_when_the_dead_set_grows_then_it_says_so_but_not_while_it_stays(self) -> None:
        assert [one.title for one in alerts(view(dead=5), view(dead=5), view(dead=7))] == [
            "The dead set of queue chat grows."
        ]

    def test_when_the_outbox_grows_beyond_a_burst_then_it_says_so(self) -> None:
        assert alerts(view(), view(outbox_entries=MANY_EVENTS - 1)) == []
        assert len(alerts(view(), view(outbox_entries=MANY_EVENTS))) == 1

    def test_when_redis_is_near_its_limit_then_it_says_so(self) -> None:
        [alert] = alerts(view(), memory=Memory(used_bytes=95, max_bytes=100))

        assert alert.title == "Redis is near its limit."


class TestGivenHeartbeats:
    def test_when_samples_are_read_then_they_are_summed_at_their_times(self) -> None:
        workers = {"a": {"recent": "1,0,0,10,5;2,0,500,20,6"}, "b": {"recent": "3,1,0,100,50"}}

        found = overview({"chat": [view(workers=workers)]}, {}, None, Trends())

        times, tokens_in, tokens_out = found.series
        assert len(times) == NUM_SAMPLES
        assert abs(times[-1] - time.time()) < 5 if times[-1] is not None else False
        assert (tokens_in[-2:], tokens_out[-2:], tokens_in[0]) == ([10.0, 120.0], [5.0, 56.0], None)

    def test_when_a_worker_has_adapters_then_the_page_names_them_beside_its_model(self) -> None:
        found = overview({"chat": [view(workers={"a": {"model": "m", "adapters": "law poet"}})]}, {}, None, Trends())

        assert "adapters law, poet" in fragment("parts/workers.html", found=found)

    def test_when_samples_are_damaged_then_there_are_none(self) -> None:
        assert samples_of("1,2;x") == samples_of("") == ()
