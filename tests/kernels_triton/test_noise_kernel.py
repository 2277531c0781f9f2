"""Random bits and noise against the reference: the bits must be equal, the noise as near as float32 can say."""

# torch's types are partial; triton's language is not typable.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportMissingTypeStubs=false, reportGeneralTypeIssues=false, reportArgumentType=false

import pytest
import torch
import triton
import triton.language as tl

from sluice.kernels.philox.kernel import gumbel, random_words_triton
from sluice.kernels.philox.reference import gumbel_reference, random_words_reference
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES

ONE_DTYPE = [DEVICES[0], DEVICES[2]]


@triton.jit
def _philox_kernel(out_ptr, counters_ptr, seed_ptr):
    lane = tl.arange(0, 1)
    c0 = tl.load(counters_ptr + lane).to(tl.uint32)
    c1 = tl.load(counters_ptr + 1 + lane).to(tl.uint32)
    c2 = tl.load(counters_ptr + 2 + lane).to(tl.uint32)
    c3 = tl.load(counters_ptr + 3 + lane).to(tl.uint32)
    x0, x1, x2, x3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr + lane, x0.to(tl.int64))
    tl.store(out_ptr + 1 + lane, x1.to(tl.int64))
    tl.store(out_ptr + 2 + lane, x2.to(tl.int64))
    tl.store(out_ptr + 3 + lane, x3.to(tl.int64))


@triton.jit
def _gumbel_kernel(out_ptr, words_ptr, num_words, BLOCK: tl.constexpr):  # noqa: N803 - as in kernels
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + offsets, mask=offsets < num_words, other=0).to(tl.uint32)
    tl.store(out_ptr + offsets, gumbel(words), mask=offsets < num_words)


def as_int64(unsigned: int) -> int:
    """The int64 of the same bits."""
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


@pytest.mark.parametrize(("device", "dtype"), ONE_DTYPE)
class TestGivenTheGenerator:
    @pytest.mark.parametrize(
        ("counters", "key", "words"),
        [
            ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                0x299F31D0A4093822,
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
        ids=["zeros", "ones", "pi"],
    )
    def test_when_it_gets_the_inputs_of_its_authors_then_it_gives_their_words(
        self, device: str, dtype: torch.dtype, counters: list[int], key: int, words: list[int]
    ) -> None:
        out = torch.zeros(4, dtype=torch.int64, device=device)

        _philox_kernel[(1,)](out, torch.tensor(counters, device=device), torch.tensor([as_int64(key)], device=device))

        assert out.tolist() == words

    @pytest.mark.parametrize(
        ("seed", "position", "counter_2"),
        cross_section([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], [(0, 0), (77, 4), (2**31 - 1, 2**31 - 1)]),
    )
    def test_when_tokens_draw_then_each_gets_the_word_of_the_reference(
        self, device: str, dtype: torch.dtype, seed: int, position: int, counter_2: int
    ) -> None:
        words, noise = random_words_triton(
            1031,
            torch.tensor([as_int64(seed)], device=device),
            torch.tensor([position], dtype=torch.int32, device=device),
            torch.tensor([counter_2], dtype=torch.int32, device=device),
        )

        token_ids = torch.arange(1031, device=device)
        expected = random_words_reference(token_ids, seed=seed, position=position, counter_2=counter_2)
        assert torch.equal(words, expected)
        torch.testing.assert_close(noise, gumbel_reference(expected), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("device", "dtype"), ONE_DTYPE)
class TestGivenAnyWord:
    def test_when_it_becomes_noise_then_it_is_finite_and_that_of_the_reference(
        self, device: str, dtype: torch.dtype
    ) -> None:
        ends = torch.arange(2048)
        middle = torch.randint(0, 2**32, (8192,), generator=torch.Generator().manual_seed(0))
        around_the_series_end = 2**28 + torch.arange(-64, 64)
        words = torch.cat([ends, 2**32 - 1 - ends, middle, around_the_series_end]).to(device)
        noise = torch.empty(len(words), dtype=torch.float32, device=device)

        _gumbel_kernel[(triton.cdiv(len(words), 1024),)](noise, words, len(words), BLOCK=1024)

        assert noise.isfinite().all()
        torch.testing.assert_close(noise, gumbel_reference(words), rtol=1e-6, atol=2e-6)
