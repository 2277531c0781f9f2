"""Where the loop meets the exchange: nothing waits that has something to do, and nothing is counted twice."""

import threading
import time
from collections.abc import Generator
from dataclasses import replace
from math import inf

import pytest

from sluice.engine.request import Finish, FinishReason, Request, Room, SequenceStats, TokenDelta
from sluice.worker.clock import monotonic_s
from sluice.worker.errors import ComponentDied
from sluice.worker.serve.mailbox import Mailbox, bytes_of
from sluice.worker.serve.offered_room import MOST_PULL_S

STATS = SequenceStats(num_prompt_tokens=1)


def room(size: int) -> Room:
    return Room(kv_tokens=size, prefill_tokens=size, sequences=size)


def request(name: str) -> Request:
    return Request(id=name, prompt_token_ids=(1,))


def delta(name: str, start: int = 0, finish: Finish | None = None) -> TokenDelta:
    return TokenDelta(request_id=name, choice=0, start=start, token_ids=(1,), text="a", stats=STATS, finish=finish)


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(max_buffered_bytes=10_000)


class TestGivenJobsOnTheirWay:
    """Room was stated; jobs were pulled into it."""

    def test_when_pulled_then_the_room_shrinks_until_the_engine_counts_them_itself(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(room(100), wait_s=0)

        mailbox.expect([("a", room(30)), ("b", room(20))], 0.0)
        assert mailbox.room() == room(50)

        mailbox.deliver([request("a")])
        assert [one.id for one in mailbox.new_requests(room(100), wait_s=0)] == ["a"]
        # The room just stated does not know of `a` yet.
        assert mailbox.room() == room(50)

        mailbox.new_requests(room(70), wait_s=0)
        assert mailbox.room() == room(50)

    def test_when_the_last_of_a_pull_is_ready_then_it_knows_what_the_pull_took(self, mailbox: Mailbox) -> None:
        now_s = monotonic_s()
        mailbox.expect([("a", room(1)), ("b", room(1))], now_s - 0.03)
        mailbox.deliver([request("a")])
        assert mailbox.ahead_s == 0.0

        mailbox.deliver([request("b")])
        first = mailbox.ahead_s
        mailbox.expect([("c", room(1))], monotonic_s() - 0.001)
        mailbox.deliver([request("c")])

        assert 2 * 0.03 <= first < 2 * MOST_PULL_S
        assert 0.7 * first < mailbox.ahead_s < first, "the longest of late counts"

    def test_when_a_pull_takes_very_long_then_it_counts_as_less(self, mailbox: Mailbox) -> None:
        mailbox.expect([("a", room(1))], monotonic_s() - 20.0)
        mailbox.deliver([request("a")])

        assert mailbox.ahead_s == 2 * MOST_PULL_S

    def test_when_jobs_are_resumed_then_they_are_not_timed(self, mailbox: Mailbox) -> None:
        mailbox.expect([("a", room(1))], None)
        mailbox.deliver([request("a")])

        assert mailbox.ahead_s == 0.0

    def test_when_places_are_coming_then_the_jobs_on_their_way_take_the_free_ones_first(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(replace(room(3), num_coming=2), wait_s=0)
        assert not mailbox.room().is_taken

        mailbox.expect([("a", room(1))], 0.0)

        assert (mailbox.room().sequences, mailbox.room().is_taken) == (2, True)

    def test_when_the_timed_one_is_lost_then_the_next_pull_is_timed(self, mailbox: Mailbox) -> None:
        mailbox.expect([("a", room(1))], 0.0)
        mailbox.lose(["a"])
        mailbox.expect([("b", room(1))], monotonic_s() - 0.02)
        mailbox.deliver([request("b")])

        assert 2 * 0.02 <= mailbox.ahead_s < 2 * MOST_PULL_S

    def test_when_the_engine_has_not_counted_all_then_the_last_ones_stay_subtracted(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(room(100), wait_s=0)
        mailbox.expect([("a", room(30)), ("b", room(20)), ("c", room(10))], 0.0)
        mailbox.deliver([request("a"), request("b")])
        mailbox.new_requests(room(100), wait_s=0)
        mailbox.deliver([request("c")])

        mailbox.new_requests(room(100), num_uncounted=2, wait_s=0)
        assert mailbox.room() == room(40)

        mailbox.new_requests(room(70), num_uncounted=2, wait_s=0)
        assert mailbox.room() == room(40), "it has counted the first"

        mailbox.new_requests(room(40), num_uncounted=0, wait_s=0)
        assert mailbox.room() == room(40)

    def test_when_one_never_reaches_the_engine_then_its_room_is_free_again(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(room(100), wait_s=0)
        mailbox.expect([("a", room(30)), ("b", room(20))], 0.0)

        mailbox.lose(["a"])
        mailbox.forget(["b"])

        assert mailbox.room() == room(100)

    def test_when_one_is_lost_after_it_was_delivered_then_the_loop_does_not_get_it(self, mailbox: Mailbox) -> None:
        mailbox.deliver([request("a"), request("b")])

        mailbox.lose(["a"])

        assert [one.id for one in mailbox.new_requests(room(1), wait_s=0)] == ["b"]
        assert mailbox.lost() == ["a"]

    def test_when_one_is_delivered_and_cancelled_between_polls_then_it_is_aborted_later(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(room(1), wait_s=0)
        mailbox.deliver([request("a")])
        mailbox.cancel(["a", "b"])

        assert mailbox.cancelled() == ["b"]
        assert [one.id for one in mailbox.new_requests(room(1), wait_s=inf)] == ["a"]
        assert mailbox.cancelled() == ["a"]
        assert mailbox.cancelled() == []

    def test_when_more_is_on_its_way_than_fits_then_there_is_no_room(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(room(10), wait_s=0)
        mailbox.expect([("a", room(30))], 0.0)

        assert mailbox.room() == room(0)


class TestGivenAPullThreadThatSleeps:
    """It was told of the room before."""

    GIVEN_UP = Room(kv_tokens=9, prefill_tokens=9, sequences=9, over_class=0)
    MORE_GIVEN_UP = replace(GIVEN_UP, kv_tokens=10)
    COMING = replace(room(1), num_coming=1)

    @pytest.mark.parametrize(
        ("before", "after", "is_woken"),
        [
            (room(1), room(2), True),
            (room(2), room(1), False),
            (room(1), GIVEN_UP, True),
            (GIVEN_UP, room(1), True),
            (GIVEN_UP, MORE_GIVEN_UP, False),
            (COMING, room(1), True),
        ],
        ids=[
            "more is free",
            "less is free",
            "none is free any more",
            "some is free again",
            "more would be given up",
            "what was coming is free",
        ],
    )
    def test_when_the_room_changes_then_it_wakes_for_what_it_could_not_know(
        self, mailbox: Mailbox, before: Room, after: Room, is_woken: bool
    ) -> None:
        mailbox.new_requests(before, wait_s=0)
        mailbox.wait_to_pull(0)
        woken = threading.Event()

        def sleep() -> None:
            mailbox.wait_to_pull(60)
            woken.set()

        thread = threading.Thread(target=sleep, daemon=True)
        thread.start()
        mailbox.new_requests(after, wait_s=0)

        assert woken.wait(5 if is_woken else 0.1) is is_woken
        mailbox.wake()
        thread.join()

    def test_when_a_job_is_on_its_way_then_less_would_be_given_up(self, mailbox: Mailbox) -> None:
        mailbox.new_requests(self.GIVEN_UP, wait_s=0)
        mailbox.expect([("a", room(2))], 0.0)

        assert mailbox.room() == Room(kv_tokens=7, prefill_tokens=7, sequences=7, over_class=0)


class TestGivenAnIdleLoop:
    """It waits in `new_requests`."""

    @pytest.mark.parametrize("what", ["deliver", "cancel", "lose", "report", "interrupt"])
    def test_when_something_comes_then_it_wakes(self, mailbox: Mailbox, what: str) -> None:
        woken = threading.Event()

        def loop() -> None:
            mailbox.new_requests(room(1), wait_s=inf)
            woken.set()

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        match what:
            case "deliver":
                mailbox.deliver([request("a")])
            case "cancel":
                mailbox.cancel(["a"])
            case "lose":
                mailbox.lose(["a"])
            case "report":
                mailbox.announce_report()
            case _:
                mailbox.interrupt()

        assert woken.wait(5)
        thread.join()

    def test_when_nothing_comes_in_the_time_given_then_it_comes_back_without(self, mailbox: Mailbox) -> None:
        assert mailbox.new_requests(room(1), wait_s=0.01) == []

    def test_when_a_part_dies_then_the_loop_hears_it(self, mailbox: Mailbox) -> None:
        threading.Timer(0.01, lambda: mailbox.fail(ComponentDied("exchange", ValueError("no")))).start()

        with pytest.raises(ComponentDied, match="the exchange ended with ValueError: no"):
            mailbox.new_requests(room(1), wait_s=inf)

    @pytest.mark.timeout(10)
    def test_when_a_handler_runs_between_check_and_sleep_then_it_still_returns(
        self, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look = mailbox._has_mail  # pyright: ignore[reportPrivateUsage] (a handler runs in the loop's thread, anywhere)
        looks: list[bool] = []

        def look_and_be_interrupted() -> bool:
            found = look()
            if not looks:
                mailbox.interrupt()
            looks.append(found)
            return found

        monkeypatch.setattr(mailbox, "_has_mail", look_and_be_interrupted)

        assert mailbox.new_requests(room(1), wait_s=inf) == []
        assert looks == [False, True]

    def test_when_interrupted_once_then_it_returns_once(self, mailbox: Mailbox) -> None:
        mailbox.interrupt()
        assert mailbox.new_requests(room(1), wait_s=inf) == []

        threading.Timer(0.01, lambda: mailbox.deliver([request("a")])).start()
        assert [one.id for one in mailbox.new_requests(room(1), wait_s=inf)] == ["a"]


class TestGivenAnExchangeThatWaitsForTheNextRound:
    """It sleeps in `wait`, for what is urgent only."""

    @pytest.fixture
    def woken(self, mailbox: Mailbox) -> Generator[threading.Event]:
        woken = threading.Event()

        def sleep() -> None:
            mailbox.wait(60, for_urgent=True)
            woken.set()

        thread = threading.Thread(target=sleep, daemon=True)
        thread.start()
        yield woken
        mailbox.wake()
        thread.join()

    @pytest.mark.parametrize(
        "urgent", [delta("a"), delta("a", 7, Finish(reason=FinishReason.STOP))], ids=["a first token", "an end"]
    )
    def test_when_something_urgent_is_said_then_it_wakes(
        self, mailbox: Mailbox, woken: threading.Event, urgent: TokenDelta
    ) -> None:
        mailbox.publish([delta("b", 3), urgent])

        assert woken.wait(5)

    def test_when_a_job_ended_without_the_engine_then_it_wakes(self, mailbox: Mailbox, woken: threading.Event) -> None:
        mailbox.put_unpublished("a")

        assert woken.wait(5)

    def test_when_a_token_between_them_is_said_then_it_sleeps_on_and_finds_it_later(
        self, mailbox: Mailbox, woken: threading.Event
    ) -> None:
        mailbox.publish([delta("a", 1)])

        assert not woken.wait(0.1)
        steps, _ = mailbox.take_steps()
        assert [one.start for _, deltas in steps for one in deltas] == [1]

    def test_when_it_was_said_before_the_sleep_then_only_what_is_urgent_keeps_it_awake(self, mailbox: Mailbox) -> None:
        mailbox.publish([delta("a", 1)])
        began_s = time.monotonic()
        mailbox.wait(0.2, for_urgent=True)
        assert time.monotonic() - began_s >= 0.19

        mailbox.publish([delta("b")])
        mailbox.wait(inf, for_urgent=True)
        mailbox.publish([delta("a", 2)])
        mailbox.wait(inf)


class TestGivenABufferAtItsBound:
    """Redis has been away for long."""

    def test_when_the_loop_says_more_then_it_stands_still_until_redis_took_it(self) -> None:
        deltas = [delta("a")]
        mailbox = Mailbox(max_buffered_bytes=bytes_of(deltas))
        mailbox.publish(deltas)
        stood = threading.Event()

        def loop() -> None:
            mailbox.publish(deltas)
            stood.set()

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        assert not stood.wait(0.05)
        _, num_bytes = mailbox.take_steps()
        mailbox.release(num_bytes)

        assert stood.wait(5)
        thread.join()

    def test_when_an_engine_reports_meanwhile_then_it_still_stands(self) -> None:
        deltas = [delta("a")]
        mailbox = Mailbox(max_buffered_bytes=0)
        stood = threading.Event()
        thread = threading.Thread(target=lambda: (mailbox.publish(deltas), stood.set()), daemon=True)
        thread.start()

        mailbox.announce_report()

        assert not stood.wait(0.05)
        mailbox.interrupt()
        assert stood.wait(5)
        thread.join()

    def test_when_asked_to_stop_then_it_stands_still_no_longer(self) -> None:
        deltas = [delta("a")]
        mailbox = Mailbox(max_buffered_bytes=0)
        threading.Timer(0.01, mailbox.interrupt).start()

        mailbox.publish(deltas)

        assert len(mailbox.take_steps()[0]) == 1


class TestGivenAPullerWithoutRoom:
    @pytest.mark.parametrize(("gone", "wakes"), [("coming", True), ("another", False)])
    def test_when_one_that_was_coming_is_forgotten_then_it_wakes(
        self, mailbox: Mailbox, gone: str, wakes: bool
    ) -> None:
        mailbox.expect([("coming", room(1))], 0.0)
        mailbox.wait_to_pull(0)
        woken = threading.Event()

        def pull() -> None:
            mailbox.wait_to_pull(30)
            woken.set()

        threading.Thread(target=pull, daemon=True).start()
        mailbox.forget([gone])

        assert woken.wait(5 if wakes else 0.1) == wakes
        mailbox.wake()
