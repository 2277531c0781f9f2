"""Model folders: what is read from good ones, and the sentence that each bad one gets."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engine.errors import ModelFolderError, NotEnoughMemory, QuantizationUnavailable
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.models.config import parse_config
from sluice.engine.models.families import FAMILIES
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.rope_table import rope_table

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}
OLDEST = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose configs always state the sizes that others may omit."""


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights that belong to CONFIG."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (31, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (31, 16),
    }
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small, good folder."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), path / "model.safetensors")
    return path


def load(folder: Path, **options: object) -> ModelRunner:
    return load_model_runner(ModelOptions(**({"path": folder, "num_blocks": 8} | options)))  # pyright: ignore[reportArgumentType] - the tests choose names and values that fit


def rewrite_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


class TestGivenAGoodFolder:
    def test_when_it_is_loaded_then_its_limits_are_known(self, folder: Path) -> None:
        limits = load(folder, block_size=4).limits

        assert (limits.max_model_len, limits.vocab_size, limits.num_blocks, limits.block_size) == (64, 31, 8, 4)
        assert limits.eos_token_ids == {3}

    @pytest.mark.parametrize(("given", "expected"), [(7, {7}), ([7, 8], {7, 8})])
    def test_when_a_generation_config_names_ends_then_they_count(
        self, folder: Path, given: object, expected: set[int]
    ) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))

        assert load(folder).limits.eos_token_ids == expected

    def test_when_weights_are_sharded_then_they_are_the_same(self, folder: Path) -> None:
        whole = open_model_folder(folder)
        names = sorted(tensors())
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in shards.items():
            save_file({name: tensors()[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

        sharded = open_model_folder(folder)

        assert [path.name for path in sharded.weights.files] == ["a.safetensors", "b.safetensors"]
        for name, tensor in tensors().items():
            assert torch.equal(sharded.weights.get(name, tuple(tensor.shape)), tensor)
            assert torch.equal(whole.weights.get(name, tuple(tensor.shape)), tensor)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_when_dtype_is_auto_then_it_is_that_of_the_weights(self, folder: Path, dtype: torch.dtype) -> None:
        save_file(tensors(dtype), folder / "model.safetensors")

        assert open_model_folder(folder).dtype("auto") is dtype

    def test_when_sequences_are_bounded_then_max_model_len_is_the_bound(self, folder: Path) -> None:
        assert load(folder, max_model_len=40).limits.max_model_len == 40

    @pytest.mark.parametrize("original", [16, 64])
    def test_when_yarn_is_enabled_then_the_context_is_longer(self, folder: Path, original: int) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
        rewrite_config(folder, rope_scaling=scaling)

        assert load(folder).limits.max_model_len == 4 * original
        assert load(folder, max_model_len=4 * original, num_blocks=16).limits.max_model_len == 4 * original

    def test_when_memory_is_given_in_bytes_then_blocks_fill_it(self, folder: Path) -> None:
        # Two layers, two key-value heads of 4 elements padded to 16, keys and values, float32.
        block = 2 * 2 * 2 * 16 * 16 * 4

        limits = load(folder, num_blocks=None, kv_cache_bytes=5 * block + 1, max_model_len=64).limits

        assert limits.num_blocks == 5

    def test_when_keys_and_values_are_in_fp8_then_scales_count_too(self, folder: Path) -> None:
        # As above, but elements of a byte, not padded, and a scale of four bytes for each head.
        block = 2 * 2 * 2 * 16 * (4 + 4)
        options = {"num_blocks": None, "kv_cache_dtype": "fp8", "max_model_len": 64}

        assert load(folder, kv_cache_bytes=5 * block, **options).limits.num_blocks == 5
        assert load(folder, kv_cache_bytes=5 * block - 1, **options).limits.num_blocks == 4


class TestGivenAFingerprint:
    def test_when_nothing_changes_then_it_is_the_same(self, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "copy")

        assert load(folder).fingerprint == load(tmp_path / "copy").fingerprint

    def test_when_anything_that_tokens_depend_on_changes_then_so_does_it(self, folder: Path) -> None:
        fingerprints = {load(folder).fingerprint, load(folder, dtype="bfloat16").fingerprint}
        fingerprints.add(open_model_folder(folder).fingerprint(torch.bfloat16, scheme="int8"))
        fingerprints.add(open_model_folder(folder).fingerprint(torch.bfloat16, cache="fp8"))
        (folder / "tokenizer.json").write_text("{}")
        fingerprints.add(load(folder).fingerprint)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        fingerprints.add(load(folder).fingerprint)
        changed = tensors()
        changed["model.norm.weight"][3] += 1e-3
        save_file(changed, folder / "model.safetensors")
        fingerprints.add(load(folder).fingerprint)

        assert len(fingerprints) == 7

    def test_when_only_what_a_job_brings_changes_then_it_is_the_same(self, folder: Path) -> None:
        before = load(folder).fingerprint
        (folder / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.5}')

        assert load(folder).fingerprint == before

    @pytest.mark.parametrize(("rope_type", "num_known"), [("dynamic", 2), ("longrope", 2), ("linear", 1)])
    def test_when_angles_depend_on_the_longest_sequence_then_so_does_it(
        self, folder: Path, rope_type: str, num_known: int
    ) -> None:
        factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
        rewrite_config(folder, rope_scaling={"rope_type": rope_type, "factor": 2.0} | factors)

        fingerprints = {load(folder, max_model_len=length).fingerprint for length in (40, 64)}

        assert len(fingerprints) == num_known


class TestGivenABadFolder:
    def test_when_it_does_not_exist_then_it_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFolderError, match="nowhere is not a folder"):
            load(tmp_path / "nowhere")

    def test_when_it_is_empty_then_it_is_no_model_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFolderError, match=r"has no config\.json"):
            load(tmp_path)

    @pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "does not hold a JSON object")])
    def test_when_its_config_is_broken_then_it_says_so(self, folder: Path, text: str, message: str) -> None:
        (folder / "config.json").write_text(text)

        with pytest.raises(ModelFolderError, match=message):
            load(folder)

    def test_when_its_family_is_unknown_then_the_known_ones_are_listed(self, folder: Path) -> None:
        rewrite_config(folder, model_type="gpt2")

        with pytest.raises(
            ModelFolderError, match=r"'gpt2' is not one of cohere, cohere2, .*, smollm3\. vLLM may .* --engine vllm\."
        ):
            load(folder)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": "large"}, "hidden_size must be a whole number"),
            ({"vocab_size": None}, "vocab_size must be a whole number"),
            ({"num_key_value_heads": 3}, "not a multiple of 3"),
            ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of"),
            ({"quantization_config": {"bits": 4}}, "quantized weights of quant_method"),
            ({"rope_scaling": {"type": "su"}}, "rope type 'su' is not one of"),
            ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor must be a number"),
            ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor must be a number"),
            ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "list of 2 numbers"),
            ({"intermediate_size": 25}, r"is \(24, 16\), config.json expects \(25, 16\)"),
            ({"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ],
    )
    def test_when_its_config_asks_for_what_cannot_be_then_it_says_what(
        self, folder: Path, changes: dict[str, object], message: str
    ) -> None:
        rewrite_config(folder, **changes)

        with pytest.raises(ModelFolderError, match=message):
            load(folder)

    def test_when_it_has_no_weights_then_it_says_which_are_read(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

        with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
            load(folder)

    def test_when_its_weights_are_cut_short_then_it_says_so(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

        with pytest.raises(ModelFolderError, match="corrupt or truncated"):
            load(folder)

    @pytest.mark.parametrize("junk", [b"", b"not safetensors", b"\xff" * 64])
    def test_when_its_weights_are_junk_then_it_says_so(self, folder: Path, junk: bytes) -> None:
        (folder / "model.safetensors").write_bytes(junk)

        with pytest.raises(ModelFolderError, match="corrupt or truncated"):
            load(folder)

    def test_when_a_shard_is_missing_then_it_is_named(self, folder: Path) -> None:
        index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

        with pytest.raises(ModelFolderError, match=r"lacks gone\.safetensors"):
            load(folder)

    def test_when_its_weights_are_of_another_dtype_then_it_says_which_are_read(self, folder: Path) -> None:
        quantized = load_file(folder / "model.safetensors")
        quantized["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 16, dtype=torch.int8)
        save_file(quantized, folder / "model.safetensors")

        with pytest.raises(ModelFolderError, match="only fp32, fp16 and bf16"):
            load(folder)

    def test_when_an_unknown_dtype_is_asked_for_then_the_known_ones_are_listed(self, folder: Path) -> None:
        with pytest.raises(ModelFolderError, match="'int4' is not one of auto, float32"):
            load(folder, dtype="int4")

    def test_when_more_context_is_asked_for_than_the_model_has_then_both_are_named(self, folder: Path) -> None:
        with pytest.raises(ModelFolderError, match="max_model_len is 65, but this model's context is 64"):
            load(folder, max_model_len=65)


class TestGivenWeightsThatCannotBeKeptInInt8:
    def test_when_they_are_no_bfloat16_then_it_says_what_they_are(self, folder: Path) -> None:
        with pytest.raises(QuantizationUnavailable, match="int8 needs a model in bfloat16, this one is float32: set"):
            load(folder, quantization="int8")

    def test_when_their_rows_have_no_panels_then_it_says_what_is_needed(self, folder: Path) -> None:
        with pytest.raises(QuantizationUnavailable, match="int8 needs"):
            load(folder, quantization="int8", dtype="bfloat16")


class TestGivenTooLittleMemory:
    def test_when_not_one_block_fits_then_both_sizes_are_named(self, folder: Path) -> None:
        with pytest.raises(NotEnoughMemory, match=r"may take 0\.0 MiB, but one block of 16 tokens takes"):
            load(folder, num_blocks=None, kv_cache_bytes=1000)

    def test_when_one_sequence_does_not_fit_then_both_counts_are_named(self, folder: Path) -> None:
        with pytest.raises(NotEnoughMemory, match=r"64 tokens needs 4 blocks of 16 tokens .* but the KV cache has 3"):
            load(folder, num_blocks=3, max_model_len=64)

    def test_when_the_machine_refuses_then_the_cache_that_was_asked_for_is_named(self, folder: Path) -> None:
        with pytest.raises(NotEnoughMemory, match=r"1000000000000 blocks of 16 tokens cannot be allocated"):
            load(folder, num_blocks=10**12)

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say what is resident")
    def test_when_a_large_cache_is_made_then_memory_is_taken_only_where_it_is_written(self, folder: Path) -> None:
        before = resident_bytes()

        # Two layers, two heads of 16 padded elements, keys and values, float32: 8 KiB a block.
        runner = load(folder, num_blocks=2**18)

        assert runner.limits.num_blocks == 2**18
        assert resident_bytes() - before < 2**28


def resident_bytes() -> int:
    """Memory of this process that is not just promised."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class TestGivenConfigsOfBothAges:
    """transformers 5 writes `rope_parameters`; before, it was `rope_theta` and `rope_scaling`."""

    def test_when_they_mean_the_same_then_so_do_their_tables(self) -> None:
        scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        numbers = scaling | {"original_max_position_embeddings": 16}
        old = CONFIG | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **numbers}}
        new = CONFIG | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **numbers}}

        old_table, new_table = (rope_table(parse_config(config).rope, 64) for config in (old, new))

        assert torch.equal(old_table, new_table)
        assert not torch.equal(old_table, rope_table(parse_config(CONFIG | {"rope_theta": 500.0}).rope, 64))

    def test_when_rotation_is_partial_then_only_that_part_has_angles(self) -> None:
        partial = parse_config(CONFIG | {"head_dim": 16, "partial_rotary_factor": 0.5})

        assert partial.rope.rotary_size == 8
        assert rope_table(partial.rope, 5).shape == (5, 8)
        # The frequencies are those of a head of that size.
        assert torch.equal(rope_table(partial.rope, 5), rope_table(parse_config(CONFIG | {"head_dim": 8}).rope, 5))


class TestGivenAConfigOfSizesAlone:
    """Compared with transformers' own reading of it."""

    @pytest.mark.parametrize("family", sorted(FAMILIES))
    def test_when_it_leaves_all_out_then_the_family_s_defaults_are_those_of_transformers(self, family: str) -> None:
        from transformers import AutoConfig  # a second of imports

        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        # Those of the first families are longer; their configs state them.
        stated = {} if family not in OLDEST else {"max_position_embeddings": 512, "num_key_value_heads": 8}
        theirs = AutoConfig.for_model(family, **stated)

        ours = parse_config({"model_type": family, **stated} | {name: getattr(theirs, name) for name in sizes})

        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_size == (getattr(theirs, "head_dim", None) or ours.hidden_size // ours.num_heads)
        assert ours.rope.max_position_embeddings == theirs.max_position_embeddings
        assert ours.head_norm_eps == getattr(theirs, FAMILIES[family].eps_name)
        assert ours.is_tied == theirs.tie_word_embeddings
        assert ours.has_mlp_bias == getattr(theirs, "mlp_bias", False)
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
        window = getattr(theirs, "sliding_window", None) or 0
        assert list(ours.sliding_windows) == [window if kind == "sliding_attention" else 0 for kind in kinds]
        parameters = theirs.rope_parameters
        assert ours.rope.theta == parameters.get("full_attention", parameters)["rope_theta"]
        assert ours.rope.rotary_size == ours.head_size * parameters.get("partial_rotary_factor", 1.0)

    @pytest.mark.parametrize("family", ["seed_oss", "glm", "glm4", "cohere", "cohere2", "olmo2", "granite", "smollm3"])
    def test_when_it_leaves_all_out_then_biases_are_those_of_transformers(self, family: str) -> None:
        from transformers import AutoConfig

        theirs = AutoConfig.for_model(family)

        ours = parse_config(CONFIG | {"model_type": family})

        assert ours.has_qkv_bias == theirs.attention_bias
        assert ours.logit_scale == getattr(theirs, "logit_scale", 1.0)


class TestGivenAGemmaConfig:
    """Compared with transformers' own reading of it."""

    @pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
    def test_when_it_leaves_all_out_then_the_family_s_defaults_are_those_of_transformers(self, family: str) -> None:
        from transformers import AutoConfig  # a second of imports

        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        theirs = AutoConfig.for_model(family)

        ours = parse_config({"model_type": family} | {name: getattr(theirs, name) for name in sizes})

        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_size == theirs.head_dim
        assert ours.rope.max_position_embeddings == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.activation == "gelu_tanh"
        assert theirs.hidden_activation == "gelu_pytorch_tanh"
        assert ours.is_tied == theirs.tie_word_embeddings
        assert ours.has_qkv_bias == ours.has_output_bias == theirs.attention_bias
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.attention_soft_cap == (theirs.attn_logit_softcapping or 0)
        assert ours.final_soft_cap == (theirs.final_logit_softcapping or 0)
        assert ours.embedding_scale == theirs.hidden_size**0.5
        assert list(ours.sliding_windows) == [
            theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types
        ]
        thetas = {"gemma2": [1e4, None], "gemma3_text": [1e6, 1e4]}[family]
        assert [rope and rope.theta for rope in (ours.rope, ours.local_rope)] == thetas

    def test_when_it_is_of_either_age_then_its_bases_windows_and_scaling_are_the_same(self) -> None:
        common = CONFIG | {"model_type": "gemma3_text", "num_hidden_layers": 5, "sliding_window": 7}
        scaling = {"rope_type": "linear", "factor": 8.0}
        old = common | {
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": scaling,
            "sliding_window_pattern": 2,
        }
        new = common | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 500.0} | scaling,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        }

        before, after = parse_config(old), parse_config(new)

        assert before.rope == after.rope
        assert before.sliding_windows == after.sliding_windows == (7, 0, 7, 0, 7)
        assert after.window_of_all_layers == 0
        assert before.local_rope is not None
        assert after.local_rope is not None
        tables = [rope_table(rope, 64) for rope in (before.rope, before.local_rope, after.local_rope)]
        assert torch.equal(tables[1], tables[2])
        assert not torch.equal(tables[0], tables[1])
        assert (before.rope.type, before.rope.theta, before.local_rope.type) == ("linear", 500.0, "default")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "gemma", "use_bidirectional_attention": True}, "is not supported for gemma"),
            (
                {"use_bidirectional_attention": True},
                "use_bidirectional_attention True is not supported for gemma3_text",
            ),
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported for gemma3_text"),
            ({"model_type": "gemma2", "use_bidirectional_attention": True}, "is not supported for gemma2"),
            ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping must be above 0"),
            ({"final_logit_softcapping": -1.0}, "final_logit_softcapping must be above 0, got -1"),
            ({"final_logit_softcapping": "30"}, "final_logit_softcapping must be a number"),
            ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
            ({"sliding_window": None}, "sliding_window must be a whole number"),
            ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
            ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number from 1"),
            ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
            ({"layer_types": ["full_attention", "chunked_attention"]}, "each sliding_attention or full_attention"),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
                "separately for full_attention and sliding_attention, got",
            ),
            ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not one of"),
        ],
    )
    def test_when_it_asks_for_what_cannot_be_then_it_says_what(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ModelFolderError, match=message):
            parse_config(CONFIG | {"model_type": "gemma3_text"} | changes)


class TestGivenAMistralConfig:
    @pytest.mark.parametrize(("configured", "expected"), [(7, 7), (None, 0)])
    def test_when_it_has_a_window_then_no_layer_attends_beyond_it(self, configured: int | None, expected: int) -> None:
        config = parse_config(CONFIG | {"model_type": "mistral", "sliding_window": configured})

        assert config.window_of_all_layers == expected
