"""How pages write numbers, times, options and text of others."""

import time

import pytest

from sluice.gateway.ui.formats import ago, money, plain, visible
from sluice.producer.timeline.durations import DASH


class TestGivenAnAmount:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, DASH), (0.0, "0.00 EUR"), (0.5, "0.50 EUR"), (0.096, "0.0960 EUR"), (1234.5, "1,234.50 EUR")],
    )
    def test_when_it_is_shown_then_small_ones_have_more_digits(self, value: float | None, text: str) -> None:
        assert money(value, "EUR") == text


class TestGivenATime:
    @pytest.mark.parametrize(
        ("age_s", "text"),
        [(0.2, "0 s ago"), (59.5, "59 s ago"), (119, "1 m ago"), (7300, "2 h ago"), (1e6, "11 d ago")],
    )
    def test_when_it_is_shown_then_its_age_has_one_unit(self, age_s: float, text: str) -> None:
        assert ago(round((time.time() - age_s) * 1000)) == text


class TestGivenATextOfOthers:
    def test_when_characters_act_then_each_is_replaced_by_one_that_shows(self) -> None:
        acting = [chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202E, 0x2066)]

        shown = str(visible("".join(acting)))

        assert len(shown) == len(acting)
        assert shown.isprintable()

    def test_when_it_has_lines_and_other_scripts_then_they_stay(self) -> None:
        assert visible("a\tb\n\u05d0\u2028é😀") == "a\tb\n\u05d0\u2028é😀"


class TestGivenAnOption:
    @pytest.mark.parametrize(
        ("value", "text"), [("a\nb", "a\nb"), (("\n",), '["\\n"]'), (None, "null"), (True, "true")]
    )
    def test_when_it_is_shown_then_it_is_as_json_has_it(self, value: object, text: str) -> None:
        assert plain(value) == text
