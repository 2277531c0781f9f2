"""Stop strings: found wherever pieces cut them, and never shown."""

from sluice.engine.text.stopping import StopMatcher, StopStrings, prepared


def pushed(matcher: StopMatcher, *pieces: str, may_stop: bool = True) -> list[str]:
    return [matcher.push(piece, may_stop=may_stop) for piece in pieces]


class TestGivenAStopString:
    def test_when_it_comes_in_one_piece_then_the_text_ends_before_it(self) -> None:
        matcher = StopMatcher(StopStrings(("END",)))

        assert pushed(matcher, "one two END three") == ["one two "]
        assert matcher.matched == "END"

    def test_when_pieces_cut_it_then_its_beginning_is_held_back(self) -> None:
        matcher = StopMatcher(StopStrings(("END",)))

        assert pushed(matcher, "one E", "N", "D") == ["one ", "", ""]
        assert matcher.matched == "END"

    def test_when_a_beginning_turns_out_to_be_none_then_it_is_shown(self) -> None:
        matcher = StopMatcher(StopStrings(("END",)))

        assert pushed(matcher, "E", "N", "X", "E") == ["", "", "ENX", ""]
        assert matcher.matched is None
        assert matcher.release() == "E"

    def test_when_the_text_only_resembles_it_then_at_most_a_prefix_of_it_is_held_back(self) -> None:
        matcher = StopMatcher(StopStrings(("aab",)))

        assert pushed(matcher, "aaaa", "b") == ["aa", ""]
        assert matcher.matched == "aab"

    def test_when_it_is_one_character_then_nothing_is_ever_held_back(self) -> None:
        matcher = StopMatcher(StopStrings(("\n",)))

        assert pushed(matcher, "a", "b\nc") == ["a", "b"]

    def test_when_a_token_has_no_text_then_nothing_happens(self) -> None:
        matcher = StopMatcher(StopStrings(("ab",)))

        assert pushed(matcher, "a", "", "b") == ["", "", ""]
        assert matcher.matched == "ab"


class TestGivenChoicesWithTheSameStopStrings:
    def test_when_they_begin_then_these_are_prepared_once(self) -> None:
        assert prepared(("END", "\n")) is prepared(("END", "\n"))


class TestGivenSeveralStopStrings:
    def test_when_both_are_there_then_the_one_that_ends_first_counts(self) -> None:
        matcher = StopMatcher(StopStrings(("long stop", "ng")))

        assert pushed(matcher, "a long stop") == ["a lo"]
        assert matcher.matched == "ng"

    def test_when_two_end_together_then_the_one_named_first_counts(self) -> None:
        matcher = StopMatcher(StopStrings(("b", "ab")))

        assert pushed(matcher, "xab") == ["xa"]
        assert matcher.matched == "b"


class TestGivenThatItIsTooEarlyToStop:
    def test_when_a_stop_string_is_complete_then_it_is_text(self) -> None:
        matcher = StopMatcher(StopStrings(("ab",)))

        assert pushed(matcher, "xab", may_stop=False) == ["xab"]
        assert pushed(matcher, "y") == ["y"]
        assert matcher.matched is None

    def test_when_it_was_complete_within_what_is_held_back_then_it_does_not_count_later(self) -> None:
        matcher = StopMatcher(StopStrings(("bc", "abcd")))

        assert pushed(matcher, "abc", may_stop=False) == [""]
        assert pushed(matcher, "x") == ["abcx"]
        assert matcher.matched is None

    def test_when_it_began_too_early_but_ends_in_time_then_it_counts(self) -> None:
        matcher = StopMatcher(StopStrings(("ab",)))

        assert pushed(matcher, "xa", may_stop=False) == ["x"]
        assert pushed(matcher, "b") == [""]
        assert matcher.matched == "ab"
