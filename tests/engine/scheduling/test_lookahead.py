"""For how many steps ahead room is offered."""

from sluice.engine.scheduling.lookahead import MAX_STEPS, Lookahead


def lookahead(seconds: float, *steps_s: float) -> Lookahead:
    ahead = Lookahead()
    ahead.seconds = seconds
    for taken_s in steps_s:
        ahead.note_step(taken_s)
    return ahead


class TestGivenAPullThatTakesSeconds:
    def test_when_no_step_was_measured_then_the_next_one_is_looked_at(self) -> None:
        assert lookahead(5.0).num_steps == 1

    def test_when_a_step_takes_longer_then_the_next_one_is_looked_at(self) -> None:
        assert lookahead(0.006, 0.1, 0.1).num_steps == 1

    def test_when_steps_are_shorter_then_those_that_a_pull_takes_and_one_are(self) -> None:
        assert lookahead(0.006, 0.005, 0.005).num_steps == 2
        assert lookahead(0.006, 0.0025).num_steps == 3

    def test_when_steps_are_very_short_then_there_is_a_limit(self) -> None:
        assert lookahead(0.1, 1e-5).num_steps == MAX_STEPS

    def test_when_steps_become_slower_then_fewer_are(self) -> None:
        assert lookahead(0.006, 0.001, *[0.01] * 50).num_steps == 1
