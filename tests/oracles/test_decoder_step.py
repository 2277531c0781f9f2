"""A step as one native call: the bits of its operations one by one, and of the same tokens in any other batch."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.engine.config import Quantization
from sluice.engine.execution.block_groups import block_groups
from sluice.engine.execution.kv_cache import make_caches, make_grouped_caches
from sluice.engine.executor import ModelLimits
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence as Tokens
from sluice.kernels.copy_blocks import parts_of
from sluice.kernels.paged_attention import FP8, INT8, KVCache
from sluice.kernels.write_kv import HeadNorm
from tests.engine.layouts import Part, StepLayout
from tests.grids import cross_section
from tests.oracles.tiny_models import (
    COHERE2,
    EXAONE4,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    TinyModel,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_BLOCKS = 100
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
QWEN3_MOE_NATIVE: dict[str, object] = {**QWEN3_MOE, "num_experts": 20, "moe_intermediate_size": 64}
MODELS = {
    "llama": TinyModel("llama", {**SIZES, "num_attention_heads": 6, "hidden_size": 192}),
    "mistral, window": TinyModel("mistral", {**SIZES, "sliding_window": 70}),
    "qwen2, biases": TinyModel("qwen2", {**SIZES, "num_attention_heads": 2, "tie_word_embeddings": True}),
    "qwen3, norms of heads": TinyModel("qwen3", SIZES),
    "qwen2_moe, a shared expert": TinyModel(
        "qwen2_moe",
        {
            **QWEN2_MOE,
            **SIZES,
            "num_attention_heads": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 192,
        },
    ),
    "granitemoe, experts in one tensor": TinyModel("granitemoe", {**GRANITE, **MIXTRAL, **SIZES}),
    "gpt_oss, sinks and biases": TinyModel("gpt_oss", GPT_OSS | SIZES),
    "qwen3_moe, experts": TinyModel("qwen3_moe", QWEN3_MOE_NATIVE | SIZES),
    "qwen3_moe, experts in two layers": TinyModel(
        "qwen3_moe", {**QWEN3_MOE_NATIVE, **SIZES, "norm_topk_prob": True, "mlp_only_layers": [1]}
    ),
    "gemma2, soft caps": TinyModel("gemma2", GEMMA2 | SIZES),
    "gemma3": TinyModel("gemma3_text", GEMMA3 | SIZES),
    "smollm3, a layer without positions": TinyModel("smollm3", {**SIZES, "no_rope_layers": [1, 0, 1]}),
    "granite, multipliers": TinyModel("granite", GRANITE | SIZES),
    "olmo2, norms of all heads": TinyModel("olmo2", {**SIZES, "num_attention_heads": 2}),
    "exaone4, norms after blocks": TinyModel("exaone4", EXAONE4 | SIZES),
    "cohere2, parallel layer norms": TinyModel("cohere2", {**COHERE2, **SIZES, "num_attention_heads": 2}),
    "glm4, partial rotation": TinyModel("glm4", SIZES),
}


QUANTIZATION: dict[str, Quantization] = {"bfloat16": "none", "int8": "int8", "int4": "int4"}


@pytest.fixture(autouse=True)
def _inference(native_products: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute each model with one kind of weights, and with all of them in the long suite."""
    if "decoder" not in metafunc.fixturenames:
        return
    if any("model" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        metafunc.parametrize("decoder", list(QUANTIZATION), indirect=True)
    else:
        cases = cross_section(list(MODELS), list(QUANTIZATION))
        metafunc.parametrize(("model", "decoder"), cases, indirect=True)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> TinyModel:
    return MODELS[request.param]


@pytest.fixture
def decoder(request: pytest.FixtureRequest, model: TinyModel, tmp_path: Path) -> Decoder:
    model.save(tmp_path, torch.bfloat16)
    folder = open_model_folder(tmp_path)
    config = parse_config(folder.config)
    form = WeightForm(torch.bfloat16, CPU, quantization=QUANTIZATION[request.param])
    return load_decoder(config, folder.weights, form=form, max_model_len=160, max_tokens=256)


def caches_of(decoder: Decoder, dtype: torch.dtype = torch.bfloat16) -> list[KVCache]:
    return make_caches(decoder.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)


def sequences() -> list[Tokens]:
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 30, 157, 5, 16)
    return [
        Tokens(
            id=i,
            request_id=str(i),
            choice=0,
            sampling=Sampling(temperature=0),
            token_ids=torch.randint(97, (length,), generator=generator).tolist(),
            num_prompt_tokens=length,
            tables=[list(range(i * 20, i * 20 + -(-length // BLOCK_SIZE)))],
        )
        for i, length in enumerate(lengths)
    ]


def forward(
    decoder: Decoder, parts: Sequence[Part], caches: list[KVCache], *, by_operations: bool = False
) -> torch.Tensor:
    """Logits of the last token of each part."""
    tensors = layout_of(len(parts)).lay_out(parts)
    compute = decoder.forward_by_operations if by_operations else decoder.forward
    return compute(tensors, caches).clone()


def layout_of(max_num_seqs: int, *, window_groups: int = 0) -> StepLayout:
    return StepLayout(
        max_num_seqs=max_num_seqs,
        max_blocks_per_seq=20,
        num_blocks=NUM_BLOCKS * (1 + window_groups),
        block_size=BLOCK_SIZE,
        window_groups=window_groups,
    )


def whole(sequence: Tokens) -> Part:
    return sequence, 0, sequence.num_tokens, True


class TestGivenADecoder:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, INT8], ids=str)
    def test_when_a_step_is_native_then_it_is_its_operations_to_the_bit(
        self, decoder: Decoder, dtype: torch.dtype
    ) -> None:
        parts = [whole(sequence) for sequence in sequences()]
        apart, together = caches_of(decoder, dtype), caches_of(decoder, dtype)

        expected = forward(decoder, parts, apart, by_operations=True)
        actual = forward(decoder, parts, together)

        assert decoder.has_native_step
        assert torch.equal(actual, expected)
        for one, other in zip(apart, together, strict=True):
            assert all(map(torch.equal, parts_of(one), parts_of(other)))

    def test_when_the_cache_is_in_int8_then_logits_are_close_to_those_of_bfloat16(self, decoder: Decoder) -> None:
        parts = [whole(sequence) for sequence in sequences()]

        narrow, wide = forward(decoder, parts, caches_of(decoder, INT8)), forward(decoder, parts, caches_of(decoder))

        # Random weights of this size turn half a percent of a value into several percent of a logit.
        off = (narrow.float() - wide.float()).norm() / wide.float().norm()
        assert 0 < off < 0.15

    def test_when_the_cache_is_in_fp8_then_the_step_is_left_to_the_operations(self, decoder: Decoder) -> None:
        """The native step would read it as its own layout."""
        parts = [whole(sequence) for sequence in sequences()]
        caches, others = (
            make_caches(decoder.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=FP8, device=CPU)
            for _ in range(2)
        )

        actual = forward(decoder, parts, caches)

        assert torch.equal(actual, forward(decoder, parts, others, by_operations=True))
        assert all(bool(cache.keys.view(torch.uint8).any()) for cache in caches)

    def test_when_rows_want_no_logits_then_they_are_left_out_of_the_logits_only(self, decoder: Decoder) -> None:
        parts = [(*whole(sequence)[:3], i % 2 == 0) for i, sequence in enumerate(sequences())]

        actual = forward(decoder, parts, caches_of(decoder))

        expected = forward(decoder, [whole(sequence) for sequence in sequences()], caches_of(decoder))
        assert torch.equal(actual, expected[::2])

    def test_when_a_token_is_decoded_then_it_has_the_bits_of_a_prefill_in_chunks(self, decoder: Decoder) -> None:
        """What a resumed job rests on: its tokens were decodes among neighbours, and are now part of one prefill."""
        tokens = sequences()
        expected = forward(decoder, [whole(sequence) for sequence in tokens], caches_of(decoder))

        caches = caches_of(decoder)
        for sequence in tokens:
            for start in range(0, sequence.num_tokens - 1, 7):
                size = min(7, sequence.num_tokens - 1 - start)
                forward(decoder, [(sequence, start, size, True)], caches)
        last = [(sequence, sequence.num_tokens - 1, 1, True) for sequence in tokens]
        decoded = forward(decoder, last, caches)
        alone = [forward(decoder, [part], caches) for part in last]

        assert torch.equal(decoded, expected)
        assert torch.equal(torch.cat(alone), expected)

    def test_when_memory_is_reused_then_steps_equal_first_steps(self, decoder: Decoder) -> None:
        """One layout serves all steps: a step may reuse its tensors with other numbers, or others of another size."""
        _, first, second, *_ = sequences()
        others = [caches_of(decoder) for _ in range(2)]
        caches = caches_of(decoder)
        for each in (caches, *others):
            forward(decoder, [(one, 0, 20, True) for one in (first, second)], each)
        layout = layout_of(2)
        steps = [[(first, 20), (second, 20)], [(first, 21)], [(first, 22), (second, 21)], [(first, 23), (second, 22)]]

        for step in steps:
            parts = tuple((sequence, start, 1, True) for sequence, start in step)
            tensors = layout.lay_out(parts)
            actual = decoder.forward(tensors, caches).clone()

            assert torch.equal(actual, decoder.forward_by_operations(tensors, others[0]))
            fresh = Decoder(decoder.config, decoder.weights, max_tokens=256)
            assert torch.equal(actual, fresh.forward(tensors, others[1]))

    @pytest.mark.parametrize("model", [MODELS["qwen3, norms of heads"]], ids=["qwen3"])
    def test_when_norms_of_heads_have_an_offset_and_epsilon_then_they_are_used(self, decoder: Decoder) -> None:
        def other_norm(norm: HeadNorm | None, index: int) -> HeadNorm:
            assert norm is not None
            return replace(norm, eps=0.1 * (1 + index), weight_offset=1.0 + index)

        layers = tuple(
            replace(layer, head_norm=other_norm(layer.head_norm, index))
            for index, layer in enumerate(decoder.weights.layers)
        )
        other = Decoder(decoder.config, replace(decoder.weights, layers=layers), max_tokens=256)
        parts = [whole(sequence) for sequence in sequences()]

        actual = forward(other, parts, caches_of(other))

        assert torch.equal(actual, forward(other, parts, caches_of(other), by_operations=True))
        assert not torch.equal(actual, forward(decoder, parts, caches_of(decoder)))


@pytest.mark.parametrize("model", [MODELS["gemma2, soft caps"], MODELS["gemma3"]], ids=["gemma2", "gemma3"])
class TestGivenGroupsOfLayersWithAWindow:
    """Each has a block table, and all share the memory of blocks."""

    @staticmethod
    def grouped(decoder: Decoder) -> tuple[list[KVCache], list[Tokens], int]:
        """The caches, sequences with all tables, and how many groups there are."""
        groups = block_groups(decoder.config.sliding_windows).num_window_groups
        limits = ModelLimits(
            max_model_len=160,
            vocab_size=97,
            eos_token_ids=frozenset(),
            num_blocks=NUM_BLOCKS * (1 + groups),
            block_size=BLOCK_SIZE,
            sliding_window=11,
            window_groups=groups,
        )
        parts, caches = make_grouped_caches(decoder.config, limits, dtype=torch.bfloat16, device=CPU)
        assert len(parts) < len(caches)
        tokens = sequences()
        for sequence in tokens:
            first = sequence.block_table
            sequence.tables += [[block_id + NUM_BLOCKS * (1 + group) for block_id in first] for group in range(groups)]
        return caches, tokens, groups

    def test_when_they_step_then_bits_are_those_of_separate_memory(self, decoder: Decoder) -> None:
        expected = forward(decoder, [whole(sequence) for sequence in sequences()], caches_of(decoder))
        caches, tokens, groups = self.grouped(decoder)
        others, _, _ = self.grouped(decoder)

        tensors = layout_of(5, window_groups=groups).lay_out([whole(sequence) for sequence in tokens])
        actual = decoder.forward(tensors, caches).clone()

        assert torch.equal(actual, expected)
        assert torch.equal(decoder.forward_by_operations(tensors, others), expected)
        for one, other in zip(caches, others, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)

    def test_when_they_decode_then_blocks_before_the_window_are_not_read(self, decoder: Decoder) -> None:
        expected = forward(decoder, [whole(sequence) for sequence in sequences()], caches_of(decoder))
        caches, tokens, groups = self.grouped(decoder)
        layout = layout_of(5, window_groups=groups)
        decoder.forward(layout.lay_out([(one, 0, one.num_tokens - 1, True) for one in tokens[1:]]), caches)
        for sequence in tokens:
            first = max(0, sequence.num_tokens - 11) // BLOCK_SIZE
            for cache in caches:
                for block_id in sequence.tables[cache.table][:first] if cache.table else ():
                    cache.keys[block_id] = cache.values[block_id] = float("nan")

        last = [(sequence, sequence.num_tokens - 1, 1, True) for sequence in tokens]
        actual = [decoder.forward(layout.lay_out(last), caches).clone() for _ in range(2)]

        assert torch.equal(actual[0], expected)
        assert torch.equal(actual[1], expected)

    def test_when_tables_are_missing_or_do_not_match_then_they_are_refused(self, decoder: Decoder) -> None:
        caches, tokens, groups = self.grouped(decoder)
        tensors = layout_of(5, window_groups=groups).lay_out([whole(sequence) for sequence in tokens])
        assert tensors.window_slots is not None

        with pytest.raises(ValueError, match=rf"caches are of {1 + groups} tables, got 1"):
            decoder.forward(tensors._replace(window_slots=None, window_tables=None), caches)
        with pytest.raises(ValueError, match=r"window_slots must be \[W, 209\]"):
            decoder.forward(tensors._replace(window_slots=tensors.window_slots[:, 1:]), caches)


class TestGivenTwoDecoders:
    def test_when_they_step_at_the_same_time_then_they_do_not_notice_each_other(self, tmp_path: Path) -> None:
        MODELS["llama"].save(tmp_path, torch.bfloat16)
        folder = open_model_folder(tmp_path)
        form = WeightForm(torch.bfloat16, CPU)
        decoders = [
            load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=160, max_tokens=256)
            for _ in range(2)
        ]
        parts = [whole(sequence) for sequence in sequences()]
        expected = forward(decoders[0], parts, caches_of(decoders[0]))

        def logits(decoder: Decoder) -> list[torch.Tensor]:
            with torch.inference_mode():
                return [forward(decoder, parts, caches_of(decoder)) for _ in range(20)]

        with ThreadPoolExecutor(2) as threads:
            actual = [each for found in threads.map(logits, decoders) for each in found]

        assert all(torch.equal(each, expected) for each in actual)


class TestGivenMoreThreadsThanCores:
    """Some are always descheduled: within a task, between two, and for a whole step."""

    @pytest.mark.parametrize(
        ("name", "weights"), cross_section(["gemma2, soft caps", "qwen2_moe, a shared expert"], list(QUANTIZATION))
    )
    def test_when_steps_follow_each_other_then_bits_are_those_of_one_thread(
        self, tmp_path: Path, weights: str, name: str
    ) -> None:
        MODELS[name].save(tmp_path, torch.bfloat16)
        folder = open_model_folder(tmp_path)
        form = WeightForm(torch.bfloat16, CPU, quantization=QUANTIZATION[weights])
        decoder = load_decoder(
            parse_config(folder.config), folder.weights, form=form, max_model_len=160, max_tokens=256
        )
        # Steps of many tokens and of few, and one without logits, whose last phases have no tasks.
        steps = [[whole(one) for one in sequences()], [whole(sequences()[3])], [(*whole(sequences()[1])[:3], False)]]
        before, cores = torch.get_num_threads(), os.sched_getaffinity(0)

        def logits(num_threads: int) -> list[torch.Tensor]:
            torch.set_num_threads(num_threads)
            return [forward(decoder, step, caches_of(decoder)) for step in steps]

        try:
            expected = logits(1)
            # The team shrinks and grows: a thread may wake in the step after the one that it was called to.
            actual = [logits(num_threads) for num_threads in (2, 9, 3) * 20]
        finally:
            torch.set_num_threads(before)

        for found in actual:
            assert all(map(torch.equal, found, expected))
        # Threads have changed cores, and each may still run where it could.
        assert all(os.sched_getaffinity(int(thread)) == cores for thread in os.listdir("/proc/self/task"))


class TestGivenABatchThatNativeCodeWouldMisread:
    @pytest.mark.parametrize(
        ("name", "wrong", "problem"),
        [
            ("input_ids", torch.zeros(257, dtype=torch.int64), "257 tokens, 5 rows of logits: there is room for 256"),
            (
                "logit_rows",
                torch.zeros(210, dtype=torch.int64),
                "209 tokens, 210 rows of logits: there is room for 256",
            ),
            ("positions", torch.zeros(208, dtype=torch.int64), r"positions must be \[209\] torch.int64"),
            ("slot_mapping", torch.zeros(209, dtype=torch.int32), r"slot_mapping must be \[209\] torch.int64"),
            ("query_start_locs", torch.zeros(5, dtype=torch.int32), r"query_start_locs must be \[6\] torch.int32"),
            ("context_lens", torch.zeros(10, dtype=torch.int32)[::2], r"context_lens must be \[5\] .* contiguous"),
            (
                "block_tables",
                torch.zeros(4, 20, dtype=torch.int32),
                r"block_tables must be \[5, blocks\], got \(4, 20\)",
            ),
            ("block_tables", torch.zeros(5, 20, dtype=torch.int64), "block_tables must be int32"),
            ("block_tables", torch.zeros(20, 5, dtype=torch.int32).T, "block_tables must be contiguous in its last"),
        ],
    )
    def test_when_it_is_computed_then_it_is_refused(
        self, tmp_path: Path, name: str, wrong: torch.Tensor, problem: str
    ) -> None:
        MODELS["qwen2, biases"].save(tmp_path, torch.bfloat16)
        folder = open_model_folder(tmp_path)
        form = WeightForm(torch.bfloat16, CPU)
        decoder = load_decoder(
            parse_config(folder.config), folder.weights, form=form, max_model_len=160, max_tokens=256
        )
        tensors = layout_of(5).lay_out([whole(sequence) for sequence in sequences()])

        with pytest.raises(ValueError, match=problem):
            decoder.forward(tensors._replace(**{name: wrong}), caches_of(decoder))
