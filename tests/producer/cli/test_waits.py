"""What a client says while it waits: real processes whose stderr is read, and both clients' callbacks."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.producer import AsyncProducer, Producer, QueueSettings, ResultTimeout, WaitCause, WaitNotice
from sluice.producer.operations import follow, results
from sluice.protocol import waits
from sluice.protocol.calls import Beat, beat
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.waits import WaitNotifier, WaitReason
from tests.grids import fast_only
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer, redis_server

ROOT = Path(__file__).parent.parent.parent.parent


class Command:
    """A `producer` process whose lines on stderr are read as they come."""

    def __init__(self, url: str, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        environ |= {"SLUICE_STATE_DIR": str(Path(url.partition("://")[2]).parent / "state")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sluice.producer", *arguments, "--redis-url", url],
            cwd=ROOT, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def next_line(self) -> str:
        """Wait for its next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self) -> tuple[str, str]:
        """Wait for its end, and give the rest of both outputs."""
        return self.process.communicate(timeout=60)


@contextmanager
def command(url: str, *arguments: str) -> Generator[Command]:
    """A process that does not outlive the test."""
    made = Command(url, *arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


class Heard:
    """Collects notices; a test waits for the next one."""

    def __init__(self) -> None:
        self.notices: list[WaitNotice] = []
        self._arrived = threading.Condition()

    def __call__(self, notice: WaitNotice) -> None:
        with self._arrived:
            self.notices.append(notice)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> list[WaitNotice]:
        """Wait until there are this many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.notices) >= count, timeout=60), self.notices
        return self.notices


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give notice after a tenth of the usual time, in this process."""
    monkeypatch.setattr(waits, "NOTICE_AFTER_S", waits.NOTICE_AFTER_S / 10)
    for module in (follow, results):
        monkeypatch.setattr(module, "WAIT_BLOCK_MS", results.WAIT_BLOCK_MS // 10)


class TestGivenAQueueWithoutWorkers:
    @pytest.mark.parametrize("is_json", fast_only([False], [True]))
    def test_when_a_prompt_is_asked_then_it_says_so_and_then_that_it_goes_on(
        self, valkey: RedisServer, worker: HandWorker, is_json: bool
    ) -> None:
        with command(valkey.url, "ask", "hello", *["--json"] * is_json) as asked:
            first = asked.next_line()
            [leased] = worker.pull()
            worker.generate(leased)
            out, rest = asked.end()

        assert first == (
            "producer: waiting: no worker serves queue 'default'. "
            "Start one on the same server: worker start --queue default\n"
        )
        assert "w0 w1 w2" in out
        assert rest.startswith("producer: continued after ")
        assert rest.count("\n") == 1

    @pytest.mark.long
    def test_when_a_file_waits_for_its_jobs_then_it_says_so(
        self, valkey: RedisServer, worker: HandWorker, tmp_path: Path
    ) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')

        with command(valkey.url, "submit", str(tmp_path / "in.jsonl"), "--batch", tmp_path.name, "--wait") as asked:
            while "no worker serves" not in (line := asked.next_line()):
                assert line, "it ended without a word"
            [leased] = worker.pull()
            worker.generate(leased)
            _, rest = asked.end()

        assert "producer: continued after " in rest

    @pytest.mark.long
    def test_when_the_asker_gives_up_then_only_one_fate_of_the_job_is_told(self, valkey: RedisServer) -> None:
        with command(valkey.url, "ask", "hello", "--timeout", "3") as asked:
            _, output = asked.end()

        assert asked.process.returncode == 1
        assert "no worker serves" in output
        assert "is cancelled" in output
        assert "continues" not in output

    @pytest.mark.usefixtures("early")
    def test_when_a_worker_loads_its_model_then_that_is_what_is_waited_for(
        self, valkey: RedisServer, redis_client: Any
    ) -> None:
        seconds, _ = redis_client.time()
        redis_client.hset(QueueKeys("default", 0).key("config"), "starting", f"{seconds * 1000} host-7")

        heard = Heard()
        with Producer(valkey.url, on_wait=heard) as producer, pytest.raises(ResultTimeout):
            producer.result(producer.submit("hello"), timeout_s=1)

        [notice] = heard.notices
        assert notice.message == "a worker of queue 'default' loads its model, on host-7"

    def test_when_its_job_is_looked_at_then_the_status_says_the_same(self, producer: Producer) -> None:
        status = producer.status(producer.submit("hello"))

        assert status.waits_for is not None
        assert "no worker serves queue 'default'" in status.waits_for


@pytest.mark.usefixtures("early")
class TestGivenAQueueWithAWorker:
    def test_when_it_is_paused_then_a_reader_is_told_how_to_resume(self, valkey: RedisServer) -> None:
        heard = Heard()
        with Producer(valkey.url, on_wait=heard) as producer:
            producer.pause()
            with pytest.raises(ResultTimeout):
                producer.result(producer.submit("hello"), timeout_s=1)

        [notice] = heard.notices
        assert notice.cause is WaitCause.QUEUE_PAUSED
        assert "producer queues resume --queue default" in notice.message

    @pytest.mark.long
    def test_when_others_are_ahead_then_their_number_is_told(self, valkey: RedisServer, worker: HandWorker) -> None:
        worker.beat()
        heard = Heard()
        with Producer(valkey.url, on_wait=heard) as producer:
            producer.submit("first")
            with pytest.raises(ResultTimeout):
                producer.result(producer.submit("second"), timeout_s=1)

        [notice] = heard.notices
        assert notice.cause is WaitCause.BEHIND_OTHERS
        assert notice.message.startswith("1 jobs are ahead of job ")

    @pytest.mark.long
    def test_when_a_running_job_is_silent_then_it_says_that_it_runs(
        self, valkey: RedisServer, worker: HandWorker
    ) -> None:
        heard = Heard()
        with Producer(valkey.url, on_wait=heard) as producer:
            job = producer.submit("hello")
            worker.pull()
            with pytest.raises(ResultTimeout):
                list(producer.stream(job, timeout_s=1))

        assert [one.cause for one in heard.notices] == [WaitCause.RUNNING]

    def test_when_the_queue_is_full_then_a_submit_that_waits_says_which_limit(
        self, valkey: RedisServer, worker: HandWorker
    ) -> None:
        worker.beat()
        with Producer(valkey.url) as producer:
            producer.configure(QueueSettings(max_waiting_jobs=1))
            producer.submit("first")

        with command(valkey.url, "ask", "second", "--block", "60") as asked:
            line = asked.next_line()

        assert line.startswith("producer: waiting: ")
        assert "the queue holds 1 jobs and takes 1" in line
        assert "producer queues set" in line


class TestGivenAFullWorker:
    """It runs a job, and reports its rate."""

    @pytest.fixture(autouse=True)
    def full(self, producer: Producer, worker: HandWorker) -> None:
        producer.submit("first", max_tokens=400)
        worker.pull()
        about = {"tokens_per_s": "2.0", "places": "1", "running": "1", "state": "pulling"}
        sent = Beat(incarnation=worker.incarnation, held=(), processed_pull=1, expiry_ms=60_000, about=about)
        run(worker.client, beat(worker.keys, sent))

    def test_when_nothing_is_ahead_then_no_time_of_the_start_is_promised(self, producer: Producer) -> None:
        status = producer.status(producer.submit("second"))

        how = "it starts when a worker has room for it"
        assert status.waits_for == f"no job of its tenant and class is ahead of job {status.id}; {how}"
        assert status.starts_in_s is None

    def test_when_another_is_ahead_then_its_work_is_told_and_no_start(self, producer: Producer) -> None:
        producer.submit("second", max_tokens=99)

        status = producer.status(producer.submit("third"))

        work_s = (status.ahead_tokens or 0) / 2.0
        assert status.waits_for == f"1 jobs are ahead of job {status.id}, about {work_s:.0f} s of work"
        assert status.starts_in_s == work_s > 45


@pytest.mark.usefixtures("early")
class TestGivenManyReadersOfOneClient:
    async def test_when_all_wait_then_one_notice_begins_and_one_ends(
        self, valkey: RedisServer, worker: HandWorker
    ) -> None:
        heard: list[WaitNotice] = []
        is_told = asyncio.Event()

        def hear(notice: WaitNotice) -> None:
            heard.append(notice)
            is_told.set()

        async with AsyncProducer(valkey.url, on_wait=hear) as producer:
            jobs = [await producer.submit(f"p{i}") for i in range(20)]
            waiting = [asyncio.create_task(producer.result(job)) for job in jobs]
            await asyncio.wait_for(is_told.wait(), 60)
            for leased in worker.pull():
                worker.generate(leased)
            await asyncio.gather(*waiting)

        # A reader that asks only after the worker came has another cause.
        assert [one.is_over for one in heard if one.cause is WaitCause.NO_WORKER] == [False, True]


@pytest.mark.usefixtures("early")
class TestGivenAServerThatGoesAway:
    def test_when_it_returns_then_both_are_told(self) -> None:
        heard = Heard()
        with redis_server("valkey", is_durable=True) as server, Producer(server.url, on_wait=heard) as producer:
            job = producer.submit("hello", durability="memory")
            server.kill()
            asking = threading.Thread(target=producer.status, args=(job,))
            asking.start()
            heard.wait_for(1)
            server.start()
            asking.join()

        assert [(one.cause, one.is_over) for one in heard.notices] == [
            (WaitCause.SERVER_UNREACHABLE, False), (WaitCause.SERVER_UNREACHABLE, True),
        ]  # fmt: skip
        assert "check that the server runs" in heard.notices[0].message


class TestGivenAWaitOfOneCall:
    def test_when_its_cause_changes_then_the_first_ends_and_the_second_begins(self) -> None:
        heard = Heard()
        with WaitNotifier(heard).wait() as wait:
            wait.waits_for(WaitReason(WaitCause.NO_WORKER, "none"))
            wait.waits_for(WaitReason(WaitCause.NO_WORKER, "none"))
            wait.waits_for(WaitReason(WaitCause.BEHIND_OTHERS, "3 jobs"))

        assert [(one.cause, one.is_over) for one in heard.notices] == [
            (WaitCause.NO_WORKER, False),
            (WaitCause.NO_WORKER, True),
            (WaitCause.BEHIND_OTHERS, False),
            (WaitCause.BEHIND_OTHERS, True),
        ]

    def test_when_it_fails_then_its_end_is_left_to_the_error(self) -> None:
        heard = Heard()

        def fail() -> None:
            with WaitNotifier(heard).wait() as wait:
                wait.waits_for(WaitReason(WaitCause.NO_WORKER, "none"))
                raise ResultTimeout

        with pytest.raises(ResultTimeout):
            fail()

        assert [one.is_over for one in heard.notices] == [False]
