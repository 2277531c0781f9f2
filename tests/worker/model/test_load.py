"""A model that cannot be loaded: whether a person must act, which setting says so, and which errors differ from it."""

import shutil
from pathlib import Path

import pytest
import torch

from sluice.engine.errors import QuantizationUnavailable
from sluice.engine.execution import kv_cache
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start import model_loading
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model import load as serving
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load, prepare
from tests.engine.gguf.test_gguf_file import whole


class TestGivenAMachineWhoseMemoryAnotherProcessHolds:
    """Nothing is free now."""

    @pytest.fixture(autouse=True)
    def no_free_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none(_device: torch.device) -> int:
            return 0

        monkeypatch.setattr(kv_cache, "free_memory_bytes", none)

    def test_when_the_cache_s_size_is_measured_then_it_is_worth_another_try(self) -> None:
        with pytest.raises(WorkerBroken, match=r"cannot be loaded now: the KV cache may take 0\.0 MiB, but one block"):
            load(load_config({}))

    def test_when_the_length_of_a_sequence_is_stated_then_a_person_must_act(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_MAX_MODEL_LEN: the KV cache may take"):
            load(load_config({"SLUICE_MAX_MODEL_LEN": "64"}))


class TestGivenACacheThatIsStated:
    def test_when_it_does_not_hold_one_sequence_then_a_person_must_act(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_NUM_BLOCKS: one sequence of 64 tokens needs 4 blocks"):
            load(load_config({"SLUICE_NUM_BLOCKS": "3", "SLUICE_MAX_MODEL_LEN": "64"}))

    def test_when_this_machine_does_not_give_so_much_then_a_person_must_act(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_NUM_BLOCKS: the KV cache of 1000000000000 blocks"):
            load(load_config({"SLUICE_NUM_BLOCKS": "1000000000000"}))


class TestGivenADeviceThatCannotKeepAModelAsAsked:
    @pytest.mark.parametrize(
        ("asked", "named"),
        [
            ({"QUANTIZATION": "int8"}, "SLUICE_QUANTIZATION"),
            ({"KV_CACHE_DTYPE": "fp8"}, "SLUICE_KV_CACHE_DTYPE"),
            ({"QUANTIZATION": "int8", "KV_CACHE_DTYPE": "fp8"}, "SLUICE_QUANTIZATION or SLUICE_KV_CACHE_DTYPE"),
        ],
        ids=str,
    )
    def test_when_it_is_loaded_then_what_asks_for_it_is_named(
        self, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], named: str
    ) -> None:
        def accept(_device: str) -> None:
            pass

        def refuse(_options: ModelOptions) -> None:
            raise QuantizationUnavailable("this GPU has none.")

        # In the place of a GPU of before 2022.
        monkeypatch.setattr(serving, "check_device", accept)
        monkeypatch.setattr(model_loading, "plan_load", refuse)

        with pytest.raises(ConfigError) as caught:
            load(load_config({"SLUICE_DEVICE": "cuda:0", **{f"SLUICE_{name}": value for name, value in asked.items()}}))

        assert caught.value.problems == (f"{named}: this GPU has none.",)


class TestGivenAWorkerThatMustBeDeterministic:
    def test_when_the_model_cannot_be_then_that_setting_is_named(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load(load_config({"SLUICE_DETERMINISTIC": "true", "SLUICE_DTYPE": "float32"}))

        (problem,) = caught.value.problems
        assert problem.startswith("SLUICE_DETERMINISTIC: on the CPU it needs a model in bfloat16, and this one is in")


class TestGivenAFolderByARelativePath:
    """A copy of the small model, `models/small`, and a link to it, `models/current`."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder; `models` is the working folder."""
        folder = tmp_path / "models" / "small"
        shutil.copytree(SMALL_MODEL, folder)
        (folder / "inner").mkdir()
        folder.with_name("current").symlink_to(folder)
        monkeypatch.chdir(folder.parent)
        return folder

    @pytest.mark.parametrize("path", ["current", "./current/", "../models/current"])
    def test_when_it_is_a_link_then_the_model_has_the_links_name(self, path: str) -> None:
        assert prepare(load_config({}, flags={"model.path": path})).name == "current"

    @pytest.mark.parametrize(("inside", "path"), [("", "."), ("", "./"), ("inner", "..")])
    def test_when_it_is_the_working_folder_or_above_then_its_name_is_found(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, inside: str, path: str
    ) -> None:
        monkeypatch.chdir(folder / inside)

        assert prepare(load_config({}, flags={"model.path": path})).name == "small"


class TestGivenNoShareOfTheMemory:
    def test_when_a_model_is_loaded_by_a_worker_or_without_one_then_it_takes_the_same(self) -> None:
        assert load_config({}).model.memory_share == ModelOptions(path=SMALL_MODEL).memory_fraction


class TestGivenAGguf:
    """Whose weights are not read: what is known before they are."""

    def test_when_it_is_prepared_then_its_name_types_and_tokenizer_are_known(self, tmp_path: Path) -> None:
        file = tmp_path / "tiny.Q4_0.gguf"
        file.write_bytes(whole())

        prepared = prepare(load_config({"SLUICE_MODEL": str(file)}))

        assert prepared.name == "tiny.Q4_0"
        assert "llama, vocabulary of 8 tokens, with chat template, GGUF of F32" in prepared.description

    def test_when_it_is_not_there_then_it_is_no_name_to_download(self) -> None:
        with pytest.raises(
            ConfigError, match=r"SLUICE_MODEL: models/gone\.gguf is not a folder: give a model folder, a G"
        ):
            prepare(load_config({"SLUICE_MODEL": "models/gone.gguf"}))
