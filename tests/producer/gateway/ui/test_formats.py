"""How pages write numbers and options."""

import pytest

from sluice.producer.gateway.ui.formats import money, plain
from sluice.producer.timeline.durations import DASH


class TestGivenAnAmount:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, DASH), (0.0, "0.00 EUR"), (0.5, "0.50 EUR"), (0.096, "0.0960 EUR"), (1234.5, "1,234.50 EUR")],
    )
    def test_when_it_is_shown_then_small_ones_have_more_digits(self, value: float | None, text: str) -> None:
        assert money(value, "EUR") == text


class TestGivenAnOption:
    @pytest.mark.parametrize(
        ("value", "text"), [("a\nb", "a\nb"), (("\n",), '["\\n"]'), (None, "null"), (True, "true")]
    )
    def test_when_it_is_shown_then_it_is_as_json_has_it(self, value: object, text: str) -> None:
        assert plain(value) == text
