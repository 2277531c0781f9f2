"""Sampling on the CPU against its reference, on every path: exactly the same tokens."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice.kernels.philox import counter_2
from sluice.kernels.sample import SampleOptions, draws_with, sample
from sluice.kernels.sample.reference import kept_set_reference, sample_reference

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one row is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 0
    choice: int = 0


def options_of(rows: Sequence[Row]) -> SampleOptions:
    return SampleOptions(
        temperature=torch.tensor([row.temperature for row in rows]),
        top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        top_p=torch.tensor([row.top_p for row in rows]),
        min_p=torch.tensor([row.min_p for row in rows]),
        seed=torch.tensor([row.seed for row in rows], dtype=torch.uint64).view(torch.int64),
        position=torch.tensor([row.position for row in rows], dtype=torch.int32),
        counter_2=torch.tensor([counter_2(row.choice) for row in rows]),
    )


FILTERS = (
    Row(),
    Row(temperature=0.0),
    Row(temperature=0.3),
    Row(temperature=5.0),
    Row(top_k=1),
    Row(top_k=7),
    Row(top_p=0.5),
    Row(top_p=0.95, temperature=2.0),
    Row(min_p=0.1),
    Row(min_p=1.0),
    Row(top_k=20, top_p=0.8, min_p=0.01),
    Row(top_k=300, temperature=2.0),
    Row(top_p=0.999, temperature=10.0),
    Row(top_k=10_000, top_p=1e-6),
)


def logits_of(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


@pytest.mark.usefixtures("path")
class TestGivenRowsWithEveryFilter:
    @pytest.mark.parametrize("vocab_size", [1, 5, 16, 97, 1000, 20_003])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
    def test_when_they_are_sampled_together_then_tokens_equal_the_reference(
        self, vocab_size: int, dtype: torch.dtype, spread: float
    ) -> None:
        rows = [replace(row, seed=2**64 - 1 - i, position=i) for i, row in enumerate(FILTERS)]
        logits = logits_of(len(rows), vocab_size, spread=spread).to(dtype)

        tokens = sample(logits, options_of(rows))

        assert tokens.tolist() == sample_reference(logits, options_of(rows)).tolist()

    def test_when_logits_tie_then_tokens_equal_the_reference(self) -> None:
        rows = [replace(row, seed=i) for i, row in enumerate(FILTERS * 4)]
        logits = (logits_of(len(rows), 300) * 2).round() / 8

        assert sample(logits, options_of(rows)).tolist() == sample_reference(logits, options_of(rows)).tolist()

    def test_when_a_row_is_sampled_alone_then_its_token_is_the_same(self) -> None:
        logits = logits_of(len(FILTERS), 500)

        together = sample(logits, options_of(FILTERS)).tolist()

        alone = [int(sample(logits[i : i + 1], options_of([row]))) for i, row in enumerate(FILTERS)]
        assert alone == together

    def test_when_rows_are_sampled_step_after_step_then_tokens_equal_the_reference(self) -> None:
        options = options_of([replace(row, seed=i) for i, row in enumerate(FILTERS)])
        draw = draws_with(options)
        before: tuple[Tensor, list[int]] | None = None

        for step, dtype in enumerate([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]):
            options.position.fill_(step)
            logits = logits_of(len(FILTERS), 500, seed=step).to(dtype)
            tokens = draw(logits)

            expected = sample_reference(logits, options).tolist()
            assert tokens.tolist() == expected
            if before is not None:
                assert before[0].tolist() == before[1], "a step in flight lost what it had drawn"
            before = tokens, expected

    def test_when_there_are_other_rows_than_options_then_it_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"logits|options"):
            draws_with(options_of(FILTERS))(logits_of(len(FILTERS) + 1, 50))

    def test_when_rows_lie_in_a_wider_buffer_then_what_is_beside_them_is_not_read(self) -> None:
        buffer = torch.full((len(FILTERS), 340), NAN)
        buffer[:, 7:310] = logits_of(len(FILTERS), 303)
        view = buffer[:, 7:310]

        tokens = sample(view, options_of(FILTERS))

        assert tokens.tolist() == sample_reference(view.clone(), options_of(FILTERS)).tolist()


@pytest.mark.usefixtures("path")
class TestGivenBadRows:
    @pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0], [-INF, -INF, -INF], [1.0, INF, 2.0], [-INF, NAN, -INF]])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_when_they_have_neighbours_then_only_they_yield_no_token(
        self, bad: list[float], temperature: float
    ) -> None:
        logits = torch.full((3, 40), -1.0)
        logits[:, 5] = 3.0
        logits[1] = -INF
        logits[1, 20:23] = torch.tensor(bad)
        rows = [Row(temperature=temperature, top_k=1)] * 3

        assert sample(logits, options_of(rows)).tolist() == [5, -1, 5]

    def test_when_all_but_one_token_are_masked_then_it_is_drawn(self) -> None:
        logits = torch.full((len(FILTERS), 40), -INF)
        logits[:, 33] = -7.0

        assert sample(logits, options_of(FILTERS)).tolist() == [33] * len(FILTERS)


class TestGivenEqualLogits:
    @pytest.mark.usefixtures("path")
    @pytest.mark.parametrize("vocab_size", [3, 40])
    def test_when_sampled_greedily_then_the_lowest_id_is_taken(self, vocab_size: int) -> None:
        logits = torch.zeros(1, vocab_size)
        logits[0, vocab_size - 2 :] = 1.0

        assert int(sample(logits, options_of([Row(temperature=0.0)]))) == vocab_size - 2


class TestGivenTiesAtTheEdge:
    """The order is value descending, id ascending, so that a kept set is one set."""

    z = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0])

    @pytest.mark.parametrize(
        ("top_k", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (4, [1, 3, 2, 4]), (6, [1, 3, 2, 4, 5, 0])]
    )
    def test_when_the_kth_value_ties_then_exactly_k_are_kept(self, top_k: int, kept: list[int]) -> None:
        assert kept_set_reference(self.z, top_k=top_k).tolist() == kept

    def test_when_mass_is_reached_within_a_tie_then_the_lower_ids_are_kept(self) -> None:
        assert kept_set_reference(torch.zeros(10), top_p=0.35).tolist() == [0, 1, 2, 3]

    def test_when_both_filters_are_set_then_mass_is_of_the_first_k(self) -> None:
        assert kept_set_reference(torch.zeros(100), top_k=4, top_p=0.5).tolist() == [0, 1]

    def test_when_min_p_is_one_then_only_the_best_are_kept(self) -> None:
        assert kept_set_reference(self.z, min_p=1.0).tolist() == [1, 3]

    def test_when_min_p_is_first_then_top_p_is_of_what_it_left(self) -> None:
        assert kept_set_reference(self.z, min_p=0.9, top_p=0.5).tolist() == [1]


class TestGivenAnyFilters:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        logits=st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=1, max_size=80),
        top_k=st.integers(0, 90),
        top_p=st.floats(0.01, 1.0),
        min_p=st.floats(0.0, 1.0),
        temperature=st.sampled_from([0.25, 1.0, 3.0]),
        seed=st.integers(0, 2**64 - 1),
    )
    def test_when_rows_are_sampled_then_tokens_equal_the_reference(
        self, logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
    ) -> None:
        rows = [
            Row(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed, position=i) for i in range(4)
        ]
        tensor = torch.tensor([logits] * 4)

        assert sample(tensor, options_of(rows)).tolist() == sample_reference(tensor, options_of(rows)).tolist()


class TestGivenManyDraws:
    @pytest.mark.parametrize("row", [Row(), Row(temperature=0.5), Row(top_p=0.8), Row(top_k=6), Row(min_p=0.05)])
    def test_when_tokens_are_counted_then_they_follow_the_softmax_over_the_kept_set(self, row: Row) -> None:
        """Chi-square over many positions of one row, with a fixed seed."""
        num_draws = 20_000
        logits = logits_of(1, 40, seed=5, spread=1.5)
        options = options_of([row])
        many = SampleOptions(
            temperature=options.temperature.repeat(num_draws),
            top_k=options.top_k.repeat(num_draws),
            top_p=options.top_p.repeat(num_draws),
            min_p=options.min_p.repeat(num_draws),
            seed=options.seed.repeat(num_draws),
            position=torch.arange(num_draws, dtype=torch.int32),
            counter_2=options.counter_2.repeat(num_draws),
        )

        counts = sample(logits.expand(num_draws, -1), many).bincount(minlength=40).double()

        z = logits[0] / row.temperature
        kept = kept_set_reference(z, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
        expected = z[kept].double().softmax(0) * num_draws
        assert int(counts.sum()) == int(counts[kept].sum()) == num_draws
        is_common = expected >= 20
        assert bool((counts[kept][~is_common] < 60).all())
        chi_square = float(((counts[kept] - expected) ** 2 / expected)[is_common].sum())
        degrees = int(is_common.sum()) - 1
        # Mean and standard deviation of chi-square are d and sqrt(2 d); the draws never change.
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5
