"""Sampling against the reference: the same kept set, the same token."""

# torch's types are partial; triton's language is not typable.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportMissingTypeStubs=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.sample import SampleOptions
from sluice.kernels.sample.kernel import find_kept_sets, sample_triton
from sluice.kernels.sample.reference import sample_reference
from sluice.kernels.sample.row import scale_plain
from tests.grids import fast_only
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import generator_on, kept_set_differs, make_options, random_tensor

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.3},
    {"top_k": 10**6},
    {"top_p": 0.01},
    {"top_p": 0.5, "temperature": 1.7},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.01},
    {"top_k": 3, "top_p": 0.9, "temperature": 5.0},
]

HARD_FILTERS: list[dict[str, float]] = [
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 30, "top_p": 0.8, "min_p": 1e-4},
    {"top_p": 1 - 2**-24, "temperature": 3.0},
    {"top_k": 700, "top_p": 0.5},
    {"top_p": 1e-6, "min_p": 1e-9},
]
HARD_ROWS: list[Callable[[Tensor], Tensor]] = [
    torch.zeros_like,
    lambda x: (x > 3).to(x.dtype) * 2,
    lambda x: x.round(),
    lambda x: torch.where(x > 2, x, -float("inf")),
    lambda x: x.sort(descending=True).values,
    lambda x: x.sort().values / 8 + 300,
    lambda x: torch.where(x == x.min(), x, -float("inf")),
    # Neither can be divided with the reciprocal of the temperature.
    lambda x: x * (torch.finfo(x.dtype).max / 32),
    lambda x: x * torch.finfo(x.dtype).tiny,
]


@triton.jit
def _scale_kernel(out_ptr, logits_ptr, temperature_ptr, num_logits, BLOCK: tl.constexpr):  # noqa: N803 - as in kernels
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + tl.program_id(1))
    logits = tl.load(logits_ptr + offsets, mask=offsets < num_logits, other=0.0)
    scaled = scale_plain(logits, temperature, tl.div_rn(1.0, temperature))
    tl.store(out_ptr + tl.program_id(1) * num_logits + offsets, scaled, mask=offsets < num_logits)


def draw(logits: Tensor, options: SampleOptions) -> Tensor:
    out = torch.full(logits.shape[:1], -7, dtype=torch.int64, device=logits.device)
    sample_triton(logits, options, out=out)
    return out


def kept_rows(logits: Tensor, options: SampleOptions) -> Tensor:
    """`[S, V]` bool: what the kernel keeps, from its cuts."""
    cut_keys, cut_ids = find_kept_sets(logits, options)
    z = logits.float() / options.temperature[:, None] + 0.0
    bits = z.view(torch.int32)
    keys = torch.where(bits < 0, ~bits, bits ^ -(2**31)).long() & 0xFFFFFFFF
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (keys > cut_keys[:, None]) | ((keys == cut_keys[:, None]) & (ids <= cut_ids[:, None]))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenLogits:
    @pytest.mark.slow
    @pytest.mark.parametrize("vocab_size", fast_only([1100], [33, 5003]))
    def test_when_rows_have_any_filter_then_kept_sets_and_tokens_equal_the_reference(
        self, device: str, dtype: torch.dtype, vocab_size: int
    ) -> None:
        # A slice of a wider buffer, of odd width.
        wide = random_tensor(len(FILTERS), vocab_size + 5, dtype=dtype, generator=generator_on(device), spread=4)
        wide[:, vocab_size:] = float("nan")
        logits = wide[:, :vocab_size]
        options = make_options(FILTERS, device)

        kept, tokens = kept_rows(logits, options), draw(logits, options)

        assert [d for row in range(len(FILTERS)) if (d := kept_set_differs(logits, options, row, kept[row]))] == []
        assert tokens.tolist() == sample_reference(logits, options).tolist()

    def test_when_there_is_one_token_then_it_is_drawn(self, device: str, dtype: torch.dtype) -> None:
        logits = torch.full((3, 1), -5.0, dtype=dtype, device=device)
        options = make_options([{"temperature": 0.0}, {"top_k": 1, "top_p": 0.1}, {}], device)

        assert draw(logits, options).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("batch", [1, 9])
    def test_when_values_tie_then_the_lowest_ids_are_kept_whatever_the_batch(
        self, device: str, dtype: torch.dtype, batch: int
    ) -> None:
        logits = random_tensor(batch, 700, dtype=dtype, generator=generator_on(device), spread=2)
        logits = (logits * 2).round() / 2
        logits[:, 5] = -0.0
        options = make_options(([{"top_k": 9}] if batch == 1 else [{"top_k": k} for k in range(1, 10)]), device)

        kept = kept_rows(logits, options)

        assert [d for row in range(batch) if (d := kept_set_differs(logits, options, row, kept[row]))] == []
        assert kept.sum(dim=1).tolist() == options.top_k.tolist()

    def test_when_values_tie_at_the_end_of_the_mass_then_the_lowest_ids_are_kept(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = torch.zeros(3, 40, dtype=dtype, device=device)
        options = make_options([{"top_p": 0.5}, {"top_k": 32, "top_p": 0.125}, {"top_p": 0.024}], device)

        kept = kept_rows(logits, options)

        assert kept.sum(dim=1).tolist() == [20, 4, 1]
        assert kept[0, :20].all()

    def test_when_tokens_are_banned_then_they_are_never_kept(self, device: str, dtype: torch.dtype) -> None:
        logits = torch.full((3, 50), float("-inf"), dtype=dtype, device=device)
        logits[:, [7, 30]] = 1.0
        options = make_options([{"top_k": 40}, {"top_p": 0.999}, {"min_p": 1e-30}], device)

        kept = kept_rows(logits, options)

        assert [row.nonzero().flatten().tolist() for row in kept] == [[7, 30]] * 3
        assert set(draw(logits, options).tolist()) <= {7, 30}

    def test_when_a_row_is_greedy_then_it_takes_the_lowest_of_the_largest(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = random_tensor(4, 3000, dtype=dtype, generator=generator_on(device))
        logits[0, [2999, 1700, 1701]] = 50.0
        logits[1, [0, 2999]] = 50.0
        logits[2, 2999] = 50.0
        options = make_options([{"temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 0.5}] * 4, device)

        tokens = draw(logits, options).tolist()

        assert tokens[:3] == [1700, 0, 2999]
        assert tokens == sample_reference(logits, options).tolist()

    @pytest.mark.slow
    def test_when_a_row_is_broken_then_it_says_so_and_its_neighbours_do_not_notice(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = random_tensor(10, 1100, dtype=dtype, generator=generator_on(device), spread=3)
        whole = make_options([{"temperature": float(row % 2), "top_p": 0.9} for row in range(10)], device)
        undisturbed = draw(logits, whole)
        logits[2, 1090] = logits[3, 0] = float("nan")
        logits[4:6] = float("-inf")
        logits[6, 1099] = logits[7, 17] = float("inf")
        logits[8:, 3] = float("-inf")

        tokens = draw(logits, whole)

        assert tokens[2:8].tolist() == [-1] * 6
        assert tokens[:2].tolist() == undisturbed[:2].tolist()
        assert tokens.tolist() == sample_reference(logits, whole).tolist()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenABatch:
    @pytest.mark.long
    @pytest.mark.slow
    @pytest.mark.parametrize("first", range(5))
    def test_when_rows_are_hard_to_search_then_kept_sets_and_tokens_equal_the_reference(
        self, device: str, dtype: torch.dtype, first: int
    ) -> None:
        rows = random_tensor(len(HARD_ROWS), 1030, dtype=dtype, generator=generator_on(device), spread=3)
        logits = torch.stack([make(row) for make, row in zip(HARD_ROWS, rows, strict=True)])
        filters = [HARD_FILTERS[(first + row) % len(HARD_FILTERS)] for row in range(len(rows))]
        options = make_options(filters, device)

        kept, tokens = kept_rows(logits, options), draw(logits, options)

        assert [d for row in range(len(rows)) if (d := kept_set_differs(logits, options, row, kept[row]))] == []
        assert tokens.tolist() == sample_reference(logits, options).tolist()

    @pytest.mark.long
    def test_when_rows_are_divided_among_more_programs_then_their_cuts_and_tokens_stay(
        self, device: str, dtype: torch.dtype
    ) -> None:
        # More tiles than a program draws from at once.
        logits = random_tensor(4, 9 * 1024 + 3, dtype=dtype, generator=generator_on(device), spread=3)
        options = make_options([{"top_p": 0.9}, {"top_p": 0.6, "temperature": 1.3}, {"top_k": 11}, {}], device)

        with patch("sluice.kernels.sample.kernel._NUM_PROGRAMS", 1):
            alone = (*find_kept_sets(logits, options), draw(logits, options))
        with patch("sluice.kernels.sample.kernel._NUM_PROGRAMS", 10**6):
            divided = (*find_kept_sets(logits, options), draw(logits, options))

        assert all(torch.equal(one, other) for one, other in zip(alone, divided, strict=True))
        assert alone[2].tolist() == sample_reference(logits, options).tolist()

    def test_when_no_row_has_a_filter_then_the_search_for_one_changes_nothing(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = random_tensor(5, 1500, dtype=dtype, generator=generator_on(device), spread=3)
        options = make_options([{"temperature": 0.5 * row} for row in range(5)], device)

        tokens, searched = draw(logits, options), draw(logits, replace(options, has_filters=True))

        assert not options.has_filters
        assert tokens.tolist() == searched.tolist() == sample_reference(logits, options).tolist()

    @pytest.mark.long
    def test_when_plain_logits_are_scaled_then_quotients_are_correctly_rounded(
        self, device: str, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device)
        numbers = random_tensor(2**16, dtype=dtype, generator=generator, spread=5).float()
        logits = torch.cat([numbers, numbers * 2.0**80, numbers * 2.0**-80, torch.tensor([-float("inf")]).to(numbers)])
        temperatures = torch.cat([
            torch.tensor([1e-5, 0.3, 0.7, 1.0, 1.3, 1 - 2**-24, 1 + 2**-23, 2 - 2**-22, 1e5]).to(numbers),
            torch.rand(7, generator=generator, device=device) + 0.1,
        ])  # fmt: skip
        out = torch.empty(len(temperatures), len(logits), device=device)

        grid = (triton.cdiv(len(logits), 8192), len(temperatures))
        _scale_kernel[grid](out, logits, temperatures, len(logits), BLOCK=8192)

        assert torch.equal(out, logits / temperatures[:, None])


@pytest.mark.parametrize(("device", "dtype"), DEVICES[:1] + DEVICES[2:3])
class TestGivenARowWithASeed:
    def test_when_its_neighbours_and_its_place_change_then_its_token_does_not(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = random_tensor(5, 1100, dtype=dtype, generator=generator_on(device), spread=2)
        mine: dict[str, float] = {"temperature": 0.8, "top_p": 0.95, "seed": 99}
        others: list[dict[str, float]] = [
            {"temperature": 0.0},
            {"top_k": 3},
            {"top_p": 0.2, "seed": 99},
            {"min_p": 0.3},
        ]

        alone = draw(logits[:1], make_options([mine], device))
        first = draw(logits, make_options([mine, *others], device))
        order = [4, 3, 0, 1, 2]
        third = draw(logits[order], make_options([*others[:2], mine, *others[2:]], device))

        assert first[0] == alone[0]
        assert third[2] == alone[0]
