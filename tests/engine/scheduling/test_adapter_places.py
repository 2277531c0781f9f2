"""Places of adapters, of which each running sequence has one or none."""

from sluice.engine.request import Sampling
from sluice.engine.scheduling.adapter_places import AdapterPlaces
from sluice.engine.sequence import Sequence


def sequence_with(adapter: str) -> Sequence:
    return Sequence(
        id=0,
        request_id=adapter,
        choice=0,
        sampling=Sampling(),
        adapter=adapter,
        token_ids=[1],
        num_prompt_tokens=1,
    )


class TestGivenTwoPlaces:
    def test_when_both_are_in_use_then_only_their_adapters_and_none_have_room(self) -> None:
        places = AdapterPlaces(2)
        held = [sequence_with(name) for name in ("a", "b", "a")]
        for sequence in held:
            places.hold(sequence)

        assert [places.has_room(sequence_with(name)) for name in ("a", "b", "", "c")] == [True, True, True, False]
        assert [sequence.adapter_place for sequence in held] == [0, 1, 0]
        places.check_invariants(held)

    def test_when_one_is_released_then_it_stays_until_another_needs_its_place(self) -> None:
        places = AdapterPlaces(2)
        first, second = sequence_with("a"), sequence_with("b")
        places.hold(first)
        places.hold(second)
        places.release(first)
        again, other = sequence_with("a"), sequence_with("c")

        places.hold(again)
        places.release(again)
        places.hold(other)

        assert (again.adapter_place, other.adapter_place, second.adapter_place) == (-1, 0, 1)
        places.check_invariants([second, other])

    def test_when_none_is_in_use_then_the_least_recently_used_leaves(self) -> None:
        places = AdapterPlaces(2)
        for name in ("a", "b", "a"):
            sequence = sequence_with(name)
            places.hold(sequence)
            places.release(sequence)
        other, last = sequence_with("c"), sequence_with("a")

        places.hold(other)
        places.hold(last)

        assert (other.adapter_place, last.adapter_place) == (1, 0)


class TestGivenNoPlaces:
    def test_when_a_sequence_has_no_adapter_then_it_needs_none(self) -> None:
        places, sequence = AdapterPlaces(0), sequence_with("")

        places.hold(sequence)
        places.release(sequence)

        assert places.has_room(sequence)
        assert sequence.adapter_place == -1
