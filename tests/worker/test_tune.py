"""Settings found for a traffic: over a model whose step time is known, so that what is best is known too."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from benchmarks.disciplines.arrivals import constant, merged, poisson, uniform
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.history import tables
from sluice.history.database import open_database
from sluice.worker.cli import main
from sluice.worker.config import WorkerConfig, load_config
from sluice.worker.errors import ConfigError, ExitCode, NotReady
from sluice.worker.recorder.migrate import prepare
from sluice.worker.tune import progress
from sluice.worker.tune.command import current_choice, report_of, start_command
from sluice.worker.tune.figures import Target
from sluice.worker.tune.replay import Arrival, SimulatedExecutor, VirtualClock
from sluice.worker.tune.search import Choice, Model, SearchResult, search
from sluice.worker.tune.traffic import read_history, read_traffic

CHATS_AND_LONG_PROMPTS = merged(
    poisson(8.0, 24, constant(16), constant(30)), poisson(1.0, 3, constant(1500), constant(5))
)

DEFAULTS = current_choice(load_config({}))


def model(step_time: StepTime, *, num_tokens: int = 32768, discipline: str = "continuous") -> Model:
    """A model in virtual time; `num_tokens` fit its cache, whatever the size of a block."""
    clock = VirtualClock()

    def load(block_size: int) -> SimulatedExecutor:
        cache = NullModelConfig(num_blocks=num_tokens // block_size, block_size=block_size, max_model_len=2048)
        return SimulatedExecutor(step_time, clock, cache)

    return Model(load, clock, EngineConfig(discipline=discipline))


@pytest.fixture(scope="module")
def stalls() -> SearchResult:
    """What is found for prompts that stall decodes."""
    serving = model(StepTime(fixed_s=5e-3, token_s=2e-4))
    return search(serving, CHATS_AND_LONG_PROMPTS, Target(ttft_s=0.2, tpot_s=0.05), DEFAULTS)


class TestGivenPromptsThatStallDecodes:
    """A token of a prompt costs 0.2 ms: 1,500 of them at once hold everybody up for 0.3 s."""

    def test_when_it_is_tuned_then_more_meet_the_target_than_with_the_defaults(self, stalls: SearchResult) -> None:
        best, choice = stalls.best, stalls.best.choice
        assert best.predicted.attainment > stalls.current.predicted.attainment
        assert choice.max_num_batched_tokens < 1500 or choice.long_prefill_token_threshold

    def test_when_the_machine_keeps_to_its_step_time_then_what_was_predicted_is_measured(
        self, stalls: SearchResult
    ) -> None:
        assert stalls.fit.median_error < 0.01
        for outcome in (stalls.current, stalls.best):
            assert outcome.measured.attainment == pytest.approx(outcome.predicted.attainment, abs=0.05)
            assert outcome.measured.tpot_mean_s == pytest.approx(outcome.predicted.tpot_mean_s, rel=0.05)


class TestGivenADiscipline:
    @pytest.mark.parametrize(("discipline", "pads"), [("continuous", False), ("static", True)])
    def test_when_it_is_tuned_then_it_is_what_is_replayed_and_run(self, discipline: str, pads: bool) -> None:
        serving = model(StepTime(fixed_s=5e-3, token_s=2e-4), discipline=discipline)
        chats = poisson(50.0, 8, constant(16), uniform(2, 20))

        replays = serving.predict(chats, DEFAULTS), serving.run(chats, DEFAULTS)

        num_needed = sum(one.num_prompt_tokens + one.num_output_tokens - 1 for one in chats)
        for replayed in replays:
            assert (sum(step.work.num_tokens for step in replayed.steps) > num_needed) == pads

    def test_when_it_computes_prompts_whole_then_no_threshold_is_tried(self) -> None:
        serving = model(StepTime(fixed_s=5e-3, token_s=2e-4), discipline="prefill-first")
        long = poisson(2.0, 4, constant(1500), constant(5))

        assert (
            search(serving, long, Target(ttft_s=0.2, tpot_s=0.05), DEFAULTS).best.choice.long_prefill_token_threshold
            == 0
        )


class TestGivenAMachineThatIsBusy:
    """Now and then something else runs for a second."""

    @pytest.mark.parametrize(("every", "warns"), [(20, True), (0, False)])
    def test_when_steps_are_disturbed_then_the_report_says_so(self, every: int, warns: bool) -> None:
        clock = VirtualClock()

        class Disturbed(SimulatedExecutor):
            num_steps = 0

            def launch(self, batch: Batch) -> Computed:
                self.num_steps += 1
                clock.pass_s(float(every > 0 and self.num_steps % every == 0))
                return super().launch(batch)

        lone = [Arrival(at_s=0.0, num_prompt_tokens=16, num_output_tokens=4)]
        target = Target(ttft_s=1.0, tpot_s=1.0)
        busy = Model(
            lambda block_size: Disturbed(StepTime(fixed_s=1e-3), clock, NullModelConfig()), clock, EngineConfig()
        )

        report = report_of(search(busy, lone, target, DEFAULTS), "continuous", target)

        assert ("so the machine was busy" in report) == warns


class TestGivenAChoice:
    """Its command, read again by `worker start`, must mean what was tuned."""

    choice = Choice(max_num_seqs=8, max_num_batched_tokens=512, long_prefill_token_threshold=64, block_size=32)

    def started(self, command: str) -> WorkerConfig:
        """The settings that it gives `worker start`."""
        words = shlex.split(command)
        start = main.commands["start"]
        params = start.make_context("start", words[2:]).params
        device = {"model.device": params["gpu"] or "cpu"}
        flags = {name.replace("__", "."): value for name, value in params.items() if "__" in name and value is not None}
        return load_config({}, flags=flags | device)

    def test_when_settings_were_given_then_the_command_gives_them_too(self) -> None:
        given: dict[str, object] = {
            "queue.name": "night",
            "model.path": "./my model",
            "model.dtype": "bfloat16",
            "model.quantization": "int8",
            "model.memory_fraction": "0.3",
            "model.max_model_len": "900",
            "model.num_threads": "3",
            "batching.discipline": "dynamic",
            "batching.batch_window_s": "0.5",
        }
        config = load_config({}, flags=given)

        started = self.started(start_command(config, self.choice))

        assert started.model == replace(config.model, block_size=32)
        assert started.queue.names == ("night",)
        assert started.batching == replace(
            config.batching, max_num_seqs=8, max_num_batched_tokens=512, long_prefill_token_threshold=64
        )

    def test_when_a_gpu_and_blocks_are_given_then_the_cache_has_the_measured_size(self) -> None:
        config = load_config({}, flags={"model.path": "m", "model.device": "cuda:1", "model.num_blocks": "100"})

        started = self.started(start_command(config, self.choice))

        assert (started.model.device, started.model.num_blocks, started.model.block_size) == ("cuda:1", 50, 32)

    def test_when_blocks_were_given_with_their_size_then_their_memory_is_kept(self) -> None:
        config = load_config({}, flags={"model.path": "m", "model.num_blocks": "100", "model.block_size": "64"})

        assert self.started(start_command(config, self.choice)).model.num_blocks == 200

    def test_when_a_default_was_given_then_the_command_says_it_too(self) -> None:
        """The environment may say something else."""
        assert " --cpu " in start_command(load_config({}), self.choice)
        assert " --quantization auto " in start_command(load_config({}), self.choice)


class TestGivenAMachineThatServesAll:
    LONE = tuple(Arrival(at_s=float(n), num_prompt_tokens=16, num_output_tokens=4) for n in range(12))
    TARGET = Target(ttft_s=1.0, tpot_s=1.0)

    def found(self, current: Choice) -> SearchResult:
        return search(model(StepTime(fixed_s=1e-3)), self.LONE, self.TARGET, current)

    @pytest.mark.parametrize("current", [DEFAULTS, Choice(max_num_seqs=1, max_num_batched_tokens=16)])
    def test_when_all_choices_are_alike_then_the_current_settings_are_kept(self, current: Choice) -> None:
        found = self.found(current)

        assert found.best.choice == found.candidate.choice == current
        report = report_of(found, "continuous", self.TARGET)
        assert report.endswith("no choice was predicted to be better than the current settings:")
        assert "recommended" not in report


class TestGivenAChoiceThatIsPredictedToBeBetter:
    """The prompts that stall decodes; what is measured for the choice is replaced."""

    TARGET = Target(ttft_s=0.2, tpot_s=0.05)

    @pytest.mark.parametrize(("attainment", "is_kept"), [(-0.1, True), (0.0, True), (0.1, False)])
    def test_when_it_does_not_measure_better_then_the_current_settings_are_kept(
        self, stalls: SearchResult, attainment: float, *, is_kept: bool
    ) -> None:
        assert stalls.candidate.choice != stalls.current.choice
        measured = replace(stalls.current.measured, attainment=stalls.current.measured.attainment + attainment)
        found = replace(stalls, candidate=replace(stalls.candidate, measured=measured))

        assert (found.best == found.current) == is_kept
        report = report_of(found, "continuous", self.TARGET)
        assert ("rejected, measured" in report) == is_kept
        assert ("recommended, measured" in report) != is_kept


class TestGivenAFileOfTraffic:
    def read(self, folder: Path, *lines: object, rate: float = 2.0) -> list[Arrival]:
        path = folder / "traffic.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        return read_traffic(path, len, rate=rate)

    def test_when_lines_say_when_they_came_then_the_first_is_the_beginning(self, tmp_path: Path) -> None:
        late = {"at_s": 101.5, "prompt": "hello", "max_tokens": 9}
        early = {"at_s": 100, "prompt_tokens": 3, "output_tokens": 2, "max_tokens": 8}

        assert self.read(tmp_path, late, early) == [
            Arrival(at_s=0.0, num_prompt_tokens=3, num_output_tokens=2, max_tokens=8),
            Arrival(at_s=1.5, num_prompt_tokens=5, num_output_tokens=9, max_tokens=9),
        ]

    def test_when_no_line_says_then_they_come_at_the_rate(self, tmp_path: Path) -> None:
        arrivals = self.read(tmp_path, *[{"prompt_tokens": 3, "output_tokens": 2}] * 40, rate=4.0)

        assert arrivals[0].at_s == 0
        assert 8 < arrivals[-1].at_s < 10

    def test_when_lines_are_wrong_then_each_is_reported(self, tmp_path: Path) -> None:
        wrong = [{"prompt_tokens": 0, "output_tokens": 2}, {"prompt_tokens": 3}, {"model": "x"}, [1, 2], 7]

        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, *wrong)

        problems = [problem.split(":", 1)[1] for problem in caught.value.problems]
        assert problems == [
            "1: prompt_tokens must be 1 or more, got 0",
            "2: output_tokens is missing",
            "3: model is not one of at_s, prompt, prompt_tokens, output_tokens, max_tokens",
            "4: must be an object, got [1, 2]",
            "5: must be an object, got 7",
        ]

    @pytest.mark.parametrize(
        "at_s", [float("nan"), float("inf"), float("-inf"), 10**400], ids=["nan", "inf", "-inf", "huge"]
    )
    def test_when_a_time_is_not_finite_then_it_is_reported(self, tmp_path: Path, at_s: float) -> None:
        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, {"at_s": at_s, "prompt_tokens": 3, "output_tokens": 2})

        (problem,) = caught.value.problems
        assert f"traffic.jsonl:1: at_s must be seconds, got {at_s}" in problem

    def test_when_it_is_a_batch_file_then_one_sentence_says_so(self, tmp_path: Path) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        lines = [{"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(9)]

        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, *lines)

        (problem,) = caught.value.problems
        assert problem.endswith(
            "traffic.jsonl:1 and 8 more lines: is a job of a batch file; a line of traffic has "
            "at_s, prompt, prompt_tokens, output_tokens, max_tokens"
        )

    def test_when_lines_are_wrong_in_many_ways_then_the_rest_is_counted(self, tmp_path: Path) -> None:
        wrong = [{"prompt_tokens": -n, "output_tokens": 2} for n in range(20)]

        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, *wrong)

        assert len(caught.value.problems) == 6
        assert caught.value.problems[-1].endswith(": 15 more lines are wrong in other ways")

    def test_when_only_some_lines_say_when_then_that_is_reported(self, tmp_path: Path) -> None:
        timed = {"at_s": 1, "prompt_tokens": 3, "output_tokens": 2}

        with pytest.raises(ConfigError, match="at_s is on 1 of 2 lines"):
            self.read(tmp_path, timed, {"prompt_tokens": 3, "output_tokens": 2})


class TestGivenAHistory:
    """Three jobs that are done, one of them two days before the newest; one that failed, one of another queue."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        url = f"sqlite:///{tmp_path / 'history.db'}"
        database = open_database(url, is_writer=True)
        prepare(database)
        day_ms = 86_400_000
        rows = [
            ("old", "q", "done", 0),
            ("first", "q", "done", 2 * day_ms),
            ("failed", "q", "failed", 2 * day_ms),
            ("other", "r", "done", 2 * day_ms),
            ("newest", "q", "done", 2 * day_ms + 1500),
        ]
        with database.begin() as connection:
            for job_id, queue, state, submitted_ms in rows:
                connection.execute(
                    sa.insert(tables.jobs).values(
                        id=job_id, queue=queue, partition=0, tenant="t", version=1, state=state, choices=2,
                        submitted_ms=submitted_ms, prompt_tokens=12, output_tokens=10,
                    )
                )  # fmt: skip
        database.dispose()
        return url

    def test_when_it_is_read_then_the_newest_jobs_come_as_they_came(self, url: str) -> None:
        assert read_history(url, ["q"], hours=24, most=100) == [
            Arrival(at_s=0.0, num_prompt_tokens=12, num_output_tokens=5),
            Arrival(at_s=1.5, num_prompt_tokens=12, num_output_tokens=5),
        ]

    def test_when_it_has_no_such_job_then_a_file_is_asked_for(self, url: str) -> None:
        with pytest.raises(ConfigError, match="no job of 'nobody' that is done: give a file"):
            read_history(url, ["nobody"], hours=24, most=100)

    def test_when_it_is_not_there_then_that_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(NotReady, match="the history cannot be read"):
            read_history(f"sqlite:///{tmp_path / 'none.db'}", ["q"], hours=24, most=100)


class TestGivenSettings:
    def test_when_they_are_listed_then_they_are_measured_next_to_the_best(self) -> None:
        environ = {
            "SLUICE_MAX_NUM_SEQS": "200", "SLUICE_MAX_NUM_BATCHED_TOKENS": "300", "SLUICE_BLOCK_SIZE": "32",
            "SLUICE_LONG_PREFILL_TOKEN_THRESHOLD": "90",
        }  # fmt: skip

        assert current_choice(load_config(environ)) == Choice(
            max_num_seqs=200, max_num_batched_tokens=300, long_prefill_token_threshold=90, block_size=32
        )


class TestGivenTheCommand:
    def test_when_a_request_is_longer_than_the_model_takes_then_it_is_misuse(self, tmp_path: Path) -> None:
        traffic = tmp_path / "traffic.jsonl"
        traffic.write_text('{"prompt_tokens": 500, "output_tokens": 20}')

        result = CliRunner().invoke(main, ["tune", "null?max_model_len=256", str(traffic)])

        assert result.exit_code == ExitCode.MISUSED
        assert "a request of 520 tokens; this worker takes 256" in result.output

    @pytest.mark.slow
    def test_when_requests_came_hours_apart_then_the_pauses_are_skipped(self, tmp_path: Path) -> None:
        traffic = tmp_path / "traffic.jsonl"
        lines = [{"at_s": 3600 * (n // 3), "prompt_tokens": 200, "output_tokens": 5} for n in range(6)]
        traffic.write_text("\n".join(map(json.dumps, lines)))

        result = CliRunner().invoke(
            main,
            ["tune", "null?step_s=0.0005", str(traffic), "--discipline", "orca"],
            env={"SLUICE_MAX_NUM_SEQS": "1"},
        )

        assert result.exit_code == ExitCode.DONE, result.output
        *report, command = result.stdout.splitlines()
        measured = [line.split("  ")[0] for line in report if "ed  " in line]
        assert measured[:2] == ["current, predicted", "current, measured"]
        assert command.startswith("worker start --queue default --cpu --model 'null?step_s=0.0005'")
        assert " --discipline orca " in command
        assert any("discipline orca" in line for line in report)
        progress = result.stderr.splitlines()
        assert "tuning for 6 requests of 3600 s; pauses between them are skipped" in progress
        assert any(line.startswith("running settings for real: ") and "about " in line for line in progress)


class TestGivenAStageOfAMinute:
    def test_when_parts_end_then_it_says_how_much_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s, lines = [0.0], list[str]()
        monkeypatch.setattr(progress, "monotonic", lambda: now_s[0])
        stage = progress.ProgressReporter(lines.append).stage("simulating", 60, estimate_s=300)

        def part() -> int:
            now_s[0] += 1
            return 7

        assert [stage.timed(part) for _ in range(60)] == [7] * 60

        assert lines[:3] == [
            "simulating: 0 of 60, about 5 min",
            "simulating: 2 of 60, about 58 s left",
            "simulating: 4 of 60, about 56 s left",
        ]
        assert lines[-1] == "simulating: 58 of 60, about 2 s left"
