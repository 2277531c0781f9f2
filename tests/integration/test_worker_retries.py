"""Retryable errors: the job returns after its backoff and resumes at its next token."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from sluice.engine.null_model import NullTokenizer
from sluice.protocol import calls
from sluice.protocol.calls import JobView, QueueSettings
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from sluice.worker.model.loaded_model import LocalModel
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    read_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.test_queue_depth import scrape
from tests.integration.workers import running_worker
from tests.servers import RedisServer, free_port

FAULTY = "null?obey_prompts=1"


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's clients share no typed base
    with valkey.client() as client:
        yield client


def view_of(client: Any, job_id: JobId) -> JobView:
    """Return the view of a job that the queue must have."""
    (view,) = run(client, calls.status(KEYS, [job_id]))
    assert view is not None
    return view


def let_pass(client: Any, ms: int) -> None:
    """Move the queue's clock."""
    client.hincrby(KEYS.key("config"), "test_clock_offset_ms", ms)


def wait_for_failures(client: Any, job_id: JobId, count: int) -> JobView:
    """Until it has gone back so often."""
    wait_until(lambda: view_of(client, job_id).failures == count, f"it has failed {count} times")
    return view_of(client, job_id)


class TestGivenStepsThatFail:
    def test_when_they_fail_alike_then_all_are_counted_and_one_warning_has_the_error(
        self, valkey: RedisServer, client: Any
    ) -> None:
        port = free_port()
        with (
            capture_logs() as lines,
            running_worker(valkey.url, model__path=FAULTY, metrics__enabled=True, metrics__port=port),
        ):
            for failures in (2, 4):
                submit_all(client, [Ask(prompt="[[fail@5x2]]", options=JobOptions(max_tokens=20))])
                wait_until(lambda num=failures: scrape(port).get("sluice_failed_steps_total") == num, "it is counted")
                wait_until(lambda: warnings_in(lines), "it is logged")

        assert [line["error"] for line in warnings_in(lines)] == ["RuntimeError: injected failure"]


def warnings_in(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines about failed steps."""
    return [line for line in lines if line["event"] == "step failed"]


class TestGivenAStepThatFailsOnOneJob:
    def test_when_it_goes_well_later_then_the_job_goes_on_at_its_next_token(
        self, valkey: RedisServer, client: Any
    ) -> None:
        # A step is tried three times before the job fails.
        ask = Ask(prompt="[[fail@5x3]]", options=JobOptions(max_tokens=20))
        with running_worker(valkey.url, model__path=FAULTY):
            (job_id,) = submit_all(client, [ask])
            view = wait_for_failures(client, job_id, 1)

            assert (view.state, view.attempt, view.error_code) == (JobState.QUEUED, 1, "engine_error")
            assert view.error == "the model failed on this request: RuntimeError: injected failure"
            assert [entry.end for entry in read_channel(client, job_id)][-1] is None, "its readers wait"
            assert view.published == (5,)
            let_pass(client, 1000)
            wait_for_ends(client, [job_id])

            assert (view_of(client, job_id).attempt, view_of(client, job_id).error) == (2, None)
            check_every_token_once(client, {job_id: ask})
        check_nothing_is_left(client)

    def test_when_every_try_fails_then_the_job_fails_with_its_last_error(
        self, valkey: RedisServer, client: Any
    ) -> None:
        run(client, calls.configure(KEYS, QueueSettings(max_failures=3)))
        with running_worker(valkey.url, model__path=FAULTY):
            (job_id,) = submit_all(client, [Ask(prompt="[[fail@3]]", options=JobOptions(max_tokens=20))])
            for failures in (1, 2):
                wait_for_failures(client, job_id, failures)
                let_pass(client, 2000)
            wait_for_ends(client, [job_id])

            view = view_of(client, job_id)
            assert (view.state, view.attempt, view.failures) == (JobState.FAILED, 3, 2)
            assert view.error_code == "engine_error"
            assert client.zscore(KEYS.key("dead"), job_id) is not None
            last = read_channel(client, job_id)[-1]
            assert last.end is not None
            assert (last.start, last.end.error_code) == (3, "engine_error")
        check_nothing_is_left(client)

    def test_when_it_is_one_choice_of_three_then_each_token_of_each_is_there_once(
        self, valkey: RedisServer, client: Any
    ) -> None:
        # Three times with the others and once alone: the first choice fails, and the others continue without it.
        ask = Ask(prompt="[[fail@6x4]]", options=JobOptions(max_tokens=20, n=3))
        with running_worker(valkey.url, model__path=FAULTY):
            (job_id,) = submit_all(client, [ask])
            wait_for_failures(client, job_id, 1)
            let_pass(client, 1000)
            wait_for_ends(client, [job_id])

            check_every_token_once(client, {job_id: ask})
        check_nothing_is_left(client)

    def test_when_it_is_cancelled_while_it_waits_for_its_retry_then_it_ends_at_once(
        self, valkey: RedisServer, client: Any
    ) -> None:
        with running_worker(valkey.url, model__path=FAULTY):
            (job_id,) = submit_all(client, [Ask(prompt="[[fail@3]]", options=JobOptions(max_tokens=20))])
            wait_for_failures(client, job_id, 1)

            assert run(client, calls.cancel(KEYS, [job_id])) == ["cancelled"]
        check_nothing_is_left(client)


class TestGivenLogitsThatAreNotNumbers:
    def test_when_they_come_then_the_job_is_not_tried_again(self, valkey: RedisServer, client: Any) -> None:
        with running_worker(valkey.url, model__path=FAULTY):
            (job_id,) = submit_all(client, [Ask(prompt="[[nan@4]]", options=JobOptions(max_tokens=20))])
            wait_for_ends(client, [job_id])

            assert (view_of(client, job_id).attempt, view_of(client, job_id).error_code) == (1, "bad_logits")


class Panic(BaseException):
    """What a library written in Rust raises: no Exception."""


class TestGivenAPromptThatBreaksTheTokenizer:
    """What it raises must not take the worker and its other jobs along."""

    @pytest.mark.parametrize("error", [ZeroDivisionError("no"), Panic("no")])
    def test_when_it_is_prepared_then_it_alone_goes_back_and_fails_in_the_end(
        self, valkey: RedisServer, client: Any, error: BaseException
    ) -> None:
        class Breaking(NullTokenizer):
            def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
                if "bad" in text:
                    raise error
                return super().encode(text, add_special_tokens=add_special_tokens)

        def breaking(served: LocalModel) -> LocalModel:
            return replace(served, text=replace(served.text, tokenizer=Breaking()))

        with running_worker(valkey.url, change=breaking) as worker:
            bad_id, good_id = submit_all(client, [Ask(prompt="a bad prompt"), Ask()])
            for failures in (1, 2):
                wait_for_failures(client, bad_id, failures)
                let_pass(client, 2000)
            wait_for_ends(client, [bad_id, good_id])

            assert worker.exit_code is None
            view = view_of(client, bad_id)
            assert (view.state, view.error_code) == (JobState.FAILED, "preparation_failed")
            assert view.error == f"its request could not be made: {type(error).__name__}: no"
            check_every_token_once(client, {good_id: Ask()})
        check_nothing_is_left(client)
