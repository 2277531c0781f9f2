"""Chains on the command line, run in this process against a real server."""

import json
from pathlib import Path

import pytest

from sluice.producer import JobState, Producer
from sluice.protocol.wire import decode_prompt
from tests.producer.commands import Run
from tests.producer.worker_side import HandWorker


class TestGivenAFileWhoseJobsWaitForAnother:
    def test_when_the_other_is_done_then_they_run_with_its_output(
        self, run: Run, tmp_path: Path, producer: Producer, worker: HandWorker
    ) -> None:
        Path(tmp_path / "jobs.jsonl").write_text('{"prompt": "one {{outputs[0]}}"}\n{"prompt": "two {{outputs[1]}}"}\n')
        parent = producer.submit("parent")
        submit = "submit", "jobs.jsonl", "--after", str(parent)

        ended = run(*submit)
        again = run(*submit)
        [listed] = json.loads(run("chains", "--json").output())
        shown = run("chains").output()
        worker.generate(worker.pull()[0])
        producer.release_chains()

        assert ended.code == 1  # the second line is refused
        assert "line 2: the prompt uses outputs[1], and after names 1 jobs, counted from 0" in ended.err
        assert "0 jobs submitted, 1 submitted before" in again.err
        assert listed["after"]["ids"] == [parent.id]
        assert f"{parent} to be done" in shown
        assert [decode_prompt(leased.payload) for leased in worker.pull()] == ["one w0 w1 w2 "]
        assert producer.chains() == []

    def test_when_a_failure_releases_them_then_they_wait_for_a_worker(
        self, run: Run, tmp_path: Path, producer: Producer
    ) -> None:
        Path(tmp_path / "jobs.jsonl").write_text('{"prompt": "one"}\n')
        parent = producer.submit("parent")
        producer.cancel(parent)

        submitted = run("submit", "jobs.jsonl", "--after", str(parent), "--on-failure", "release")
        producer.release_chains()

        assert submitted.code == 0
        assert producer.queue()[0].waiting_jobs == 1


class TestGivenAChainOfThreeJobs:
    """They are a batch, of which no job is in the queue yet."""

    @pytest.fixture
    def jobs(self, producer: Producer) -> list[str]:
        parent = producer.submit("parent")
        return [str(answer) for answer in producer.submit_many(["one", "two", "three"], batch="b", after=[parent])]

    def test_when_one_is_cancelled_then_the_others_are_listed(
        self, run: Run, producer: Producer, jobs: list[str]
    ) -> None:
        producer.cancel(jobs[0])
        producer.release_chains()

        [chain] = producer.chains()
        header, line = run("chains").output().splitlines()

        assert chain.job_ids == (jobs[1], jobs[2])
        assert dict(zip(header.split("\t"), line.split("\t"), strict=True)).items() >= {
            "chain": chain.id, "jobs": "2", "blocked": f"{jobs[1]}, {jobs[2]}",
        }.items()  # fmt: skip

    def test_when_the_chain_is_cancelled_then_all_its_jobs_end(
        self, run: Run, producer: Producer, jobs: list[str]
    ) -> None:
        [chain] = producer.chains()

        answers = run("cancel", "--chain", chain.id, "--reason", "not needed").output()
        producer.release_chains()
        again = run("cancel", "--chain", chain.id)

        assert answers.splitlines() == [f"{job}\tasked" for job in jobs]
        assert [producer.status(job).state for job in jobs] == [JobState.CANCELLED] * 3
        assert again.code == 1
        assert f"the queue has no blocked jobs of chain {chain.id}" in again.err

    @pytest.mark.usefixtures("jobs")
    def test_when_its_batch_is_cancelled_then_the_error_names_the_way(self, run: Run) -> None:
        ended = run("cancel", "--batch", "b")

        assert ended.code == 1
        assert "producer cancel --chain" in ended.err
