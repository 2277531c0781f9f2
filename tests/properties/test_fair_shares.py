"""Tenants share the workers' tokens by their weights, and classes go first by rank and share.

The real scripts on a real server, several incarnations, and a clock that the test moves: ten seconds take about two.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, permutations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sluice.protocol import limits
from sluice.protocol.calls import LeasedJob, NewJob, Progress
from sluice.protocol.wire import JobId
from tests.grids import fast_only
from tests.protocol.driving import Queue, Worker, check, ending, new_job, tokens
from tests.servers import RedisServer

TICK_MS = 20
WINDOW_MS = 10_000
TOKENS_PER_S = 400
"""Of one slot."""

SLOTS = 4
NUM_WORKERS = 4
MAX_TOKENS = 100
PUBLISH_EVERY = 50
TOLERANCE = 0.02


@dataclass(slots=True)
class Running:
    """A job in a slot. Changes with each tick."""

    leased: LeasedJob
    output_tokens: int
    left: float
    published: int = 0

    @property
    def written(self) -> int:
        """Output tokens so far: the prompt is computed first."""
        return max(0, self.output_tokens - math.ceil(self.left))


@dataclass(slots=True)
class SlottedWorker:
    """Generates for a few jobs at a time, each at the same speed. Changes with each tick."""

    worker: Worker
    tokens_per_s: float = TOKENS_PER_S
    running: list[Running] = field(default_factory=list[Running])

    def tick(self, dice: random.Random) -> Counter[str]:
        """Pull what fits, generate for a tick, and end finished jobs; return the tokens of each tenant."""
        if len(self.running) < SLOTS:
            for leased in self.worker.pull(sequences=SLOTS - len(self.running)).jobs:
                most = int(leased.id.rpartition("x")[2])
                output = dice.randint(most // 5, most)
                self.running.append(Running(leased, output, left=leased.prompt_tokens + output))
        done = Counter[str]()
        for one in self.running:
            step = min(one.left, self.tokens_per_s * TICK_MS / 1000)
            one.left -= step
            done[one.leased.id.split(".")[1]] += round(step)
        over = [one for one in self.running if one.left <= 0]
        self.running = [one for one in self.running if one.left > 0]
        # With tokens: a channel without any expires after a minute, and a busy machine takes that long.
        self.worker.advance(*[ending(one.leased, one.published, one.output_tokens - one.published) for one in over])
        self.worker.advance(
            *[self.publish(one) for one in self.running if one.written - one.published >= PUBLISH_EVERY]
        )
        return done

    def publish(self, one: Running) -> Progress:
        """Return the tokens generated since the last call."""
        start, one.published = one.published, one.written
        return tokens(one.leased, start, one.published - start)


def a_job(tenant: str, number: int, max_tokens: int, **changes: int) -> NewJob:
    """Add a job whose name holds its `max_tokens`."""
    return new_job(f"j{number}x{max_tokens}", tenant, max_tokens=max_tokens, **changes)


@dataclass(slots=True)
class Crowd:
    """Tenants that always have work waiting. Changes: it submits."""

    queue: Queue
    dice: random.Random
    max_tokens: Mapping[str, int]
    names: Iterator[int] = field(default_factory=count)

    def keep_waiting(self, tenant: str, at_least: int) -> None:
        """Submit until so many wait."""
        waiting = {lane[1]: lane[2] for lane in self.queue.look().lanes}.get(tenant, 0)
        if waiting >= at_least:
            return
        most = self.max_tokens[tenant]
        jobs = [a_job(tenant, next(self.names), most, prompt_tokens=self.dice.randint(1, 50)) for _ in range(64)]
        self.queue.submit(*jobs)


def serve(
    queue: Queue, workers: list[SlottedWorker], tenants: Mapping[str, int], dice: random.Random, ms: int
) -> Counter[str]:
    """Let time pass, with jobs of so many tokens waiting for each tenant; returns the tokens that each got."""
    crowd, got = Crowd(queue, dice, tenants), Counter[str]()
    crowd.names = count(queue.look().totals.get("submitted", 0))
    for at_ms in range(0, ms, TICK_MS):
        if at_ms % 500 == 0:
            for tenant in tenants:
                crowd.keep_waiting(tenant, at_least=120)
            for one in workers:
                one.worker.beat(*[running.leased.id for running in one.running])
        queue.pass_time(TICK_MS)
        for one in dice.sample(workers, len(workers)):
            got += one.tick(dice)
    return got


def fresh(server: RedisServer) -> Queue:
    """An empty queue with a stopped clock."""
    client = server.client()
    client.flushall()
    queue = Queue(client)
    queue.stop_clock()
    return queue


class TestGivenATenantThatFloods:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "weights",
        fast_only(
            [{"flood": 2.0, "calm": 1.0, "third": 0.5}], [{"flood": 1.0, "calm": 1.0}, {"flood": 1.0, "calm": 3.0}]
        ),
        ids=str,
    )
    def test_when_others_have_work_for_ten_seconds_then_shares_are_within_two_percent(
        self, valkey: RedisServer, weights: Mapping[str, float]
    ) -> None:
        seed = random.SystemRandom().randrange(10**6)
        print(f"seed {seed}")  # noqa: T201  # shown where it fails
        dice, queue = random.Random(seed), fresh(valkey)
        queue.configure(mode="fair", weights=weights)
        workers = [SlottedWorker(queue.worker(f"w{i}")) for i in range(NUM_WORKERS)]
        # It is there first, has a thousand jobs waiting, and holds every slot.
        queue.submit(*[a_job("flood", -i, MAX_TOKENS) for i in range(1, 251)])
        serve(queue, workers, {"flood": MAX_TOKENS}, dice, 1000)

        got = serve(queue, workers, dict.fromkeys(weights, MAX_TOKENS), dice, WINDOW_MS)

        # A job that ends within a tick leaves its slot empty until the next one: half a tick of nine.
        assert got.total() > 0.93 * NUM_WORKERS * SLOTS * TOKENS_PER_S * WINDOW_MS / 1000, "no worker was idle"
        check_shares(got, weights)
        check(queue)


class TestGivenOutputsFarBeyondTheReserve:
    RESERVE = 64

    def given(self, valkey: RedisServer, tokens_per_s: float) -> tuple[random.Random, Queue, list[SlottedWorker]]:
        seed = random.SystemRandom().randrange(10**6)
        print(f"seed {seed}")  # noqa: T201  # shown where it fails
        queue = fresh(valkey)
        queue.configure(mode="fair", reserve_tokens=self.RESERVE)
        return random.Random(seed), queue, [SlottedWorker(queue.worker(f"w{i}"), tokens_per_s) for i in range(2)]

    @pytest.mark.slow
    def test_when_a_tenant_s_jobs_outlast_the_window_then_it_gets_at_most_its_share(self, valkey: RedisServer) -> None:
        dice, queue, workers = self.given(valkey, TOKENS_PER_S)
        outlasting = round(TOKENS_PER_S * WINDOW_MS / 1000) * 10
        queue.submit(a_job("long", -1, outlasting), a_job("long", -2, outlasting))

        got = serve(queue, workers, {"long": MAX_TOKENS, "short": MAX_TOKENS}, dice, WINDOW_MS)

        check_shares(got, {"long": 1.0, "short": 1.0})
        check(queue)

    @pytest.mark.slow
    def test_when_a_tenant_s_jobs_are_thirty_times_as_long_then_shares_still_hold(self, valkey: RedisServer) -> None:
        dice, queue, workers = self.given(valkey, 10 * TOKENS_PER_S)
        length = 30 * self.RESERVE
        serve(queue, workers, {"long": length}, dice, 1000)

        got = serve(queue, workers, {"long": length, "short": MAX_TOKENS * 4}, dice, WINDOW_MS)

        check_shares(got, {"long": 1.0, "short": 1.0})
        check(queue)


def check_shares(got: Counter[str], weights: Mapping[str, float]) -> None:
    """Each tenant has its share of all tokens, within two percent of them."""
    total, whole = got.total(), sum(weights.values())
    excess = {tenant: round(got[tenant] / total - weight / whole, 4) for tenant, weight in weights.items()}
    print(excess)  # noqa: T201  # shown where it fails
    assert all(abs(one) <= TOLERANCE for one in excess.values()), excess


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int, str]]:
    """(milliseconds since the one before, class, tenant) of some jobs."""
    one = st.tuples(st.integers(0, 1500), st.integers(0, 4), st.sampled_from("abc"))
    return draw(st.lists(one, min_size=2, max_size=12))


class TestGivenJobsOfManyClasses:
    STEP_MS = 1000
    COSTS = (1, 1, 5, 30, 30)
    """Of a job of each class: small ones of the lower classes, so that their share soon covers one."""

    @pytest.mark.parametrize("mode", ["fifo", "fair", "deadline"])
    @settings(
        max_examples=25,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(jobs=arrivals(), data=st.data())
    def test_when_they_are_pulled_then_the_highest_goes_first_but_for_the_share(
        self, valkey: RedisServer, mode: str, jobs: list[tuple[int, int, str]], data: st.DataObject
    ) -> None:
        queue = fresh(valkey)
        queue.configure(mode=mode, age_step_ms=self.STEP_MS)
        workers = [queue.worker(name) for name in "AB"]
        came: dict[JobId, tuple[int, int]] = {}
        waiting: set[JobId] = set()
        share = 0.0

        def pull_one() -> None:
            nonlocal share
            worker = data.draw(st.sampled_from(workers))
            worker.beat()
            for leased in worker.pull(sequences=1).jobs:
                waiting.discard(leased.id)
                share += self.check_turn(leased.id, waiting, came, share, queue.now_ms)
                worker.advance(ending(leased, 0, 0))

        for number, (after_ms, priority, tenant) in enumerate(jobs):
            queue.pass_time(after_ms)
            cost = self.COSTS[priority]
            job_id = queue.add(f"j{number}", tenant, priority=priority, prompt_tokens=cost, max_tokens=0)
            came[job_id] = (queue.now_ms, priority)
            waiting.add(job_id)
            if data.draw(st.booleans()):
                pull_one()
        while waiting:
            queue.pass_time(data.draw(st.integers(0, 3000)))
            pull_one()
        queue.client.close()

    def check_turn(
        self, taken: JobId, waiting: set[JobId], came: Mapping[JobId, tuple[int, int]], share: float, now_ms: int
    ) -> float:
        """Check that a job's class was next; return what it adds to the share of the lower classes, or takes from it.

        Among the lower classes, the wait of the oldest job of a class lifts it.
        """
        times_and_classes = [came[one] for one in (taken, *waiting)]
        oldest = {one: min(at_ms for at_ms, other in times_and_classes if other == one) for _, one in times_and_classes}
        priority = came[taken][1]
        cost = self.COSTS[priority]
        highest, *lower = sorted(oldest, reverse=True)
        if not lower:
            return 0
        if priority == highest:
            return cost * 5 / 95
        assert share > cost - 1e-6, (taken, share)
        rank = {one: (one + (now_ms - oldest[one]) / self.STEP_MS, -oldest[one]) for one in lower}
        assert rank[priority] == max(rank.values()), (taken, rank)
        return -cost


class TestGivenTenantsOfOneClass:
    @pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
    def test_when_all_have_work_then_none_waits_for_more_than_one_job_of_each_other(
        self, valkey: RedisServer, order: tuple[str, ...]
    ) -> None:
        queue = fresh(valkey)
        for tenant in order:
            queue.submit(*[new_job(f"{tenant}{i}", tenant) for i in range(12)])
        worker = queue.worker("A")

        taken = [job.id.split(".")[1] for _ in range(30) for job in worker.pull(sequences=1).jobs]

        since = {tenant: Counter[str]() for tenant in order}
        for tenant in taken:
            since = {one: Counter[str]() if one == tenant else since[one] + Counter([tenant]) for one in order}
            assert all(max(others.values(), default=0) <= 2 for others in since.values()), taken


class TestGivenATenantThatIsAheadAndNewcomersWithoutEnd:
    """It has had more than others, so they go first; but each of them would, and there is always one."""

    COST = 30

    @settings(
        max_examples=15,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @example(ahead=0, at_once=1, is_early=True)
    @given(ahead=st.integers(0, 600), at_once=st.integers(1, 20), is_early=st.booleans())
    def test_when_it_waits_then_for_no_more_tokens_than_its_lead_times_those_who_wait(
        self, valkey: RedisServer, ahead: int, at_once: int, is_early: bool
    ) -> None:
        queue, numbers = fresh(valkey), count()
        worker = queue.worker("A")
        queue.client.hset(queue.keys.key("served"), "zz", str(ahead))
        queue.add("mine", "zz")

        served = 0
        while True:
            queue.submit(*[new_job("j", f"n{next(numbers)}") for _ in range(at_once + 1 - queue.look().waiting_jobs)])
            worker.beat()
            leased = worker.take(sequences=1)
            if leased.id == "0.zz.mine":
                break
            worker.advance(ending(leased, 0, 2 if is_early else 20))
            served += 12 if is_early else self.COST
            # Besides its lead: what each may have been charged and not yet used when it is looked at.
            assert served <= (at_once + 1) * (ahead + 2 * self.COST), (served, ahead, at_once)
        queue.client.close()


class TestGivenJobsWithDeadlinesWithoutEnd:
    STEP_MS = 100

    @settings(
        max_examples=15,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data(), ms_per_token=st.sampled_from((0, 5)))
    def test_when_one_has_no_deadline_then_it_waits_for_none_due_ten_steps_after_it(
        self, valkey: RedisServer, data: st.DataObject, ms_per_token: int
    ) -> None:
        queue, numbers = fresh(valkey), count()
        queue.configure(mode="deadline", age_step_ms=self.STEP_MS, ms_per_token=ms_per_token)
        worker = queue.worker("A")
        queue.add("mine", "calm")
        bound_ms = limits.STEPS_WITHOUT_DEADLINE * self.STEP_MS
        latest_ms = queue.now_ms + bound_ms

        for _ in range(2 * limits.STEPS_WITHOUT_DEADLINE):
            # All cost the same, so slack orders as deadlines do.
            due_ms = [queue.now_ms + data.draw(st.integers(1, 3 * bound_ms)) for _ in range(2)]
            for at_ms in due_ms:
                queue.add(f"j{next(numbers)}", data.draw(st.sampled_from("abc")), deadline_ms=at_ms)
            leased = worker.take(sequences=1)
            worker.advance(ending(leased, 0, 20))
            if leased.id == "0.calm.mine":
                break
            assert leased.deadline_ms is not None
            assert leased.deadline_ms <= latest_ms
            queue.pass_time(self.STEP_MS)
            worker.beat()
        else:
            pytest.fail("it was never its turn")
        queue.client.close()
