"""Resumed jobs: after a worker that left, under another model, over a channel or a second of Redis that was lost."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, decode_entry
from sluice.worker.jobs import progress as advance
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    expected_tokens,
    field_of,
    num_on_channel,
    read_channel,
    result_of,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import RunningWorker, running_worker
from tests.servers import RedisServer, redis_server

SLOW = "null?step_s=0.005"
LONG = Ask(options=JobOptions(max_tokens=100, n=2), seed=5)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


def leave_in_the_middle(url: str, client: Any, ask: Ask = LONG, *, model: str = SLOW) -> JobId:
    """A worker begins a job, and hands it over after some tokens."""
    with running_worker(url, model__path=model, drain__mode="hand-over"):
        (job_id,) = submit_all(client, [ask])
        wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")
    assert state_of(client, job_id) is JobState.QUEUED
    return job_id


class TestGivenAJobThatAnotherWorkerBegan:
    def test_when_the_same_model_resumes_then_the_output_has_no_seam(self, valkey: RedisServer, client: Any) -> None:
        job_id = leave_in_the_middle(valkey.url, client)

        with running_worker(valkey.url, model__path=SLOW):
            wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: LONG})

    def test_when_no_reader_streams_it_then_checkpoints_are_enough(self, valkey: RedisServer, client: Any) -> None:
        ask = Ask(options=JobOptions(max_tokens=300), stream=False)
        with running_worker(valkey.url, model__path=SLOW, drain__mode="hand-over"):
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id) >= 64, "a checkpoint is there")
        with running_worker(valkey.url, model__path=SLOW):
            wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})
        assert len(read_channel(client, job_id)) < 15

    def test_when_another_model_may_continue_then_it_does_after_the_same_tokens(
        self, valkey: RedisServer, client: Any
    ) -> None:
        job_id = leave_in_the_middle(valkey.url, client)
        before = [one for entry in read_channel(client, job_id) for one in entry.token_ids]

        with running_worker(valkey.url, model__path="null?mean_output_tokens=1000000"):
            wait_for_ends(client, [job_id])

        assert state_of(client, job_id) is JobState.DONE
        assert list(result_of(client, job_id).choices[0].token_ids)[: len(before)] == before

    def test_when_another_model_must_not_then_the_job_fails_and_says_so(self, valkey: RedisServer, client: Any) -> None:
        job_id = leave_in_the_middle(valkey.url, client)

        with running_worker(valkey.url, model__path="null?mean_output_tokens=9", queue__on_model_change="fail"):
            wait_for_ends(client, [job_id])

        end = read_channel(client, job_id)[-1].end
        assert end is not None
        assert (end.state, end.error_code) == (JobState.FAILED, "model_changed")

    def test_when_it_should_wait_then_the_worker_with_its_model_gets_it(self, valkey: RedisServer, client: Any) -> None:
        job_id = leave_in_the_middle(valkey.url, client)
        other: dict[str, Any] = {
            "model__path": "null?mean_output_tokens=9", "queue__on_model_change": "wait", "queue__model_wait_s": 0.05,
        }  # fmt: skip

        with running_worker(valkey.url, **other):
            # A job of the other worker's own shows that it serves, and does not touch the waiting one.
            (own_id,) = submit_all(client, [Ask(options=JobOptions(max_tokens=5), seed=1)])
            wait_for_ends(client, [own_id])
            with running_worker(valkey.url, model__path=SLOW):
                wait_for_ends(client, [job_id])

        assert field_of(client, job_id, "attempt") == "2", "waiting is no attempt"
        check_every_token_once(client, {job_id: LONG})
        check_nothing_is_left(client)


class TestGivenAJobOfWhichOneChoiceHadEnded:
    """Another worker resumes the other choice, and must not publish the first one's end again."""

    def test_when_another_worker_goes_on_then_each_choice_has_its_tokens_and_one_end(
        self, valkey: RedisServer, client: Any
    ) -> None:
        ask = next(ask for seed in range(1000) if is_uneven(ask := ending_by_a_stop(seed)))
        with running_worker(valkey.url, model__path=SLOW, drain__mode="hand-over"):
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id, 1) >= 40, "the second choice speaks")
        assert state_of(client, job_id) is JobState.QUEUED
        assert read_channel(client, job_id, 0)[-1].end is not None

        with running_worker(valkey.url, model__path=SLOW):
            wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})


def ending_by_a_stop(seed: int) -> Ask:
    """Two choices, of which either may end early."""
    return Ask(options=JobOptions(max_tokens=120, n=2, stop=("qu", "x.", "zt")), seed=seed)


def is_uneven(ask: Ask) -> bool:
    """Whether the first choice ends long before the second."""
    (first, _), (second, _) = expected_tokens(ask)
    return len(first) < 20 and len(second) > 100


class TestGivenAChannelThatWasLost:
    def test_when_the_same_model_goes_on_then_it_is_generated_again_in_silence(
        self, valkey: RedisServer, client: Any
    ) -> None:
        job_id = leave_in_the_middle(valkey.url, client)
        published = num_on_channel(client, job_id)
        client.delete(KEYS.channel(job_id, 0))

        with running_worker(valkey.url, model__path=SLOW):
            wait_for_ends(client, [job_id])

        (tokens, text), _ = expected_tokens(LONG)
        assert result_of(client, job_id).choices[0].text == text
        entries = [decode_entry(next(iter(fields.values()))) for _, fields in client.xrange(KEYS.channel(job_id, 0))]
        assert entries[0].start == published
        assert [one for entry in entries for one in entry.token_ids] == tokens[published:], (
            "only what was not published"
        )
        assert list(result_of(client, job_id).choices[0].token_ids) == tokens

    def test_when_another_model_goes_on_then_the_job_fails_with_where(self, valkey: RedisServer, client: Any) -> None:
        job_id = leave_in_the_middle(valkey.url, client)
        client.delete(KEYS.channel(job_id, 0))

        with running_worker(valkey.url, model__path="null?mean_output_tokens=1000000"):
            wait_for_ends(client, [job_id])

        assert state_of(client, job_id) is JobState.FAILED
        assert field_of(client, job_id, "error_code") == "channel_lost"

    @pytest.mark.parametrize("num_choices", [1, 2])
    def test_when_an_entry_is_garbage_then_only_the_job_fails_and_says_so(
        self, valkey: RedisServer, client: Any, num_choices: int
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=300, n=num_choices, ignore_eos=True))
        job_id = leave_in_the_middle(valkey.url, client, ask)
        channel = KEYS.channel(job_id, num_choices - 1)
        last = client.xrevrange(channel, count=1)[0][0]
        client.delete(channel)
        client.xadd(channel, {"e": b"\xff garbage"}, id=last)

        with running_worker(valkey.url, model__path=SLOW):
            wait_for_ends(client, [job_id])

        assert field_of(client, job_id, "error_code") == "channel_damaged"
        assert "cannot be read" in (field_of(client, job_id, "error") or "")


class TestGivenARedisThatLosesItsLastSeconds:
    """Its append-only file is older than what it acknowledged."""

    def test_when_it_comes_back_then_the_worker_sends_again_from_there(self) -> None:
        asks = [Ask(options=JobOptions(max_tokens=150, n=1 + i % 2), seed=i) for i in range(6)]
        with redis_server("valkey", is_durable=True) as server, server.client() as client:
            worker = RunningWorker(server.url, {"model.path": "null?step_s=0.01"}, lambda served: served)
            job_ids = submit_all(client, asks)
            wait_until(lambda: all(num_on_channel(client, one) >= 5 for one in job_ids), "all jobs speak")
            with copied_aside(server, client):
                # The server will restart with this copy: fewer tokens than it acknowledges below.
                assert all(num_on_channel(client, one) < 40 for one in job_ids)
                wait_until(lambda: all(num_on_channel(client, one) >= 40 for one in job_ids), "they speak on")
                server.kill()
            server.start()
            wait_for_ends(client, job_ids)
            worker.stop()

            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)


class copied_aside:  # noqa: N801  # used as a context manager
    """On leaving, the server's files are as they were on entering."""

    def __init__(self, server: RedisServer, client: Any) -> None:
        self._folder = server.folder / "appendonlydir"
        client.config_set("appendfsync", "always")

    def __enter__(self) -> None:
        self._kept = {path: path.read_bytes() for path in self._folder.iterdir()}

    def __exit__(self, *_error: object) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        for path, data in self._kept.items():
            path.write_bytes(data)


class TestGivenAResultTooLargeForACall:
    def test_when_the_job_ends_then_it_is_written_in_parts(
        self, valkey: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A true one would have millions of tokens.
        monkeypatch.setattr(advance, "PART_BYTES", 100)
        ask = Ask(options=JobOptions(max_tokens=400, n=2))

        with running_worker(valkey.url):
            (job_id,) = submit_all(client, [ask])
            wait_for_ends(client, [job_id])

        assert client.strlen(KEYS.result(job_id)) > 1000
        check_every_token_once(client, {job_id: ask})


class TestGivenAServerThatIsFull:
    """maxmemory is reached: only submit may be refused."""

    def test_when_jobs_run_then_they_end_all_the_same(self, valkey: RedisServer, client: Any) -> None:
        asks = [Ask(options=JobOptions(max_tokens=60), seed=i) for i in range(4)]
        job_ids = submit_all(client, asks)
        try:
            client.config_set("maxmemory", 1)
            with running_worker(valkey.url, model__path=SLOW):
                wait_for_ends(client, job_ids)
        finally:
            client.config_set("maxmemory", 0)

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
