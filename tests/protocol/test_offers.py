"""The text in which a heartbeat publishes what an engine can run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.limits import MAX_OFFER_BYTES
from sluice.protocol.offers import Offer

names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40)
listed = st.lists(names, max_size=5).map(tuple)
plain = st.lists(st.from_regex("[a-z0-9_-]{1,20}", fullmatch=True), max_size=5).map(tuple)


def offer(**said: object) -> Offer:
    usual = {
        "engine": "other 1.0",
        "exactness": "bitwise",
        "features": (),
        "refused": (),
        "families": (),
        "weights": (),
    }
    return Offer(**(usual | said))  # pyright: ignore[reportArgumentType]  # fields by name


class TestGivenAnOffer:
    @given(features=plain, refused=plain, families=plain, weights=plain)
    def test_when_its_text_is_read_then_it_is_the_same(self, **said: tuple[str, ...]) -> None:
        made = offer(exactness="same tokens", **said)

        assert Offer.read(str(made)) == made

    @given(engine=names, features=listed, refused=listed, families=st.lists(names, max_size=300).map(tuple))
    def test_when_a_name_has_any_text_then_it_takes_no_other_field(
        self, engine: str, features: tuple[str, ...], refused: tuple[str, ...], families: tuple[str, ...]
    ) -> None:
        text = str(offer(engine=engine, features=features, refused=refused, families=families))

        read = Offer.read(text)
        assert (read.exactness, read.weights) == ("bitwise", ())
        assert "\n" not in text

    def test_when_it_has_many_families_then_the_last_ones_are_left_out(self) -> None:
        families = tuple(f"family{number}" for number in range(500))

        read = Offer.read(str(offer(families=families, weights=("plain",))))

        assert len(str(offer(families=families)).encode()) <= MAX_OFFER_BYTES
        assert read.families[:50] == families[:50]
        assert (read.families[-1], read.weights) == ("…", ("plain",))


class TestGivenAForeignText:
    @given(st.text())
    def test_when_it_is_read_then_it_is_some_offer(self, text: str) -> None:
        assert isinstance(Offer.read(text), Offer)

    @pytest.mark.parametrize("about", [{}, {"offer": ""}])
    def test_when_a_heartbeat_has_none_then_there_is_none(self, about: dict[str, str]) -> None:
        assert Offer.of(about) is None
