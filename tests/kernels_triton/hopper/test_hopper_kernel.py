"""The attention kernel for Hopper against dense attention in float64, emulated on the CPU."""

# torch's types are partial, triton's are missing.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from sluice.kernels.paged_attention.call import Chunks
from sluice.kernels.paged_attention.hopper import attend_chunks_on_hopper, serves
from sluice.kernels.paged_attention.kernel import allocate_cuda
from tests.grids import grid
from tests.kernels_triton.hopper.gluon_emulator import emulate
from tests.oracles.kernel_cases import (
    AttentionCase,
    AttentionInputs,
    attention_agreement,
    blocks_needed,
    generator_on,
    make_attention,
)

RUNS_COMPILED = True
"""What is emulated is the source that is compiled, not what Triton's interpreter makes of it."""

ALL = Chunks(min_query_len=1)
"""The kernel computes every sequence."""

ORDERS = ["012", "210", "120"]
"""Which group of warps goes on when several can: two compute, the third copies."""


def inputs_of(
    query_lens: list[int],
    context_lens: list[int],
    *,
    group: int,
    head_size: int = 128,
    block_size: int = 16,
    num_padding: int = 0,
) -> AttentionInputs:
    case = AttentionCase(
        query_lens=query_lens,
        context_lens=context_lens,
        num_heads=2 * group,
        num_kv_heads=2,
        head_size=head_size,
        block_size=block_size,
        num_padding=num_padding,
    )
    cache = allocate_cuda(
        blocks_needed(case) + 2, block_size, 2, head_size, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    return make_attention(case, cache, torch.bfloat16, generator_on("cpu"))


def attend(inputs: AttentionInputs, order: str, monkeypatch: pytest.MonkeyPatch, chunks: Chunks = ALL) -> Tensor:
    """The kernel's output, into memory that was NaN."""

    def launch(kernel: Any, *, grid: tuple[int, ...], warmup: bool, num_warps: int, **arguments: object) -> None:
        emulate(kernel, grid, arguments, [int(number) for number in order])

    monkeypatch.setattr(JITFunction, "run", launch)
    call = inputs.call()
    attend_chunks_on_hopper(call, chunks)
    return call.out


class TestGivenAMixedBatch:
    @pytest.mark.parametrize(
        ("query_lens", "context_lens", "group", "order"),
        grid(
            [([40], [40]), ([1, 70, 1], [600, 200, 5]), ([33, 0, 2, 20], [400, 5, 128, 129])],
            [1, 4, 8, 64],
            ORDERS,
            fast=[
                ([40], [40], 1, ORDERS[0]),
                ([1, 70, 1], [600, 200, 5], 4, ORDERS[1]),
                ([33, 0, 2, 20], [400, 5, 128, 129], 4, ORDERS[2]),
            ],
        ),
    )
    def test_when_it_runs_then_every_row_agrees(
        self,
        query_lens: list[int],
        context_lens: list[int],
        group: int,
        order: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        inputs = inputs_of(query_lens, context_lens, group=group)

        assert attention_agreement(inputs, attend(inputs, order, monkeypatch)).holds

    def test_when_rows_are_padding_then_they_become_zeros(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of two kinds: rows past the last sequence's, and rows of a sequence without context."""
        inputs = inputs_of([70, 1], [200, 0], group=4, num_padding=5)

        out = attend(inputs, ORDERS[0], monkeypatch)

        assert attention_agreement(inputs, out).holds
        assert torch.equal(out[-6:], torch.zeros_like(out[-6:]))

    def test_when_sequences_have_few_new_tokens_then_their_rows_are_left_to_decode(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = inputs_of([4, 70, 1], [30, 200, 5], group=4)

        out = attend(inputs, ORDERS[0], monkeypatch, replace(ALL, min_query_len=5))

        is_left = out.isnan().all(dim=-1).all(dim=-1)
        assert is_left.tolist() == [True] * 4 + [False] * 70 + [True]

    def test_when_chunks_are_short_then_their_rows_are_left_to_that_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those that see 150 keys or more."""
        inputs = inputs_of([40, 41, 33], [150, 149, 149], group=4)

        out = attend(inputs, ORDERS[0], monkeypatch, Chunks(5, min_keys=150))

        assert out.isnan().all(dim=-1).all(dim=-1).tolist() == [True] * 40 + [False] * 74


class TestGivenACall:
    def test_when_it_is_like_those_measured_then_the_kernel_serves_it(self) -> None:
        assert serves(inputs_of([40], [40], group=4).call())

    @pytest.mark.parametrize(
        ("name", "value"), [("sliding_window", 5), ("soft_cap", 2.0), ("sinks", torch.zeros(8))], ids=str
    )
    def test_when_its_softmax_differs_then_it_does_not(self, name: str, value: Any) -> None:  # a call's own types
        assert not serves(replace(inputs_of([40], [40], group=4).call(), **{name: value}))

    @pytest.mark.parametrize(("group", "head_size", "block_size"), [(3, 128, 16), (4, 64, 16), (4, 128, 32)])
    def test_when_its_sizes_differ_then_it_does_not(self, group: int, head_size: int, block_size: int) -> None:
        assert not serves(inputs_of([40], [40], group=group, head_size=head_size, block_size=block_size).call())

    def test_when_its_rows_are_not_aligned_then_it_does_not(self) -> None:
        call = inputs_of([40], [40], group=4).call()
        wide = torch.zeros(40, 8 * 128 + 1, dtype=torch.bfloat16)

        assert not serves(replace(call, query=wide[:, 1:].view(40, 8, 128)))
        assert not serves(replace(call, query=wide[:, :-1].view(40, 8, 128)))
