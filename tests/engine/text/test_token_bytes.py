"""Bytes of single tokens, of each kind of vocabulary."""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

import pytest
from tokenizers import Tokenizer as Backend

from sluice.engine.executor import TextDecoder
from sluice.engine.text.logprobs import bytes_reader
from sluice.engine.text.tokenizer import Tokenizer, TokenizerFacts
from tests.engine.vocabularies import byte_level_backend, gemma_backend, metaspace_backend, sentence_piece_backend

TEXT = "the fox, é 😀 日本語"


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, TokenizerFacts(special_tokens={}))


def bytes_of(tokenizer: Tokenizer, token: str) -> bytes | None:
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    return tokenizer.token_bytes(token_id)


class TestGivenAByteLevelVocabulary:
    def test_when_a_character_has_several_tokens_then_their_bytes_are_it(self) -> None:
        tokenizer = tokenizer_of(byte_level_backend())
        token_ids = tokenizer.encode("😁", add_special_tokens=False)

        pieces = [tokenizer.token_bytes(token_id) or b"" for token_id in token_ids]

        assert len(pieces) > 1
        assert b"".join(pieces).decode() == "😁"

    def test_when_a_token_is_special_then_it_is_its_text(self) -> None:
        tokenizer = tokenizer_of(byte_level_backend())

        assert [bytes_of(tokenizer, token) for token in ("<|end|>", "<|é|>")] == [b"<|end|>", "<|é|>".encode()]


class TestGivenASentencePieceVocabulary:
    def test_when_tokens_are_words_or_bytes_then_so_are_their_bytes(self) -> None:
        tokenizer = tokenizer_of(sentence_piece_backend())

        assert [bytes_of(tokenizer, token) for token in ("▁fox", "<0xE2>", "é")] == [b" fox", b"\xe2", "é".encode()]
        assert bytes_of(tokenizer, "</s>") == b"</s>"


@pytest.mark.parametrize(
    "backend",
    [byte_level_backend(), sentence_piece_backend(), gemma_backend()],
    ids=["byte-level", "sentence-piece", "gemma"],
)
class TestGivenAText:
    def test_when_the_bytes_of_its_tokens_are_joined_then_they_are_the_text(self, backend: Backend) -> None:
        tokenizer = tokenizer_of(backend)
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False)

        joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in token_ids)

        # SentencePiece puts a space before the first word, which the text of a choice leaves out.
        assert joined.decode().removeprefix(" ") == TEXT

    def test_when_an_id_is_unknown_then_it_has_none(self, backend: Backend) -> None:
        assert tokenizer_of(backend).token_bytes(10**6) is None


class TestGivenAnotherDecoder:
    def test_when_a_token_is_read_alone_then_its_text_is_what_the_decoder_says(self) -> None:
        tokenizer = tokenizer_of(metaspace_backend())

        assert [bytes_of(tokenizer, token) for token in ("three", "[END]")] == [b"three", b"[END]"]

    def test_when_it_has_no_bytes_then_its_text_is_taken(self) -> None:
        class Letters(TextDecoder):
            def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
                return "".join(map(chr, token_ids))

        assert bytes_reader(Letters())(233) == "é".encode()
