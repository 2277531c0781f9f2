"""What a worker refuses before it starts vLLM, and what it tells vLLM."""

import stat
from pathlib import Path

import pytest

from sluice.worker.checks.site import CheckLevel, Site
from sluice.worker.checks.startup import check_model
from sluice.worker.config import load_config
from sluice.worker.engines.registry import prepare
from sluice.worker.engines.vllm.load import UNREAD
from sluice.worker.errors import ConfigError
from sluice.worker.log import get_log
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load
from tests.oracles.adapters import save_adapter
from tests.oracles.tiny_models import TINY_MODELS


def python_with(folder: Path, release: str) -> str:
    """A Python that says it has a release of vLLM, none if it is empty, and Sluice."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho vllm {release}\necho sluice-llm 1.0\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


class TestGivenTheSettings:
    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"SLUICE_QUANTIZATION": "int8"}, "SLUICE_QUANTIZATION: vLLM reads how"),
            ({"SLUICE_DETERMINISTIC": "true"}, "SLUICE_DETERMINISTIC: with vLLM, bits depend on the batch"),
            ({"SLUICE_SPECULATION": "suffix"}, "SLUICE_SPECULATION: vLLM's steps verify no drafts"),
            ({"SLUICE_KERNELS": "torch"}, "SLUICE_KERNELS: vLLM has its own"),
            ({"SLUICE_MEMORY_FRACTION": "0.4"}, "SLUICE_MEMORY_FRACTION: on a CPU, .* VLLM_CPU_KVCACHE_SPACE"),
            ({"SLUICE_NUM_THREADS": "2"}, "SLUICE_NUM_THREADS: vLLM takes its threads from OMP_NUM_THREADS"),
            ({"SLUICE_MODEL": "null"}, "SLUICE_MODEL: the null model is not for vLLM"),
        ],
    )
    def test_when_one_is_for_our_own_engine_then_it_is_refused(
        self, tmp_path: Path, given: dict[str, str], problem: str
    ) -> None:
        environ = {"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": python_with(tmp_path, "0.32.0"), **given}

        with pytest.raises(ConfigError, match=problem):
            prepare(load_config(environ))

    def test_when_our_own_engine_is_given_an_option_of_vllm_then_it_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_ENGINE_OPTION: the engine sluice has no options of its own"):
            load_config({"SLUICE_ENGINE_OPTION": "tensor_parallel_size=2"})


class TestGivenTheEnvironmentOfTheEngine:
    def test_when_it_has_no_vllm_then_the_error_names_its_python(self, tmp_path: Path) -> None:
        python = python_with(tmp_path, "")

        with pytest.raises(ConfigError, match=f"{python} has no vLLM"):
            prepare(load_config({"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": python}))

    def test_when_its_python_does_not_run_then_the_error_says_why(self, tmp_path: Path) -> None:
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\necho its libraries are gone >&2\nexit 3\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

        with pytest.raises(ConfigError, match=r"SLUICE_ENGINE_PYTHON: .* does not run: its libraries are gone"):
            prepare(load_config({"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": str(program)}))

    def test_when_its_release_was_not_tried_then_it_is_refused_unless_asked_for(self, tmp_path: Path) -> None:
        environ = {"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": python_with(tmp_path, "0.99.1+cpu")}

        with pytest.raises(ConfigError, match=r"vLLM 0\.99\.1\+cpu has not been tried .* --engine-untested"):
            prepare(load_config(environ))
        assert "by vLLM 0.99.1+cpu" in prepare(load_config({**environ, "SLUICE_ENGINE_UNTESTED": "true"})).description

    def test_when_it_was_tried_then_the_text_side_is_prepared_without_vllm(self, tmp_path: Path) -> None:
        environ = {"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": python_with(tmp_path, "0.32.0")}

        prepared = prepare(load_config(environ))

        ours = prepare(load_config({}))
        assert (prepared.name, prepared.text.end_tokens) == (ours.name, ours.text.end_tokens)
        assert prepared.max_job_tokens == ours.max_job_tokens

    def test_when_the_doctor_looks_then_it_names_the_release_and_what_is_always_refused(self, tmp_path: Path) -> None:
        environ = {"SLUICE_ENGINE": "vllm", "SLUICE_ENGINE_PYTHON": python_with(tmp_path, "0.32.0")}
        site = Site(load_config(environ), environ, get_log(), patience_s=0)

        model, *refused = check_model(site)

        assert model.found.endswith("by vLLM 0.32.0")
        reason = "its steps return no states of a prompt's tokens"
        assert [one.found for one in refused] == [f"{option} is refused: {reason}" for option in UNREAD]
        assert {one.level for one in refused} == {CheckLevel.NOTE}


class TestGivenAFolderOfAdapters:
    def environ(self, folder: Path) -> dict[str, str]:
        return {
            "SLUICE_ENGINE": "vllm",
            "SLUICE_ENGINE_PYTHON": python_with(folder, "0.32.0"),
            "SLUICE_ADAPTERS": str(folder / "adapters"),
        }

    def test_when_they_can_be_used_then_they_are_described(self, tmp_path: Path) -> None:
        save_adapter(tmp_path / "adapters" / "law", SMALL_MODEL, rank=9)

        prepared = prepare(load_config(self.environ(tmp_path)))

        assert "1 adapters of rank 9 or less: law" in prepared.description

    def test_when_one_is_damaged_then_it_is_refused(self, tmp_path: Path) -> None:
        folder = save_adapter(tmp_path / "adapters" / "law", SMALL_MODEL)
        (folder / "adapter_config.json").write_text("{")

        with pytest.raises(ConfigError, match="SLUICE_ADAPTERS: the adapter 'law' cannot be read"):
            prepare(load_config(self.environ(tmp_path)))

    def test_when_one_is_of_another_model_then_it_is_refused(self, tmp_path: Path) -> None:
        TINY_MODELS["llama"].save(tmp_path / "other")
        save_adapter(tmp_path / "adapters" / "law", tmp_path / "other")

        with pytest.raises(ConfigError, match=r"SLUICE_ADAPTERS: the adapter 'law' .*this model"):
            prepare(load_config(self.environ(tmp_path)))


class TestGivenWhatRunsOurEngineAlone:
    def test_when_another_one_is_named_then_it_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_ENGINE: only `worker start` runs the engine vllm"):
            load(load_config({"SLUICE_ENGINE": "vllm"}))
