"""How long readers waited for tokens, in the history: a real worker, a real Redis that hangs, a real hand-over."""

import time
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import attempts, jobs
from sluice.history.writer import HistoryWriter
from sluice.protocol.wire import JobOptions
from sluice.worker.config import CHECKPOINT_S
from sluice.worker.connection.clients import connect
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.integration.jobs import (
    Ask,
    check_every_token_once,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer

SLOW = "null?step_s=0.005"
OUTAGE_S = 1.5


def recorded(valkey: RedisServer, history: Engine) -> tuple[Any, list[Any]]:  # Any: columns of several types
    """The job's row, and those of its attempts."""
    Recorder(connect(valkey.url, timeout_s=5), HistoryWriter(history), RecorderSettings()).drain()
    with history.connect() as connection:
        rows = connection.execute(sa.select(attempts).order_by(attempts.c.epoch)).all()
        return connection.execute(sa.select(jobs)).one(), list(rows)


class TestGivenARedisThatHangsInMidStream:
    @pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_when_the_job_has_ended_then_its_row_shows_what_readers_saw(
        self, valkey: RedisServer, sqlite_history: Engine, is_streamed: bool
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=400), stream=is_streamed)
        with running_worker(valkey.url, model__path=SLOW, beat__life_s=10.0), valkey.client() as client:
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")

            valkey.freeze()
            time.sleep(OUTAGE_S)
            valkey.thaw()

            wait_for_ends(client, [job_id])
            check_every_token_once(client, {job_id: ask})
        job, (attempt,) = recorded(valkey, sqlite_history)
        # Without a stream, readers expect nothing until the next checkpoint, at most this much later.
        least_s = OUTAGE_S if is_streamed else OUTAGE_S - CHECKPOINT_S
        assert least_s <= job.itl_max_s < OUTAGE_S + 0.5
        assert attempt.gap_s == job.itl_max_s
        assert job.itl_p50_s < 0.1


class TestGivenAJobThatChangesItsWorker:
    def test_when_it_has_ended_then_the_attempt_after_the_gap_has_it(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        with valkey.client() as client:
            with running_worker(valkey.url, model__path=SLOW, drain__mode="hand-over"):
                (job_id,) = submit_all(client, [Ask(options=JobOptions(max_tokens=600))])
                wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")
                valkey.freeze()
                time.sleep(OUTAGE_S / 2)
                valkey.thaw()
                spoken = num_on_channel(client, job_id)
                wait_until(lambda: num_on_channel(client, job_id) >= spoken + 100, "it has gone on")
            time.sleep(OUTAGE_S)
            with running_worker(valkey.url, model__path=SLOW):
                wait_for_ends(client, [job_id])

        job, (first, second) = recorded(valkey, sqlite_history)

        assert job.itl_max_s == second.gap_s
        assert OUTAGE_S / 2 <= first.gap_s < OUTAGE_S <= second.gap_s
