"""Tokens to text, one at a time."""

import pytest

from sluice.engine.null_model import NullTokenizer
from sluice.engine.text.detokenizer import ByteDetokenizer, PieceDetokenizer, WindowDetokenizer, stream_opener

BYTES: dict[int, str | bytes] = {byte: chr(byte) if byte < 128 else bytes([byte]) for byte in range(256)}
EURO = "€".encode()


class WordDecoder:
    """Words by number; a space before each but the first. A special word is 9."""

    words = ("one", "two", "three")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [token_id for token_id in token_ids if not (skip_special_tokens and token_id == 9)]
        return " ".join("<end>" if token_id == 9 else self.words[token_id] for token_id in kept)


class RawDecoder:
    """Bytes, without a separate stream."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


class SkippingDecoder(RawDecoder):
    """Bytes; 0 is a special token without text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return super().decode([one for one in token_ids if one], skip_special_tokens=skip_special_tokens)


class TestGivenBytes:
    def test_when_a_character_is_open_then_it_is_held_back_until_it_is_whole(self) -> None:
        stream = ByteDetokenizer(BYTES)

        assert [stream.push(byte) for byte in b"a" + EURO + b"b"] == ["a", "", "", "€", "b"]

    def test_when_bytes_can_become_no_character_then_they_are_replaced_at_once(self) -> None:
        stream = ByteDetokenizer(BYTES)

        assert [stream.push(byte) for byte in b"\xffa"] == ["\ufffd", "a"]

    def test_when_a_character_is_broken_off_by_a_letter_then_both_show(self) -> None:
        stream = ByteDetokenizer(BYTES)

        assert [stream.push(byte) for byte in EURO[:2] + b"a"] == ["", "", "\ufffda"]

    def test_when_the_end_comes_within_a_character_then_it_is_replaced(self) -> None:
        stream = ByteDetokenizer(BYTES)

        assert [stream.push(byte) for byte in EURO[:2]] == ["", ""]
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    def test_when_a_token_spans_two_characters_then_the_first_is_shown(
        self,
    ) -> None:
        stream = ByteDetokenizer({0: EURO[:1], 1: EURO[1:] + EURO[:2], 2: EURO[2:]})

        assert [stream.push(token_id) for token_id in (0, 1, 2)] == ["", "€", "€"]


PIECES: dict[int, str | int] = {0: " a", 1: "b", 2: "", **{byte: byte for byte in (10, 32, *range(128, 256))}}


class TestGivenPiecesAndSingleBytes:
    @pytest.mark.parametrize(("strips", "expected"), [(True, ["", "a", " a"]), (False, ["", " a", " a"])])
    def test_when_the_text_begins_with_a_space_then_one_is_dropped_if_asked(
        self, strips: bool, expected: list[str]
    ) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=strips)

        assert [stream.push(token_id) for token_id in (2, 0, 0)] == expected

    def test_when_bytes_form_a_character_then_it_shows_at_once(self) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=True)

        assert [stream.push(token_id) for token_id in (1, *EURO, 10, 1)] == ["b", "", "", "€", "\n", "b"]

    def test_when_a_space_is_a_byte_then_it_is_dropped_as_any_other(self) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=True)

        assert [stream.push(token_id) for token_id in (32, 32, 0)] == ["", " ", " a"]

    def test_when_a_token_without_text_comes_within_a_run_then_the_run_continues(self) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=True)

        assert [stream.push(token_id) for token_id in (EURO[0], 2, *EURO[1:])] == ["", "", "", "€"]
        assert stream.flush() == ""

    @pytest.mark.parametrize(
        ("token_ids", "expected"),
        [
            ((*EURO, 0xFF, *EURO, 1), ["", "", "€", "\ufffd", "", "", "€", "b"]),
            ((*EURO[:2], 0xFF, 1), ["", "", "\ufffd" * 3, "b"]),
            ((*EURO[:2], 10), ["", "", "\ufffd" * 2 + "\n"]),
            ((*EURO[:2], *EURO), ["", "", "\ufffd" * 2, "", "€"]),
            ((*EURO[:2], 2, 1), ["", "", "", "\ufffd" * 2 + "b"]),
            ((0xED, 0xA0, 0x80), ["", "", "\ufffd" * 3]),
        ],
        ids=["invalid", "within", "line-break", "another", "piece", "surrogate"],
    )
    def test_when_bytes_can_become_no_character_then_each_is_replaced_at_once(
        self, token_ids: tuple[int, ...], expected: list[str]
    ) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=True)

        assert [stream.push(token_id) for token_id in token_ids] == expected
        assert stream.flush() == ""

    def test_when_the_end_comes_within_a_character_then_each_byte_is_replaced(self) -> None:
        stream = PieceDetokenizer(PIECES, strips_first_space=True)

        assert [stream.push(token_id) for token_id in EURO[:2]] == ["", ""]
        assert stream.flush() == "\ufffd" * 2


class TestGivenADecoderOfItsOwnKind:
    def test_when_it_joins_words_then_each_comes_with_what_joins_it(self) -> None:
        stream = WindowDetokenizer(WordDecoder(), skip_special_tokens=True)

        assert [stream.push(token_id) for token_id in (0, 1, 2, 0)] == ["one", " two", " three", " one"]

    def test_when_it_follows_other_words_then_it_is_joined_to_them(self) -> None:
        stream = WindowDetokenizer(WordDecoder(), skip_special_tokens=True, after=(0, 9))

        assert [stream.push(token_id) for token_id in (1, 2)] == [" two", " three"]

    def test_when_it_follows_a_part_of_a_character_then_it_begins_anew(self) -> None:
        stream = WindowDetokenizer(RawDecoder(), skip_special_tokens=True, after=EURO[:2])

        assert [stream.push(byte) for byte in b"ab"] == ["a", "b"]

    def test_when_tokens_without_text_come_without_end_then_the_window_stays_small(self) -> None:
        decoded: list[int] = []

        class CountingDecoder(WordDecoder):
            def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
                decoded.append(len(token_ids))
                return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

        stream = WindowDetokenizer(CountingDecoder(), skip_special_tokens=True)
        texts = [stream.push(token_id) for token_id in (0, *[9] * 100, 1)]

        assert max(decoded) < 10
        assert "".join(texts) == "one two"

    def test_when_bytes_never_become_a_character_then_they_show_after_four(self) -> None:
        stream = WindowDetokenizer(RawDecoder(), skip_special_tokens=True)

        texts = [stream.push(0xFF) for _ in range(8)]

        assert texts == ["", "", "", "\ufffd" * 4] * 2

    @pytest.mark.parametrize("place", range(4))
    def test_when_special_tokens_come_before_or_within_a_character_then_it_is_whole(self, place: int) -> None:
        stream = WindowDetokenizer(SkippingDecoder(), skip_special_tokens=True)
        emoji = "😀".encode()

        texts = [stream.push(token_id) for token_id in (*emoji[:place], 0, 0, *emoji[place:])]

        assert texts == ["", "", "", "", "", "😀"]

    def test_when_special_tokens_fill_a_character_then_the_window_stays_small(self) -> None:
        decoded: list[int] = []

        class CountingDecoder(SkippingDecoder):
            def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
                decoded.append(len(token_ids))
                return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

        stream = WindowDetokenizer(CountingDecoder(), skip_special_tokens=True)
        texts = [stream.push(token_id) for token_id in (EURO[0], *[0] * 100, *EURO[1:])]

        assert max(decoded) < 10
        assert "".join(texts) == "€"

    def test_when_a_character_is_open_at_the_end_then_it_is_released(self) -> None:
        stream = WindowDetokenizer(RawDecoder(), skip_special_tokens=True)

        assert [stream.push(byte) for byte in b"a" + EURO[:2]] == ["a", "", ""]
        assert stream.flush() == "\ufffd"


class TestGivenADecoder:
    def test_when_it_can_stream_then_its_own_way_is_taken(self) -> None:
        assert isinstance(stream_opener(NullTokenizer())(True, ()), ByteDetokenizer)

    def test_when_it_cannot_then_windows_are_decoded(self) -> None:
        assert isinstance(stream_opener(WordDecoder())(True, ()), WindowDetokenizer)
