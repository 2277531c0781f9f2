"""Real models in GGUF, with our engine: the texts of transformers, and what people ask of a service, killed amid it."""

import json
import os
import re
import signal
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from sluice import LLM, SamplingParams
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.config import OWN_ENGINE
from tests.end_to_end.real_model.conftest import engine_named
from tests.end_to_end.real_model.prompts import PROMPTS
from tests.end_to_end.real_model.service import Service, chat, running_service
from tests.forks import ROOT
from tests.gateway.batches.processes import place_in
from tests.servers import redis_server
from tools.real_model.folder import real_model_folder, real_model_gguf

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.models, pytest.mark.timeout(900)]

NUM_TOKENS = 32
TEXTS = [
    *PROMPTS,
    "It's 12345 o'clock.  leading   spaces\n\n\ttabs\r\n",
    "naïve café — 日本語 한국어 🙂👩\u200d👩\u200d👧 ١٢٣ ⅷ ²³\u00a0",
    "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>user\nHi<end_of_turn>\n<html><b>hi</b></html>",
    "",
    " ",
]


class Invoice(BaseModel, extra="forbid"):
    """An invoice."""

    customer: str = Field(max_length=40)
    currency: Literal["EUR", "USD", "GBP"]
    items: list[Literal["book", "lamp", "chair", "table"]] = Field(min_length=2, max_length=12)
    is_paid: bool


class Weather(BaseModel, extra="forbid"):
    """The weather of a city on the next days."""

    city: str = Field(max_length=30)
    days: int = Field(ge=1, le=14)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """Two workers of our engine with SmolLM2's GGUF."""
    folder, engine = tmp_path_factory.mktemp("models"), engine_named(OWN_ENGINE)
    # Its template knows no tools.
    engine = replace(engine, settings={**engine.settings, "TOOL_FORMAT": "hermes"})
    with redis_server("valkey", is_durable=True) as server:
        place = place_in(folder, server.url)
        with running_service(server, place, folder, real_model_gguf(), engine) as made:
            yield made


@pytest.fixture
def _whole(request: pytest.FixtureRequest) -> Generator[None]:
    """After each test of the service, it is whole."""
    yield
    if "smollm2" in request.fixturenames:
        request.getfixturevalue("smollm2").check_it_is_whole()


def differences(folder: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[str]:
    """Say where outputs are not what transformers generates greedily: each token is its best one after those before."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # its types are partial
    reader = models.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[str] = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with torch.inference_mode():
            logits = reader(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        best = logits.argmax(dim=-1).tolist()
        found += [
            f"prompt {number}, token {at}: {ours}, not {theirs}"
            for at, (ours, theirs) in enumerate(zip(output, best, strict=True))
            if ours != theirs
        ][:1]
    return found


class TestGivenARealModelInGguf:
    @pytest.mark.parametrize("name", ["smollm2", "gemma3"])
    def test_when_fifty_prompts_are_answered_greedily_then_tokens_are_those_of_transformers(self, name: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        with LLM(real_model_gguf(name), dtype="float32", num_threads=2) as llm:
            if name == "smollm2":
                outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
            else:
                outputs = llm.generate(list(PROMPTS), params)

        prompts = [output.prompt_token_ids for output in outputs]
        found = differences(real_model_folder(name), prompts, [output.outputs[0].token_ids for output in outputs])

        assert len(outputs) == len(PROMPTS) == 50
        assert sum(len(output.outputs[0].token_ids) for output in outputs) > 20 * len(PROMPTS)
        assert found == []

    @pytest.mark.parametrize("name", ["smollm2", "gemma3"])
    def test_when_texts_are_encoded_then_tokens_are_those_of_its_folder(self, name: str) -> None:
        ours, theirs = load_tokenizer(real_model_gguf(name)), load_tokenizer(real_model_folder(name))
        documents = [path.read_text()[:5000] for path in (ROOT / "README.md", ROOT / "kernels" / "native.h")]
        # Of more than 31 spaces, transformers' reading of Gemma's file merges pairs; see the test below.
        texts = [*TEXTS, *(re.sub(" {32,}", " " * 31, document) for document in documents)]

        for text in texts:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text

    def test_when_gemma_has_more_spaces_than_a_token_then_the_longest_goes_first_as_in_sentencepiece(self) -> None:
        tokenizer = load_tokenizer(real_model_gguf("gemma3"))

        def lengths(num_spaces: int) -> list[int]:
            ids = tokenizer.encode("a" + " " * num_spaces + "b", add_special_tokens=False)
            return [len(tokenizer.decode([one], skip_special_tokens=False)) for one in ids]

        found = {num_spaces: lengths(num_spaces) for num_spaces in (16, 31, 32, 40, 62)}

        # sentencepiece 0.2.3, of a model whose runs of 2 to 31 spaces are user-defined symbols, as Gemma's are.
        assert found == {16: [1, 16, 1], 31: [1, 31, 1], 32: [1, 31, 2], 40: [1, 31, 9, 1], 62: [1, 31, 31, 1]}


class TestGivenAServiceOverARealModel:
    def test_when_chats_are_streamed_then_pieces_are_the_whole_answer(self, smollm2: Service) -> None:
        for prompt in PROMPTS[::7]:
            assert smollm2.ask_in_pieces(prompt, temperature=0) == smollm2.ask(prompt, temperature=0)

    def test_when_a_stop_string_comes_then_the_text_ends_before_it(self, smollm2: Service) -> None:
        whole = smollm2.ask("Count from 1 to 20.", temperature=0)
        stop = whole[len(whole) // 2 :][:4]

        stopped = smollm2.ask("Count from 1 to 20.", temperature=0, stop=stop)

        assert stopped == whole[: whole.index(stop)]

    def test_when_json_is_asked_for_in_each_language_then_all_is_valid(self, smollm2: Service) -> None:
        for prompt in PROMPTS[::8]:
            answer = smollm2.openai.chat.completions.parse(
                model=smollm2.model,
                messages=[{"role": "user", "content": prompt}],
                response_format=Invoice,
                max_tokens=300,
                temperature=0.7,
                seed=1,
            )
            assert isinstance(answer.choices[0].message.parsed, Invoice)

    def test_when_a_function_must_be_called_then_its_arguments_are_valid(self, smollm2: Service) -> None:
        for temperature in (0.0, 0.9):
            answer = smollm2.openai.chat.completions.parse(
                model=smollm2.model,
                messages=[{"role": "user", "content": "Will it rain in Paris this week?"}],
                tools=[openai.pydantic_function_tool(Weather)],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=300,
                temperature=temperature,
                seed=2,
            )
            [call] = answer.choices[0].message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, Weather)

    def test_when_a_worker_is_killed_amid_texts_and_json_then_each_answer_is_that_of_a_calm_run(
        self, smollm2: Service
    ) -> None:
        schema = {"json_schema": Invoice.model_json_schema()}
        jobs = [chat(prompt, seed=number, temperature=0.8) for number, prompt in enumerate(PROMPTS[::4])]
        jobs += [
            chat(f"Invoice number {number} as JSON.", structured=schema, max_tokens=300, seed=number, temperature=0.8)
            for number in range(8)
        ]
        calm = smollm2.texts(smollm2.submit(jobs))

        job_ids = smollm2.submit(jobs)
        smollm2.wait_until_they_speak(job_ids[:4], num_tokens=5)
        os.kill(min(smollm2.pids()), signal.SIGKILL)
        texts = smollm2.texts(job_ids)

        assert texts == calm
        smollm2.check_streams(job_ids, texts)
        for text in texts[-8:]:
            jsonschema.validate(json.loads(text), Invoice.model_json_schema())
