"""Queues of one worker share it by their weights, whatever their jobs, and none waits while the worker has room.

Pulls of the real schedule, from queues and an engine that are lists of jobs.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.request import Room
from sluice.protocol.calls import Notification, PullReply, PullRequest
from sluice.protocol.keys import QueueKeys
from sluice.worker.serve.pull_schedule import PullSchedule
from tests.worker.serve.test_pull_schedule import reply

CACHE_TOKENS, PLACES, SLICE_JOBS = 1000, 8, 5
LOST = 0.1
"""Share of the replies that do not arrive."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One queue. Changes as jobs come and are pulled; a job is its number of tokens."""

    keys: QueueKeys
    weight: int
    largest: int
    jobs: deque[int] = field(default_factory=deque[int])
    number: int = 0
    sent: tuple[int, ...] = ()
    """The jobs of the last pull, which a repeated one brings again."""

    taken: int = 0
    """Tokens of all jobs that were pulled; in `largest_pull`, of the most that one pull brought."""

    largest_pull: int = 0

    def pull(self, request: PullRequest) -> tuple[int, ...]:
        """Lease the first jobs that fit, and one that does not, as the script does."""
        if request.number == self.number:
            return self.sent
        self.number = request.number
        room, places, taken = request.kv_tokens, request.sequences, list[int]()
        while self.jobs and places > 0 and room > 0 and len(taken) < SLICE_JOBS and not request.holds_oversized:
            taken.append(self.jobs.popleft())
            room, places = room - taken[-1], places - 1
        self.sent = tuple(taken)
        self.taken += sum(taken)
        self.largest_pull = max(self.largest_pull, sum(taken))
        return self.sent


class Site:
    """A worker, and its queues. Changes with each pull and each job that ends."""

    def __init__(self, weights: list[int], largest: list[int], dice: Random, *, lost: float = LOST) -> None:
        self.queues = [
            Waiting(QueueKeys(f"q{place}"), weight, size)
            for place, (weight, size) in enumerate(zip(weights, largest, strict=True))
        ]
        self.by_keys = {queue.keys: queue for queue in self.queues}
        self.schedule = PullSchedule(
            list(self.by_keys), "me", reserve_tokens=16, weights={one.keys.queue: one.weight for one in self.queues}
        )
        self.dice, self.lost, self.running, self.now_s = dice, lost, list[int](), 0.0

    @property
    def room(self) -> Room:
        """What is free."""
        free = max(0, CACHE_TOKENS - sum(self.running))
        return Room(kv_tokens=free, prefill_tokens=free, sequences=max(0, PLACES - len(self.running)))

    def add(self, queue: Waiting, count: int) -> None:
        """Submit jobs, which wakes the worker."""
        queue.jobs.extend(self.dice.randint(1, queue.largest) for _ in range(count))
        self.schedule.on_notified(queue.keys, Notification("1-0", "1-0"))

    def pull(self) -> None:
        """Pull until the schedule asks for nothing."""
        while found := self.schedule.next(
            self.room, now_s=self.now_s, cache_tokens=CACHE_TOKENS, is_empty=not self.running,
            holds_oversized=sum(self.running) > CACHE_TOKENS,
        ):  # fmt: skip
            keys, request = found
            jobs = self.by_keys[keys].pull(request)
            if self.lost and self.dice.random() < self.lost:
                self.schedule.on_missed(keys)
                continue
            self.running += jobs
            made: PullReply = reply(request.number, has_more=len(jobs) == SLICE_JOBS)
            self.schedule.on_reply(keys, made, left=self.room, now_s=self.now_s, tokens=sum(jobs))

    def end_one(self) -> None:
        """End a job, some time later."""
        if self.running:
            self.running.pop(self.dice.randrange(len(self.running)))
        self.now_s += self.dice.random()

    def check_room_is_used(self) -> None:
        """Nothing waits while there is room, unless a job waits for more of it."""
        if self.room.is_some and sum(self.running) <= CACHE_TOKENS:
            assert not any(queue.jobs for queue in self.queues)


WEIGHTS = st.lists(st.integers(1, 9), min_size=2, max_size=3)
SEEDS = st.integers(0, 2**32)


def shares_apart(one: Waiting, other: Waiting, since: dict[Waiting, int]) -> tuple[float, float]:
    """How far two queues are apart in tokens for their weight, and how far a pull of each may bring them."""
    of_one, of_other = ((each.taken - since[each]) / each.weight for each in (one, other))
    return abs(of_one - of_other), one.largest_pull / one.weight + other.largest_pull / other.weight


@given(weights=WEIGHTS, seed=SEEDS, data=st.data())
def test_while_all_have_jobs_their_tokens_are_by_weight(weights: list[int], seed: int, data: st.DataObject) -> None:
    largest = data.draw(st.lists(st.integers(1, 2 * CACHE_TOKENS), min_size=len(weights), max_size=len(weights)))
    site = Site(weights, largest, Random(seed))
    nothing = dict.fromkeys(site.queues, 0)
    for _ in range(300):
        for queue in site.queues:
            site.add(queue, max(0, 20 - len(queue.jobs)))
        site.pull()
        site.end_one()

        for one in site.queues:
            apart, most = shares_apart(one, site.queues[0], nothing)
            assert apart <= most + 1e-6

    assert all(queue.taken for queue in site.queues), "none starves"


@given(weights=WEIGHTS, seed=SEEDS)
def test_when_queues_come_and_go_then_none_waits_with_room_and_none_saves_up(weights: list[int], seed: int) -> None:
    dice = Random(seed)
    site = Site(weights, [300] * len(weights), dice)
    first, second, *_ = site.queues
    since = {queue: queue.taken for queue in site.queues}
    for _ in range(300):
        for queue in site.queues:
            if dice.random() < 0.1:
                site.add(queue, dice.randint(1, 30))
        site.pull()
        site.check_room_is_used()
        site.end_one()

        if not (first.jobs and second.jobs):
            since = {queue: queue.taken for queue in site.queues}
        apart, most = shares_apart(first, second, since)
        assert apart <= most + 1e-6


@given(weight=st.integers(1, 9), seed=SEEDS)
def test_a_queue_without_jobs_takes_nothing_from_the_other(weight: int, seed: int) -> None:
    ends_s = list[float]()
    for weights in ([1], [1, weight]):
        site = Site(weights, [300, 300][: len(weights)], Random(seed), lost=0.0)
        site.add(site.queues[0], 200)
        while site.queues[0].jobs:
            site.pull()
            site.end_one()
        ends_s.append(site.now_s)

    assert ends_s[0] == ends_s[1]
