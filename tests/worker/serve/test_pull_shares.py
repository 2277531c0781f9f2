"""Which of several queues is pulled from: that which has had the least for its weight, and never one without room."""

from sluice.engine.request import NO_ROOM, Room
from sluice.protocol.calls import Notification, PullReply
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import SUSPECT_DEATHS
from sluice.worker.serve.pull_schedule import PULL_AT_LEAST_EVERY_S, PullSchedule
from tests.worker.jobs.test_leases import job
from tests.worker.serve.test_pull_schedule import ROOM, WOKEN_BY, reply

CHAT, BATCH = QueueKeys("chat"), QueueKeys("batch")
FULL = Room(kv_tokens=100, prefill_tokens=100, sequences=4, over_class=0)
"""Every place is taken; those of class 0 would be given up."""


def schedule(*, unavailable: set[QueueKeys] | None = None) -> PullSchedule:
    """Chat has three parts of the worker, batch one."""
    weights = {"chat": 3, "batch": 1}
    return PullSchedule([CHAT, BATCH], "me", reserve_tokens=16, weights=weights, unavailable=unavailable or ())


def asked(pulls: PullSchedule, *, now_s: float = 0.0, room: Room = ROOM, is_empty: bool = False) -> str | None:
    """The queue to pull from."""
    found = pulls.next(room, now_s=now_s, cache_tokens=1000, is_empty=is_empty, holds_oversized=False)
    return found[0].queue if found else None


def owed(pulls: PullSchedule) -> tuple[str, int, Notification | None, Room] | None:
    """The pull to make of a worker with room, and the room that it asks for."""
    found = pulls.next(ROOM, now_s=0.1, cache_tokens=1000, is_empty=False, holds_oversized=False)
    if found is None:
        return None
    keys, made = found
    room = Room(kv_tokens=made.kv_tokens, prefill_tokens=made.prefill_tokens, sequences=made.sequences)
    return keys.queue, made.number, made.woken_by, room


def answer(pulls: PullSchedule, keys: QueueKeys, number: int, tokens: int, **given: object) -> None:
    """A pull brings jobs of so many tokens, and there are more."""
    made: PullReply = reply(number, **{"has_more": True, **given})
    pulls.on_reply(keys, made, left=ROOM, now_s=0.0, tokens=tokens)


def served(pulls: PullSchedule, count: int, *, tokens: int = 30) -> str:
    """The initials of the queues that the next pulls are from, all of the same size."""
    numbers, names = {"chat": 0, "batch": 0}, ""
    for _ in range(count):
        name = asked(pulls)
        assert name is not None
        numbers[name] += 1
        answer(pulls, QueueKeys(name), numbers[name], tokens)
        names += name[0]
    return names


class TestGivenTwoQueuesThatHaveJobs:
    def test_when_pulls_bring_the_same_then_their_number_is_by_weight(self) -> None:
        assert served(schedule(), 12) == "cbccbcccbccc"

    def test_when_jobs_of_one_are_larger_then_it_gets_fewer(self) -> None:
        pulls = schedule()
        answer(pulls, CHAT, 1, 900)
        answer(pulls, BATCH, 1, 30)

        assert served(pulls, 9, tokens=30) == "bbbbbbbbb", "nine times 30, and 30 before, are as much as 900 for three"

    def test_when_one_does_not_answer_then_the_other_is_served_meanwhile(self) -> None:
        away = {CHAT}
        pulls = schedule(unavailable=away)
        assert served(pulls, 3) == "bbb"

        away.clear()

        assert served(pulls, 4) == "cccb", "it has saved nothing up"

    def test_when_a_reply_was_lost_then_its_number_is_asked_again(self) -> None:
        pulls = schedule()
        pulls.on_missed(CHAT)

        found = pulls.next(NO_ROOM, now_s=0.0, cache_tokens=1000, is_empty=False, holds_oversized=False)

        assert found is not None
        assert (found[0], found[1].number) == (CHAT, 1)


class TestGivenAQueueThatHadNoJobs:
    """Batch alone was served, for a long time."""

    def pulls(self) -> PullSchedule:
        pulls = schedule()
        pulls.on_reply(CHAT, reply(1), left=ROOM, now_s=0.0)
        for number in range(1, 100):
            assert asked(pulls) == "batch"
            answer(pulls, BATCH, number, 30)
        return pulls

    def test_when_it_has_jobs_again_then_it_goes_first_and_has_saved_nothing_up(self) -> None:
        pulls = self.pulls()

        pulls.on_notified(CHAT, WOKEN_BY)

        assert served(pulls, 8) == "cccbcccb"


class TestGivenAQueueWithASuspect:
    """This worker is to be empty for it; the other queue has jobs without end."""

    def pulls(self) -> PullSchedule:
        pulls = schedule()
        answer(pulls, BATCH, 1, 30, drain_for_suspects=True)
        return pulls

    def with_its_suspect(self) -> PullSchedule:
        pulls = self.pulls()
        assert asked(pulls, now_s=0.1, is_empty=True) == "batch"
        self.run_the_suspect(pulls)
        return pulls

    def run_the_suspect(self, pulls: PullSchedule) -> None:
        suspect = job("a").leased._replace(deaths=SUSPECT_DEATHS)
        answer(pulls, BATCH, 2, 30, jobs=(suspect,), has_more=False)

    def test_when_the_worker_is_not_empty_then_it_takes_no_jobs_of_the_other_queue(self) -> None:
        pulls = self.pulls()

        assert asked(pulls, now_s=0.1) is None
        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S) == "batch", "it shows that it drains"

    def test_when_it_is_empty_then_the_suspect_goes_first(self) -> None:
        assert asked(self.pulls(), now_s=0.1, is_empty=True) == "batch"

    def test_when_the_suspect_runs_then_no_job_of_the_other_queue_is_taken_until_it_has_ended(self) -> None:
        pulls = self.with_its_suspect()

        assert asked(pulls, now_s=0.2) is None
        assert asked(pulls, now_s=0.3, is_empty=True) == "chat"

    def test_when_the_other_queue_gets_jobs_as_it_drains_then_it_passes_the_notification_on(self) -> None:
        pulls = self.pulls()
        pulls.on_notified(CHAT, WOKEN_BY)

        assert owed(pulls) == ("chat", 1, WOKEN_BY, NO_ROOM)

    def test_when_the_other_queue_did_not_answer_as_it_drains_then_it_repeats_the_number_without_room(self) -> None:
        pulls = self.pulls()
        pulls.on_missed(CHAT)

        assert owed(pulls) == ("chat", 1, None, NO_ROOM)

    def test_when_the_other_queue_gets_jobs_as_the_suspect_runs_then_it_takes_them_when_that_has_ended(self) -> None:
        pulls = self.with_its_suspect()
        pulls.on_notified(CHAT, WOKEN_BY)
        assert owed(pulls) == ("chat", 1, WOKEN_BY, NO_ROOM)
        answer(pulls, CHAT, 1, 0, has_more=False)

        assert asked(pulls, now_s=0.2) is None
        assert asked(pulls, now_s=0.3, is_empty=True) == "chat"

    def test_when_the_other_queue_did_not_answer_as_the_suspect_runs_then_it_repeats_it_without_room(self) -> None:
        pulls = self.with_its_suspect()
        pulls.on_missed(CHAT)

        assert owed(pulls) == ("chat", 1, None, NO_ROOM)

    def test_when_the_other_queue_has_a_suspect_too_then_that_waits_for_the_end_of_the_first(self) -> None:
        pulls = self.pulls()
        answer(pulls, CHAT, 1, 0, drain_for_suspects=True)
        self.run_the_suspect(pulls)

        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S - 0.01) is None
        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S) == "batch", (
            "a pull from chat brings others if its own has gone"
        )
        assert asked(pulls, now_s=PULL_AT_LEAST_EVERY_S, is_empty=True) == "chat"


class TestGivenAFullWorker:
    """Jobs of a higher class wait in batch, which has had more than its share."""

    def pulls(self) -> PullSchedule:
        pulls = schedule()
        answer(pulls, CHAT, 1, 30, has_more=False)
        answer(pulls, BATCH, 1, 30, has_more=False)
        return pulls

    def test_when_jobs_of_the_other_queue_wait_then_it_interrupts_none(self) -> None:
        pulls = self.pulls()

        pulls.on_waiting([CHAT, BATCH])

        assert not pulls.may_interrupt(BATCH)
        assert asked(pulls, now_s=9.0, room=FULL) == "chat"
        assert pulls.next_due_s(FULL) == pulls.next_due_s(ROOM)

    def test_when_no_job_of_the_other_queue_waits_then_it_may_interrupt(self) -> None:
        pulls = self.pulls()
        pulls.on_waiting([BATCH])

        pulls.on_look(BATCH, is_waiting=True, now_s=0.1)

        assert asked(pulls, now_s=0.1, room=FULL) == "batch"

    def test_when_the_other_queue_is_paused_then_it_may_interrupt(self) -> None:
        pulls = self.pulls()
        answer(pulls, CHAT, 2, 0, is_paused=True)

        pulls.on_waiting([CHAT, BATCH])

        assert pulls.may_interrupt(BATCH)

    def test_when_it_may_not_then_it_passes_a_notification_on_without_asking_for_jobs(self) -> None:
        pulls = self.pulls()
        pulls.on_waiting([CHAT, BATCH])
        pulls.on_notified(BATCH, WOKEN_BY)

        found = pulls.next(FULL, now_s=0.1, cache_tokens=1000, is_empty=False, holds_oversized=False)

        assert found is not None
        assert (found[0], found[1].woken_by, found[1].sequences) == (BATCH, WOKEN_BY, 0)
