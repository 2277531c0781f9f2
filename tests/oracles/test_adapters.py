"""Adapters against PEFT: the same greedy tokens, however requests of several adapters and of none are batched."""

# The types of torch, transformers and PEFT are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import torch

from sluice.engine.config import Quantization
from sluice.engine.request import Request, Sampling
from tests.grids import grid
from tests.oracles.adapters import save_adapter
from tests.oracles.engines import CALM, DISTURBED, run
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel

MODELS = ["llama-llama3", "qwen2-window", "gemma3-untied", "phi3", "glm4", "granite", "cohere2", "olmo2", "exaone4"]
FAST = [("chunks of three", "llama-llama3"), ("preemption, host tier", "phi3")]
MAX_TOKENS = 12
ADAPTERS: Mapping[str, Mapping[str, object]] = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "few-modules": {"r": 7, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "pattern": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*\.[12]\.(self_attn|mlp)\..*(v|down|o|qkv)_proj",
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {r"1\.mlp\.down_proj": 20},
    },
}
NATIVE = TinyModel("llama", {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 16})
"""Its rows are whole steps of the native products."""


def requests() -> list[Request]:
    """The same prompts for each adapter, and for none."""
    random = Random(5)
    shared = [random.randrange(2, VOCAB_SIZE) for _ in range(24)]
    prompts = [shared, [*shared, 3], [random.randrange(2, VOCAB_SIZE) for _ in range(9)]]
    return [
        Request(
            id=f"{adapter or 'none'}/{number}",
            prompt_token_ids=tuple(prompt),
            adapter=adapter,
            sampling=Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        for number, prompt in enumerate(prompts)
        for adapter in ("", *ADAPTERS)
    ]


def generated(model: Any, prompt: tuple[int, ...]) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


@cache
def folders_and_expected(name: str) -> tuple[Path, Path, Mapping[str, list[int]]]:
    """A saved model, a folder of adapters, and the tokens that PEFT generates for each request."""
    from peft import LoraConfig, get_peft_model

    folder, adapters = (Path(mkdtemp(prefix="sluice-tiny-")) for _ in range(2))
    models: dict[str, Any] = {"": TINY_MODELS[name].save(folder)}
    for number, (adapter, config) in enumerate(ADAPTERS.items()):
        made = LoraConfig(**cast("dict[str, Any]", dict(config)), init_lora_weights=False)
        models[adapter] = get_peft_model(TINY_MODELS[name].build(), made)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter_name, parameter in models[adapter].named_parameters():
                if "lora_" in parameter_name:
                    parameter.copy_(torch.randn_like(parameter) * 0.15)
        models[adapter].save_pretrained(adapters / adapter)
    expected = {request.id: generated(models[request.adapter], request.prompt_token_ids) for request in requests()}
    return folder, adapters, expected


@cache
def native_folders() -> tuple[Path, Path]:
    """A model in bfloat16 whose steps are native, and a folder of its adapters."""
    folder, adapters = (Path(mkdtemp(prefix="sluice-tiny-")) for _ in range(2))
    NATIVE.save(folder, torch.bfloat16)
    for number, adapter in enumerate(ADAPTERS):
        save_adapter(adapters / adapter, folder, rank=3 + 4 * number, seed=number, std=0.15)
    return folder, adapters


# PEFT asks a model of transformers for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestGivenAdaptersOfATinyModel:
    @pytest.mark.parametrize(("disturbance", "name"), grid(list(DISTURBED), MODELS, fast=FAST))
    def test_when_the_engine_is_disturbed_then_tokens_equal_those_of_peft(self, disturbance: str, name: str) -> None:
        setting = replace(DISTURBED[disturbance], abort=frozenset())
        folder, adapters, expected = folders_and_expected(name)

        outcome = run(folder, requests(), setting, adapters=adapters)

        assert outcome.errors == {}
        assert {request_id: tokens for (request_id, _), tokens in outcome.token_ids.items()} == expected
        assert len(set(map(tuple, expected.values()))) > len(ADAPTERS)

    def test_when_two_adapters_have_one_prompt_then_they_share_no_blocks(self) -> None:
        folder, adapters, _ = folders_and_expected("llama-llama3")
        same = [request for request in requests() if request.id.endswith("/0")]
        setting = replace(CALM, max_num_seqs=1, block_size=4)

        assert run(folder, same, setting, adapters=adapters).num_cached_tokens == 0
        again = [replace(request, id=f"{request.id} again") for request in same]
        assert run(folder, [*same, *again], setting, adapters=adapters).num_cached_tokens > 0


@cache
def tokens_alone(quantization: Quantization, block_size: int) -> dict[tuple[str, int], list[int]]:
    """The tokens of each request in an engine of its own. Sums of attention depend on the size of blocks."""
    folder, adapters = native_folders()
    setting = replace(CALM, block_size=block_size, num_blocks=4096 // block_size)
    runs = [run(folder, [request], setting, quantization=quantization, adapters=adapters) for request in requests()]
    return {key: tokens for each in runs for key, tokens in each.token_ids.items()}


NATIVE_FAST = [
    ("together", "none"),
    ("tiny blocks", "int8"),
    ("chunks of three", "int4"),
    ("preemption", "none"),
    ("overlapped", "int8"),
]


class TestGivenAdaptersOfANativeModel:
    """In bfloat16, where a step is one native call."""

    @pytest.mark.parametrize(
        ("disturbance", "quantization"), grid(list(DISTURBED), ["none", "int8", "int4"], fast=NATIVE_FAST)
    )
    def test_when_requests_are_batched_then_each_has_the_tokens_that_it_has_alone(
        self, disturbance: str, quantization: Quantization
    ) -> None:
        setting = replace(DISTURBED[disturbance], abort=frozenset())
        folder, adapters = native_folders()
        expected = tokens_alone(quantization, setting.block_size)

        outcome = run(folder, requests(), setting, quantization=quantization, adapters=adapters)

        assert outcome.token_ids == expected
        assert len(set(map(tuple, expected.values()))) > len(ADAPTERS)

    @pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
    def test_when_others_have_adapters_then_a_request_without_has_the_logprobs_of_a_model_without(
        self, quantization: Quantization
    ) -> None:
        folder, adapters = native_folders()
        watched = [replace(request, sampling=replace(request.sampling, logprobs=3)) for request in requests()]
        plain = [request for request in watched if not request.adapter]

        mixed = run(folder, watched, quantization=quantization, adapters=adapters)
        without = run(folder, plain, quantization=quantization)

        assert {key: mixed.logprobs[key] for key in without.logprobs} == without.logprobs
