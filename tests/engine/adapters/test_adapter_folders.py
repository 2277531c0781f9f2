"""Folders of adapters: what is read of them, and what is refused by a sentence."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engine.adapters.catalogue import read_catalogue
from sluice.engine.adapters.folder import open_adapter
from sluice.engine.adapters.modules import modules_of
from sluice.engine.adapters.weights import AdapterWeights
from sluice.engine.batch import Admission, Batch, ScheduledRow
from sluice.engine.errors import AdapterError
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner, plan_load
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.request import Sampling
from sluice.worker.model.folders import SMALL_MODEL
from tests.oracles.adapters import save_adapter

PREFIX = "base_model.model.model.layers.0.self_attn"


def change_config(adapter: Path, **changes: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights_of(adapter: Path) -> AdapterWeights:
    config = parse_config(open_model_folder(SMALL_MODEL).config)
    return AdapterWeights(open_adapter(adapter), modules_of(config))


class TestGivenAConfig:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"peft_type": "IA3"}, "its peft_type is 'IA3', and only LORA is"),
            ({"use_dora": True}, "it is a DoRA"),
            ({"fan_in_fan_out": True}, "fan_in_fan_out"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"bias": "all"}, "bias is 'all'"),
            ({"lora_bias": True}, "lora_bias"),
            ({"trainable_token_indices": [3]}, "trainable_token_indices"),
            ({"layer_replication": [[0, 2]]}, "layer_replication"),
            ({"r": 0}, "r must be a whole number from 1 to 1024, got 0"),
            ({"r": True}, "r must be a whole number"),
            ({"lora_alpha": "much"}, "lora_alpha must be a number, got 'much'"),
            ({"rank_pattern": {"q_proj": -1}}, "rank_pattern must be an object of numbers"),
            ({"alpha_pattern": {"(": 2}}, "alpha_pattern has a name that is no pattern"),
            ({"target_modules": None}, "target_modules must be a list of names or a pattern"),
        ],
    )
    def test_when_it_asks_for_what_is_not_supported_then_a_sentence_says_so(
        self, changes: dict[str, object], reason: str, tmp_path: Path
    ) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        change_config(adapter, **changes)

        with pytest.raises(AdapterError, match=r"the adapter 'one' is not supported: .*\.$") as raised:
            open_adapter(adapter)

        assert reason in str(raised.value)

    def test_when_it_is_missing_or_damaged_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")

        with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
            open_adapter(adapter)
        (adapter / "adapter_config.json").write_text("{")
        with pytest.raises(AdapterError, match="is not valid JSON"):
            open_adapter(adapter)
        (adapter / "adapter_config.json").unlink()
        with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
            open_adapter(adapter)

    def test_when_ranks_and_alphas_differ_then_scales_are_those_of_peft(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL, rank=4, lora_alpha=8)
        change_config(adapter, rank_pattern={"down_proj": 16}, alpha_pattern={r"0\.mlp\.down_proj": 4})
        opened = open_adapter(adapter)
        stabilised = replace(opened, is_rank_stabilised=True)
        names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]

        assert [opened.scale_of(name) for name in names] == [2.0, 0.25, 0.5]
        assert [stabilised.scale_of(name) for name in names] == [4.0, 1.0, 2.0]


class TestGivenWeights:
    def test_when_they_are_of_another_model_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        file = adapter / "adapter_model.safetensors"
        whole = load_file(file)
        name = f"{PREFIX}.q_proj.lora_A.weight"
        cases = {
            "lacks lora_A": {key: part for key, part in whole.items() if key != name},
            "this model and its rank need": whole | {name: whole[name][:, 1:].contiguous()},
            "in another dtype": whole | {name: whole[name].to(torch.int8)},
            "embeddings or the output head": whole | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 4)},
            "it is a DoRA": whole | {f"{PREFIX}.q_proj.lora_magnitude_vector": torch.zeros(4)},
            "is not of a pair": whole | {f"{PREFIX}.q_proj.bias": torch.zeros(4)},
            "no linear layer": whole | {f"{PREFIX}.x_proj.lora_A.weight": torch.zeros(4, 4)},
            "lacks the weights of": {key: part for key, part in whole.items() if ".q_proj." not in key},
            "changes nothing": {},
        }
        for reason, tensors in cases.items():
            save_file(tensors, file)
            if reason == "changes nothing":
                change_config(adapter, target_modules=[])
            with pytest.raises(AdapterError, match=reason):
                weights_of(adapter)

    def test_when_target_modules_does_not_name_them_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        change_config(adapter, target_modules=["q_proj"])

        with pytest.raises(AdapterError, match="which target_modules does not name"):
            weights_of(adapter)

    def test_when_the_file_is_truncated_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])

        with pytest.raises(AdapterError, match="is corrupt or truncated"):
            weights_of(adapter)


class TestGivenAFolderOfAdapters:
    def test_when_it_is_read_then_each_folder_is_one_by_its_name(self, tmp_path: Path) -> None:
        save_adapter(tmp_path / "b", SMALL_MODEL)
        save_adapter(tmp_path / "a", SMALL_MODEL, seed=1)
        (tmp_path / ".hidden").mkdir()
        (tmp_path / "README").write_text("")

        adapters = read_catalogue(tmp_path).adapters

        assert list(adapters) == ["a", "b"]
        assert adapters["a"].hash != adapters["b"].hash

    def test_when_a_name_is_not_one_word_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        save_adapter(tmp_path / "a b", SMALL_MODEL)

        with pytest.raises(AdapterError, match="needs another name"):
            read_catalogue(tmp_path)

    def test_when_there_are_none_then_a_sentence_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(AdapterError, match="has no folders"):
            read_catalogue(tmp_path)
        with pytest.raises(AdapterError, match="is not a folder"):
            read_catalogue(tmp_path / "missing")

    def test_when_files_change_after_the_start_then_the_adapter_is_not_loaded(self, tmp_path: Path) -> None:
        adapter = save_adapter(tmp_path / "one", SMALL_MODEL)
        runner = load_model_runner(ModelOptions(path=SMALL_MODEL, num_blocks=8, adapters=tmp_path))
        change_config(adapter, lora_alpha=99)

        row = ScheduledRow(slot=0, sequence_id=1, start=0, num_tokens=1, samples=True)
        admission = Admission(
            slot=0,
            sequence_id=1,
            request_id="job",
            choice=0,
            sampling=Sampling(temperature=0),
            cache_salt="",
            token_ids=(5,),
            num_prompt_tokens=1,
            block_ids=(0,),
            adapter="one",
            adapter_place=0,
        )

        with pytest.raises(AdapterError, match="have changed since this worker started"):
            runner.launch(Batch((row,), admissions=(admission,)))
        assert runner.limits.adapters != plan_load(ModelOptions(path=SMALL_MODEL, adapters=tmp_path)).limits.adapters
