"""The whole engine against transformers' generate: the same greedy tokens, however requests arrive and are batched."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import torch

from sluice.engine.request import Request, Sampling
from tests.grids import cross_section
from tests.oracles.engines import DISTURBED, run
from tests.oracles.near_ties import num_settled
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE

MODELS = [
    "llama-llama3",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "gpt_oss",
    # Those of Gemma whose weights are not tied: the others repeat the last token.
    "gemma-untied",
    "gemma2-no-caps",
    "gemma3-untied",
    "ministral",
    "seed_oss",
    "smollm3",
    "granite",
    "phi3",
    "olmo2",
    "olmo3",
    "exaone4",
    "cohere2",
    "glm",
    "glm4",
]
MAX_TOKENS = 20


def requests() -> list[Request]:
    """Nine requests; some share a prefix, one is a single token, some ignore the end of the sequence."""
    random = Random(5)
    shared = [random.randrange(2, VOCAB_SIZE) for _ in range(24)]
    prompts = [[random.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 13, 37, 50, 16)]
    prompts += [shared + [random.randrange(2, VOCAB_SIZE)] * n for n in (1, 3, 9)]
    return [
        Request(
            id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=i % 2 == 0),
        )
        for i, prompt in enumerate(prompts)
    ]


@cache
def folder_and_expected(name: str) -> tuple[Path, dict[str, list[int]], dict[str, int]]:
    """A saved model, the tokens that transformers generates for each request, and how many before a router ties."""
    folder = Path(mkdtemp(prefix="sluice-tiny-"))
    # generate is typed for many kinds of model.
    model = cast("Any", TINY_MODELS[name].save(folder))
    expected, settled = dict[str, list[int]](), dict[str, int]()
    for request in requests():
        prompt = torch.tensor([request.prompt_token_ids])
        ends = {} if request.sampling.ignore_eos else {"eos_token_id": 1}
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
                **ends,
            )
        expected[request.id] = output[0, prompt.shape[1] :].tolist()
        # A token is drawn from what was computed of those before it.
        settled[request.id] = max(0, num_settled(model, output[0, :-1].tolist()) + 1 - prompt.shape[1])
    assert sum(settled.values()) > 0.8 * sum(map(len, expected.values())), "most routers do not nearly tie"
    return folder, expected, settled


class TestGivenATinyModel:
    @pytest.mark.parametrize(("disturbance", "name"), cross_section(list(DISTURBED), MODELS))
    def test_when_the_engine_is_disturbed_then_tokens_equal_those_of_transformers(
        self, disturbance: str, name: str
    ) -> None:
        setting = DISTURBED[disturbance]
        folder, expected, settled = folder_and_expected(name)

        outcome = run(folder, requests(), setting)

        for request in requests():
            actual, num_equal = outcome.token_ids.get((request.id, 0), []), settled[request.id]
            if request.id in setting.abort:
                num_equal = min(num_equal, len(actual))
            assert actual[:num_equal] == expected[request.id][:num_equal]
            assert request.id in setting.abort or num_equal < len(expected[request.id]) or len(actual) == num_equal
        assert outcome.errors == {}


class TestGivenTheSettings:
    """What their names promise does happen."""

    def test_when_the_pool_is_tiny_then_sequences_are_preempted(self) -> None:
        folder, *_ = folder_and_expected("llama-llama3")

        assert run(folder, requests(), DISTURBED["preemption"]).num_preemptions > 0
        assert run(folder, requests(), DISTURBED["preemption, no prefix cache"]).num_preemptions > 0

    def test_when_tokens_are_drafted_then_some_are_accepted(self) -> None:
        folder, *_ = folder_and_expected("llama-tied")

        assert run(folder, requests(), DISTURBED["drafts"]).num_accepted_tokens > 0

    @pytest.mark.parametrize("name", ["preemption, host tier", "overlapped, a late device, host tier"])
    def test_when_there_is_a_host_tier_then_preempted_sequences_load_from_it(self, name: str) -> None:
        folder, *_ = folder_and_expected("llama-llama3")

        assert run(folder, requests(), DISTURBED[name]).num_loaded_tokens > 0

    def test_when_prompts_share_a_prefix_then_it_is_computed_once(self) -> None:
        folder, *_ = folder_and_expected("llama-llama3")

        assert run(folder, requests(), DISTURBED["tiny blocks"]).num_cached_tokens > 0
