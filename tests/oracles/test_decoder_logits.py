"""The decoder against transformers: logits of every position, each family and rope type, float32."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence
from sluice.kernels.linear import cpu as linear_cpu
from sluice.kernels.native import library
from tests.engine.layouts import StepLayout
from tests.grids import cross_section
from tests.oracles.near_ties import num_settled
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE, save_text_and_images

CPU = torch.device("cpu")
LENGTHS = (1, 30, 77, 5)
NATIVE_SIZES: dict[str, object] = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes that the native step takes."""

IN_BFLOAT16 = (
    "llama-llama3", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "olmo2", "cohere2", "glm4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(path: Path, max_model_len: int, dtype: torch.dtype = torch.float32) -> Decoder:
    folder = open_model_folder(path)
    config = parse_config(folder.config)
    return load_decoder(
        config, folder.weights, form=WeightForm(dtype, CPU), max_model_len=max_model_len, max_tokens=256
    )


def logits_of(decoder: Decoder, prompts: list[list[int]], *, block_size: int, chunk: int) -> list[torch.Tensor]:
    """Logits `[tokens, V]` of each prompt, all computed together in chunks."""
    blocks_per_sequence = -(-max(map(len, prompts)) // block_size)
    num_blocks = blocks_per_sequence * len(prompts)
    caches = make_caches(
        decoder.config, num_blocks=num_blocks, block_size=block_size, dtype=decoder.weights.dtype, device=CPU
    )
    layout = StepLayout(
        max_num_seqs=len(prompts),
        max_blocks_per_seq=blocks_per_sequence,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    blocks = torch.randperm(num_blocks).view(len(prompts), -1).tolist()
    sequences = [
        Sequence(
            id=i,
            request_id=str(i),
            choice=0,
            sampling=Sampling(temperature=0),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            tables=[blocks[i][: -(-len(prompt) // block_size)]],
        )
        for i, prompt in enumerate(prompts)
    ]
    parts: dict[int, list[torch.Tensor]] = {sequence.id: [] for sequence in sequences}
    for start in range(0, max(map(len, prompts)), chunk):
        scheduled = [(s, start, min(chunk, s.num_tokens - start), True) for s in sequences if start < s.num_tokens]
        tensors = layout.lay_out(scheduled)
        every_row = torch.arange(tensors.input_ids.shape[0])
        # A native step writes its logits to the same memory each time.
        logits = decoder.forward(tensors._replace(logit_rows=every_row), caches).clone()
        rows = logits.split([size for _, _, size, _ in scheduled])
        for (sequence, *_), own in zip(scheduled, rows, strict=True):
            parts[sequence.id].append(own)
    return [torch.cat(chunks) for chunks in parts.values()]


class TestGivenATinyModel:
    @pytest.mark.parametrize(
        ("name", "block_size", "chunk"), cross_section(list(TINY_MODELS), [(4, 16), (16, 100), (5, 3)])
    )
    def test_when_prompts_are_computed_then_all_logits_equal_those_of_transformers(
        self, name: str, block_size: int, chunk: int, tmp_path: Path
    ) -> None:
        model = TINY_MODELS[name].save(tmp_path)
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        # LongRoPE is chosen by the longest sequence here, and by the sequence's own length there.
        prompts = [p for p in prompts if len(p) > 40] if name.endswith("longrope") else prompts

        actual = logits_of(load(tmp_path, max_model_len=160), prompts, block_size=block_size, chunk=chunk)

        num_compared = 0
        for prompt, logits in zip(prompts, actual, strict=True):
            settled = num_settled(model, prompt)
            expected = model(torch.tensor([prompt])).logits[0, :settled]
            torch.testing.assert_close(logits[:settled], expected, rtol=1e-4, atol=1e-4)
            num_compared += settled
        assert num_compared > 0.7 * sum(map(len, prompts)), "most routers do not nearly tie"


class TestGivenLongRope:
    def test_when_no_sequence_may_be_longer_then_it_keeps_the_short_factors(self, tmp_path: Path) -> None:
        model = TINY_MODELS["llama-longrope"].save(tmp_path)
        prompt = list(range(30))

        (actual,) = logits_of(load(tmp_path, max_model_len=40), [prompt], block_size=4, chunk=50)

        torch.testing.assert_close(actual, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)


class TestGivenDynamicRope:
    def test_when_a_sequence_is_long_then_it_stretches_to_the_longest_one_allowed(self, tmp_path: Path) -> None:
        model = TINY_MODELS["llama-dynamic"].save(tmp_path)
        prompt = torch.randint(VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1)).tolist()

        (actual,) = logits_of(load(tmp_path, max_model_len=300), [prompt], block_size=16, chunk=100)

        torch.testing.assert_close(actual, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)


class TestGivenWeightsInBfloat16:
    @pytest.mark.parametrize(
        ("name", "step"),
        cross_section(
            IN_BFLOAT16,
            ["native", "operations"],
        ),
    )
    def test_when_prompts_are_computed_then_the_error_is_at_most_about_transformers(
        self, name: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import AutoModelForCausalLM

        is_native = step == "native"
        if is_native and library() is None:
            pytest.skip("there is no C compiler")
        # Also on a processor on which such products are slow.
        monkeypatch.setattr(linear_cpu, "multiplies_bfloat16", lambda: is_native)
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        model = TINY_MODELS[name]
        sized = replace(model, config={**model.config, **NATIVE_SIZES}) if is_native else model
        rounded = sized.save(tmp_path, torch.bfloat16)
        decoder = load(tmp_path, 160, torch.bfloat16)
        assert decoder.has_native_step == is_native

        actual = torch.cat(logits_of(decoder, prompts, block_size=16, chunk=50)).float()

        peer = torch.cat([rounded(torch.tensor([prompt])).logits[0] for prompt in prompts]).float()
        # Loaded anew: rounding the other one has rounded its rotary frequencies, too.
        precise = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        exact = torch.cat([precise(torch.tensor([prompt])).logits[0] for prompt in prompts])
        assert float((actual - exact).square().mean()) < 1.5 * float((peer - exact).square().mean())


class TestGivenAModelOfTextAndImages:
    @pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
    def test_when_prompts_are_text_then_logits_equal_those_of_transformers(self, prefix: str, tmp_path: Path) -> None:
        model = save_text_and_images(tmp_path, prefix)
        prompt = torch.randint(VOCAB_SIZE, (77,), generator=torch.Generator().manual_seed(1)).tolist()

        (actual,) = logits_of(load(tmp_path, max_model_len=160), [prompt], block_size=16, chunk=30)

        torch.testing.assert_close(actual, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)
