"""Penalties against a loop over dictionaries in float64, and the native path bit by bit against torch's operators."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.kernels.penalties import Penalties, apply_penalties
from sluice.kernels.penalties.cpu import apply_penalties_torch
from sluice.kernels.penalties.reference import penalties_reference

VOCAB_SIZE = 20
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
ROW = st.tuples(TOKENS, TOKENS, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))
Row = tuple[list[int], list[int], float, float, float]


def penalties_of(rows: list[Row], num_extras: int) -> Penalties:
    """Those of rows in places in reverse order; the last tokens of each output are extras."""
    seen = torch.zeros(len(rows), VOCAB_SIZE, dtype=torch.int32)
    extras = torch.full((len(rows), num_extras), -1, dtype=torch.int32)
    for row, (prompt, output, *_) in enumerate(rows):
        counted = output[: len(output) - num_extras] if num_extras else output
        for token in prompt:
            seen[-1 - row, token] |= 1
        for token in counted:
            seen[-1 - row, token] += 2
        rest = output[len(counted) :]
        extras[row, : len(rest)] = torch.tensor(rest, dtype=torch.int32)
    strengths = torch.tensor([strengths for _, _, *strengths in rows], dtype=torch.float64).float().T.contiguous()
    return Penalties(
        seen=seen,
        places=torch.arange(len(rows) - 1, -1, -1, dtype=torch.int32),
        extras=extras,
        repetition=strengths[0],
        frequency=strengths[1],
        presence=strengths[2],
    )


def listed(penalties: Penalties) -> Penalties:
    """The same, with the tokens that have a count listed in any order."""
    tokens = torch.full_like(penalties.seen, -1)
    lengths = torch.zeros(len(tokens), dtype=torch.int32)
    for place, counts in enumerate(penalties.seen):
        found = counts.nonzero().flatten().flip(0)
        tokens[place, : len(found)], lengths[place] = found.int(), len(found)
    return replace(penalties, listed=(tokens, lengths))


def some_logits(num_rows: int) -> torch.Tensor:
    """Zeros of both signs, a banned one and numbers."""
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 3], logits[:, 4], logits[:, 5] = 0.0, -0.0, -math.inf
    return logits


class TestGivenPenalties:
    @settings(max_examples=100, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=4), num_extras=st.integers(0, 3))
    def test_when_they_are_applied_then_logits_equal_the_reference(self, rows: list[Row], num_extras: int) -> None:
        logits = some_logits(len(rows))
        actual = logits.clone()

        apply_penalties(actual, penalties_of(rows, num_extras))

        for row, (prompt, output, repetition, frequency, presence) in enumerate(rows):
            expected = penalties_reference(
                logits[row], prompt, output, repetition=repetition, frequency=frequency, presence=presence
            )
            torch.testing.assert_close(actual[row].double(), expected, rtol=1e-5, atol=1e-5)

    @settings(max_examples=100, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=4), num_extras=st.integers(0, 3))
    def test_when_torch_applies_them_then_the_bits_are_the_same(self, rows: list[Row], num_extras: int) -> None:
        penalties = penalties_of(rows, num_extras)
        native, torchs = some_logits(len(rows)), some_logits(len(rows))

        apply_penalties(native, penalties)
        apply_penalties_torch(torchs, penalties)

        assert torch.equal(native.view(torch.int32), torchs.view(torch.int32))

    @settings(max_examples=100, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=4), num_extras=st.integers(0, 3))
    def test_when_seen_tokens_are_listed_then_the_bits_are_the_same(self, rows: list[Row], num_extras: int) -> None:
        penalties = penalties_of(rows, num_extras)
        found, by_list = some_logits(len(rows)), some_logits(len(rows))

        apply_penalties(found, penalties)
        apply_penalties(by_list, listed(penalties))

        assert torch.equal(found.view(torch.int32), by_list.view(torch.int32))

    def test_when_tokens_are_extras_then_the_bits_are_those_of_counted_ones(self) -> None:
        rows: list[Row] = [([1, 2], [7, 2, 7, 7], 1.3, 0.3, 0.7), ([9], [4], 0.7, -1.1, 0.0)]
        counted, extra = some_logits(2), some_logits(2)

        apply_penalties(counted, penalties_of(rows, 0))
        apply_penalties(extra, penalties_of(rows, 3))

        assert torch.equal(counted.view(torch.int32), extra.view(torch.int32))
