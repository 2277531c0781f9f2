"""The folder that ships: its files, its prompts, and its accuracy on held-out questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tokenizers import Tokenizer

from tests.grids import fast_only
from tools.small_model import stories
from tools.small_model.documents import DocumentMaker, lay_out
from tools.small_model.example import Example, Kind
from tools.small_model.measure import Speaker, generated, held_out
from tools.small_model.model import Decoder, Shape, load_weights
from tools.small_model.train import Trainer

FOLDER = Path(__file__).parents[2] / "worker" / "small_model"
MAX_BYTES = 8_000_000

FLOORS: dict[Kind, float] = {
    Kind.ARITHMETIC: 0.95,
    Kind.STORY: 0.40,
    Kind.FACT: 0.93,
    Kind.LIST: 0.60,
    Kind.JSON: 0.87,
    Kind.TALK: 0.88,
}
"""Share of held-out questions answered rightly, a little under what was measured (tools/small_model/README.md)."""


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    torch.set_num_threads(1)
    return Speaker(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def asked(prompt: str, *, is_plain: bool = False) -> Example:
    return Example(kind=Kind.TALK, task="", key="", prompt=prompt, answer="", is_plain=is_plain)


def share_right(speaker: Speaker, examples: list[Example], *, max_tokens: int) -> float:
    answers = speaker.answers(examples, max_tokens=max_tokens)
    return sum(ended and each.is_right(text) for each, (text, ended) in zip(examples, answers, strict=True)) / len(
        examples
    )


class TestGivenTheFiles:
    """A Hugging Face folder, small enough for a repository."""

    def test_when_weighed_then_it_is_at_most_eight_megabytes(self) -> None:
        total = sum(path.stat().st_size for path in FOLDER.iterdir() if path.suffix != ".pyc")

        assert total <= MAX_BYTES

    def test_when_the_weights_are_read_then_they_are_bfloat16_and_tied(self) -> None:
        weights = load((FOLDER / "model.safetensors").read_bytes())

        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert "lm_head.weight" not in weights
        assert json.loads((FOLDER / "config.json").read_text())["tie_word_embeddings"] is True

    def test_when_the_ids_are_compared_then_all_three_files_agree(self, tokenizer: Tokenizer) -> None:
        config = json.loads((FOLDER / "config.json").read_text())
        generation = json.loads((FOLDER / "generation_config.json").read_text())

        assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.token_to_id("<|end|>")
        assert config["bos_token_id"] == generation["bos_token_id"] == tokenizer.token_to_id("<|bos|>")
        assert config["vocab_size"] == tokenizer.get_vocab_size()


class TestGivenTheTokenizer:
    """Byte-level, digits one by one."""

    def test_when_a_number_is_read_then_each_digit_is_a_token(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("1234, 56", add_special_tokens=False).tokens == ["1", "2", "3", "4", ",Ġ", "5", "6"]

    def test_when_a_plain_prompt_is_read_then_it_begins_with_bos_once(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("Once upon a time").tokens[:2] == ["<|bos|>", "Once"]

    @settings(max_examples=200)
    @given(text=st.text(max_size=60).filter(lambda text: "<|" not in text))
    def test_when_any_text_is_read_and_written_then_it_is_the_same(self, text: str) -> None:
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

        assert tokenizer.decode(tokenizer.encode(text).ids) == text


class TestGivenTheChatTemplate:
    """Turns with roles, each ended by the token that also ends generation."""

    def test_when_messages_are_rendered_then_the_answer_is_asked_for(self, speaker: Speaker) -> None:
        messages = [
            {"role": "system", "content": "Be short and clear."},
            {"role": "user", "content": " Hello \n"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What is 2 + 2?"},
        ]

        text = speaker.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

        assert text == (
            "<|bos|><|system|>Be short and clear.<|end|><|user|>Hello<|end|><|assistant|>Hello!<|end|>"
            "<|user|>What is 2 + 2?<|end|><|assistant|>"
        )

    def test_when_a_role_is_unknown_then_the_template_says_which_it_knows(self, speaker: Speaker) -> None:
        with pytest.raises(Exception, match="system, user and assistant"):
            speaker.tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


class TestGivenHeldOutQuestions:
    """None of these was trained on. Few and short here; all of them in the slow test below."""

    @pytest.mark.parametrize(
        "kind", fast_only([Kind.ARITHMETIC], [kind for kind in Kind if kind is not Kind.ARITHMETIC])
    )
    def test_when_asked_then_the_share_of_right_answers_is_above_the_floor(self, speaker: Speaker, kind: Kind) -> None:
        num_asked = 8 if kind is Kind.STORY else 48
        longest = 900 if kind is Kind.STORY else 160
        examples = [each for each in held_out(kind, 200, seed=1) if len(each.answer) <= longest][:num_asked]

        share = share_right(speaker, examples, max_tokens=320)

        assert share >= FLOORS[kind] - 0.08

    @pytest.mark.long
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("kind", Kind)
    def test_when_hundreds_are_asked_then_the_floor_holds(self, speaker: Speaker, kind: Kind) -> None:
        count = 60 if kind is Kind.STORY else 400

        num_right = sum(is_right for _, _, is_right in generated(speaker, kind, count=count))

        assert num_right >= FLOORS[kind] * count

    def test_when_json_is_asked_for_then_all_answers_parse(self, speaker: Speaker) -> None:
        examples = held_out(Kind.JSON, 48, seed=1)

        answers = speaker.answers(examples, max_tokens=120)

        assert all(isinstance(json.loads(text), dict | list) for text, _ in answers)


class TestGivenOneQuestionOfEachKind:
    """What a newcomer would type first."""

    @pytest.mark.parametrize(
        ("prompt", "answer"),
        [
            ("What is 12 + 30?", "12 + 30 = 42."),
            ("What is 47 + 36?", "47 + 36 = 70 + 13 = 83."),
            ("What is the capital of France?", "The capital of France is Paris."),
            ("Count from 3 to 12.", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12."),
            ("Name five fruits.", "1. apple\n2. pear\n3. plum\n4. cherry\n5. grape"),
            ("Write JSON for a person named Ada who is 36.", '{"name": "Ada", "age": 36}'),
            ("Hello!", "Hello! How can I help you?"),
        ],
    )
    def test_when_asked_then_it_answers(self, speaker: Speaker, prompt: str, answer: str) -> None:
        assert speaker.answers([asked(prompt)], max_tokens=80) == [(answer, True)]

    def test_when_a_text_is_begun_then_it_goes_on_to_its_end(self, speaker: Speaker) -> None:
        [(text, has_ended)] = speaker.answers([asked("Once upon a time", is_plain=True)], max_tokens=400)

        assert has_ended
        assert text.endswith("The end.")


@pytest.mark.slow
class TestGivenALongJob:
    """Jobs of a thousand tokens and more, for showing that a killed worker loses nothing."""

    def test_when_it_counts_to_a_hundred_then_every_number_is_there(self, speaker: Speaker) -> None:
        [(text, has_ended)] = speaker.answers([asked("Count from 1 to 100.")], max_tokens=400)

        assert has_ended
        assert text == ", ".join(map(str, range(1, 101))) + "."

    @pytest.mark.long
    def test_when_it_counts_to_a_thousand_then_its_first_600_tokens_are_right(self, speaker: Speaker) -> None:
        [(text, _)] = speaker.answers([asked("Count from 1 to 1000.")], max_tokens=600)

        assert text.startswith(", ".join(map(str, range(1, 160))))

    @pytest.mark.long
    def test_when_it_writes_ten_chapters_then_all_are_there(self, speaker: Speaker) -> None:
        [(text, has_ended)] = speaker.answers([asked("Tell a long story about a fox.")], max_tokens=1000)

        assert has_ended
        assert text.count("Chapter ") == stories.LONG_CHAPTERS


class TestGivenTheTrainingModel:
    """The decoder that is trained is the model that transformers loads."""

    def test_when_both_read_a_text_then_their_logits_agree(self, speaker: Speaker, tokenizer: Tokenizer) -> None:
        decoder = Decoder(Shape())
        load_weights(decoder, FOLDER)
        maker = DocumentMaker(tokenizer)
        document = maker.conversation([each for each in held_out(Kind.JSON, 20) if not each.is_plain][:1])
        rows = lay_out([[document]], len(document))

        with torch.no_grad():
            hidden = decoder(rows.token_ids, rows.positions, rows.mask).float()
            logits = hidden @ decoder.embed_tokens.weight.t()
            expected = speaker.model(rows.token_ids).logits

        difference = (logits - expected).abs().mean() / expected.abs().mean()
        assert difference < 0.02

    @pytest.mark.slow
    def test_when_it_learns_a_few_steps_then_the_loss_falls(self, tokenizer: Tokenizer) -> None:
        shape = Shape(hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)
        trainer = Trainer(shape, compiled=False)
        documents = [
            DocumentMaker(tokenizer).conversation([each]) for each in held_out(Kind.ARITHMETIC, 16) if not each.is_plain
        ]
        rows = lay_out([[each] for each in documents], 128)

        losses = [trainer.step([rows], progress=0.0) for _ in range(12)]

        assert losses[-1] < losses[0]
