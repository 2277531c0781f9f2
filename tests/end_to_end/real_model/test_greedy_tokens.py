"""The folder that `tools.real_model` makes: our engine says to it what transformers says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sluice import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Count from 1 to 20.",
    "Explain photosynthesis in two sentences.",
)
NUM_TOKENS = 64


@pytest.fixture
def _whole() -> None:
    """In place of the service's: there is none."""


class TestGivenTheFolderOfARealModel:
    def test_when_chats_are_answered_greedily_then_tokens_are_those_of_transformers(self, model: Path) -> None:
        with LLM(model, dtype="float32", num_threads=2) as llm:
            chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))

        expected = [greedy_tokens(model, output.prompt_token_ids) for output in outputs]

        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert "Paris" in outputs[0].text


def greedy_tokens(model: Path, prompt: tuple[int, ...]) -> list[int]:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # its types are partial
    reader = models.from_pretrained(model, dtype=torch.float32)
    generated = reader.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
    return generated[0, len(prompt) :].tolist()
