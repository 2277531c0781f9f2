"""Real models in GGUF: our engine reads a file as transformers does."""

import pytest

from sluice import LLM, SamplingParams
from sluice.engine.text.tokenizer import load_tokenizer
from tests.end_to_end.real_model.test_greedy_tokens import NUM_TOKENS, greedy_tokens
from tests.forks import ROOT
from tools.real_model.folder import real_model_folder, real_model_gguf

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

PROMPTS = ["The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n", "1, 2, 3, 4,"]
TEXTS = [
    "It's 12345 o'clock.  leading   spaces\n\n\ttabs\r\n",
    "naïve café — 日本語 한국어 🙂👩\u200d👩\u200d👧 ١٢٣ ⅷ ²³\u00a0",
    "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>user\nHi<end_of_turn>\n<html><b>hi</b></html>",
    "",
    " ",
]


@pytest.fixture
def _whole() -> None:
    """In place of the service's: there is none."""


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
class TestGivenARealModelInGguf:
    def test_when_prompts_are_continued_then_tokens_are_those_of_transformers(self, name: str) -> None:
        with LLM(real_model_gguf(name), dtype="float32", num_threads=2) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))

        expected = [greedy_tokens(real_model_folder(name), output.prompt_token_ids) for output in outputs]

        assert [list(output.outputs[0].token_ids) for output in outputs] == expected

    def test_when_texts_are_encoded_then_tokens_are_those_of_its_folder(self, name: str) -> None:
        ours, theirs = load_tokenizer(real_model_gguf(name)), load_tokenizer(real_model_folder(name))
        texts = [*TEXTS, *(path.read_text()[:5000] for path in (ROOT / "README.md", ROOT / "kernels" / "native.h"))]

        assert ours.first_difference(theirs) is None
        for text in texts:
            assert ours.encode(text) == theirs.encode(text)
