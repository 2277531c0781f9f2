"""The write of keys and values against the steps one after another, in a cache full of NaN."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.write_kv.kernel import write_kv_triton
from sluice.kernels.write_kv.reference import write_kv_reference
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import WriteInputs, generator_on, make_write, same_bits, write_agreement


def cache_of(num_kv_heads: int, head_size: int, device: str, dtype: torch.dtype, block_size: int = 16) -> KVCache:
    return allocate_cuda(4, block_size, num_kv_heads, head_size, dtype=dtype, device=torch.device(device))


def write(inputs: WriteInputs, cache: KVCache) -> Tensor:
    """The kernel's queries, into memory that was NaN."""
    shape = (inputs.qkv.shape[0], inputs.num_heads, cache.head_size)
    out = torch.full(shape, float("nan"), dtype=cache.keys.dtype, device=cache.keys.device)
    write_kv_triton(
        inputs.qkv,
        inputs.positions,
        inputs.slot_mapping,
        inputs.cos_sin,
        cache,
        head_norm=inputs.head_norm,
        out=out,
    )
    return out


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenACacheFullOfNaN:
    @pytest.mark.parametrize(
        ("num_tokens", "num_heads", "num_kv_heads", "head_size", "rotary_size", "norm_offset"),
        cross_section(
            [
                (1, 1, 1, 16, 16),
                (7, 4, 2, 32, 32),
                (5, 7, 1, 80, 80),
                (3, 6, 3, 64, 16),
                (2, 2, 2, 24, 0),
                (40, 2, 1, 16, 16),
            ],
            [None, 0.0, 1.0],
        ),
    )
    def test_when_tokens_are_written_then_their_slots_agree_and_no_other_is_touched(
        self,
        device: str,
        dtype: torch.dtype,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary_size: int,
        norm_offset: float | None,
    ) -> None:
        cache = cache_of(num_kv_heads, head_size, device, dtype)
        inputs = make_write(
            cache,
            num_tokens=num_tokens,
            num_heads=num_heads,
            rotary_size=rotary_size,
            norm_offset=norm_offset,
            generator=generator_on(device),
        )

        out = write(inputs, cache)

        assert write_agreement(inputs, cache, out).holds

    def test_when_heads_are_normalised_then_they_are_rounded_before_they_are_rotated(
        self, device: str, dtype: torch.dtype
    ) -> None:
        """Which no tolerance shows; but nearly every bit is then the reference's."""
        cache = cache_of(2, 64, device, dtype)
        inputs = make_write(
            cache, num_tokens=30, num_heads=4, rotary_size=64, norm_offset=1.0, generator=generator_on(device)
        )
        expected = write_kv_reference(
            inputs.qkv,
            inputs.positions,
            inputs.slot_mapping,
            inputs.cos_sin,
            cache_of(2, 64, device, dtype),
            head_norm=inputs.head_norm,
        )

        out = write(inputs, cache)

        assert dtype == torch.float32 or float((out == expected).double().mean()) > 0.99

    def test_when_no_token_has_a_slot_then_the_cache_stays_as_it_was(self, device: str, dtype: torch.dtype) -> None:
        cache = cache_of(2, 16, device, dtype)
        inputs = make_write(
            cache, num_tokens=5, num_heads=4, rotary_size=16, norm_offset=None, generator=generator_on(device)
        )
        keys, values = cache.keys.clone(), cache.values.clone()

        out = write(replace(inputs, slot_mapping=torch.full_like(inputs.slot_mapping, -1)), cache)

        assert same_bits(cache.keys, keys)
        assert same_bits(cache.values, values)
        assert not out.isnan().any()

    def test_when_values_are_not_numbers_then_they_are_stored_as_they_are(
        self, device: str, dtype: torch.dtype
    ) -> None:
        cache = cache_of(1, 16, device, dtype, block_size=8)
        inputs = make_write(
            cache, num_tokens=2, num_heads=1, rotary_size=16, norm_offset=None, generator=generator_on(device)
        )
        values = inputs.qkv[:, 32:]
        values[0, 3], values[0, 11], values[1, 0] = float("inf"), float("-inf"), float("nan")

        write(inputs, cache)

        assert same_bits(cache.values[0, 0, 0], values[0])
        assert same_bits(cache.values[3, 7, 0], values[1])

    def test_when_there_are_no_tokens_then_nothing_happens(self, device: str, dtype: torch.dtype) -> None:
        cache = cache_of(1, 16, device, dtype)
        inputs = make_write(
            cache, num_tokens=3, num_heads=1, rotary_size=16, norm_offset=None, generator=generator_on(device)
        )

        none = replace(inputs, qkv=inputs.qkv[:0], positions=inputs.positions[:0], slot_mapping=inputs.slot_mapping[:0])

        assert write(none, cache).shape[0] == 0
        assert cache.keys.isnan().all()
