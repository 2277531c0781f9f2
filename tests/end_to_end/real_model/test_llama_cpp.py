"""Real models in GGUF: llama.cpp generates the same tokens from the same file, except where two nearly tie."""

from collections.abc import Generator

import pytest

from benchmarks.quality.llama_cpp import Text, greedy_text, partings, server, serving, tokenized
from benchmarks.quality.run import gguf_forms
from sluice import LLM, SamplingParams
from sluice.engine.text.tokenizer import load_tokenizer
from tests.end_to_end.real_model.prompts import PROMPTS
from tools.real_model.folder import real_model_gguf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.models,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        server() is None, reason="llama.cpp is not built: `python -m benchmarks engines --peers llama.cpp` does it"
    ),
]

NUM_TOKENS = 64
NEAR = 1.5
"""Difference of two logits. SmolLM2 parts where it is at most 1.1, in the middle 0.1: both round rows to 8 bits,
each in its own way.
"""


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    """A real model."""
    return request.param


@pytest.fixture(scope="module")
def llama_cpp(name: str) -> Generator[str]:
    """llama.cpp's server with its file."""
    with serving(real_model_gguf(name)) as url:
        yield url


@pytest.fixture(scope="module")
def texts(name: str, llama_cpp: str) -> list[Text]:
    """What it generates after fifty prompts."""
    tokenizer = load_tokenizer(real_model_gguf(name))
    return [greedy_text(llama_cpp, tokenizer.encode(prompt), NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def _whole() -> None:
    """In place of the service's: there is none."""


class TestGivenAFileThatLlamaCppReads:
    def test_when_texts_are_encoded_then_tokens_are_its_own(self, name: str, llama_cpp: str) -> None:
        ours = load_tokenizer(real_model_gguf(name))

        different = [text for text in PROMPTS if ours.encode(text) != tokenized(llama_cpp, text)]

        assert different == []

    def test_when_it_generates_then_our_best_tokens_are_its_own_but_for_near_ties(
        self, name: str, llama_cpp: str, texts: list[Text]
    ) -> None:
        num_tokens = sum(len(text.tokens) for text in texts)
        assert num_tokens > 2000
        for form in gguf_forms(name):
            found = partings(llama_cpp, form.load(), texts)

            assert len(found) < 0.05 * num_tokens
            assert [one for one in found if max(one.margin_here, one.margin_there or 0) > NEAR] == []

    def test_when_the_engine_generates_then_it_parts_only_at_such_a_tie(
        self, name: str, llama_cpp: str, texts: list[Text]
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        [*_, packed] = gguf_forms(name)
        first: dict[int, int] = {}
        for parting in partings(llama_cpp, packed.load(), texts):
            first.setdefault(parting.text, parting.at)

        with LLM(packed.path, num_threads=2) as llm:
            outputs = llm.generate([list(text.prompt) for text in texts], params)

        for number, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            at = first.get(number, len(text.tokens))
            assert output.outputs[0].token_ids[:at] == text.tokens[:at]
