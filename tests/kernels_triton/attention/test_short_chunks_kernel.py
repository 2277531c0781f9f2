"""Short chunks over long contexts against dense attention in float64, split over their keys."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.paged_attention import kernel, short_chunks
from sluice.kernels.paged_attention.short_chunks import _divide  # pyright: ignore[reportPrivateUsage]
from tests.grids import fast_only
from tests.kernels_triton.attention.test_paged_attention_kernel import EXTRAS, attend, bent, case_with, inputs_for
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import attention_agreement

SEGMENT = 32
"""Keys of the shortest segment in these tests."""


def nothing(*_arguments: object, **_options: object) -> None:
    """Launch nothing."""


def written(out: Tensor) -> Tensor:
    """Which rows `[T]` have no NaN any more."""
    return ~out.isnan().flatten(1).any(dim=1)


@contextmanager
def processors(count: int) -> Generator[list[int]]:
    """Launch as for a device of so many, with short segments; the list grows with each launch for short chunks."""
    launches: list[int] = []
    attend_short_chunks = short_chunks.attend_short_chunks

    def attended(*args: Any, **options: Any) -> None:  # Any: passed on
        launches.append(count)
        attend_short_chunks(*args, **options)

    def programs(_device: torch.device, per_processor: int) -> int:
        return count * per_processor

    with (
        patch.object(kernel, "num_programs", programs),
        patch.object(kernel, "SHORT_CHUNK_KEYS", 3 * SEGMENT),
        patch.object(kernel, "SHORT_CHUNK_SEGMENT", SEGMENT),
        patch.object(kernel, "attend_short_chunks", attended),
    ):
        yield launches


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenShortChunks:
    """Of more new tokens than a decode, over at least `3 * SEGMENT` keys, in a step that has few."""

    @pytest.mark.parametrize("count", fast_only([8, 12], [9, 200]))
    def test_when_the_device_has_any_number_of_processors_then_every_row_agrees(
        self, device: str, dtype: torch.dtype, count: int
    ) -> None:
        inputs = inputs_for(case_with([20, 1, 33, 9], [170, 100, 97, 96], num_padding=3), device, dtype)

        with processors(count) as launched:
            out = attend(inputs)

        assert launched
        assert attention_agreement(inputs, out).holds

    def test_when_other_sequences_see_few_keys_then_each_is_computed_by_one_kernel(
        self, device: str, dtype: torch.dtype
    ) -> None:
        inputs = inputs_for(case_with([30, 20, 0, 17, 1], [130, 95, 200, 97, 120]), device, dtype)
        is_short = [True] * 30 + [False] * 20 + [True] * 17 + [False]
        is_decode = [False] * 67 + [True]

        with processors(8), patch.object(kernel, "attend_decodes", nothing):
            with patch.object(kernel, "attend_chunks", nothing):
                short = attend(inputs)
            with patch.object(kernel, "attend_short_chunks", nothing):
                others = attend(inputs)

        assert (~written(short)).tolist() == [not one for one in is_short]
        assert (~written(others)).tolist() == [one or other for one, other in zip(is_short, is_decode, strict=True)]

    @pytest.mark.parametrize("window", fast_only([101], [64, 97, 130, 1000]))
    def test_when_a_window_hides_old_keys_then_neither_they_nor_their_blocks_are_read(
        self, device: str, dtype: torch.dtype, window: int
    ) -> None:
        inputs = inputs_for(case_with([40, 1, 17], [200, 150, 131], sliding_window=window), device, dtype)

        with processors(10) as launched:
            out = attend(inputs)

        assert launched
        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize(("soft_cap", "has_sinks"), fast_only(EXTRAS[2:], EXTRAS[:2]))
    def test_when_there_are_a_cap_or_sinks_then_they_count_once_per_row(
        self, device: str, dtype: torch.dtype, soft_cap: float, has_sinks: bool
    ) -> None:
        inputs = inputs_for(bent(case_with([20, 17], [170, 100]), soft_cap, has_sinks), device, dtype)

        with processors(10) as launched:
            out = attend(inputs)

        assert launched
        assert attention_agreement(inputs, out).holds

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_size"), fast_only([(5, 1, 24)], [(2, 2, 64), (24, 1, 16), (16, 1, 80)])
    )
    def test_when_heads_share_keys_in_any_number_then_they_agree(
        self, device: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int
    ) -> None:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        inputs = inputs_for(case_with([19, 40], [170, 100], **sizes), device, dtype)

        with processors(64) as launched:
            out = attend(inputs)

        assert launched
        assert attention_agreement(inputs, out).holds


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenChunksThatAreNotShort:
    @pytest.mark.parametrize(
        ("query_lens", "context_lens", "window", "count"),
        fast_only([([40], [95], 0, 20), ([40], [300], 31, 20)], [([1, 8], [300, 300], 0, 20), ([140], [240], 0, 4)]),
    )
    def test_when_none_may_be_short_then_nothing_is_launched_for_them(
        self, device: str, dtype: torch.dtype, query_lens: list[int], context_lens: list[int], window: int, count: int
    ) -> None:
        case = case_with(query_lens, context_lens, sliding_window=window)
        inputs = inputs_for(case, device, dtype)

        with processors(count) as launched:
            out = attend(inputs)

        assert not launched
        assert attention_agreement(inputs, out).holds


@triton.jit
def _divide_kernel(
    blocks_ptr,
    segments_ptr,
    size_ptr,
    query_start_locs_ptr,
    context_lens_ptr,
    S,  # noqa: N803 - as in kernels
    window,
    items_per_head,
    HAS_WINDOW: tl.constexpr,  # noqa: N803 - as in kernels
    BLOCK_S: tl.constexpr,  # noqa: N803 - as in kernels
):
    """Divide chunks of 5 new tokens or more over 2,049 keys or more, in blocks of 32."""
    blocks, segments, size = _divide(
        query_start_locs_ptr, context_lens_ptr, S, window, 5, 2049, items_per_head,
        HAS_WINDOW, BLOCK_QUERIES=32, BLOCK_S=BLOCK_S, TILE=64, MIN_SEGMENT=512,
    )  # fmt: skip
    offsets = tl.arange(0, BLOCK_S)
    tl.store(blocks_ptr + offsets, blocks)
    tl.store(segments_ptr + offsets, segments)
    tl.store(size_ptr, size)


@pytest.mark.parametrize(("device", "dtype"), [DEVICES[0], DEVICES[2]])
class TestGivenTheDivision:
    @pytest.mark.parametrize("window", [0, 4096])
    @pytest.mark.parametrize("items_per_head", [1, 16, 132])
    def test_when_a_batch_is_any_then_segments_cover_the_keys_and_fit_into_memory(
        self, device: str, dtype: torch.dtype, items_per_head: int, window: int
    ) -> None:
        numbers = torch.Generator().manual_seed(items_per_head)
        for num_sequences in (1, 7, 64):
            lens = torch.randint(1, 700, (num_sequences,), generator=numbers)
            contexts = (lens + 2.0 ** (17 * torch.rand(num_sequences, generator=numbers))).int()
            starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(device)
            blocks, segments, size = (torch.zeros(n, dtype=torch.int32, device=device) for n in (64, 64, 1))

            _divide_kernel[(1,)](
                blocks, segments, size, starts, contexts.to(device), num_sequences, window, items_per_head,
                HAS_WINDOW=window > 0, BLOCK_S=64,
            )  # fmt: skip

            keys = contexts.clamp(max=lens + window - 1) if window else contexts
            is_short = (lens >= 5) & (keys >= 2049)
            blocks, segments = blocks[:num_sequences].cpu(), segments[:num_sequences].cpu()
            assert torch.equal(blocks, torch.where(is_short, -(-lens // 32), 0).int())
            assert ((segments * size.cpu() >= keys) | ~is_short).all()
            assert int((blocks * segments)[segments > 1].sum()) < 2 * items_per_head or not (segments > 1).any()
            assert int(size) % 64 == 0
