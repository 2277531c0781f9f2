"""The tokens that end an answer, whichever part of a model folder names them."""

import json
import shutil
from pathlib import Path

import pytest

from sluice.engine.request import FinishReason, Request, Sampling
from sluice.protocol.wire import Message
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load, prepare
from sluice.worker.model.loaded_model import LocalModel
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE

END, PAD = "<|end|>", "<|pad|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose configs and tokenizer name the end of another model. Its chat template ends answers as trained."""
    folder = tmp_path / "model"
    shutil.copytree(SMALL_MODEL, folder)
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    for name in ("config.json", "generation_config.json"):
        rewrite(folder / name, eos_token_id=pad_id)
    rewrite(folder / "tokenizer_config.json", eos_token=PAD)
    return folder


def rewrite(path: Path, **values: object) -> None:
    before = path.read_text() if path.exists() else "{}"
    path.write_text(json.dumps({**json.loads(before), **values}))


def loaded(folder: Path) -> LocalModel:
    return load(load_config({"SLUICE_MODEL": str(folder)}))


def answer_of(model: LocalModel) -> FinishReason:
    """Why the answer to a question ended."""
    assert model.text.template is not None
    prompt = model.text.template.render((Message(role="user", content="What is 2 + 2?"),), now_ms=0)
    token_ids = tuple(model.encode(prompt, add_special_tokens=False))
    sampling = Sampling(temperature=0, max_tokens=60)
    model.engine.add([Request(id="r", prompt_token_ids=token_ids, sampling=sampling)])
    ends = [delta.finish for _ in range(60) for delta in model.engine.advance() if delta.finish is not None]
    return ends[0].reason


class TestGivenAFineTuneWhoseConfigsNameTheBaseModelsEnd:
    """Its answers end with its chat template's token."""

    def test_when_it_has_answered_then_the_answer_ends(self, folder: Path) -> None:
        assert answer_of(loaded(folder)) is FinishReason.STOP

    def test_when_it_is_loaded_then_each_end_is_named_with_its_sources(self, folder: Path) -> None:
        ends = loaded(folder).text.end_tokens

        assert [END in line and "chat template" in line for line in ends] == [False, True]
        assert PAD in ends[0]
        assert "generation_config.json, tokenizer" in ends[0]


class TestGivenATemplateThatEndsAnswersWithNoToken:
    def test_when_it_is_loaded_then_only_the_folders_own_ends_hold(self, folder: Path) -> None:
        template = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ raise_exception('') if false }}"
        (folder / "chat_template.jinja").write_text(template)

        assert [line.split()[0] for line in loaded(folder).text.end_tokens] == [PAD]

    def test_when_it_refuses_an_assistants_turn_then_the_model_loads(self, folder: Path) -> None:
        refusing = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        (folder / "chat_template.jinja").write_text(refusing)

        assert [line.split()[0] for line in loaded(folder).text.end_tokens] == [PAD]


class TestGivenAFineTuneWhoseMarkersAreOnlyInItsTokenizerConfig:
    """Its tokenizer.json has them as text of the vocabulary."""

    @pytest.fixture
    def fine_tune(self, tmp_path: Path) -> Path:
        """The small model in this form."""
        folder = tmp_path / "fine-tune"
        shutil.copytree(SMALL_MODEL, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        markers = {str(token.pop("id")): token for token in tokenizer["added_tokens"]}
        rewrite(folder / "tokenizer.json", added_tokens=[])
        rewrite(folder / "tokenizer_config.json", added_tokens_decoder=markers)
        return folder

    def test_when_it_chats_then_it_reads_and_ends_as_the_model_does(self, fine_tune: Path) -> None:
        model, original = loaded(fine_tune), loaded(SMALL_MODEL)
        text = "<|bos|><|user|>Hi<|end|><|assistant|>"

        assert model.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False)
        assert model.text.end_tokens == original.text.end_tokens
        assert answer_of(model) is FinishReason.STOP


class TestGivenAGgufOfGptOssThatStatesOneEnd:
    """Its chat format ends a call of a tool with another token."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """A small random model, whose tokenizer has the format's tokens."""
        pytest.importorskip("gguf")
        from gguf import GGMLQuantizationType

        from tests.engine.gguf.writing import write_model

        TINY_MODELS["gpt_oss"].save(tmp_path / "folder")
        file, control, text = tmp_path / "model.gguf", 3, 1
        ends = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"]
        letters = [*(chr(ord("!") + number) for number in range(VOCAB_SIZE - len(ends) - 1)), "!!"]
        fields = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-4o",
            "tokenizer.ggml.tokens": [*letters, *ends],
            "tokenizer.ggml.token_type": [*(text for _ in letters), *(control for _ in ends)],
            "tokenizer.ggml.merges": ["! !"],
            "tokenizer.ggml.eos_token_id": len(letters) + ends.index("<|return|>"),
        }
        write_model(tmp_path / "folder", file, GGMLQuantizationType.F32, fields)
        return file

    def test_when_it_is_loaded_then_every_end_of_its_family_ends_an_answer(self, file: Path) -> None:
        prepared = prepare(load_config({"SLUICE_MODEL": str(file), "SLUICE_DTYPE": "float32"}))

        names = [line.split()[0] for line in prepared.text.end_tokens]
        assert sorted(names) == ["<|call|>", "<|endoftext|>", "<|return|>"]
        [call] = [line for line in prepared.text.end_tokens if "call" in line]
        assert call == "<|call|> (96: family)"

    def test_when_it_samples_the_end_of_a_call_then_the_answer_ends(self, file: Path) -> None:
        model = load(load_config({"SLUICE_MODEL": str(file), "SLUICE_DTYPE": "float32"}))
        likely = Sampling(temperature=0, max_tokens=5, logit_bias={VOCAB_SIZE - 1: 100.0})

        model.engine.add([Request(id="r", prompt_token_ids=(1, 2, 3), sampling=likely)])
        ends = [delta.finish for _ in range(6) for delta in model.engine.advance() if delta.finish is not None]

        assert [(end.reason, end.stop) for end in ends] == [(FinishReason.STOP, None)]


class TestGivenATokenWithoutAnEmbedding:
    """The small model's embeddings end with its vocabulary."""

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{{ messages }}", r"SLUICE_MODEL: its eos_token is '<\|im_end\|>', which is token 1536, .* knows 1536"),
            ("{{ messages }}<|im_end|>", "its eos_token is"),
        ],
    )
    def test_when_it_is_the_end_then_it_is_refused(self, tmp_path: Path, template: str, reason: str) -> None:
        folder = tmp_path / "model"
        shutil.copytree(SMALL_MODEL, folder)
        rewrite(folder / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=template)

        with pytest.raises(ConfigError, match=reason):
            prepare(load_config({"SLUICE_MODEL": str(folder)}))

    def test_when_the_chat_template_writes_it_then_it_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(SMALL_MODEL, folder)
        rewrite(folder / "added_tokens.json", **{"<|im_start|>": 1536})
        (folder / "chat_template.jinja").write_text("<|im_start|>{{ messages }}")

        with pytest.raises(ConfigError, match=r"its chat template writes '<\|im_start\|>', which is token 1536"):
            prepare(load_config({"SLUICE_MODEL": str(folder)}))

    def test_when_only_a_prompt_may_have_it_then_the_model_loads(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(SMALL_MODEL, folder)
        rewrite(folder / "added_tokens.json", **{"[PAD]": 1536})

        assert prepare(load_config({"SLUICE_MODEL": str(folder)})).text.template is not None


class TestGivenAGenerationConfigWithAnOddEnd:
    @pytest.mark.parametrize("value", ["1", [1, None], 2**40, True])
    def test_when_it_is_loaded_then_the_field_is_named(self, folder: Path, value: object) -> None:
        rewrite(folder / "generation_config.json", eos_token_id=value)

        with pytest.raises(ConfigError, match=r"SLUICE_MODEL: generation_config.json: eos_token_id must be a token id"):
            prepare(load_config({"SLUICE_MODEL": str(folder)}))

    def test_when_it_is_none_then_the_others_count(self, folder: Path) -> None:
        rewrite(folder / "generation_config.json", eos_token_id=-1)

        assert [END in line for line in loaded(folder).text.end_tokens] == [False, True]
