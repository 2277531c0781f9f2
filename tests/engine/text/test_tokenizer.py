"""A model folder's tokenizer: what is read from which file, and what is wrong with it."""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Backend
from tokenizers import models

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.detokenizer import ByteDetokenizer, PieceDetokenizer, WindowDetokenizer
from sluice.engine.text.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer
from tests.engine.vocabularies import byte_level_backend, gemma_backend, metaspace_backend, sentence_piece_backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a byte-level tokenizer."""
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"vocab_size": 400, "eos_token_id": 1})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


class TestGivenAModelFolder:
    def test_when_text_is_encoded_then_it_decodes_to_the_same(self, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        text = "the naïve fox, 日本 €"

        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
        assert tokenizer.encode_batch([text, "x"]) == [tokenizer.encode(text), tokenizer.encode("x")]

    def test_when_special_tokens_are_skipped_then_only_they_have_no_text(self, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        token_ids = tokenizer.encode("<|end|>two words")

        assert token_ids == [tokenizer.token_id("<|end|>"), tokenizer.token_id("two words")]
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == "two words"
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|end|>two words"

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
    def test_when_it_names_its_own_end_then_its_id_is_known(self, folder: Path, name: str) -> None:
        write(folder, name, {"eos_token": {"content": "<|begin|>"}})

        assert load_tokenizer(folder).facts.eos_token_id == 0

    def test_when_it_names_special_tokens_then_templates_can_use_them(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "x": 1})

        assert load_tokenizer(folder).facts.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer_config.json", {"chat_template": "TEMPLATE"}),
            (
                "tokenizer_config.json",
                {"chat_template": [{"name": "tools", "template": "X"}, {"name": "default", "template": "TEMPLATE"}]},
            ),
            ("chat_template.json", {"chat_template": "TEMPLATE"}),
        ],
    )
    def test_when_a_chat_template_is_in_any_of_its_places_then_it_is_found(
        self, folder: Path, name: str, content: object
    ) -> None:
        write(folder, name, content)

        assert load_tokenizer(folder).facts.chat_template == "TEMPLATE"

    def test_when_a_template_has_its_own_file_then_that_one_counts(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": "older"})
        (folder / "chat_template.jinja").write_text("TEMPLATE")

        assert load_tokenizer(folder).facts.chat_template == "TEMPLATE"

    def test_when_there_is_no_template_then_there_is_none(self, folder: Path) -> None:
        assert load_tokenizer(folder).facts.chat_template is None

    def test_when_the_file_says_to_cut_prompts_then_they_are_not_cut(self, tmp_path: Path) -> None:
        backend = Backend.from_str(byte_level_backend().to_str())
        backend.enable_truncation(max_length=3)
        backend.enable_padding(length=100)
        backend.save(str(tmp_path / "tokenizer.json"))

        assert 3 < len(load_tokenizer(tmp_path).encode("a prompt of some length")) < 100


class TestGivenAVocabulary:
    @pytest.mark.parametrize(
        ("backend", "kind"),
        [
            (byte_level_backend(), ByteDetokenizer),
            (sentence_piece_backend(), PieceDetokenizer),
            (gemma_backend(), PieceDetokenizer),
            (metaspace_backend(), WindowDetokenizer),
        ],
        ids=["byte-level", "sentence-piece", "gemma", "other"],
    )
    def test_when_a_text_begins_then_the_best_way_is_chosen(self, backend: Backend, kind: type) -> None:
        tokenizer = Tokenizer(backend, TokenizerFacts(special_tokens={}))

        assert isinstance(tokenizer.stream(skip_special_tokens=True), kind)


class TestGivenAFolderThatIsWrong:
    def test_when_there_is_none_then_it_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFolderError, match="is not a folder"):
            load_tokenizer(tmp_path / "absent")

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\0\1\2"])
    def test_when_the_tokenizer_is_broken_then_it_is_said(self, folder: Path, content: str) -> None:
        (folder / "tokenizer.json").write_text(content)

        with pytest.raises(ModelFolderError, match="cannot be read as a tokenizer"):
            load_tokenizer(folder)

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_when_another_file_is_broken_then_it_is_named(self, folder: Path, content: str) -> None:
        (folder / "tokenizer_config.json").write_text(content)

        with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json"):
            load_tokenizer(folder)

    @pytest.mark.parametrize("template", [5, True, {"a": 1}, [1], [["x"]], [{"name": "default", "template": 5}]])
    def test_when_the_template_of_the_config_is_no_text_then_it_is_named(self, folder: Path, template: object) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": template})

        with pytest.raises(ModelFolderError, match=r"chat_template in .* must be text, or a list"):
            load_tokenizer(folder)

    def test_when_the_template_is_no_text_then_it_is_named(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")

        with pytest.raises(ModelFolderError, match=r"chat_template\.jinja"):
            load_tokenizer(folder)

    def test_when_the_tokenizer_has_more_tokens_than_the_model_then_it_is_refused(self, folder: Path) -> None:
        write(folder, "config.json", {"vocab_size": 100})

        with pytest.raises(ModelFolderError, match=r"330 tokens .* knows 100"):
            load_tokenizer(folder)

    @pytest.mark.slow
    def test_when_there_is_no_tokenizer_at_all_then_it_is_said(self, tmp_path: Path) -> None:
        write(tmp_path, "config.json", {"model_type": "llama", "vocab_size": 10})

        with pytest.raises(ModelFolderError, match=r"has no tokenizer\.json"):
            load_tokenizer(tmp_path)


class TestGivenAnOlderFolder:
    """One with vocab.json and merges.txt, and no tokenizer.json."""

    @pytest.mark.slow
    def test_when_it_is_loaded_then_its_tokenizer_is_converted(self, tmp_path: Path) -> None:
        model = Backend.from_str(byte_level_backend().to_str()).model
        assert isinstance(model, models.BPE)
        model.save(str(tmp_path))
        write(tmp_path, "config.json", {"model_type": "gpt2", "vocab_size": 400})

        tokenizer = load_tokenizer(tmp_path)

        assert tokenizer.decode(tokenizer.encode("the fox"), skip_special_tokens=True) == "the fox"


class TestGivenAFreshInterpreter:
    def test_when_a_tokenizer_is_loaded_then_neither_torch_nor_transformers_is(self, folder: Path) -> None:
        code = (
            "import sys, pathlib; from sluice.engine.text.tokenizer import load_tokenizer; "
            f"load_tokenizer(pathlib.Path({str(folder)!r})); print({{'torch', 'transformers'}} & set(sys.modules))"
        )

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert done.stdout.strip() == "set()", done.stderr


class TestGivenAFolderWithOnlyATokenizerModel:
    """Llama 2's form: the file that SentencePiece trains."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A model folder without tokenizer.json."""
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("the naïve fox saw two words and 日本\n" * 50)
        SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=320,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
        write(tmp_path, "config.json", {"model_type": "llama", "vocab_size": 320})
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        write(tmp_path, "tokenizer_config.json", special | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
        return tmp_path

    def test_when_text_is_encoded_then_it_is_as_sentencepiece_does(self, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        trained = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

        # Not with a space first: transformers adds none before it, sentencepiece does.
        for text in ("two naïve words", "the  fox", "日本 🙂\nfox", "unseen: Größe"):
            assert tokenizer.encode(text, add_special_tokens=False) == trained.encode(text)
            assert tokenizer.encode(text)[0] == trained.bos_id()
            assert tokenizer.decode(trained.encode(text), skip_special_tokens=True) == text
