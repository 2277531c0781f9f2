"""What a worker refuses before it starts vLLM, and what it tells vLLM."""

import os
import stat
from pathlib import Path

import pytest

from sluice.worker.config import load_config
from sluice.worker.engines.registry import prepare
from sluice.worker.engines.vllm.load import show_devices_from
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import load


def python_with(folder: Path, release: str) -> str:
    """A Python that says it has a release of vLLM, none if it is empty, and Sluice."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho vLLM: {release}\necho Sluice: 1.0\n")
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


class TestGivenSeveralDevices:
    @pytest.mark.parametrize(
        ("visible", "index", "seen"),
        [(None, 2, "2,3,4"), ("4,5,6", 0, "4,5,6"), ("4,5,6", 1, "5,6"), ("GPU-a,GPU-b", 1, "GPU-b")],
    )
    def test_when_one_is_named_then_vllm_sees_it_and_those_after_it(
        self, monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, seen: str
    ) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        show_devices_from(index)

        found = os.environ["CUDA_VISIBLE_DEVICES"]
        assert found.startswith(seen) if visible is None else found == seen


class TestGivenWhatRunsOurEngineAlone:
    def test_when_another_one_is_named_then_it_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_ENGINE: only `worker start` runs the engine vllm"):
            load(load_config({"SLUICE_ENGINE": "vllm"}))
