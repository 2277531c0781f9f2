"""A held job: its fields are its own, and each transition needs the state it starts from."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from sluice.engine.request import Finish, FinishReason, Preemptions, SequenceStats, TokenDelta
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId, JobSpec
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.held_job import HeldJob, HoldState
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.progress import pending_updates
from sluice.worker.jobs.results import Origin

ORIGIN = Origin(model="m", fingerprint="f", worker="w")
ROOT = Path(__file__).parents[3]
WORKER = ROOT / "worker"
JOBS = WORKER / "jobs"
PAGE = ROOT / "docs" / "reference" / "job-states.md"


def new_job(*, choices: int = 1, pulled_ms: int = 0) -> HeldJob:
    leased = LeasedJob(
        id=JobId("0.t.a"), epoch=1, attempt=1, priority=0, spec=b"", payload=b"", seed=1, choices=choices,
        submitted_ms=0, pulled_ms=pulled_ms, deadline_ms=None, prompt_tokens=1, published=(0,) * choices,
        ended=(False,) * choices, fingerprint=None, fits=True,
    )  # fmt: skip
    return Leases().new_job(leased, QueueKeys("q"), JobSpec())


def assignments(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that a module assigns, also by index, of an object other than `self`."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            continue
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else node.targets
        yield from (one for target in targets for one in attributes(target) if ast.unparse(one.value) != "self")


def attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    """The attributes that one target assigns, whole or in part."""
    match target:
        case ast.Attribute():
            yield target
        case ast.Subscript() | ast.Starred():
            yield from attributes(target.value)
        case ast.Tuple() | ast.List():
            for part in target.elts:
                yield from attributes(part)
        case _:
            return


class TestGivenTheFieldsOfAHeldJob:
    def test_when_the_worker_s_modules_are_read_then_none_assigns_a_job_s_fields(self) -> None:
        names = {*HeldJob.__slots__, *(one.name for one in fields(ChannelOutput))}

        found = [
            f"{path.relative_to(WORKER)}:{target.lineno}: {ast.unparse(target)}"
            for path in sorted(WORKER.rglob("*.py"))
            # The simulation of `worker tune` has sequences of its own.
            if path not in (JOBS / "held_job.py", WORKER / "tune" / "replay.py")
            for target in assignments(ast.parse(path.read_text()))
            if target.attr in names
        ]

        assert found == []


class TestGivenATransition:
    def test_when_the_documents_show_the_transitions_then_they_show_the_same(self) -> None:
        def rows(text: str) -> list[list[str]]:
            table = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("|")]
            return [[cell.strip() for cell in row] for row in table[2:]]

        module = rows(inspect.getdoc(inspect.getmodule(HeldJob)) or "")
        page = rows(PAGE.read_text().partition("## Inside a worker\n")[2].partition("\n## ")[0])

        assert page == module
        assert {state for row in module for state in row[2].split(", ")} == {state.value for state in HoldState}

    def test_when_it_was_admitted_then_it_is_not_admitted_again(self) -> None:
        job = new_job()
        job.admit()

        with pytest.raises(AssertionError, match="admitted while admitted"):
            job.admit()

    def test_when_it_is_flagged_twice_then_the_first_state_stands(self) -> None:
        job = new_job()

        assert job.flag(JobState.CANCELLED)
        assert not job.flag(JobState.EXPIRED)
        assert job.stop is JobState.CANCELLED

    def test_when_it_was_rejected_then_its_end_is_published_and_it_is_not_given_back(self) -> None:
        job = new_job(choices=2)
        job.end_all(End(state=JobState.FAILED), now_ms=1)

        assert not job.give_back()
        assert job.has_updates
        assert job.is_active

    def test_when_it_returns_then_it_returns_once(self) -> None:
        job = new_job()

        assert job.give_back()
        assert not job.give_back()
        assert (job.is_active, job.is_held) == (False, True)

    def test_when_it_has_output_then_it_returns_only_with_all_published(self) -> None:
        job = new_job()
        job.admit()
        stats = SequenceStats(num_prompt_tokens=1)
        job.add_output(TokenDelta("r", 0, 0, (1,), "a", stats), now_s=1.0, now_ms=1000)

        assert not job.give_back(with_output=True)
        (update,) = pending_updates(job, ORIGIN, now_s=1.0)
        job.acknowledge(update, now_s=1.0)
        assert not job.give_back()
        assert job.give_back(with_output=True)


class TestGivenAJobWhoseChoicesWerePreempted:
    def test_when_they_end_then_its_measures_have_the_first_ones_by_time(self) -> None:
        job = new_job(choices=2, pulled_ms=5000)
        job.admit()
        waits = Preemptions().begin(1.5).end(1.75).begin(2.0)
        many = Preemptions()
        for number in range(20):
            many = many.begin(1.0 + number / 10).end(1.05 + number / 10)

        for choice, known in enumerate((waits, many)):
            stats = SequenceStats(num_prompt_tokens=1, num_preemptions=2, preemptions=known)
            delta = TokenDelta("r", choice, 0, (), "", stats, finish=Finish(reason=FinishReason.LENGTH))
            job.add_output(delta, now_s=4.0, now_ms=9000)

        record = job.record
        assert (record.preemptions, record.preempted_ms) == (4, 250 + 20 * 50)
        assert len(record.preemption_times) == 16
        assert record.preemption_times[:2] == ((1000, 50), (1100, 50))
        assert {(1500, 250), (2000, None)} <= set(record.preemption_times)
