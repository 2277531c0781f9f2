"""Sampling options of rows on the device: each row has its sequence's, whatever was there before."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.execution.sampling.row_options import RowOptions
from sluice.engine.execution.slots import Slot
from sluice.engine.request import Sampling
from sluice.kernels.philox import counter_2
from sluice.kernels.sample import sample

MAX_ROWS = 6
VOCAB_SIZE = 50
PARAMS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-9, 0.7, 1.5]),
    top_k=st.integers(0, 100),
    top_p=st.sampled_from([0.25, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.125]),
    seed=st.integers(0, 2**64 - 1),
)
STEPS = st.lists(st.lists(st.tuples(PARAMS, st.integers(0, 3)), min_size=1, max_size=MAX_ROWS), min_size=1, max_size=4)


def slot(number: int, params: Sampling, choice: int) -> Slot:
    return Slot(
        index=number,
        sequence_id=number,
        choice=choice,
        sampling=params,
        token_ids=[1],
        num_prompt_tokens=1,
        num_blocks=0,
    )


def make_options() -> RowOptions:
    return RowOptions(max_rows=MAX_ROWS, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))


class TestGivenRowsThatComeAndGo:
    @given(steps=STEPS)
    def test_when_they_are_filled_then_each_row_has_its_own(self, steps: list[list[tuple[Sampling, int]]]) -> None:
        rows = make_options()
        for at, step in enumerate(steps):
            slots = [slot(100 * at + n, params, choice) for n, (params, choice) in enumerate(step)]

            rows.fill(slots)[:] = range(len(step))
            rows.send()

            options = rows.first(len(step))
            wanted = [params for params, _ in step]
            assert (
                options.temperature.tolist()
                == torch.tensor([0.0 if p.temperature == 1e-9 else p.temperature for p in wanted]).tolist()
            )
            assert options.top_k.tolist() == [min(p.top_k, VOCAB_SIZE) for p in wanted]
            assert options.top_p.tolist() == [p.top_p for p in wanted]
            assert options.min_p.tolist() == [p.min_p for p in wanted]
            assert [seed % 2**64 for seed in options.seed.tolist()] == [p.seed for p in wanted]
            assert options.counter_2.tolist() == [counter_2(choice) for _, choice in step]
            assert options.position.tolist() == list(range(len(step)))
            assert not rows.first(MAX_ROWS).temperature[len(step) :].any(), "rows of padding take an argmax"


class TestGivenLogits:
    def test_when_padding_is_drawn_too_then_the_rows_have_the_same_tokens(self) -> None:
        rows = make_options()
        params = [Sampling(temperature=1.0, seed=n, top_k=20) for n in range(3)]
        rows.fill([slot(n, one, 0) for n, one in enumerate(params)])[:] = [5, 6, 7]
        rows.send()
        logits = torch.randn(MAX_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

        rows.draw(logits)

        assert rows.drawn[:3].tolist() == sample(logits[:3], rows.first(3)).tolist()
