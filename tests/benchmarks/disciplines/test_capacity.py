"""The search for the largest rate."""

from benchmarks.disciplines.capacity import largest_rate


class TestGivenARateThatIsSearched:
    def test_when_there_is_a_largest_one_then_it_is_found_within_the_tolerance(self) -> None:
        assert 9.5 <= largest_rate(lambda rate: rate <= 10.0, low=0.1, high=1000.0) <= 10.0

    def test_when_none_or_all_are_borne_then_the_end_of_the_range_is_the_answer(self) -> None:
        assert largest_rate(lambda rate: False, low=0.1, high=10.0) == 0.0
        assert largest_rate(lambda rate: True, low=0.1, high=10.0) == 10.0
