"""The logits that a step draws from, bit by bit: what was asked is applied one operation after the other, by numpy.

What is drawn from them is tested in tests/kernels; that it depends on nothing else, in tests/oracles.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.execution.sampling import edited_rows
from sluice.engine.execution.sampling import sampler as module
from sluice.engine.execution.sampling.edited_rows import NO_TOKENS, LastTokens
from sluice.engine.execution.sampling.sampler import Sampler
from sluice.engine.execution.slots import Slot
from sluice.engine.request import Sampling
from sluice.kernels.sample import SampleOptions, draws_with

VOCAB_SIZE = 12
EOS = 1
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
PARAMS = st.builds(
    Sampling,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    # Some of them name what the vocabulary does not have.
    logit_bias=st.dictionaries(st.integers(-2, VOCAB_SIZE + 2), st.floats(-100, 100), max_size=5),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE + 2), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


def slot_with(sequence_id: int, prompt: list[int], params: Sampling) -> Slot:
    return Slot(
        index=sequence_id,
        sequence_id=sequence_id,
        choice=0,
        sampling=params,
        token_ids=prompt.copy(),
        num_prompt_tokens=len(prompt),
        num_blocks=0,
    )


_drawn_from: list[Tensor] = []


@pytest.fixture(scope="module", autouse=True)
def _noted() -> Iterator[None]:
    """Note what each draw is from."""

    def noting(options: SampleOptions) -> Callable[[Tensor], Tensor]:
        draw = draws_with(options)

        def note_and_draw(logits: Tensor) -> Tensor:
            _drawn_from.append(logits)
            return draw(logits)

        return note_and_draw

    with patch.object(module, "draws_with", noting):
        yield


def make_sampler() -> Sampler:
    return Sampler(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        max_rows=8,
        max_sequences=8,
        device=torch.device("cpu"),
    )


def drawn_from(sampler: Sampler, logits: Tensor, slots: Items[Slot], last: Items[int] = ()) -> Tensor:
    """The logits that the next token of each slot is drawn from.

    Args:
        sampler: draws.
        logits: of the step.
        slots: its rows.
        last: each row's last token, if only the step before has it.
    """
    before = LastTokens({slot.sequence_id: row for row, slot in enumerate(slots)}, torch.tensor(last)) if last else None
    num_fed = 1 if last else 0
    rows = sampler.prepare(slots, [len(slot.token_ids) + num_fed - slot.num_prompt_tokens for slot in slots])
    sampler.sample(logits, rows, last=before or NO_TOKENS)
    edited = _drawn_from.pop()
    _drawn_from.clear()
    if rows.edited is None:
        return edited
    assert len(edited) == len(rows.edited.edits), "only edited rows are copied"
    return logits.clone().index_copy_(0, rows.edited.rows.rows, edited)


def expected_row(row: NDArray[np.float32], sequence: Slot) -> NDArray[np.float32]:
    """Biases, bans, repetition, frequency and presence, each rounded to float32, token by token."""
    params, result = sequence.sampling, row.copy()
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    for token, bias in params.logit_bias.items():
        if 0 <= token < VOCAB_SIZE:
            result[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])} & {*range(VOCAB_SIZE)}:
            result[token] += np.float32(-math.inf)
    if params.has_penalties:
        for token in set(sequence.token_ids):
            count, repetition = np.float32(output.count(token)), np.float32(params.repetition_penalty)
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
            taken = np.float32(params.frequency_penalty) * count
            result[token] -= taken + np.float32(params.presence_penalty) * np.float32(count > 0)
    return result


def check_drawn_from(sampler: Sampler, sequences: Items[Slot], seed: int, last: Items[int] = ()) -> None:
    logits = torch.randn(len(sequences), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, 3], logits[:, 4], logits[:, 5] = 0.0, -0.0, -math.inf
    before = logits.clone()

    edited = drawn_from(sampler, logits, sequences, last)

    if last:
        sequences = [
            replace(one, token_ids=[*one.token_ids, token]) for one, token in zip(sequences, last, strict=True)
        ]
    expected = np.stack([expected_row(row, one) for row, one in zip(before.numpy(), sequences, strict=True)])
    assert np.array_equal(edited.numpy().view(np.int32), expected.view(np.int32))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "what was given is changed"


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, PARAMS), min_size=1, max_size=4), output=TOKENS)
def test_given_any_rows_when_they_generate_then_each_step_draws_from_what_was_asked(
    rows: list[tuple[list[int], Sampling]], output: list[int]
) -> None:
    sampler = make_sampler()
    sequences = [slot_with(index, prompt, params) for index, (prompt, params) in enumerate(rows)]

    for step, token in enumerate(output):
        # The last of them misses every second step.
        check_drawn_from(sampler, sequences[: len(sequences) - step % 2] or sequences, seed=step)
        for sequence in sequences:
            sequence.token_ids.append((token + sequence.sequence_id) % VOCAB_SIZE)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, PARAMS), min_size=1, max_size=4), output=TOKENS, is_again=st.booleans())
def test_given_a_device_that_lags_when_rows_generate_then_draws_are_as_asked(
    rows: list[tuple[list[int], Sampling]], output: list[int], is_again: bool
) -> None:
    sampler = make_sampler()
    sequences = [slot_with(index, prompt, params) for index, (prompt, params) in enumerate(rows)]

    for step, token in enumerate(output):
        last = [(token + sequence.sequence_id) % VOCAB_SIZE for sequence in sequences]
        check_drawn_from(sampler, sequences, step, last)
        if is_again:
            # The step in flight has drawn another token than it does when it is tried again.
            check_drawn_from(sampler, sequences, step, last[::-1])
        for sequence, drawn in zip(sequences, last, strict=True):
            sequence.token_ids.append(drawn)


class TestGivenRowsOfEveryKind:
    penalised = Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.3)
    biased = Sampling(temperature=0, logit_bias={EOS: 5.0, 7: -3.0}, min_tokens=2)
    both = replace(penalised, logit_bias={2: 1.5, 7: -3.0}, min_tokens=1)

    def test_when_a_step_is_drawn_then_all_penalties_are_applied_by_one_call(self) -> None:
        plain = Sampling(temperature=0)
        sequences = [slot_with(i, [2, 3], p) for i, p in enumerate([plain, self.penalised, self.biased, self.both])]

        with patch.object(edited_rows, "apply_penalties", wraps=edited_rows.apply_penalties) as apply:
            drawn_from(make_sampler(), torch.zeros(4, VOCAB_SIZE), sequences)

        apply.assert_called_once()
        edited, penalties = apply.call_args.args
        assert edited.shape == (3, VOCAB_SIZE)
        assert penalties.places.tolist() == [0, -1, 1]
        assert penalties.seen.shape == (8, VOCAB_SIZE), "as many places as a step has rows"

    def test_when_a_row_slot_gets_another_sequence_then_no_count_is_left(self) -> None:
        sampler = make_sampler()
        check_drawn_from(sampler, [slot_with(0, [2, 3], self.penalised)], seed=0)

        check_drawn_from(sampler, [slot_with(0, [5], self.penalised)], seed=1)

    def test_when_a_slot_is_admitted_again_then_no_earlier_state_is_left(self) -> None:
        sampler, logits = make_sampler(), torch.zeros(1, VOCAB_SIZE)
        edited = drawn_from(sampler, logits, [slot_with(0, [2, 3], self.both)])

        plain = drawn_from(sampler, logits, [slot_with(0, [2, 3], Sampling(temperature=0))])

        assert edited is not logits
        assert plain is logits

    def test_when_the_bans_of_all_rows_are_over_then_nothing_is_copied(self) -> None:
        sampler = make_sampler()
        sequence = slot_with(0, [2, 3], Sampling(temperature=0, min_tokens=1))
        logits = torch.zeros(1, VOCAB_SIZE)

        first = drawn_from(sampler, logits, [sequence])
        sequence.token_ids.append(5)
        second = drawn_from(sampler, logits, [sequence])

        assert first is not logits
        assert second is logits

    def test_when_a_step_is_drawn_again_after_the_bans_were_over_then_they_are_back(self) -> None:
        sampler, sequence = make_sampler(), slot_with(0, [2, 3], self.biased)
        sequence.token_ids += [5, 6]
        check_drawn_from(sampler, [sequence], seed=0)

        del sequence.token_ids[-1]

        check_drawn_from(sampler, [sequence], seed=1)
