"""Logits that are not finite: the request that has them fails with a sentence, and its neighbours do not notice."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sluice.engine.request import Request, Sampling
from tests.oracles.engines import DISTURBED, run
from tests.oracles.tiny_models import TINY_MODELS

POISON = 50
"""A token whose embedding is NaN."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY_MODELS["llama"].save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


class TestGivenARequestWithBadLogits:
    @pytest.mark.parametrize("setting", ["together", "tiny blocks", "chunks of three", "overlapped"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_when_it_runs_beside_others_then_only_it_fails(
        self, folder: Path, setting: str, temperature: float
    ) -> None:
        def request(name: str, prompt: tuple[int, ...]) -> Request:
            # The poison is banned from the output: it may come from prompts only.
            params = Sampling(temperature=temperature, max_tokens=6, ignore_eos=True, logit_bias={POISON: -100.0})
            return Request(id=name, prompt_token_ids=prompt, sampling=params)

        shared = tuple(range(2, 22))
        healthy = [request("a", shared), request("b", (*shared, 5)), request("c", (9, 8))]
        sick = request("sick", (*shared, POISON, 7))
        alone = run(folder, healthy).token_ids

        outcome = run(folder, [healthy[0], sick, *healthy[1:]], DISTURBED[setting])

        assert set(outcome.errors) == {("sick", 0)}
        assert "not finite" in outcome.errors["sick", 0]
        assert {key: tokens for key, tokens in outcome.token_ids.items() if tokens} == alone
