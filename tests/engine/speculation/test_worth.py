"""From which probability a draft pays, learnt from the times of steps."""

from random import Random

import pytest

from sluice.engine.speculation.worth import DraftWorth


def learnt(fixed_s: float, token_s: float, sizes: list[int], *, noise: float = 0.0) -> float:
    """What is learnt from steps that take `fixed_s` and `token_s` a token, each of which yields half its tokens."""
    worth, random = DraftWorth(), Random(0)
    for size in sizes:
        taken_s = (fixed_s + token_s * size) * (1 + noise * random.random())
        worth.note(size, max(1, size // 2), taken_s, num_rows=max(1, size // 2))
    return worth.of_step(round(sum(max(1, size // 2) for size in sizes) / len(sizes))).probability


class TestGivenStepsOfDifferentSizes:
    @pytest.mark.parametrize("noise", [0.0, 0.1])
    def test_when_a_token_costs_little_then_unlikely_drafts_pay(self, noise: float) -> None:
        sizes = [Random(n).randint(1, 20) for n in range(200)]

        cheap = learnt(0.03, 0.001, sizes, noise=noise)
        dear = learnt(0.03, 0.006, sizes, noise=noise)

        # What a token costs over what the mean step takes, times what it yields, and a margin of a half.
        assert cheap == pytest.approx(1.5 * 5 * 0.001 / (0.03 + 0.001 * 10), abs=0.05)
        assert dear > 2 * cheap

    def test_when_one_step_takes_a_minute_then_it_changes_little(self) -> None:
        worth = DraftWorth()
        for number in range(200):
            worth.note(1 + number % 8, 2, 0.03 + 0.001 * (number % 8), num_rows=1)
        before = worth.of_step(1).probability
        worth.note(1, 1, 60.0, num_rows=1)

        assert worth.of_step(1).probability == pytest.approx(before, rel=0.5)


class TestGivenStepsOfOneSize:
    def test_when_the_batch_is_full_then_only_sure_drafts_pay(self) -> None:
        assert learnt(0.03, 0.001, [1] * 50) < 0.15
        assert learnt(0.03, 0.001, [256] * 50) > 0.4

    def test_when_times_differ_by_other_work_then_no_unlikely_draft_pays(self) -> None:
        worth, random = DraftWorth(), Random(0)
        found = list[float]()
        for number in range(2000):
            # Four drafts in every eighth step: the times say hardly anything of what a token costs.
            size = 64 + 4 * (number % 8 == 0)
            worth.note(size, size, (0.03 + 0.001 * size) * (1 + random.expovariate(1)), num_rows=64)
            found.append(worth.of_step(64).probability)

        # The first steps are not judged.
        assert min(found[8:]) > 0.6


class TestGivenABatchThatFillsUp:
    """One sequence was alone for a while."""

    def test_when_sixty_four_run_then_unlikely_drafts_no_longer_pay(self) -> None:
        worth = DraftWorth()
        for number in range(100):
            worth.note(1 + number % 8, 1 + number % 8, 0.03 + 0.001 * (number % 8), num_rows=1)

        alone, full = worth.of_step(1).probability, worth.of_step(64).probability

        assert alone < 0.3
        assert full == 0.95
