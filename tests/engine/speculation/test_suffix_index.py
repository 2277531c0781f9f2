"""The index of earlier occurrences against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.speculation.suffix_index import MAX_MATCH, MIN_MATCH, Match, SuffixIndex

SIZE = 256
texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=700),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=60).map(lambda part: part * 12),
)


def index_of(text: list[int], *, chunk: int = 10_000) -> SuffixIndex:
    """An index that has got `text` in chunks, and compares every place."""
    index = SuffixIndex(max_size=SIZE, max_candidates=SIZE)
    for start in range(0, len(text), chunk):
        index.extend(text[start : start + chunk])
    return index


def longest_in(known: list[int], text: list[int]) -> Match | None:
    """The latest of the longest occurrences of the end of `text` in the last tokens of `known`."""
    first = max(0, len(known) - SIZE)
    best: Match | None = None
    for place in range(first + MIN_MATCH, len(known)):
        length = 0
        most = min(MAX_MATCH, place - first, len(text))
        while length < most and known[place - 1 - length] == text[-1 - length]:
            length += 1
        if length >= max(MIN_MATCH, best.length if best is not None else 0):
            best = Match(place, length)
    return best


class TestGivenAText:
    """Longer and shorter than what the index keeps, with few tokens or with many."""

    @given(texts.filter(lambda text: len(text) >= MIN_MATCH), st.integers(1, 300))
    def test_when_its_end_is_searched_then_the_longest_occurrence_is_found(self, text: list[int], chunk: int) -> None:
        index = index_of(text, chunk=chunk)

        assert index.find(text, index.key) == longest_in(text, text)

    @given(texts, texts.filter(lambda text: len(text) >= MIN_MATCH))
    def test_when_another_text_is_searched_in_it_then_the_longest_occurrence_is_found(
        self, known: list[int], text: list[int]
    ) -> None:
        index = index_of(known)

        assert index.find(text, index_of(text).key) == longest_in(known, text)

    @given(texts, st.integers(0, 700), st.integers(1, 40))
    def test_when_tokens_are_read_then_they_are_those_of_the_text(
        self, text: list[int], place: int, count: int
    ) -> None:
        index = index_of(text)

        is_kept = max(0, len(text) - SIZE) + MIN_MATCH <= place < len(text)
        assert index.has(place) == is_kept
        if is_kept:
            assert index.tokens(place, count) == tuple(text[place : place + count])
            assert index.token(place) == text[place]

    def test_when_it_has_grown_then_a_token_takes_at_most_forty_bytes(self) -> None:
        index = SuffixIndex(max_size=2**15)
        index.extend(range(20_000))

        assert index.num_bytes <= 40 * 20_000
