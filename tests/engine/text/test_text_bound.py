"""The most text that one token stands for: never too little, and None where nothing bounds it."""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sluice.engine.text.text_bound import max_token_bytes
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL
from tests.engine.vocabularies import byte_level_backend, metaspace_backend, sentence_piece_backend


def changed(change: Callable[[Backend], object]) -> Backend:
    backend = deepcopy(byte_level_backend())
    change(backend)
    return backend


def with_nfc() -> Backend:
    return changed(lambda backend: setattr(backend, "normalizer", normalizers.NFC()))


def small_model() -> Backend:
    return Backend.from_file(str(SMALL_MODEL / "tokenizer.json"))


class TestGivenAVocabularyWithATokenForEveryByte:
    @pytest.mark.parametrize("make", [byte_level_backend, sentence_piece_backend, with_nfc, small_model])
    @given(
        text=st.text() | st.text("e\N{COMBINING ACUTE ACCENT}\N{KELVIN SIGN} \N{HANGUL CHOSEONG KIYEOK}\u1161\u11a8")
    )
    def test_when_text_is_encoded_then_no_token_exceeds_the_bound(self, make: Callable[[], Backend], text: str) -> None:
        backend = make()
        bound = max_token_bytes(backend)

        num_tokens = len(backend.encode(text, add_special_tokens=False).ids)

        assert bound is not None
        assert len(text.encode()) <= bound * num_tokens

    def test_when_it_is_the_small_models_then_it_is_its_longest_token(self) -> None:
        assert load_tokenizer(SMALL_MODEL).max_token_bytes == 13


class TestGivenATokenizerThatDropsOrJoinsText:
    @pytest.mark.parametrize(
        "backend",
        [
            pytest.param(metaspace_backend(), id="unknown words"),
            pytest.param(changed(lambda one: setattr(one, "model", models.BPE())), id="bytes without a token"),
            pytest.param(changed(lambda one: setattr(one, "normalizer", normalizers.Strip())), id="strip"),
            pytest.param(changed(lambda one: setattr(one, "normalizer", normalizers.Replace(" ", ""))), id="removal"),
            pytest.param(
                changed(
                    lambda one: setattr(
                        one,
                        "pre_tokenizer",
                        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
                    )
                ),
                id="removed separators",
            ),
            pytest.param(changed(lambda one: one.add_tokens([AddedToken("<m>", lstrip=True)])), id="strips spaces"),
        ],
    )
    def test_when_asked_then_there_is_no_bound(self, backend: Backend) -> None:
        assert max_token_bytes(backend) is None
