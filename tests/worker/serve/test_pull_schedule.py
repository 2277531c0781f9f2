"""When to pull: at a notification, at more room, at a timer, in turns; and under the same number until answered."""

from sluice.engine.request import NO_ROOM, Room
from sluice.protocol.calls import Notification, PullReply
from sluice.protocol.keys import QueueKeys
from sluice.worker.serve.pull_schedule import PULL_AT_LEAST_EVERY_S, PullSchedule

ONE, TWO = QueueKeys("q", 0), QueueKeys("q", 1)
WOKEN_BY = Notification("6-0", "6-0")
ROOM = Room(kv_tokens=100, prefill_tokens=100, sequences=10)


def room(sequences: int) -> Room:
    return Room(kv_tokens=100, prefill_tokens=100, sequences=sequences)


def reply(number: int, **given: object) -> PullReply:
    fields: dict[str, object] = {
        "number": number, "jobs": (), "last_notification": "5-0", "has_more": False, "is_paused": False,
        "drain_for_suspects": False, "server_ms": 1000, "look_again_ms": None, "due_ms": None,
    }  # fmt: skip
    return PullReply(**{**fields, **given})  # pyright: ignore[reportArgumentType]  # fields by name


def asked(
    pulls: PullSchedule, *, now_s: float = 0.0, left: Room = ROOM, is_empty: bool = True
) -> tuple[int, int] | None:
    """(partition, number) of the pull to make."""
    found = pulls.next(left, now_s=now_s, cache_tokens=1000, is_empty=is_empty, holds_oversized=False)
    return (found[0].partition, found[1].number) if found else None


def woken_by(pulls: PullSchedule, left: Room) -> Notification | None:
    """What the next pull acknowledges."""
    found = pulls.next(left, now_s=0.0, cache_tokens=1000, is_empty=True, holds_oversized=False)
    assert found is not None
    return found[1].woken_by


class TestGivenOnePartition:
    def test_when_a_reply_was_lost_then_the_same_number_is_asked_again(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)

        assert asked(pulls) == (0, 1)
        assert asked(pulls) == (0, 1)
        pulls.on_reply(ONE, reply(1), left=ROOM, now_s=0.0)
        pulls.on_notified(ONE, WOKEN_BY)
        assert asked(pulls) == (0, 2)

    def test_when_a_reply_is_lost_and_there_is_no_room_then_the_pull_is_repeated(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        assert asked(pulls, left=NO_ROOM) is None
        assert asked(pulls) == (0, 1)
        pulls.on_missed(ONE)

        found = pulls.next(NO_ROOM, now_s=0.0, cache_tokens=1000, is_empty=True, holds_oversized=False)

        assert found is not None
        request = found[1]
        assert (request.number, request.sequences, request.is_empty) == (1, 0, False), "suspects need room too"
        pulls.on_reply(ONE, reply(1, has_more=True), left=NO_ROOM, now_s=0.0)
        assert asked(pulls, left=NO_ROOM) is None

    def test_when_all_was_taken_then_nothing_is_asked_until_something_happens(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=ROOM, now_s=0.0)

        assert asked(pulls, now_s=0.1) is None
        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S) == (0, 2)

    def test_when_it_is_notified_then_it_asks_once_and_says_by_what(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=ROOM, now_s=0.0)
        pulls.on_notified(ONE, WOKEN_BY)

        assert woken_by(pulls, ROOM) == WOKEN_BY

        pulls.on_reply(ONE, reply(2), left=ROOM, now_s=0.0)
        assert asked(pulls) is None

    def test_when_it_is_notified_without_room_then_it_asks_so_that_another_is(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=room(0), now_s=0.0)
        pulls.on_notified(ONE, WOKEN_BY)

        assert woken_by(pulls, NO_ROOM) == WOKEN_BY

        pulls.on_reply(ONE, reply(2), left=room(0), now_s=0.0)
        assert asked(pulls, left=NO_ROOM) is None

    def test_when_it_stopped_at_its_bite_then_it_asks_at_once(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)

        pulls.on_reply(ONE, reply(1, has_more=True), left=ROOM, now_s=0.0)

        assert asked(pulls) == (0, 2)

    def test_when_room_grows_then_it_asks_and_when_it_shrinks_it_does_not(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=room(5), now_s=0.0)

        assert asked(pulls, left=room(3)) is None
        assert asked(pulls, left=room(4)) == (0, 2)

    def test_when_there_is_no_room_then_it_never_asks(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)

        assert asked(pulls, left=room(0), now_s=99.0) is None

    def test_when_a_timer_is_due_then_it_asks_in_time(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1, look_again_ms=1050), left=ROOM, now_s=10.0)

        assert asked(pulls, now_s=10.04) is None
        assert asked(pulls, now_s=10.051) == (0, 2)

    def test_when_it_must_drain_for_a_suspect_then_it_asks_when_empty_or_to_go_on(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1, drain_for_suspects=True, has_more=True), left=ROOM, now_s=0.0)

        assert asked(pulls, now_s=0.1, is_empty=False) is None
        assert asked(pulls, now_s=0.1, is_empty=True) == (0, 2)
        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S, is_empty=False) == (0, 2)

    def test_when_paused_then_it_does_not_spin(self) -> None:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1, has_more=True, is_paused=True), left=ROOM, now_s=0.0)

        assert asked(pulls, now_s=0.1) is None


class TestGivenPlacesThatAreAboutToBecomeFree:
    """Every place is taken, and one is offered before it is free; the last pull, at 0 s, filled the worker."""

    COMING = Room(kv_tokens=100, prefill_tokens=100, sequences=1, num_coming=1)

    def pulls(self) -> PullSchedule:
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=NO_ROOM, now_s=0.0)
        return pulls

    def test_when_the_last_pull_filled_the_worker_then_it_asks_before_the_place_is_free(self) -> None:
        assert asked(self.pulls(), now_s=0.01, left=self.COMING) == (0, 2)

    def test_when_nothing_waits_then_it_does_not_ask_again_until_a_look_finds_some(self) -> None:
        pulls = self.pulls()
        assert asked(pulls, now_s=0.1, left=self.COMING) == (0, 2)
        pulls.on_reply(ONE, reply(2), left=self.COMING, now_s=0.1)
        pulls.on_look(ONE, is_waiting=False, now_s=0.12)
        assert asked(pulls, now_s=0.12, left=self.COMING) is None

        pulls.on_look(ONE, is_waiting=True, now_s=0.14)

        assert asked(pulls, now_s=0.14, left=self.COMING) == (0, 3)


class TestGivenAFullWorker:
    """Every place is taken; those of class 0 would be given up."""

    GIVEN_UP = Room(kv_tokens=100, prefill_tokens=100, sequences=4, over_class=0)

    def pulls(self) -> PullSchedule:
        """The worker was filled by its last pull, at 0 s."""
        pulls = PullSchedule([ONE], "me", reserve_tokens=16)
        pulls.on_reply(ONE, reply(1), left=NO_ROOM, now_s=0.0)
        return pulls

    def test_when_a_higher_class_waits_then_it_asks_for_that_alone(self) -> None:
        pulls = self.pulls()
        assert asked(pulls, now_s=0.1, left=self.GIVEN_UP) is None

        pulls.on_look(ONE, is_waiting=True, now_s=0.1)

        found = pulls.next(self.GIVEN_UP, now_s=0.1, cache_tokens=1000, is_empty=False, holds_oversized=False)
        assert found is not None
        assert found[1].over_class == 0

    def test_when_a_pull_leaves_what_waits_then_it_asks_again_when_it_is_told(self) -> None:
        pulls = self.pulls()
        pulls.on_look(ONE, is_waiting=True, now_s=0.1)
        pulls.on_reply(ONE, reply(2, look_again_ms=1030), left=self.GIVEN_UP, now_s=0.1)

        pulls.on_look(ONE, is_waiting=True, now_s=0.12)

        assert asked(pulls, now_s=0.12, left=self.GIVEN_UP) is None
        assert asked(pulls, now_s=0.131, left=self.GIVEN_UP) == (0, 3)

    def test_when_what_was_left_is_gone_and_another_comes_then_it_asks(self) -> None:
        pulls = self.pulls()
        pulls.on_reply(ONE, reply(2), left=self.GIVEN_UP, now_s=0.1)
        pulls.on_look(ONE, is_waiting=False, now_s=0.15)

        pulls.on_look(ONE, is_waiting=True, now_s=0.2)

        assert asked(pulls, now_s=0.2, left=self.GIVEN_UP) == (0, 3)

    def test_when_a_place_becomes_free_then_it_asks_at_once(self) -> None:
        pulls = self.pulls()
        pulls.on_reply(ONE, reply(2), left=self.GIVEN_UP, now_s=0.1)

        assert asked(pulls, now_s=0.11, left=room(1)) == (0, 3)

    def test_when_a_place_becomes_free_during_such_a_pull_then_it_asks_at_once(self) -> None:
        pulls = self.pulls()
        pulls.on_look(ONE, is_waiting=True, now_s=0.1)
        assert asked(pulls, now_s=0.1, left=self.GIVEN_UP) == (0, 2)

        pulls.on_reply(ONE, reply(2), left=room(1), now_s=0.1)

        assert asked(pulls, now_s=0.11, left=room(1)) == (0, 3)

    def test_when_one_becomes_free_as_it_passes_a_notification_on_then_it_asks(self) -> None:
        pulls = self.pulls()
        pulls.on_notified(ONE, WOKEN_BY)
        assert asked(pulls, now_s=0.1, left=NO_ROOM) == (0, 2)

        pulls.on_reply(ONE, reply(2), left=room(1), now_s=0.1)

        assert asked(pulls, now_s=0.11, left=room(1)) == (0, 3)

    def test_when_a_pull_for_that_place_finds_nothing_then_it_asks_no_more(self) -> None:
        pulls = self.pulls()
        assert asked(pulls, now_s=0.5, left=self.GIVEN_UP) == (0, 2)
        pulls.on_reply(ONE, reply(2), left=room(1), now_s=0.5)
        assert asked(pulls, now_s=0.51, left=room(1)) == (0, 3)

        pulls.on_reply(ONE, reply(3), left=room(1), now_s=0.51)

        assert asked(pulls, now_s=0.52, left=room(1)) is None

    def test_when_none_is_seen_then_it_asks_rarely_for_returned_ones(self) -> None:
        pulls = self.pulls()
        pulls.on_look(ONE, is_waiting=False, now_s=0.4)

        assert asked(pulls, now_s=0.49, left=self.GIVEN_UP) is None
        assert asked(pulls, now_s=0.5, left=self.GIVEN_UP) == (0, 2)

    def test_when_a_notification_reached_it_before_it_was_full_then_it_passes_it_on(self) -> None:
        pulls = self.pulls()
        pulls.on_notified(ONE, WOKEN_BY)

        assert woken_by(pulls, self.GIVEN_UP) == WOKEN_BY


class TestGivenTwoPartitions:
    def test_when_both_have_more_then_they_take_turns_each_with_its_own_numbers(self) -> None:
        pulls = PullSchedule([ONE, TWO], "me", reserve_tokens=16)
        served: list[tuple[int, int] | None] = []
        for _ in range(4):
            turn = asked(pulls)
            assert turn is not None
            served.append(turn)
            pulls.on_reply(QueueKeys("q", turn[0]), reply(turn[1], has_more=True), left=ROOM, now_s=0.0)

        assert served == [(0, 1), (1, 1), (0, 2), (1, 2)]
