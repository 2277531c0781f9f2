"""Biases and penalties against loops over dictionaries in float64, and bit by bit against one after the other."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.kernels.penalties import NO_BIAS, Penalties, apply_penalties
from sluice.kernels.penalties.reference import bias_reference, penalties_reference

VOCAB_SIZE = 20
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
BIASES = st.dictionaries(
    st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32) | st.just(-math.inf), max_size=VOCAB_SIZE
)
ROW = st.tuples(TOKENS, TOKENS, BIASES, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))
Row = tuple[list[int], list[int], dict[int, float], float, float, float]


def entries_of(rows: list[Row]) -> Penalties:
    """One entry for each token of a row that is seen or biased."""
    entries = [
        (
            row,
            token,
            bias.get(token, NO_BIAS),
            repetition if token in {*prompt, *output} else 1.0,
            float(output.count(token)),
            frequency,
            presence,
        )
        for row, (prompt, output, bias, repetition, frequency, presence) in enumerate(rows)
        for token in sorted({*prompt, *output, *bias})
    ]
    columns = torch.tensor(entries, dtype=torch.float64).reshape(-1, 7).T
    return Penalties(
        rows=columns[0].int(),
        token_ids=columns[1].int(),
        bias=columns[2].float(),
        repetition=columns[3].float(),
        counts=columns[4].float(),
        frequency=columns[5].float(),
        presence=columns[6].float(),
    )


def some_logits(num_rows: int) -> torch.Tensor:
    """Zeros of both signs, a banned one and numbers."""
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 3], logits[:, 4], logits[:, 5] = 0.0, -0.0, -math.inf
    return logits


class TestGivenBiasesAndPenalties:
    @settings(max_examples=60, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=4))
    def test_when_they_are_applied_then_logits_equal_the_reference(self, rows: list[Row]) -> None:
        logits = some_logits(len(rows))
        actual = logits.clone()

        apply_penalties(actual, entries_of(rows))

        for row, (prompt, output, bias, repetition, frequency, presence) in enumerate(rows):
            biased = bias_reference(logits[row], bias)
            expected = penalties_reference(
                biased, prompt, output, repetition=repetition, frequency=frequency, presence=presence
            )
            torch.testing.assert_close(actual[row].double(), expected, rtol=1e-5, atol=1e-5)

    @settings(max_examples=60, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=4))
    def test_when_applied_at_once_then_bits_are_those_of_a_bias_and_then_a_penalty(self, rows: list[Row]) -> None:
        logits, both = some_logits(len(rows)), entries_of(rows)
        together, apart = logits.clone(), logits.clone()

        apply_penalties(together, both)

        neutral = torch.zeros_like(both.bias)
        biases = replace(both, repetition=neutral + 1, counts=neutral, frequency=neutral, presence=neutral)
        apply_penalties(apart, biases)
        apply_penalties(apart, replace(both, bias=torch.full_like(both.bias, NO_BIAS)))
        assert torch.equal(together.view(torch.int32), apart.view(torch.int32))


class TestGivenBiasesAlone:
    @settings(max_examples=60, deadline=None)
    @given(biases=BIASES)
    def test_when_they_are_applied_then_they_are_added_and_no_bias_keeps_every_bit(
        self, biases: dict[int, float]
    ) -> None:
        logits = some_logits(1)
        expected = logits.clone()
        at = torch.tensor(list(biases), dtype=torch.int64)
        expected[0, at] += torch.tensor(list(biases.values()))
        entries = entries_of([([], [], dict.fromkeys(range(VOCAB_SIZE), NO_BIAS) | biases, 1.3, 0.5, 0.5)])

        apply_penalties(logits, entries)

        assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))
