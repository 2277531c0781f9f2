"""Engines by name: the worker's own, one of another distribution, and one that is not installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.engine.errors import OptionRefused
from sluice.engine.request import Request, Sampling
from sluice.version import installed_version
from sluice.worker.config import ModelConfig, WorkerConfig, load_config
from sluice.worker.engine_process.process import EngineProcess
from sluice.worker.engine_process.remote_engine import RemoteEngine, ReportedSteps
from sluice.worker.engines.registry import load, prepare
from sluice.worker.errors import ConfigError, WorkerBroken
from tests.other_engine import install

NULL = WorkerConfig(model=ModelConfig(path="null"))


def config_of(**model: str) -> WorkerConfig:
    return replace(NULL, model=replace(NULL.model, **model))


class TestGivenAnEngineOfAnotherDistribution:
    @pytest.fixture(autouse=True)
    def distribution(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(tmp_path, monkeypatch)

    def test_when_it_is_asked_for_then_it_prepares_the_model(self) -> None:
        assert prepare(config_of(engine="other")).description.startswith("the other engine: ")

    def test_when_its_process_loads_then_it_generates_there(self) -> None:
        config = config_of(engine="other")
        assert config.model.has_engine_process
        with EngineProcess(config, "w") as process:
            engine = RemoteEngine(process, ReportedSteps(60.0), step_tokens=config.step_limits.max_num_batched_tokens)
            assert engine.facts.limits.vocab_size > 0
            engine.stop()

    def test_when_its_process_has_loaded_then_the_worker_refuses_what_it_refuses(self) -> None:
        config = config_of(engine="other")
        with EngineProcess(config, "w") as process:
            engine = RemoteEngine(process, ReportedSteps(60.0), step_tokens=config.step_limits.max_num_batched_tokens)
            engine.validate(Request(id="a", prompt_token_ids=(1,)))
            with pytest.raises(OptionRefused, match=r"the engine other \S+ refuses min_p: it has none"):
                engine.validate(Request(id="b", prompt_token_ids=(1,), sampling=Sampling(min_p=0.1)))
            engine.stop()


class TestGivenAnEngineThatDoesNotLoad:
    def test_when_it_raises_whatever_it_likes_then_the_worker_is_told_what(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(tmp_path, monkeypatch, before_loading="raise KeyError('a rank has no port')")

        with (
            EngineProcess(config_of(engine="other"), "w") as process,
            pytest.raises(WorkerBroken, match="KeyError: 'a rank has no port'"),
        ):
            process.load()

    def test_when_it_hangs_then_the_worker_gives_up_in_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(tmp_path, monkeypatch, before_loading="__import__('time').sleep(100)")
        config = config_of(engine="other")
        hurried = replace(config, beat=replace(config.beat, load_deadline_s=0.5))

        with (
            EngineProcess(hurried, "w") as process,
            pytest.raises(WorkerBroken, match=r"has not loaded the model for 0\.5 s"),
        ):
            process.load()


class TestGivenNoOtherEngine:
    def test_when_none_is_named_then_the_workers_own_loads_in_its_process(self) -> None:
        assert not NULL.model.has_engine_process
        assert load(NULL).name == prepare(NULL).name == "null"

    def test_when_one_is_named_then_the_error_lists_what_is_installed(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_ENGINE: no engine other is installed; there is sluice"):
            prepare(config_of(engine="other"))


class TestGivenAnotherPython:
    def test_when_it_lacks_the_worker_then_the_end_of_its_process_is_told(self) -> None:
        python = f"{sys.base_prefix}/bin/python3"
        with (
            EngineProcess(config_of(engine_python=python), "w") as process,
            pytest.raises(WorkerBroken, match="exit code 1"),
        ):
            process.load()

    def test_when_it_has_another_release_then_both_are_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        info = tmp_path / "sluice_llm-99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice-llm\nVersion: 99.0\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        with (
            EngineProcess(config_of(engine_python=sys.executable), "w") as process,
            pytest.raises(ConfigError) as raised,
        ):
            process.load()

        assert raised.value.problems == (
            f"SLUICE_ENGINE_PYTHON: its Sluice is 99.0, and this worker's is {installed_version()}: "
            "install the same release in both environments",
        )

    @pytest.mark.parametrize(
        ("environ", "problem"),
        [
            ({"SLUICE_ENGINE_PYTHON": "/no/python"}, "SLUICE_ENGINE_PYTHON: there is no program /no/python"),
            (
                {"SLUICE_ENGINE_PYTHON": sys.executable, "SLUICE_ENGINE_PROCESS": "off"},
                "SLUICE_ENGINE_PYTHON: an engine of another Python needs a process of its own",
            ),
        ],
    )
    def test_when_it_cannot_run_then_the_setting_is_refused(self, environ: dict[str, str], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            load_config(environ)
