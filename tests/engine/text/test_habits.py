"""What a text chooses where its grammar leaves it little choice."""

from sluice.engine.text.habits import Habits

SPACE_OR_BREAK, DIGITS = bytes([0b1010, 0, 0, 0]), bytes([0, 0xFF, 0, 0])


class TestGivenATextThatChoseOnce:
    def test_when_it_has_that_choice_again_then_the_same_token_is_likely(self) -> None:
        habits = Habits()
        habits.note(SPACE_OR_BREAK, 1)

        guess = habits.guess(SPACE_OR_BREAK)

        assert guess is not None
        assert guess.token_id == 1
        assert 0.5 < guess.probability < 1
        assert habits.guess(DIGITS) is None

    def test_when_the_mask_is_that_of_free_text_then_nothing_is_known(self) -> None:
        habits = Habits()
        wide = b"\1" * 64
        habits.note(wide, 8)

        assert habits.guess(wide) is None


class TestGivenATextThatChoseOften:
    def test_when_it_kept_to_a_token_then_its_guess_is_surer_than_one_of_a_text_that_changed(self) -> None:
        habits = Habits()
        for number in range(10):
            habits.note(SPACE_OR_BREAK, 3)
            habits.note(DIGITS, 8 + number % 8)

        steady, changing = habits.guess(SPACE_OR_BREAK), habits.guess(DIGITS)

        assert steady is not None
        assert changing is not None
        assert steady.probability > 0.9
        assert changing.probability < 0.2
        assert changing.token_id == 9
