"""The error for an operator who asked for weights in a form that the model cannot have."""

# torch's and safetensors' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load


class TestGivenAModelInFloat32:
    def test_when_int8_is_asked_for_then_the_setting_that_says_so_is_named(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(SMALL_MODEL, folder)
        weights = load_file(folder / "model.safetensors")
        save_file({name: tensor.to(torch.float32) for name, tensor in weights.items()}, folder / "model.safetensors")

        with pytest.raises(ConfigError) as caught:
            load(load_config({"SLUICE_MODEL": str(folder), "SLUICE_QUANTIZATION": "int8"}))

        (problem,) = caught.value.problems
        assert problem.startswith("SLUICE_QUANTIZATION: int8 needs a model in bfloat16, this one is float32")
