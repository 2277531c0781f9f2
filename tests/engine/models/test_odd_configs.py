"""Values that no field of a config may have: each is refused with the name of its field, and none breaks the reader."""

from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import ModelFolder
from sluice.engine.models.rope_table import rope_table
from sluice.engine.models.safetensors_weights import SafetensorsWeights

CONFIG: dict[str, Any] = {  # Any: the tests put anything in it
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA = CONFIG | {"model_type": "gemma2", "sliding_window": 8, "head_dim": 4, "num_attention_heads": 4}
QWEN = CONFIG | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
ODD = [True, "", "1", [], [1], [[1]], [1, None], {"a": 1}, -1, -(2**63), 2**40, 2**70, 10**400, nan, inf, -inf, 1e308]
SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
]
NUMBERS = ["rms_norm_eps", "rope_theta", "partial_rotary_factor"]
SWITCHES = ["attention_bias", "mlp_bias", "tie_word_embeddings"]
ROPES: dict[str, dict[str, object]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0, 1.0],
        "long_factor": [1.0, 1.0],
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    },
}
OTHERS = ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "rope_theta", "truncate"]


def read(config: dict[str, Any]) -> None:
    rope = parse_config(config).rope
    rope_table(rope, min(rope.longest_context, 64))


def folder_of(config: object, generation: object) -> ModelFolder:
    configs = {"config": {"eos_token_id": config}, "generation_config": {"eos_token_id": generation}}
    return ModelFolder(path=Path(), weights=SafetensorsWeights.__new__(SafetensorsWeights), **configs)


class TestGivenAFieldWithAnOddValue:
    @pytest.mark.parametrize("value", [*ODD, 0, 1.5, 1e9], ids=lambda value: str(value)[:12])
    @pytest.mark.parametrize("name", SIZES)
    def test_when_a_size_is_none_then_the_field_is_named(self, name: str, value: object) -> None:
        with pytest.raises(ModelFolderError, match=rf"config.json: {name} must be a whole number"):
            read(CONFIG | {name: value})

    @pytest.mark.parametrize("value", [*ODD, 0], ids=lambda value: str(value)[:12])
    @pytest.mark.parametrize("name", NUMBERS)
    def test_when_a_number_is_none_then_the_field_is_named(self, name: str, value: object) -> None:
        # Some are numbers, though not of those that this one may be.
        if name != "partial_rotary_factor" and value in (2**40, 2**70):
            return

        with pytest.raises(ModelFolderError, match=rf"config.json: {name} must be"):
            read(CONFIG | {name: value})

    @pytest.mark.parametrize("value", [0, 1, "false", [], 1.0, {}], ids=str)
    @pytest.mark.parametrize("name", SWITCHES)
    def test_when_a_switch_is_no_truth_then_the_field_is_named(self, name: str, value: object) -> None:
        with pytest.raises(ModelFolderError, match=rf"config.json: {name} must be true or false"):
            read(CONFIG | {name: value})

    @pytest.mark.parametrize("value", [*ODD, 1.5], ids=lambda value: str(value)[:12])
    @pytest.mark.parametrize(
        ("config", "name"),
        [(GEMMA, "sliding_window"), (QWEN, "sliding_window"), (QWEN, "max_window_layers"), (GEMMA, "layer_types")],
    )
    def test_when_windows_are_odd_then_the_field_is_named(
        self, config: dict[str, Any], name: str, value: object
    ) -> None:
        with pytest.raises(ModelFolderError, match=rf"config.json: {name} must"):
            read(config | {name: value})

    @pytest.mark.parametrize("value", [True, "x", [1], 5, nan], ids=str)
    @pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
    def test_when_rope_parameters_are_no_object_then_the_field_is_named(self, name: str, value: object) -> None:
        with pytest.raises(ModelFolderError, match=rf"config.json: {name} must be an object or null"):
            read(CONFIG | {name: value})

    @pytest.mark.parametrize("rope_type", ROPES)
    def test_when_a_rope_parameter_is_odd_then_it_is_refused_or_has_angles(self, rope_type: str) -> None:
        refused = 0
        for name, value in odd_parameters(rope_type):
            config = CONFIG | {"rope_scaling": {"rope_type": rope_type, **ROPES[rope_type], name: value}}
            refused += is_refused(config)

        assert refused > 20

    def test_when_a_head_has_an_odd_number_of_elements_then_it_is_refused(self) -> None:
        with pytest.raises(ModelFolderError, match=r"must be even, since rotary embeddings rotate pairs .* got 5"):
            read(CONFIG | {"head_dim": 5})
        with pytest.raises(ModelFolderError, match="must be even"):
            read(CONFIG | {"hidden_size": 12})
        with pytest.raises(ModelFolderError, match=r"partial_rotary_factor must .* an even number of the 16 elements"):
            read(CONFIG | {"head_dim": 16, "partial_rotary_factor": 0.2})


def is_refused(config: dict[str, Any]) -> bool:
    try:
        read(config)
    except ModelFolderError as error:
        return str(error).startswith("config.json: ")
    return False


def odd_parameters(rope_type: str) -> Iterator[tuple[str, object]]:
    for name in [*ROPES[rope_type], *OTHERS, "partial_rotary_factor"]:
        for value in [*ODD, 0, 1, 1e-320, [nan, nan], ["x", "x"], [0, 0], [None, None]]:
            yield name, value


class TestGivenAnEndToken:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [(None, []), (-1, []), ([1, -1], [1]), (0, [0]), ([], []), ([2, 30], [2, 30]), ([3, 3], [3])],
    )
    def test_when_it_is_an_id_or_none_then_it_counts(self, value: object, expected: list[int]) -> None:
        assert sorted(folder_of(value, None).eos_token_ids(31)) == expected
        assert sorted(folder_of(None, value).eos_token_ids(31)) == expected

    @pytest.mark.parametrize(
        "value",
        [True, [False], "1", {"a": 1}, [[1]], [1, None], 1.0, 31, -2, 2**40, 10**400, nan, [1, inf], ["x"], [31]],
        ids=lambda value: str(value)[:12],
    )
    def test_when_it_is_neither_then_the_field_is_named(self, value: object) -> None:
        for folder, file in ((folder_of(value, None), "config.json"), (folder_of(5, value), "generation_config.json")):
            with pytest.raises(ModelFolderError, match=rf"^{file}: eos_token_id must be a token id below 31, a list"):
                folder.eos_token_ids(31)

    def test_when_a_generation_config_has_none_then_the_model_config_is_not_read(self) -> None:
        assert folder_of(5, -1).eos_token_ids(31) == set()
        assert folder_of(5, None).eos_token_ids(31) == {5}
        assert folder_of(5, None).eos_source == "config.json"
