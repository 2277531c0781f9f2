"""The noise's definition: known bits, and what its transform promises."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math

import pytest
import torch

from sluice.kernels.philox import counter_2
from sluice.kernels.philox.reference import gumbel_reference, philox4x32_reference, random_words_reference
from sluice.kernels.sample import MAX_NOISE_SPAN

# From the test vectors of Random123 (Salmon et al., 2011): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


class TestGivenAKnownAnswer:
    @pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
    def test_when_philox_is_computed_then_its_words_are_those_known(
        self, counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
    ) -> None:
        c0, c1, c2, c3 = (torch.tensor(word) for word in counter)

        actual = philox4x32_reference((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))

        assert tuple(int(word) for word in actual) == words


class TestGivenAKey:
    ids = torch.arange(4000)

    def words(self, *, seed: int = 2**63 + 5, position: int = 3, choice: int = 0) -> torch.Tensor:
        return random_words_reference(self.ids, seed=seed, position=position, counter_2=counter_2(choice))

    def test_when_any_part_of_it_changes_then_so_do_nearly_all_words(self) -> None:
        others = [self.words(seed=2**63 + 6), self.words(seed=5), self.words(position=4), self.words(choice=1)]

        assert all(int((other == self.words()).sum()) <= 1 for other in others)

    def test_when_tokens_are_asked_for_apart_then_their_words_are_the_same(self) -> None:
        some = torch.tensor([3999, 0, 17])

        apart = random_words_reference(some, seed=2**63 + 5, position=3, counter_2=counter_2(0))

        assert torch.equal(apart, self.words()[some])

    def test_when_choices_differ_then_so_do_their_counters(self) -> None:
        counters = [counter_2(choice) for choice in range(3)]

        assert counters == [0, 4, 8]  # of every job that has been generated: a resumed output continues identically


class TestGivenTheGumbelTransform:
    def test_when_words_are_extreme_then_noise_is_finite_and_within_the_span(self) -> None:
        noise = gumbel_reference(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))

        assert noise.isfinite().all()
        assert float(noise.max() - noise.min()) < MAX_NOISE_SPAN

    def test_when_words_grow_then_noise_falls(self) -> None:
        noise = gumbel_reference(torch.arange(0, 2**32, 2**24 + 1))

        assert bool((noise.diff() < 0).all())

    def test_when_many_are_drawn_then_mean_and_variance_are_gumbels(self) -> None:
        words = random_words_reference(torch.arange(200_000), seed=11, position=0, counter_2=0)
        noise = gumbel_reference(words).double()

        # Gumbel: mean Euler's constant, variance pi^2 / 6; five standard errors.
        assert abs(float(noise.mean()) - 0.5772157) < 5 * 1.2825 / math.sqrt(200_000)
        assert abs(float(noise.var()) - math.pi**2 / 6) < 0.04
