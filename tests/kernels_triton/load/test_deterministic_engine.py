"""A whole engine over the interpreted kernels of a deterministic process: a request's output does not depend on others.

Tokens and log-probabilities are compared bit by bit.
"""

from pathlib import Path

import pytest

from benchmarks.gpu.checks.determinism import ALONE, COMPANIES, Company, outputs, runner_for, with_logprobs
from benchmarks.gpu.checks.sameness import make_requests
from benchmarks.gpu.models import save_small_model, triton_in_place_of_cpu
from benchmarks.gpu.scale import toy_scale
from sluice.engine.request import Request, Sampling
from tests.kernels_triton.invariant.matrix_unit import matrix_unit
from tests.oracles.tiny_models import GEMMA2, TinyModel

TINY = TinyModel("gemma2", {**GEMMA2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1})
CHUNKS = Company(name="in chunks, among others", num_at_once=3, max_num_batched_tokens=7, num_blocks=40)


def compare(folder: Path, asked: list[Request], company: Company) -> None:
    """Run the requests one by one and in company, and check that their outputs are the same."""
    with triton_in_place_of_cpu(deterministic=True), matrix_unit():
        expected = outputs(runner_for(toy_scale(), folder, ALONE), asked, ALONE)
        found = outputs(runner_for(toy_scale(), folder, company), asked, company)
    assert found == expected
    assert all(len(tokens) == 2 for tokens in found.values())


class TestGivenADeterministicEngine:
    @pytest.mark.long
    def test_when_prompts_are_in_chunks_among_others_then_outputs_have_the_same_bits(self, tmp_path: Path) -> None:
        """With sliding windows and soft caps; greedy and drawn."""
        TINY.save(tmp_path)
        prompts, temperatures = ((5, 9, 40), (17, 3, 2, 80, 61, 9, 33, 12, 8, 3, 5)), (0.0, 0.9)
        asked = [
            Request(
                id=str(n),
                prompt_token_ids=prompt,
                sampling=Sampling(seed=n, temperature=temperature, max_tokens=2, ignore_eos=True, logprobs=3),
            )
            for n, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        ]

        compare(tmp_path, asked, CHUNKS)

    @pytest.mark.long
    @pytest.mark.parametrize("company", COMPANIES, ids=str)
    def test_when_requests_have_every_option_then_outputs_have_the_same_bits(
        self, company: Company, tmp_path: Path
    ) -> None:
        """With penalties, filters, two choices of one request, and a prefix that all share."""
        save_small_model("qwen3", tmp_path)

        compare(tmp_path, with_logprobs(make_requests(5, max_tokens=2)), company)
