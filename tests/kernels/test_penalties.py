"""Penalties and biases against a loop over dictionaries."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.penalties import Penalties, add_bias, apply_penalties
from kernels.penalties.reference import penalties_reference

TOKENS = st.lists(st.integers(0, 19), max_size=30)
ROW = st.tuples(TOKENS, TOKENS, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4))
def test_penalties_equal_their_reference(rows: list[tuple[list[int], list[int], float, float, float]]) -> None:
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(0))
    entries = [
        (row, token, float(output.count(token)), repetition, frequency, presence)
        for row, (prompt, output, repetition, frequency, presence) in enumerate(rows)
        for token in sorted({*prompt, *output})
    ]
    columns = torch.tensor(entries, dtype=torch.float64).reshape(-1, 6).T
    penalties = Penalties(
        rows=columns[0].long(),
        token_ids=columns[1].long(),
        counts=columns[2].float(),
        repetition=columns[3].float(),
        frequency=columns[4].float(),
        presence=columns[5].float(),
    )
    actual = logits.clone()

    apply_penalties(actual, penalties)

    for row, (prompt, output, repetition, frequency, presence) in enumerate(rows):
        expected = penalties_reference(
            logits[row], prompt, output, repetition=repetition, frequency=frequency, presence=presence
        )
        torch.testing.assert_close(actual[row], expected, rtol=1e-5, atol=1e-5)


def test_biases_add_up_and_bans_stay() -> None:
    logits = torch.zeros(2, 5)
    rows, tokens = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2, 4, 4])

    add_bias(logits, rows, tokens, torch.tensor([1.0, 2.0, 5.0, -float("inf")]))

    assert logits[0].tolist() == [0, 0, 3, 0, 0]
    assert logits[1].tolist() == [0, 0, 0, 0, -float("inf")]
