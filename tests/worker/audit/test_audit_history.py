"""Where queue, history and journal disagree: found, named, repaired where that can be, and gone at the second audit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sluice.history.retention import forget_before
from sluice.producer import Producer, after
from sluice.producer.bulk.run import BulkRun, BulkSettings
from sluice.protocol import calls
from sluice.protocol.bulk_files.journal import journal_path
from sluice.protocol.calls import Duplicate, SourceLine
from sluice.protocol.chains.chain import After
from sluice.protocol.jobs import template
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, JobSpec, Message, Prompt, encode_prompt, encode_spec
from sluice.worker.cli import main
from tests.chaos.checker.rows import row_of
from tests.protocol.driving import Queue, ending, new_job, tokens
from tests.worker.audit.audits import Scene


def forget(queue: Queue, job_id: JobId) -> None:
    """As a Redis that lost its last second: nothing of the job is left, nor any counter with it."""
    entry = queue.fields(*job_id.split(".")[1:])
    if "entry" in entry:
        queue.client.xdel(queue.keys.key("lane", entry["lane"]), entry["entry"])
    for name in queue.names("*:" + job_id.split(".")[2] + "*"):
        queue.client.delete(queue.keys.key(name))
    queue.client.hdel(queue.keys.key("held", "W"), job_id)
    queue.client.zrem(queue.keys.key("delayed"), job_id)
    queue.client.delete(queue.keys.key("outbox"))


def only(found: dict[tuple[str, str], str], *kinds: str) -> dict[str, str]:
    """What was done about the jobs of these kinds, by subject."""
    return {subject: done for (kind, subject), done in found.items() if kind in kinds}


class TestGivenAJobThatTheHistoryDoesNotKnowRight:
    @pytest.mark.parametrize("end", ["queued", "running", "done", "failed", "cancelled"])
    def test_when_its_row_is_gone_then_repair_writes_the_history_again(self, scene: Scene, end: str) -> None:
        job_id = scene.queue.add("one")
        bring_to(scene.queue, job_id, end)
        scene.record()
        scene.forget_in_history(job_id)

        assert set(scene.found()) == {("not_in_history", job_id)}
        assert scene.repair() == {("not_in_history", job_id): "events republished"}
        scene.record()

        assert scene.found() == {}
        assert scene.state_in_history(job_id) == end

    def test_when_its_row_says_otherwise_then_repair_writes_the_history_again(self, scene: Scene) -> None:
        job_id = scene.queue.add("one")
        bring_to(scene.queue, job_id, "done")
        scene.record()
        scene.change_history(job_id, state="failed")

        (finding,) = scene.audit().findings
        assert (finding.kind, finding.queue, finding.history) == (
            "history_differs", "done (version 3)", "failed (version 3)",
        )  # fmt: skip
        scene.repair()
        scene.record()

        assert scene.found() == {}
        assert scene.state_in_history(job_id) == "done"

    def test_when_its_row_stopped_at_an_older_state_then_repair_writes_the_history_again(self, scene: Scene) -> None:
        job_id = scene.queue.add("one")
        bring_to(scene.queue, job_id, "done")
        scene.record()
        scene.change_history(job_id, state="running", version=2)

        assert set(scene.found()) == {("history_differs", job_id)}
        scene.repair()
        scene.record()

        assert scene.found() == {}
        assert scene.state_in_history(job_id) == "done"

    def test_when_its_events_are_only_on_their_way_then_that_alone_is_said(self, one_scene: Scene) -> None:
        one_scene.queue.add("one")

        assert set(one_scene.found()) == {("history_behind", "0: outbox")}
        one_scene.record()
        assert one_scene.found() == {}

    def test_when_its_row_was_deleted_on_request_then_nothing_is_wrong(self, one_scene: Scene) -> None:
        job_id = one_scene.queue.add("one")
        bring_to(one_scene.queue, job_id, "done")
        one_scene.record()
        one_scene.change_history(job_id, deleted_ms=1, version=0)

        assert one_scene.found() == {}

    def test_when_retention_deleted_its_row_then_nothing_is_wrong(self, one_scene: Scene) -> None:
        job_id = one_scene.queue.add("one")
        bring_to(one_scene.queue, job_id, "failed")
        one_scene.record()
        one_scene.forget_in_history(job_id)
        one_scene.queue.pass_time(3 * 86_400_000)

        assert set(one_scene.found()) == {("not_in_history", job_id)}
        assert one_scene.found(retention_days=2) == {}


def bring_to(queue: Queue, job_id: JobId, end: str) -> None:
    """Let the one job that waits come to a state."""
    worker = queue.worker("W")
    if end == "cancelled":
        queue.cancel(job_id)
    if end not in ("running", "done", "failed"):
        return
    job = worker.take()
    worker.advance(tokens(job, 0, 2))
    if end != "running":
        worker.advance(ending(job, 2, 1, state=JobState(end)))


class TestGivenAJobThatTheQueueForgot:
    PROMPTS: tuple[Prompt, ...] = ("plain", '["looks like JSON"]', (5, 6, 7), (Message(role="user", content="hi"),))

    @pytest.mark.parametrize("end", ["queued", "running"])
    def test_when_repaired_then_it_is_the_same_job_and_runs_to_its_end(self, scene: Scene, end: str) -> None:
        self.lose_and_repair(scene, "plain", end)

    @pytest.mark.parametrize("prompt", PROMPTS, ids=str)
    def test_when_it_had_any_kind_of_prompt_then_it_has_the_same_again(self, one_scene: Scene, prompt: Prompt) -> None:
        self.lose_and_repair(one_scene, prompt, "running")

    def lose_and_repair(self, scene: Scene, prompt: Prompt, end: str) -> None:
        options = JobOptions(max_tokens=20, stop=("end",), logit_bias={3: 0.5})
        spec = encode_spec(JobSpec(options=options, model="m", metadata={"a": "b"}, callback_url="https://x.org/h"))
        asked: dict[str, Any] = {"batch": "b", "priority": 4, "wants_callback": True, "idempotency_key": "one"}
        asked["source"] = SourceLine(custom_id="c", number=7, endpoint="/v1/completions")
        job = new_job("one", spec=spec, payload=encode_prompt(prompt), **asked)
        scene.queue.submit(job)
        before = scene.queue.fields("t", "one")
        bring_to(scene.queue, job.id, end)
        scene.record()
        forget(scene.queue, job.id)

        assert ("forgotten", job.id) in scene.found()
        assert only(scene.repair(), "forgotten") == {job.id: "re-added"}
        scene.record()

        after = scene.queue.fields("t", "one")
        same = (
            *("spec", "seed", "class", "max_tokens", "choices", "bytes", "digest", "batch", "callback", "key"),
            *("custom_id", "line", "endpoint"),
        )
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
        by_key_alone = replace(job, id=JobId("0.t.again"))
        assert scene.queue.submit(job, by_key_alone) == [Duplicate(job.id, JobState.QUEUED)] * 2
        assert scene.found() == {}
        taken = scene.queue.worker("V").take()
        assert (taken.payload, taken.seed) == (job.payload, job.seed)
        scene.queue.worker("V").advance(ending(taken, 0, 2))
        scene.record()
        assert scene.state_in_history(job.id) == "done"
        assert scene.found() == {}

    def test_when_the_history_keeps_no_prompts_then_it_is_named_and_left(self, scene: Scene) -> None:
        scene.queue.configure(keep_prompts="hash")
        job_id = scene.queue.add("one")
        scene.record()
        forget(scene.queue, job_id)

        done = only(scene.repair(), "forgotten")

        assert "does not keep its prompt" in done[job_id]
        assert ("forgotten", job_id) in scene.found()

    def test_when_it_had_times_then_what_is_left_of_them_counts(self, one_scene: Scene) -> None:
        queue = one_scene.queue
        queue.client.hdel(queue.keys.key("config"), "test_clock_ms")
        now_ms = queue.look().server_ms
        job_id = queue.add("one", ttl_ms=60_000, not_before_ms=now_ms + 30_000, deadline_ms=now_ms + 90_000)
        before = queue.fields("t", "one")
        one_scene.record()
        forget(queue, job_id)

        one_scene.repair()

        after = queue.fields("t", "one")
        assert (after["not_before"], after["deadline"]) == (before["not_before"], before["deadline"])
        assert int(after["ttl"]) == pytest.approx(int(before["ttl"]), abs=5000)

    def test_when_only_its_prompt_is_gone_then_repair_restores_it(self, scene: Scene) -> None:
        job_id = scene.queue.add("one", payload=encode_prompt("the prompt"))
        scene.record()
        scene.queue.client.delete(scene.queue.keys.payload(job_id))

        assert set(scene.found()) == {("prompt_gone", job_id)}
        assert scene.repair() == {("prompt_gone", job_id): "prompt restored"}

        assert scene.found() == {}
        assert scene.queue.worker("V").take().payload == encode_prompt("the prompt")


class TestGivenAQueueThatWentBack:
    def go_back(self, queue: Queue, name: str, before: dict[str, str]) -> None:
        queue.client.set(queue.keys.key("job", "t", name), row_of(before))

    def test_when_a_queued_job_had_run_before_then_its_versions_continue_the_history(self, scene: Scene) -> None:
        queue, worker = scene.queue, scene.queue.worker("W")
        job_id = queue.add("one")
        for _ in range(3):
            worker.give_back(worker.take())
        scene.record()
        about = queue.fields("t", "one")
        queue.write_fields(job_id, version=1)

        assert set(scene.found()) == {("queue_went_back", job_id)}
        scene.repair()
        scene.record()

        assert scene.found() == {}
        assert int(queue.fields("t", "one")["version"]) > int(about["version"])
        worker.advance(ending(worker.take(), 0, 1))
        scene.record()
        assert scene.state_in_history(job_id) == "done"

    @pytest.mark.parametrize("version", [99, 2**31 - 1])
    def test_when_another_user_forged_an_end_then_the_real_one_takes_its_place(
        self, one_scene: Scene, version: int
    ) -> None:
        queue, worker = one_scene.queue, one_scene.queue.worker("W")
        job_id = queue.add("one")
        fields = {"state": "failed", "error": "forged", "submitted_ms": queue.view(job_id).submitted_ms}
        queue.client.xadd(queue.keys.outbox, {"e": pack_for_script([["ended", job_id, version, 1, fields]])})
        worker.advance(ending(worker.take(), 0, 1))
        one_scene.record()
        assert one_scene.state_in_history(job_id) == "failed"

        assert set(one_scene.repair()) == {("queue_went_back", job_id)}
        one_scene.record()

        assert one_scene.found() == {}
        assert one_scene.state_in_history(job_id) == "done"

    def test_when_a_job_is_queued_that_had_ended_then_it_is_named_and_its_end_stands(self, one_scene: Scene) -> None:
        job_id = one_scene.queue.add("one")
        one_scene.record()
        one_scene.change_history(job_id, state="done", version=3)

        assert set(one_scene.found()) == {("queue_went_back", job_id)}
        assert one_scene.repair() == {("queue_went_back", job_id): "left: its end is in the history"}
        assert one_scene.state_in_history(job_id) == "done"


class TestGivenAJournalOfAcknowledgedJobs:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"number {n}", "seed": n}) + "\n" for n in range(5)))
        return path

    def submit(self, scene: Scene, file: Path, rule: After | None = None) -> tuple[Path, list[JobId]]:
        """As `producer submit` does; the journal and its jobs."""
        journal = file.with_suffix(".journal")
        settings = BulkSettings(
            path=str(file), batch="b", journal=journal, defaults={"max_tokens": 9, "tenant": "acme"}, after=rule
        )
        with (
            Producer(scene.server.url, queue="q") as producer,
            BulkRun.opened(producer, settings, lambda _: None) as run,
        ):
            run.submit()
        return journal, [JobId(line) for line in journal.read_text().splitlines() if "acme" in line[:7]]

    def lose(self, scene: Scene, job_id: JobId) -> None:
        forget(scene.queue, job_id)
        scene.forget_in_history(job_id)

    def test_when_all_are_known_then_nothing_is_found(self, scene: Scene, file: Path) -> None:
        journal, ids = self.submit(scene, file)
        scene.record()

        report = scene.audit(journal=journal)

        assert len(ids) == 5
        assert (report.findings, report.num_journal) == ([], 5)

    def test_when_they_are_blocked_then_nothing_is_found(self, one_scene: Scene, file: Path) -> None:
        parent = one_scene.queue.add("parent", tenant="acme")
        journal, ids = self.submit(one_scene, file, after(parent))
        one_scene.record()

        report = one_scene.audit(journal=journal)

        assert len(ids) == 5
        assert (report.findings, report.num_journal) == ([], 5)

    def test_when_one_is_unknown_then_it_is_named_and_re_added_from_the_file(self, scene: Scene, file: Path) -> None:
        journal, ids = self.submit(scene, file)
        scene.record()
        before = scene.queue.fields(*ids[2].split(".")[1:])
        self.lose(scene, ids[2])

        assert ("unknown_to_all", ids[2]) in scene.found(journal=journal)
        assert "neither" in only(scene.repair(journal=journal), "unknown_to_all")[ids[2]]
        assert only(scene.repair(journal=journal, file=file), "unknown_to_all") == {ids[2]: "re-added"}
        scene.record()

        after = scene.queue.fields(*ids[2].split(".")[1:])
        same = ("spec", "seed", "digest", "max_tokens", "bytes", "cost")
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
        assert scene.found(journal=journal) == {}

    def test_when_retention_may_have_deleted_its_row_then_it_is_named_but_not_rerun(
        self, one_scene: Scene, file: Path
    ) -> None:
        journal, ids = self.submit(one_scene, file)
        worker = one_scene.queue.worker("W")
        job = next(one for one in worker.pull().jobs if one.id == ids[2])
        worker.advance(ending(job, 0, 1))
        one_scene.record()
        forget(one_scene.queue, ids[2])
        assert forget_before(one_scene.history, one_scene.queue.keys.queue, 2**60) == 1

        done = one_scene.repair(journal=journal, file=file, retention_days=30)

        assert done[("lost_or_deleted", ids[2])].startswith("left")
        assert one_scene.queue.fields(*ids[2].split(".")[1:]) == {}

    def test_when_the_file_is_another_then_it_says_that_no_line_is_the_job(self, one_scene: Scene, file: Path) -> None:
        journal, ids = self.submit(one_scene, file)
        one_scene.record()
        self.lose(one_scene, ids[0])
        file.write_text('{"prompt": "something else"}\n')

        done = only(one_scene.repair(journal=journal, file=file), "unknown_to_all")

        assert done == {ids[0]: "not re-added: no line of in.jsonl becomes this job"}

    def test_when_a_line_is_no_id_then_it_is_ignored(self, one_scene: Scene, tmp_path: Path) -> None:
        journal = tmp_path / "torn.journal"
        journal.write_text("run 0\nasked {\n0123456789abcdef01234567\n\n0.acme.0123456789abcdef01234567")

        report = one_scene.audit(journal=journal)

        assert (report.findings, report.num_journal, report.notes) == ([], 0, [])


class TestGivenTheCommand:
    def run(self, scene: Scene, *more: str) -> tuple[int, str]:
        url = scene.history.url.render_as_string(hide_password=False)
        arguments = ["audit", "--queue", "q", "--redis-url", scene.server.url, "--database-url", url]
        done = CliRunner().invoke(main, [*arguments, "--pause-s", "0", "--history-s", "0", *more])
        return done.exit_code, done.output

    def test_when_all_agree_then_it_says_so_and_exits_with_0(self, one_scene: Scene) -> None:
        one_scene.queue.add("one")
        one_scene.record()

        code, output = self.run(one_scene)

        assert code == 0
        assert "All sources agree" in output

    def test_when_something_disagrees_then_each_side_is_reported_and_it_exits_with_1(self, one_scene: Scene) -> None:
        job_id = one_scene.queue.add("one")
        one_scene.record()
        one_scene.forget_in_history(job_id)

        code, output = self.run(one_scene)
        assert code == 1
        assert "NOT IN HISTORY (1)" in output
        assert f"{job_id}" in output
        assert "queue: queued (version 1); history: no row" in output

        code, output = self.run(one_scene, "--json", "--repair")
        (found,) = json.loads(output)["disagreements"]
        assert code == 1
        assert (found["job_id"], found["repair"]) == (job_id, "events republished")

    def test_when_the_queue_alone_is_asked_for_then_no_history_is_needed(self, one_scene: Scene) -> None:
        one_scene.queue.add("one")

        assert self.run(one_scene, "--no-history")[0] == 0

    @pytest.mark.parametrize(
        "more", [("--file", __file__), ("--journal", __file__, "--no-history"), ("--pause-s", "-1")], ids=str
    )
    def test_when_it_is_misused_then_it_exits_with_2(self, one_scene: Scene, more: tuple[str, ...]) -> None:
        assert self.run(one_scene, *more)[0] == 2

    def test_when_the_history_is_not_there_then_it_says_what_to_do(self, one_scene: Scene, tmp_path: Path) -> None:
        code, output = self.run(one_scene, "--database-url", f"sqlite:///{tmp_path}/none.db")

        assert code == 2
        assert "--no-history" in output

    def test_when_help_is_asked_for_then_its_journal_is_where_journals_are(self) -> None:
        output = CliRunner().invoke(main, ["audit", "--help"]).output

        assert f"journals/{journal_path('SERVER', 'default', 'nightly')}" in output


def test_when_options_are_written_to_a_journal_then_the_same_jobs_are_drawn() -> None:
    """A journal's `asked` holds for options that JSON has no word for."""
    assert template({"stop": ["a"], "max_tokens": 3}).asked == template({"stop": ("a",), "max_tokens": 3}).asked


class TestGivenAQueueWhoseSettingsAreLost:
    """A worker had served it; then Redis forgot everything."""

    @pytest.fixture(autouse=True)
    def served(self, one_scene: Scene) -> None:
        queue = one_scene.queue
        queue.add("one")
        queue.worker("W").advance(ending(queue.worker("W").take(), 0, 1))
        one_scene.record()
        queue.client.flushall()

    def test_when_there_are_none_then_it_is_reported(self, one_scene: Scene) -> None:
        assert one_scene.found() == {("settings_lost", "0: settings"): 1}

    def test_when_a_new_worker_writes_its_own_then_it_is_still_reported_until_one_is_set(
        self, one_scene: Scene
    ) -> None:
        queue = one_scene.queue
        queue.step_clock(60_000)
        queue.run(calls.restore_settings(queue.keys, calls.KnownSettings()))
        queue.configure(max_job_tokens=100)
        assert one_scene.found() == {("settings_lost", "0: settings"): 1}

        queue.configure(keep_prompts="none")

        assert one_scene.found() == {}

    def test_when_a_worker_remembers_them_then_nothing_is_reported(self, one_scene: Scene) -> None:
        queue = one_scene.queue
        known = calls.KnownSettings(stamp="a0000000000aa:3", values={"keep_prompts": "none"})

        queue.run(calls.restore_settings(queue.keys, known))

        assert one_scene.found() == {}
