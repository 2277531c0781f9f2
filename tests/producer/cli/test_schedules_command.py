"""The commands `producer schedules …`, run in this process against a real server."""

import json
from pathlib import Path
from typing import Any

from sluice.producer import Producer
from sluice.protocol.wire import decode_prompt
from tests.producer.commands import Ended, Run
from tests.producer.test_schedules import last_fired
from tests.producer.worker_side import HandWorker


class TestGivenAFileOfJobs:
    def test_when_it_is_scheduled_then_each_line_is_a_job_of_a_run(
        self, run: Run, tmp_path: Path, worker: HandWorker, redis_client: Any
    ) -> None:
        Path(tmp_path / "jobs.jsonl").write_text('{"prompt": "one", "seed": 3}\n\n{"prompt": "two"}\n')

        added = run("schedules", "add", "report", "--cron", "* * * * *", "--file", "jobs.jsonl", "--seed", "9")
        last_fired(redis_client, 1)
        fired = run("schedules", "run", "--once")

        assert "schedule 'report' runs next at " in added.output()
        jobs = worker.pull()
        assert [(decode_prompt(leased.payload), leased.seed) for leased in jobs] == [("one", 3), ("two", 9)]
        assert fired == Ended(0, "".join(f"{leased.id}\n" for leased in jobs), "")

    def test_when_a_line_is_wrong_then_it_is_named_and_nothing_is_added(
        self, run: Run, tmp_path: Path, producer: Producer
    ) -> None:
        Path(tmp_path / "jobs.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "max_tokens": "many"}\n')

        ended = run("schedules", "add", "report", "--cron", "@daily", "--file", "jobs.jsonl")

        assert ended.code == 2
        assert "line 2: " in ended.err
        assert producer.schedules() == []


class TestGivenASchedule:
    """Every morning in Berlin, for a tenant."""

    def test_when_it_is_managed_then_each_command_says_what_is_so(self, run: Run) -> None:
        rule = ("--cron", "0 9 * * *", "--tz", "Europe/Berlin", "--tenant", "acme")
        run("schedules", "add", "report", *rule, "--prompt", "hello").output()

        assert run("schedules", "pause", "report", "--tenant", "acme").output() == "schedule 'report' is paused\n"
        [paused] = json.loads(run("schedules", "list", "--json").output())
        assert run("schedules", "resume", "report", "--tenant", "acme").output() == "schedule 'report' is resumed\n"
        [resumed] = json.loads(run("schedules", "list", "--tenant", "acme", "--json").output())
        times = run("schedules", "next", "report", "--tenant", "acme", "--count", "3").output().splitlines()
        assert run("schedules", "remove", "report", "--tenant", "acme").output() == "schedule 'report' is removed\n"

        assert (paused["paused"], paused["next_run"]) == (True, None)
        assert (resumed["paused"], resumed["next_run"], resumed["zone"]) == (False, times[0], "Europe/Berlin")
        assert [time.partition("T")[2][:5] for time in times] == ["09:00"] * 3
        assert json.loads(run("schedules", "list", "--json").output()) == []

    def test_when_it_is_of_another_tenant_or_unknown_then_a_sentence_says_so(self, run: Run) -> None:
        run("schedules", "add", "report", "--cron", "@daily", "--prompt", "hello", "--tenant", "acme").output()

        ended = run("schedules", "pause", "report")

        assert (ended.code, "tenant 'default' has no schedule 'report'" in ended.err) == (1, True)

    def test_when_its_rule_or_zone_is_wrong_then_a_sentence_says_so(self, run: Run) -> None:
        rule = run("schedules", "add", "report", "--cron", "now and then", "--prompt", "hello")
        zone = run("schedules", "add", "report", "--cron", "@daily", "--tz", "Mars", "--prompt", "hello")

        assert (rule.code, "'now and then' is not a cron rule" in rule.err) == (2, True)
        assert (zone.code, "there is no time zone 'Mars'" in zone.err) == (2, True)
