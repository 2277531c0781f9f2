"""Chains on a real server: each blocked job runs once, or ends with a reason, whichever process releases it or dies."""

import random
import tracemalloc
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from sluice.producer import (
    IdempotencyConflict,
    InvalidJob,
    JobCancelled,
    JobId,
    JobNotFound,
    JobState,
    Message,
    Producer,
    QueueFull,
    Receipt,
    after,
    job,
)
from sluice.producer.operations import control
from sluice.producer.operations.chains import submit_after
from sluice.producer.operations.operation import Ask
from sluice.protocol.bounds import BLOCKED_JOBS
from sluice.protocol.calls import LeasedJob
from sluice.protocol.chains.chain import ChainKeys
from sluice.protocol.chains.releasing import SLICE, ChainLook, ChainWatch
from sluice.protocol.durability import NOTHING_ASKED
from sluice.protocol.jobs import checked_job
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run_commands
from sluice.protocol.wire import decode_prompt
from sluice.worker.connection.clients import connect
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

KEYS = ChainKeys(QueueKeys("default"))
CHILD = JobId("0.default.child")


def end(worker: HandWorker, text: str = "parent's text", state: JobState = JobState.DONE) -> None:
    """Run the one job that waits, to this end."""
    [leased] = worker.pull()
    worker.say(leased, [1, 2], text)
    worker.say(leased, [], "", end=state, error=None if state is JobState.DONE else "broken", code="internal")


def prompts(jobs: Iterable[LeasedJob]) -> list[object]:
    return [decode_prompt(leased.payload) for leased in jobs]


def released(producer: Producer) -> None:
    """Look until nothing more is released."""
    while producer.release_chains().released:
        pass


def submitted(client: Any) -> int:
    """The number of jobs that the queue has accepted."""
    return int(client.hget(KEYS.queue.key("counters"), "submitted"))


def left(client: Any) -> list[bytes]:
    """The keys of chains that are left, except the count of bytes."""
    return [key for key in client.keys("*:chains*") if not key.endswith(b":bytes")]


class TestGivenAJobThatWaitsForAnother:
    @pytest.fixture
    def parent(self, producer: Producer) -> Receipt:
        return producer.submit("parent")

    @pytest.fixture
    def child(self, producer: Producer, parent: Receipt) -> Receipt:
        return producer.submit("Sum up: {{outputs[0]}}!", after=[parent])

    def test_when_the_other_is_done_then_it_runs_with_its_output(
        self, producer: Producer, worker: HandWorker, child: Receipt, redis_client: Any
    ) -> None:
        producer.release_chains()
        before = producer.status(child)
        end(worker)

        producer.release_chains()

        jobs = worker.pull()
        assert (child.state, before.state) == (JobState.BLOCKED, JobState.BLOCKED)
        assert [leased.id for leased in jobs] == [child.id]
        assert prompts(jobs) == ["Sum up: parent's text!"]
        assert left(redis_client) == []
        assert redis_client.get(KEYS.num_bytes) is None

    def test_when_its_status_is_read_then_it_says_for_which_job_it_waits(
        self, producer: Producer, parent: Receipt, child: Receipt
    ) -> None:
        status = producer.status(child)

        assert status.waits_for == f"job {child} is blocked: it waits for {parent} to be done"
        [chain] = producer.chains()
        assert (chain.after.ids, chain.job_ids) == ((parent.id,), (child.id,))

    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    @pytest.mark.usefixtures("parent")
    def test_when_the_other_ends_otherwise_then_it_is_cancelled_with_the_reason(
        self,
        producer: Producer,
        worker: HandWorker,
        child: Receipt,
        parent: Receipt,
        state: JobState,
        redis_client: Any,
    ) -> None:
        if state is JobState.CANCELLED:
            producer.cancel(parent)
        else:
            end(worker, state=state)

        producer.release_chains()

        with pytest.raises(JobCancelled, match=f"Job {parent}, for which it waited, has ended as {state}"):
            producer.result(child, timeout_s=5)
        assert worker.pull() == []
        assert left(redis_client) == []

    def test_when_the_other_has_gone_then_it_is_cancelled(
        self, producer: Producer, worker: HandWorker, child: Receipt, parent: Receipt
    ) -> None:
        end(worker)
        producer.delete([parent])

        producer.release_chains()

        with pytest.raises(JobCancelled, match=f"Job {parent}, for which it waited, has gone from the queue"):
            producer.result(child, timeout_s=5)

    def test_when_the_output_has_expired_then_it_is_cancelled(
        self, producer: Producer, worker: HandWorker, child: Receipt, parent: Receipt, redis_client: Any
    ) -> None:
        end(worker)
        redis_client.delete(KEYS.queue.result(parent.id))

        producer.release_chains()

        with pytest.raises(JobCancelled, match="for which it waited, has expired"):
            producer.result(child, timeout_s=5)

    def test_when_the_prompt_becomes_too_large_then_it_is_cancelled(
        self, producer: Producer, worker: HandWorker, child: Receipt
    ) -> None:
        end(worker, text="x" * 5_000_000)

        producer.release_chains()

        with pytest.raises(JobCancelled, match="With the outputs, the prompt is 5000"):
            producer.result(child, timeout_s=5)

    @pytest.mark.usefixtures("child")
    def test_when_many_references_become_large_then_it_is_cancelled_before_its_text_is_made(
        self, producer: Producer, worker: HandWorker, parent: Receipt
    ) -> None:
        large = producer.submit("{{outputs[0]}}" * 250_000, after=[parent])
        end(worker, text="x" * 30_000)
        tracemalloc.start()
        try:
            released(producer)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        with pytest.raises(JobCancelled, match="With the outputs, the prompt is 7500000000 characters"):
            producer.result(large, timeout_s=5)
        assert peak_bytes < 100_000_000
        assert prompts(worker.pull()) == [f"Sum up: {'x' * 30_000}!"]

    def test_when_it_is_read_while_it_is_blocked_then_the_read_waits_for_its_end(
        self, producer: Producer, worker: HandWorker, child: Receipt, valkey: RedisServer
    ) -> None:
        def streamed() -> str:
            with Producer(valkey.url) as reader:
                return "".join(event.text for event in reader.stream(child, timeout_s=30))

        with ThreadPoolExecutor(2) as threads:
            text, result = threads.submit(streamed), threads.submit(producer.result, child, 30)
            end(worker)
            with Producer(valkey.url) as another:
                another.release_chains()
            end(worker, text="child's text")
            assert (text.result(), result.result().text) == ("child's text", "child's text")

    def test_when_it_is_cancelled_then_a_look_ends_it_and_the_other_goes_on(
        self, producer: Producer, worker: HandWorker, child: Receipt, redis_client: Any
    ) -> None:
        answer = producer.cancel(child, reason="not needed")
        producer.release_chains()

        assert answer == "asked"
        assert producer.status(child).state is JobState.CANCELLED
        with pytest.raises(JobCancelled, match="not needed"):
            producer.result(child, timeout_s=5)
        assert len(worker.pull()) == 1
        assert left(redis_client) == []

    def test_when_it_is_deleted_then_it_stays(self, producer: Producer, child: Receipt) -> None:
        assert producer.delete([child]) == [False]
        assert producer.status(child).state is JobState.BLOCKED

    def test_when_another_waits_for_it_then_they_run_in_order(
        self, producer: Producer, worker: HandWorker, child: Receipt
    ) -> None:
        grandchild = producer.submit(messages=[{"role": "user", "content": "{{ outputs[0] }}?"}], after=[child])
        end(worker)
        released(producer)
        end(worker, text="child's text")
        released(producer)

        [leased] = worker.pull()
        assert leased.id == grandchild.id
        assert decode_prompt(leased.payload) == (Message(role="user", content="child's text?"),)

    def test_when_the_queue_is_full_then_it_is_released_once_there_is_room(
        self, producer: Producer, worker: HandWorker, child: Receipt, redis_client: Any
    ) -> None:
        end(worker)
        producer.submit("another")
        redis_client.hset(KEYS.queue.key("config"), "max_waiting_jobs", 1)
        full = producer.release_chains()
        redis_client.hdel(KEYS.queue.key("config"), "max_waiting_jobs")

        producer.release_chains()

        assert [message for _, message in full.problems] == ["the queue holds 1 jobs and takes 1"]
        assert child.id in [leased.id for leased in worker.pull()]

    def test_when_its_batch_is_closed_meanwhile_then_it_is_cancelled(
        self, producer: Producer, worker: HandWorker, parent: Receipt
    ) -> None:
        producer.submit("first", batch="b")
        child = producer.submit("second", batch="b", after=[parent])
        producer.close_batch("b")
        jobs = worker.pull()
        worker.generate(next(leased for leased in jobs if leased.id == parent.id))

        producer.release_chains()

        with pytest.raises(JobCancelled, match="the batch b is closed"):
            producer.result(child, timeout_s=5)
        assert producer.batch("b").total == 1


class TestGivenSeveralJobsToWaitFor:
    @pytest.mark.parametrize(
        ("when", "on_failure", "states", "is_released"),
        [
            ("all", "cancel", ["done"], None),
            ("all", "cancel", ["done", "done"], True),
            ("all", "cancel", ["failed"], False),
            ("all", "release", ["failed"], None),
            ("all", "release", ["failed", "done"], True),
            ("any", "cancel", ["failed"], None),
            ("any", "cancel", ["failed", "done"], True),
            ("any", "cancel", ["failed", "failed"], False),
            ("any", "release", ["failed"], True),
        ],
    )
    def test_when_some_have_ended_then_the_rule_decides(
        self, producer: Producer, worker: HandWorker, when: Any, on_failure: Any, states: list[str], is_released: bool
    ) -> None:
        parents = [producer.submit(f"parent {i}") for i in range(2)]
        child = producer.submit("child", after=after(*parents, when=when, on_failure=on_failure))
        jobs = worker.pull()
        for leased, state in zip(jobs, states, strict=False):
            worker.say(leased, [1], "text")
            worker.say(leased, [], "", end=JobState(state), error=None, code="internal")
            released(producer)

        expected = {None: JobState.BLOCKED, True: JobState.QUEUED, False: JobState.CANCELLED}[is_released]
        assert producer.status(child).state is expected

    def test_when_one_has_gone_after_it_was_done_then_it_still_counts(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        parents = [producer.submit(f"parent {i}") for i in range(2)]
        child = producer.submit("child", after=parents)
        first, second = worker.pull()
        worker.generate(first)
        released(producer)
        producer.delete([first.id])
        worker.generate(second)

        released(producer)

        assert producer.status(child).state is JobState.QUEUED

    def test_when_they_have_different_ends_then_each_output_is_in_its_place(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        parents = [producer.submit(f"parent {i}") for i in range(3)]
        producer.submit(
            "{{outputs[2]}}, {{outputs[0]}}, {{outputs[1]}}, {{outputs[0]}}",
            after=after(*parents, on_failure="release"),
        )
        jobs = {leased.id: leased for leased in worker.pull()}
        for parent, text in zip(parents[:2], ("a", "b {{outputs[0]}}"), strict=True):
            worker.say(jobs[parent.id], [1], text)
            worker.say(jobs[parent.id], [], "", end=JobState.DONE)
        worker.say(jobs[parents[2].id], [], "", end=JobState.FAILED, error="broken", code="internal")

        released(producer)

        assert prompts(worker.pull()) == [", a, b {{outputs[0]}}, a"]


class TestGivenAQueueOfSeveralPartitions:
    def test_when_jobs_wait_for_jobs_of_other_partitions_then_each_runs_in_its_own(
        self, valkey: RedisServer, redis_client: Any
    ) -> None:
        workers = [HandWorker(redis_client, QueueKeys("default", partition)) for partition in range(3)]
        with Producer(valkey.url, partitions=3) as producer:
            parents = [producer.submit("parent", job_id=JobId(f"{i}.default.parent")) for i in range(3)]
            children = [str(answer) for answer in producer.submit_many(["{{outputs[2]}}"] * 20, after=parents)]
            doomed = producer.submit("doomed", after=children[:1])
            for worker in workers:
                end(worker)
            released(producer)
            producer.cancel(children[0])
            released(producer)

            started = [leased for worker in workers for leased in worker.pull()]
            assert {leased.id for leased in started} == {*children[1:]}
            assert {*prompts(started)} == {"parent's text"}
            assert len({leased.id[0] for leased in started}) == 3
            assert producer.status(doomed).state is JobState.CANCELLED


class TestGivenADamagedChain:
    @pytest.mark.parametrize("key", ["chains", "jobs", "ends"])
    def test_when_another_is_due_then_it_is_released_and_the_damaged_one_is_a_problem(
        self, producer: Producer, worker: HandWorker, redis_client: Any, key: str
    ) -> None:
        parent = producer.submit("parent")
        children = [producer.submit(name, after=[parent]) for name in ("damaged", "sound")]
        damaged = next(chain.id for chain in producer.chains() if chain.job_ids == (children[0].id,))
        redis_client.hset(getattr(KEYS, key), damaged, b"\xff")
        redis_client.zadd(KEYS.after, {f"{parent} nonsense": 0, "nonsense": 0, "no job": 0})
        end(worker)

        look = producer.release_chains()

        assert [leased.id for leased in worker.pull()] == [children[1].id]
        assert [chain for chain, _ in look.problems] == [damaged]


class TestGivenAWrongSubmit:
    def test_when_it_waits_for_an_unknown_job_then_a_sentence_says_so(self, producer: Producer) -> None:
        with pytest.raises(InvalidJob, match="which queue 'default' does not have"):
            producer.submit("child", after=["0.default.unknown"])

    def test_when_it_waits_for_itself_then_it_is_refused(self, producer: Producer) -> None:
        with pytest.raises(InvalidJob, match="cannot wait for itself"):
            producer.submit("child", job_id=CHILD, after=[CHILD])

    @pytest.mark.parametrize("prompt", ["{{name}} and {{output_dir}}", "{outputs[-1]}", "{{ outputs"])
    def test_when_braces_have_another_meaning_then_they_stay(
        self, producer: Producer, worker: HandWorker, prompt: str
    ) -> None:
        parent = producer.submit("parent")
        producer.submit(prompt, after=[parent])
        end(worker)

        released(producer)

        assert prompts(worker.pull()) == [prompt]

    @pytest.mark.parametrize(
        ("prompt", "options", "reason"),
        [
            ("{{outputs[1]}}", {}, r"the prompt uses outputs\[1\], and after names 1 jobs"),
            ("{{output[0]}}", {}, r"\{\{output\[0\]\}\} is no output: write \{\{outputs\[0\]\}\} for"),
            ("{{ outputs[-1] }}", {}, "is no output"),
            ("{{outputs.0}} and {{outputs[0]}}", {}, "is no output"),
            ("{{Outputs[0]}}", {}, "is no output"),
            ("child", {"idempotency_key": "k"}, "a job with `after` has no idempotency_key"),
            ("child", {"tenant": "other"}, "of another tenant than 'other'"),
        ],
    )
    def test_when_a_value_is_wrong_then_a_sentence_says_so(
        self, producer: Producer, prompt: str, options: Any, reason: str
    ) -> None:
        parent = producer.submit("parent")

        with pytest.raises(InvalidJob, match=reason):
            producer.submit(prompt, after=[parent], **options)

    def test_when_the_queue_has_too_many_blocked_jobs_then_it_is_full(
        self, producer: Producer, redis_client: Any
    ) -> None:
        parent = producer.submit("parent")
        redis_client.hset(KEYS.blocked, mapping={str(i): "x 1" for i in range(BLOCKED_JOBS.most)})

        with pytest.raises(QueueFull, match="the queue has 100000 jobs of blocked jobs and takes 100000"):
            producer.submit("child", after=[parent])

    def test_when_the_server_is_at_its_maxmemory_then_it_is_full_and_nothing_is_left(
        self, producer: Producer, redis_client: Any
    ) -> None:
        parent = producer.submit("parent")
        redis_client.config_set("maxmemory", 1)
        try:
            with pytest.raises(QueueFull):
                producer.submit("child", after=[parent])
        finally:
            redis_client.config_set("maxmemory", 0)

        assert left(redis_client) == []
        assert redis_client.get(KEYS.num_bytes) is None


class TestGivenASubmitThatIsRepeated:
    @pytest.fixture
    def parent(self, producer: Producer) -> Receipt:
        return producer.submit("parent")

    def submit(self, producer: Producer, parent: Receipt, prompt: str = "child") -> Receipt:
        return producer.submit(prompt, job_id=CHILD, after=[parent])

    def test_when_it_is_blocked_released_or_ended_then_it_is_a_duplicate(
        self, producer: Producer, worker: HandWorker, parent: Receipt
    ) -> None:
        receipts = [self.submit(producer, parent), self.submit(producer, parent)]
        end(worker)
        released(producer)
        receipts.append(self.submit(producer, parent))
        end(worker)
        receipts.append(self.submit(producer, parent))

        assert [receipt.is_duplicate for receipt in receipts] == [False, True, True, True]
        states = [JobState.BLOCKED, JobState.BLOCKED, JobState.QUEUED, JobState.DONE]
        assert [receipt.state for receipt in receipts] == states
        assert worker.pull() == []

    def test_when_the_prompt_is_another_then_it_is_a_conflict(
        self, producer: Producer, worker: HandWorker, parent: Receipt
    ) -> None:
        self.submit(producer, parent)
        with pytest.raises(IdempotencyConflict):
            self.submit(producer, parent, "another")
        end(worker)
        released(producer)

        with pytest.raises(IdempotencyConflict):
            self.submit(producer, parent, "another")

    def test_when_one_submit_has_an_id_twice_then_the_second_is_a_duplicate_or_a_conflict(
        self, producer: Producer, worker: HandWorker, parent: Receipt
    ) -> None:
        jobs = [job(prompt, job_id=CHILD) for prompt in ("child", "child", "another")]

        first, second, third = producer.submit_many(jobs, after=[parent])

        assert isinstance(first, Receipt)
        assert isinstance(second, Receipt)
        assert (first.is_duplicate, second.is_duplicate) == (False, True)
        assert isinstance(third, IdempotencyConflict)
        end(worker)
        released(producer)
        assert prompts(worker.pull()) == ["child"]

    @pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED])
    def test_when_another_job_is_submitted_with_its_id_meanwhile_then_that_one_runs_and_the_look_says_so(
        self, producer: Producer, worker: HandWorker, parent: Receipt, redis_client: Any, state: JobState
    ) -> None:
        self.submit(producer, parent)
        end(worker, state=state)
        producer.submit("another", job_id=CHILD)

        look = producer.release_chains()

        said = f"another job was submitted as {CHILD} while it was blocked"
        assert (look.released, [message for _, message in look.problems]) == ([], [said])
        assert prompts(worker.pull()) == ["another"]
        assert left(redis_client) == []

    def test_when_a_later_chain_has_taken_its_id_over_then_that_one_decides(
        self, producer: Producer, worker: HandWorker, parent: Receipt, redis_client: Any
    ) -> None:
        self.submit(producer, parent)
        later = producer.submit("later parent")
        record = redis_client.hgetall(KEYS.chains)
        redis_client.delete(KEYS.chains)  # as if that submit had not completed yet
        self.submit(producer, later, "another")
        redis_client.hset(KEYS.chains, mapping=record)
        jobs = worker.pull()
        worker.generate(jobs[0])
        released(producer)
        before = worker.pull()
        worker.generate(jobs[1])
        released(producer)

        assert before == []
        assert prompts(worker.pull()) == ["another"]
        assert left(redis_client) == []


class TestGivenManyBlockedJobs:
    @pytest.mark.long
    def test_when_ten_thousand_wait_for_one_then_a_look_reads_one_row_and_all_run_once(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        parent = producer.submit("parent")
        jobs = (job(f"child {i}", deadline=timedelta(hours=1)) for i in range(10_000))
        ids = {str(answer) for answer in producer.submit_many(jobs, after=[parent])}
        reads = redis_client.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0)
        producer.release_chains()
        num_reads = redis_client.info("commandstats")["cmdstat_getrange"]["calls"] - reads
        end(worker)

        released(producer)

        assert len(ids) == 10_000
        assert num_reads == 1
        assert submitted(redis_client) == 10_001
        assert left(redis_client) == []
        assert producer.release_chains().problems == []

    @pytest.mark.long
    def test_when_there_are_more_jobs_to_wait_for_than_a_look_reads_then_each_look_reads_the_next(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        parents = [str(answer) for answer in producer.submit_many(f"parent {i}" for i in range(SLICE + 10))]
        children = [producer.submit("child", after=[parent]) for parent in parents]
        last = max(range(len(parents)), key=lambda i: parents[i])
        producer.cancel(parents[last])

        first, second = producer.release_chains(), producer.release_chains()

        assert first.released == []
        assert [one.num_jobs for one in second.released] == [1]
        assert producer.status(children[last]).state is JobState.CANCELLED


# ---------------------------------------------------------------- deaths and interleavings


Commands = Generator[Any, Any, Any]


def commands_of(step: Any) -> Sequence[Any]:
    return step.commands if isinstance(step, Ask) else step


class Process:
    """A process that runs the steps of a generator, one command at a time. Changes with each `move`."""

    def __init__(self, client: Any, steps: Commands) -> None:
        self._client, self._steps = client, steps
        self._replies: list[object] = []
        self._left: list[Any] = []
        self.result: object = None
        self.has_ended = False
        self._next(None)

    def _next(self, replies: list[object] | None) -> None:
        try:
            self._left = list(commands_of(self._steps.send(replies)))
            self._replies = []
        except StopIteration as stop:
            self.result, self.has_ended = stop.value, True

    def move(self) -> None:
        """Run one command."""
        self._replies += run_commands(self._client, [self._left.pop(0)])
        if not self._left:
            self._next(self._replies)


@pytest.fixture
def connection(valkey: RedisServer) -> Generator[Any]:
    client = connect(valkey.url, timeout_s=10)
    yield client
    client.close()


def look(client: Any) -> Process:
    return Process(client, ChainWatch(QueueKeys("default")).release(ChainLook()))


def all_done(producer: Producer, worker: HandWorker) -> list[str]:
    """Run everything that waits; return the ids in the order of their starts."""
    jobs = worker.pull()
    for leased in jobs:
        worker.generate(leased)
    return [leased.id for leased in jobs]


class TestGivenAProcessThatDiesAtAnyCommand:
    @pytest.mark.parametrize("scenario", ["release", "cancel", "flagged", "two", "refused"])
    def test_when_another_looks_then_each_job_ends_once(
        self, producer: Producer, redis_client: Any, connection: Any, scenario: str
    ) -> None:
        num_commands, is_over = 0, False
        while not is_over:
            redis_client.flushall()
            worker = HandWorker(redis_client)
            parents = [producer.submit("parent", batch="b") for _ in range(2 if scenario == "two" else 1)]
            middle = job("b", batch="b" if scenario == "refused" else None)
            children = [str(one) for one in producer.submit_many(["{{outputs[0]}}", middle, "c"], after=parents)]
            producer.close_batch("b")
            if scenario == "cancel":
                producer.cancel(parents[0])
            else:
                all_done(producer, worker)
            if scenario == "flagged":
                producer.cancel(children[1])
            process = look(connection)
            for _ in range(num_commands):
                if not process.has_ended:
                    process.move()
            is_over = process.has_ended
            started = all_done(producer, worker)

            released(producer)
            started += all_done(producer, worker)

            states = [producer.status(child).state for child in children]
            expected = {"cancel": [], "flagged": children[::2], "refused": children[::2]}.get(scenario, children)
            ends = [JobState.DONE if child in expected else JobState.CANCELLED for child in children]
            assert (started, states, left(redis_client)) == (expected, ends, []), num_commands
            assert submitted(redis_client) == len(parents) + len(children)
            num_commands += 1
        assert num_commands > 10

    def test_when_it_submits_then_the_chain_is_there_as_a_whole_or_can_be_submitted_again(
        self, producer: Producer, worker: HandWorker, redis_client: Any, connection: Any
    ) -> None:

        num_commands, is_over = 0, False
        while not is_over:
            redis_client.flushall()
            worker = HandWorker(redis_client)
            parent = producer.submit("parent")
            child = checked_job("child", {"job_id": CHILD}).new_job(1)
            submit = submit_after(producer.target, child, after(parent), NOTHING_ASKED, is_chosen=True)
            process = Process(connection, submit)
            for _ in range(num_commands):
                if not process.has_ended:
                    process.move()
            is_over = process.has_ended
            producer.release_chains()

            producer.submit("child", job_id=CHILD, after=[parent])
            all_done(producer, worker)
            released(producer)

            assert all_done(producer, worker) == [CHILD], num_commands
            assert redis_client.get(KEYS.num_bytes) is None
            num_commands += 1


class TestGivenProcessesAtOnce:
    @pytest.mark.parametrize("seed", range(20))
    def test_when_their_commands_interleave_then_each_job_runs_once_and_a_cancelled_one_ends(
        self, producer: Producer, worker: HandWorker, redis_client: Any, connection: Any, seed: int
    ) -> None:
        chance = random.Random(seed)
        parents = [producer.submit("parent") for _ in range(2)]
        children = [JobId(str(one)) for one in producer.submit_many(["{{outputs[1]}}", "b", "c"], after=parents)]
        all_done(producer, worker)
        cancels = control.cancel(producer.target, [children[1]], "not needed")
        makers: list[Callable[[], Process]] = [*(lambda: look(connection),) * 3, lambda: Process(connection, cancels)]
        processes = [make() for make in makers]
        while going := [process for process in processes if not process.has_ended]:
            chance.choice(going).move()

        released(producer)

        assert producer.status(children[1]).state is JobState.CANCELLED
        assert sorted(all_done(producer, worker)) == sorted([children[0], children[2]])
        assert left(redis_client) == []
        assert submitted(redis_client) == 5

    def test_when_a_cancelled_job_is_unknown_then_it_is_not_found(self, producer: Producer) -> None:
        with pytest.raises(JobNotFound):
            producer.cancel("0.default.unknown")
