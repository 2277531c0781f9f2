"""What events say of jobs, and that neither their order nor their repetition matters."""

import hashlib
from dataclasses import asdict
from itertools import pairwise

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Engine

from sluice.history.rows import KeepPrompts, changes_of
from sluice.history.tables import attempts, jobs, results
from sluice.history.writer import HistoryWriter
from sluice.protocol.wire import encode_record
from tests.history import events as e

JOB = "0.acme.k3j9x2"


def write(history: Engine, packed: list[e.Packed], keep_prompts: KeepPrompts = "full", *, queue: str = e.QUEUE) -> None:
    """Record events as one transaction."""
    changes = changes_of(queue, e.unpacked(packed), keep_prompts=keep_prompts)
    HistoryWriter(history).write(changes.values())


def row(history: Engine, job_id: str = JOB) -> dict[str, object]:
    """The job's row as it is stored."""
    with history.connect() as connection:
        return dict(connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().one())


def attempt_rows(history: Engine) -> list[dict[str, object]]:
    """All attempts, in order."""
    with history.connect() as connection:
        return [dict(found) for found in connection.execute(sa.select(attempts).order_by("job_id", "epoch")).mappings()]


def texts(history: Engine, job_id: str) -> list[str]:
    """What the job said, one text per choice."""
    with history.connect() as connection:
        found = connection.execute(sa.select(results.c.choices).where(results.c.job_id == job_id)).scalar_one()
    return [choice["text"] for choice in found]


class TestGivenAJobThatRanOnce:
    """Submitted, started, ended."""

    def test_when_recorded_then_its_row_has_the_whole_latency_record(self, history: Engine) -> None:
        write(history, [e.submitted(JOB), e.started(JOB), e.ended(JOB)])

        found = row(history)
        assert {name: found[name] for name in ("queue", "partition", "tenant", "state", "reason", "priority")} == {
            "queue": "enrichment", "partition": 0, "tenant": "acme", "state": "done", "reason": "stop", "priority": 3,
        }  # fmt: skip
        assert found["seed"] == "18446744073709551615"
        assert (found["queue_s"], found["ttft_s"], found["e2e_s"]) == (0.05, 0.1, 1.05)
        assert found["tpot_s"] == pytest.approx((1.05 - 0.1) / 19)
        assert (found["itl_p50_s"], found["itl_p99_s"], found["itl_max_s"]) == (0.04, 0.09, 0.12)
        assert (found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]) == (11, 4, 20)
        assert (found["pulled_ms"], found["attempts"], found["worker"]) == (e.NOON_MS + 40, 1, "host:17")
        assert found["record_error"] is None

    def test_when_it_was_preempted_then_its_attempt_says_when_and_how_long(self, history: Engine) -> None:
        preempted = e.record(preemption_times=((70, 250), (600, None)), preempted_ms=250)

        write(history, [e.submitted(JOB), e.started(JOB), e.ended(JOB, record=encode_record(preempted))])

        with history.connect() as connection:
            [claim] = connection.execute(sa.select(attempts)).mappings()
        assert (claim["preempted_s"], claim["preemption_times"]) == (0.25, [[70, 250], [600, None]])

    def test_when_recorded_then_options_and_metadata_are_json(self, history: Engine) -> None:
        write(history, [e.submitted(JOB)])

        found = row(history)
        expected: dict[str, object] = {"max_tokens": 64, "temperature": 0.5, "n": 1, "stop": []}
        assert isinstance(found["options"], dict)
        assert {name: found["options"][name] for name in expected} == expected
        assert found["metadata"] == {"custom_id": "line-9x2"}

    def test_when_recorded_then_what_it_was_sampled_with_is_json(self, history: Engine) -> None:
        write(history, [e.submitted(JOB), e.started(JOB), e.ended(JOB)])

        assert row(history)["sampling"] == {**asdict(e.RESOLVED), "end_token_ids": [2]}

    def test_when_only_the_submit_is_recorded_then_the_job_is_queued(self, history: Engine) -> None:
        write(history, [e.submitted(JOB)])

        found = row(history)
        assert (found["state"], found["estimated_prompt_tokens"], found["e2e_s"]) == ("queued", 12, None)

    def test_when_the_result_is_kept_then_it_is_stored_per_choice(self, history: Engine) -> None:
        write(history, [e.submitted(JOB), e.ended(JOB, result=e.result("three", "rivers"))])

        with history.connect() as connection:
            found = connection.execute(sa.select(results)).one()
        assert [choice["text"] for choice in found.choices] == ["three", "rivers"]
        assert found.usage == {"prompt_tokens": 11, "output_tokens": 4, "cached_tokens": 0}


class TestGivenAPrompt:
    """The event carries it."""

    def test_when_prompts_are_kept_then_text_and_hash_are_stored(self, history: Engine) -> None:
        write(history, [e.submitted(JOB, prompt=e.prompt("Name three rivers."))])

        found = row(history)
        assert found["prompt"] == "Name three rivers."
        assert found["prompt_sha256"] == hashlib.sha256(b"Name three rivers.").hexdigest()

    def test_when_only_hashes_are_kept_then_the_text_is_not_stored(self, history: Engine) -> None:
        write(history, [e.submitted(JOB, prompt=e.prompt("secret"))], keep_prompts="hash")

        found = row(history)
        assert found["prompt"] is None
        assert found["prompt_sha256"] is not None

    def test_when_the_queue_keeps_only_hashes_then_the_text_is_not_stored(self, history: Engine) -> None:
        write(history, [e.submitted(JOB, prompt_to_hash=e.prompt("secret"))])

        found = row(history)
        assert (found["prompt"], found["prompt_sha256"]) == (None, hashlib.sha256(b"secret").hexdigest())

    def test_when_none_are_kept_then_nothing_of_it_is_stored(self, history: Engine) -> None:
        write(history, [e.submitted(JOB, prompt=e.prompt("secret"))], keep_prompts="none")

        found = row(history)
        assert (found["prompt"], found["prompt_sha256"]) == (None, None)


class TestGivenAJobWhoseFirstOwnerDied:
    """Two attempts."""

    HISTORY = (
        e.submitted(JOB),
        e.started(JOB),
        e.returned(JOB),
        e.started(JOB, e.NOON_MS + 90, 4, epoch=2, attempt=2, incarnation=b"inc-2"),
        e.ended(JOB, version=5, epoch=2, attempt=2, incarnation=b"inc-2", result=e.result("first")),
        e.returned(JOB, e.NOON_MS + 1060, 6, epoch=2, why=b"requeued"),
        e.started(JOB, e.NOON_MS + 1070, 7, epoch=3, attempt=3, incarnation=b"inc-2"),
        e.ended(JOB, e.NOON_MS + 1080, 8, epoch=3, attempt=3, incarnation=b"inc-2", result=e.result("second")),
    )

    def test_when_recorded_then_each_attempt_has_its_end(self, history: Engine) -> None:
        write(history, list(self.HISTORY))

        assert [
            (found["epoch"], found["incarnation"], found["outcome"], found["why"]) for found in attempt_rows(history)
        ] == [
            (1, "inc-1", "returned", "owner_died"),
            (2, "inc-2", "done", "stop"),
            (3, "inc-2", "done", "stop"),
        ]
        assert row(history)["attempts"] == 3

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_when_events_come_in_any_order_and_repeated_then_the_rows_are_the_same(
        self, history: Engine, data: st.DataObject
    ) -> None:
        job_id = f"0.acme.{data.draw(st.uuids())}"
        expected_id = f"0.acme.{data.draw(st.uuids())}"
        of_job = [[kind, job_id, *rest] for kind, _, *rest in self.HISTORY]
        repeated = data.draw(st.lists(st.sampled_from(range(len(of_job))), max_size=6))
        order = data.draw(st.permutations([*range(len(of_job)), *repeated]))
        cuts = data.draw(st.lists(st.sampled_from(range(1, len(order))), max_size=3))
        edges = sorted({0, *cuts, len(order)})

        for begin, end in pairwise(edges):
            write(history, [of_job[index] for index in order[begin:end]])
        write(history, [[kind, expected_id, *rest] for kind, _, *rest in self.HISTORY])

        assert row(history, job_id) | {"id": ""} == row(history, expected_id) | {"id": ""}
        of_both = attempt_rows(history)
        mine = [found | {"job_id": ""} for found in of_both if found["job_id"] == job_id]
        assert mine == [found | {"job_id": ""} for found in of_both if found["job_id"] == expected_id]
        assert texts(history, job_id) == texts(history, expected_id) == ["second"]


class TestGivenAFailedJobThatAPersonRequeued:
    """Its row must show that it is on its way again."""

    def test_when_recorded_then_it_is_queued_and_its_attempt_keeps_how_it_ended(self, history: Engine) -> None:
        failed = e.ended(JOB, state=b"failed", error=b"NaN", error_code=b"nan_logits", reason=None)
        write(history, [e.submitted(JOB), e.started(JOB), failed])
        write(history, [e.returned(JOB, version=4, why=b"requeued")])

        found = row(history)
        assert (found["state"], found["reason"], found["error"], found["finished_ms"]) == (
            "queued",
            "requeued",
            None,
            None,
        )
        assert [(one["outcome"], one["why"]) for one in attempt_rows(history)] == [("failed", "nan_logits")]
